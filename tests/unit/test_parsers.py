"""Which of vLLM's parsers a model gets, from shortened chat templates of the families."""

from __future__ import annotations

import pytest

from appliance import parsers

HERMES = "{% if tools %}<tools>{{ tools | tojson }}</tools> answer in <tool_call>{\"name\": ..}</tool_call>{% endif %}"
QWEN3 = HERMES + "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
LLAMA31 = "Respond in the format {\"name\": function name, \"parameters\": dictionary of argument name and its value}."
FAMILIES = {
    # class of the architecture, template, parser of tools, of thinking
    "SmolLM2": ("LlamaForCausalLM", "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>", "none", "none"),
    "no template": ("LlamaForCausalLM", None, "none", "none"),
    "Qwen 2.5": ("Qwen2ForCausalLM", HERMES, "hermes", "none"),
    "Qwen 3": ("Qwen3ForCausalLM", QWEN3, "hermes", "qwen3"),
    "Qwen 3 Coder": ("Qwen3MoeForCausalLM", "<tool_call>\n<function=name>\n<parameter=p>", "qwen3_xml", "none"),
    "Hermes 3": ("LlamaForCausalLM", HERMES, "hermes", "none"),
    "Llama 3.1": ("LlamaForCausalLM", LLAMA31 + "<|python_tag|>", "llama3_json", "none"),
    "Llama 3.2": ("LlamaForCausalLM", LLAMA31, "llama3_json", "none"),
    "Mistral 7B 0.3": ("MistralForCausalLM", "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", "none"),
    "Magistral": ("MistralForCausalLM", "[THINK]..[/THINK][TOOL_CALLS]", "mistral", "mistral"),
    "Granite 3": ("GraniteForCausalLM", "<|tool_call|>..Here is my thought process: Here is my response:", "granite", "none"),
    "Granite 4": ("GraniteMoeHybridForCausalLM", "<tool_call>{{ call }}</tool_call>", "granite4", "none"),
    "Phi 4 mini, own": ("Phi3ForCausalLM", "<|tool|>{{ tools }}<|/tool|>", "none", "none"),
    "Phi 4 mini, vLLM's": ("Phi3ForCausalLM", "functools[{{ call }}]", "phi4_mini_json", "none"),
    "DeepSeek R1 Qwen": ("Qwen2ForCausalLM", "<｜Assistant｜><｜tool▁calls▁begin｜>function<｜tool▁sep｜><think>", "deepseek_v3", "deepseek_r1"),
    "Gemma 2": ("Gemma2ForCausalLM", "<start_of_turn>{{ role }}", "none", "none"),
    "FunctionGemma": ("Gemma3ForCausalLM", "<start_function_call>call:", "functiongemma", "none"),
    "InternLM": ("InternLM2ForCausalLM", "<|action_start|><|plugin|>", "internlm", "none"),
    "OLMo 3": ("Olmo3ForCausalLM", "<function_calls>f(x=1)</function_calls><think>", "olmo3", "olmo3"),
    "GLM 4.5": ("Glm4MoeForCausalLM", "<tool_call>{name}<arg_key>k</arg_key><think>", "glm45", "glm45"),
    "LFM 2": ("Lfm2ForCausalLM", "<|tool_call_start|>[f()]<|tool_call_end|>", "lfm2", "none"),
    "a stranger": ("LlamaForCausalLM", "CALL {{ tools }} END", "none", "none"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_parsers(family: str) -> None:
    architecture, template, tools, reasoning = FAMILIES[family]
    found = parsers.marks(template)
    assert parsers.choose_tools(architecture, found, "auto").parser == tools
    assert parsers.choose_reasoning(architecture, found, "auto").parser == reasoning


def test_the_choice_says_why_and_the_operator_wins() -> None:
    found = parsers.marks(HERMES)
    assert parsers.choose_tools("Qwen2ForCausalLM", found, "auto").reason == "the chat template writes <tool_call>"
    for setting in ("none", "pythonic"):
        chosen = parsers.choose_tools("Qwen2ForCausalLM", found, setting)
        assert (chosen.parser, chosen.evidence) == (setting, "settings tools")
    none = parsers.choose_reasoning("Qwen2ForCausalLM", found, "auto")
    assert (none.parser, none.reason) == ("none", "the chat template shows no thinking that vLLM tells from the answer")


def test_a_parser_whose_token_is_missing_is_not_chosen() -> None:
    """vLLM would not start with such a model."""
    lacking = parsers.absent('{"added_tokens": [{"id": 1, "content": "<think>"}, {"id": 2, "content": "</think>"}]}')
    assert "<|python_tag|>" in lacking
    assert "<think>" not in lacking
    chosen = parsers.choose_tools("LlamaForCausalLM", parsers.marks(LLAMA31), "auto", lacking)
    assert (chosen.parser, chosen.evidence) == ("none", "tokenizer.json")
    assert chosen.reason == "vLLM's parser llama3_json needs the token <|python_tag|>, which the vocabulary does not have"
    assert parsers.choose_tools("LlamaForCausalLM", (), "llama3_json", lacking).parser == "none"
    both = parsers.marks(LLAMA31 + HERMES)
    assert parsers.choose_tools("LlamaForCausalLM", both, "auto", lacking).parser == "hermes"
    assert parsers.choose_tools("LlamaForCausalLM", parsers.marks(LLAMA31), "auto").parser == "llama3_json"


def test_every_row_is_a_name_that_the_setting_takes() -> None:
    assert {row.parser for row in parsers.TOOLS} <= set(parsers.TOOL_PARSERS)
    assert {row.parser for row in parsers.REASONING} <= set(parsers.REASONING_PARSERS)
    assert {row.parser for row in parsers.TOOLS} >= {tools for _, _, tools, _ in FAMILIES.values()} - {"none"}
