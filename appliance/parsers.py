"""PURE: which of vLLM's parsers reads a model's tool calls and which its thinking, by the marks of its chat template.

A model writes a tool call in the words of its family, and its chat template holds these words. Does not read the
template: `marks(text)` finds what counts, `choose` decides. Rules: a mark is a word that the parser itself looks for (a
test compares with vLLM's source); the first row whose marks are all there wins, so special forms stand before the
general `<tool_call>`; no row, no parser: structured output, required and named tools then still work, free choice
does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

AUTO, NONE = "auto", "none"
FORCED_FORM = "hermes"
"""The parser of a model that has none: vLLM wants one even for calls that are required or named, and holds the answer
to its form then; the front door refuses the free choice."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """`marks`: all stand in the template. `classes`: beginnings of the architecture's class; empty: any."""

    parser: str
    marks: tuple[str, ...]
    classes: tuple[str, ...] = ()


TOOLS = (
    Row(parser="lfm2", marks=("<|tool_call_start|>",)),
    Row(parser="functiongemma", marks=("<start_function_call>",)),
    Row(parser="gemma4", marks=("<|tool_call>",)),
    Row(parser="apertus", marks=("<|tools_prefix|>",)),
    Row(parser="seed_oss", marks=("<seed:tool_call>",)),
    Row(parser="deepseek_v3", marks=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    Row(parser="mistral", marks=("[TOOL_CALLS]",)),
    Row(parser="internlm", marks=("<|action_start|>", "<|plugin|>")),
    Row(parser="olmo3", marks=("<function_calls>",), classes=("Olmo",)),
    Row(parser="granite", marks=("<|tool_call|>",), classes=("Granite",)),
    Row(parser="phi4_mini_json", marks=("functools",), classes=("Phi",)),
    Row(parser="granite4", marks=("<tool_call>",), classes=("Granite",)),
    Row(parser="glm45", marks=("<tool_call>", "<arg_key>")),
    Row(parser="qwen3_xml", marks=("<tool_call>", "<function=")),
    Row(parser="hermes", marks=("<tool_call>",)),
    Row(parser="llama3_json", marks=("dictionary of argument name and its value",), classes=("Llama",)),
    Row(parser="llama3_json", marks=("<|python_tag|>",), classes=("Llama",)),
)
REASONING = (
    Row(parser="gemma4", marks=("<|channel>",), classes=("Gemma4",)),
    Row(parser="mistral", marks=("[THINK]",)),
    Row(parser="deepseek_r1", marks=("<think>", "<｜Assistant｜>")),
    Row(parser="olmo3", marks=("<think>",), classes=("Olmo3",)),
    Row(parser="glm45", marks=("<think>",), classes=("Glm4",)),
    Row(parser="seed_oss", marks=("<seed:think>",)),
    Row(parser="qwen3", marks=("<think>",), classes=("Qwen3",)),
)
"""Without `granite`: it never says that thinking has ended, and vLLM then holds no answer to a schema."""
MARKS = tuple(dict.fromkeys(mark for row in TOOLS + REASONING for mark in row.marks))

TOOL_PARSERS = (
    "apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4",
    "deepseek_v41", "dots", "ernie45", "functiongemma", "gemma4", "gigachat3", "glm45", "glm47", "granite",
    "granite-20b-fc", "granite4", "hermes", "hf", "hunyuan_a13b", "hy_v3", "hy_v4", "inkling", "internlm", "jamba",
    "k2_horizon", "kimi_k2", "kimi_k3", "lfm2", "ling3", "llama3_json", "llama4_json", "llama4_pythonic", "longcat",
    "mimo", "minicpm5", "minimax_m2", "minimax_m3", "mistral", "muse_glimmer", "olmo3", "openai", "phi4_mini_json",
    "plamo3", "poolside_v1", "pythonic", "qwen3_coder", "qwen3_json", "qwen3_xml", "seed_oss", "step3", "step3p5",
    "xlam",
)
REASONING_PARSERS = (
    "cohere_command3", "cohere_command4", "deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "ernie45",
    "gemma4", "glm45", "glm47", "granite", "granite_thinking_parser", "hf", "holo2", "hunyuan_a13b", "hy_v3", "hy_v4",
    "inkling", "k2_horizon", "kimi_k2", "kimi_k3", "ling3", "mimo", "minicpmv", "minimax_m2",
    "minimax_m2_append_think", "minimax_m3", "mistral", "muse_glimmer", "nemotron_v3", "olmo3", "openai_gptoss",
    "plamo3", "poolside_v1", "qwen3", "seed_oss", "step3", "step3p5",
)
"""Every name that vLLM 0.32 knows, for the settings `tools` and `reasoning`."""

_THINK, _PYTHON = ("<think>", "</think>"), ("<|python_tag|>",)
TOOL_TOKENS: Mapping[str, tuple[str, ...]] = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), "llama3_json": _PYTHON, "llama4_json": _PYTHON,
    "mistral": ("[TOOL_CALLS]",),
}
REASONING_TOKENS: Mapping[str, tuple[str, ...]] = {
    "deepseek_r1": _THINK, "ernie45": _THINK, "holo2": _THINK, "step3": ("</think>",), "mistral": ("[TOOL_CALLS]",),
    "olmo3": ("Ġ</", "</", "think"),  # ">" stands in every vocabulary
}
"""Parser -> tokens that it demands of the vocabulary: without them vLLM does not start."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A parser's name or `none`, and why."""

    parser: str
    reason: str
    evidence: str

    @property
    def given(self) -> bool:
        return self.parser != NONE


def marks(template: str | None) -> tuple[str, ...]:
    """The marks that stand in this template."""
    return tuple(mark for mark in MARKS if template and mark in template)


def absent(vocabulary: str) -> tuple[str, ...]:
    """The tokens that parsers need and this text of a tokenizer.json does not have."""
    needed = (token for needs in (TOOL_TOKENS, REASONING_TOKENS) for tokens in needs.values() for token in tokens)
    return tuple(token for token in dict.fromkeys(needed) if f'"{token}"' not in vocabulary)


def choose_tools(architecture: str, found: Iterable[str], setting: str, lacking: Iterable[str] = ()) -> Found:
    """`lacking`: tokens that the model's vocabulary does not have (`absent`)."""
    return _choose(TOOLS, TOOL_TOKENS, architecture, found, setting, lacking, key="tools",
                   nothing="no tool format that vLLM reads: tools must be named or required by the request")


def choose_reasoning(architecture: str, found: Iterable[str], setting: str, lacking: Iterable[str] = ()) -> Found:
    return _choose(REASONING, REASONING_TOKENS, architecture, found, setting, lacking, key="reasoning",
                   nothing="no thinking that vLLM tells from the answer")


def _choose(rows: tuple[Row, ...], needs: Mapping[str, tuple[str, ...]], architecture: str, found: Iterable[str],
            setting: str, lacking: Iterable[str], *, key: str, nothing: str) -> Found:
    there, gone = set(found), set(lacking)
    lacked = ""
    wanted = [(setting, "set by the operator", f"settings {key}")] if setting != AUTO else [
        (row.parser, f"the chat template writes {' and '.join(row.marks)}", "chat template") for row in rows
        if there.issuperset(row.marks) and (not row.classes or architecture.startswith(row.classes))]
    for parser, reason, evidence in wanted:
        token = next((token for token in needs.get(parser, ()) if token in gone), None)
        if token is None:
            return Found(parser=parser, reason=reason, evidence=evidence)
        lacked = lacked or f"vLLM's parser {parser} needs the token {token}, which the vocabulary does not have"
    return Found(parser=NONE, reason=lacked or f"the chat template shows {nothing}",
                 evidence="tokenizer.json" if lacked else "chat template")
