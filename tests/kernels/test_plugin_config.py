"""What the plugin tells vLLM about a checkpoint: fields, ignore lists, groups, the table, the environment switch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.worker,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from vLLM's own imports
]

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def _config(raw: dict[str, Any], *, tied: bool = False) -> Any:
    from appliance.vllm_plugin.config import CpuInt4Config

    config = CpuInt4Config.from_config({"quant_method": "cpu_int4", **raw})
    config.packed_modules_mapping = FUSED
    config.tied = tied
    return config


def test_every_reference_field_is_read_and_survives_pickling() -> None:
    raw = {"group_size": 128, "ignore": ["lm_head"], "quantize_embedding": False, "prefill_dequant": False,
           "dequant_threshold": 5, "use_custom_op": False, "direct_dequant": False, "some_newer_field": 1}
    config = pickle.loads(pickle.dumps(_config(raw)))
    for name, value in raw.items():
        if name != "some_newer_field":
            assert getattr(config.fields, name) == (tuple(value) if isinstance(value, list) else value), name


def test_defaults_are_those_of_the_reference() -> None:
    fields = _config({}).fields
    assert (fields.group_size, fields.ignore, fields.quantize_embedding) == (64, (), True)
    assert (fields.prefill_dequant, fields.dequant_threshold) == (True, 2)
    assert (fields.use_custom_op, fields.direct_dequant) == (True, True)


@pytest.mark.parametrize("group", [-1, 16, 48, 96, 512, "64", True])
def test_case_026_other_group_sizes_are_refused(group: object) -> None:
    from appliance.errors import ModelError

    with pytest.raises(ModelError, match="group size"):
        _config({"group_size": group})


def test_only_bf16_activations_are_offered() -> None:
    config = _config({})
    assert config.get_supported_act_dtypes() == [torch.bfloat16]
    assert config.get_config_filenames() == []
    assert config.get_name() == "cpu_int4"


@pytest.mark.parametrize(("value", "configured", "wanted"), [
    ("0", True, False), ("1", False, True), (None, True, True), (None, False, False), ("", False, False),
])
def test_the_environment_switch_wins(monkeypatch: pytest.MonkeyPatch, value: str | None, configured: bool,
                                     wanted: bool) -> None:
    monkeypatch.delenv("VLLM_OMNI_CPU_INT4_DIRECT_DEQUANT", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_OMNI_CPU_INT4_DIRECT_DEQUANT", value)
    assert _config({"direct_dequant": configured}).fields.direct_dequant is wanted


def test_a_wrong_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.errors import ConfigError

    monkeypatch.setenv("VLLM_OMNI_CPU_INT4_DIRECT_DEQUANT", "yes")
    with pytest.raises(ConfigError, match="neither 0 nor 1"):
        _config({})


def test_ignore_names_shards_suffixes_and_fused_layers() -> None:
    config = _config({"ignore": ["q_proj", "k_proj", "v_proj", "model.layers.3.mlp.down_proj", "gate_up_proj"]})
    assert config.ignores("model.layers.0.self_attn.qkv_proj")
    assert config.ignores("model.layers.0.mlp.gate_up_proj")
    assert config.ignores("model.layers.3.mlp.down_proj")
    assert not config.ignores("model.layers.2.mlp.down_proj")
    assert not config.ignores("model.layers.0.self_attn.o_proj")


def test_a_split_fused_layer_is_refused() -> None:
    from appliance.errors import ModelError

    with pytest.raises(ModelError, match="splits the fused layer"):
        _config({"ignore": ["q_proj"]}).ignores("model.layers.0.self_attn.qkv_proj")


def test_groups_of_fused_siblings() -> None:
    from appliance.errors import ModelError

    attn = "model.layers.0.self_attn."
    config = _config({"group_size_overrides": {attn + "q_proj": 32, attn + "k_proj": 32, attn + "v_proj": 32,
                                               "model.layers.0.mlp.gate_up_proj": 128}})
    assert config.group_of(attn + "qkv_proj") == 32
    assert config.group_of(attn + "o_proj") == 64
    assert config.group_of("model.layers.0.mlp.gate_up_proj") == 128
    with pytest.raises(ModelError, match="different group sizes"):
        _config({"group_size_overrides": {attn + "q_proj": 32}}).group_of(attn + "qkv_proj")


@pytest.mark.parametrize(("raw", "tied", "table", "head"), [
    ({}, True, True, True),
    ({}, False, True, True),
    ({"quantize_embedding": False}, True, False, False),
    ({"table_bits": 16}, False, False, False),
    ({"ignore": ["lm_head"]}, False, True, False),
    ({"ignore": ["lm_head"]}, True, True, True),  # tied: one tensor, decided by the table's name
    ({"ignore": ["embed_tokens"]}, True, False, False),
    ({"ignore": ["model.embed_tokens"]}, False, False, True),
])
def test_table_and_head_are_decided_together(raw: dict[str, Any], tied: bool, table: bool, head: bool) -> None:
    config = _config(raw, tied=tied)
    for prefix in ("", "model.embed_tokens"):  # several vLLM models give their table no name
        assert config.quantizes_table(prefix, head=False) is table
    assert config.quantizes_table("lm_head", head=True) is head


def test_the_table_has_its_own_group() -> None:
    config = _config({"group_size_overrides": {"model.embed_tokens": 32, "lm_head": 128}})
    assert config.table_group("", head=False) == 32
    assert config.table_group("lm_head", head=True) == 128
    config.tied = True
    assert config.table_group("lm_head", head=True) == 32


@pytest.mark.parametrize(("raw", "bits"), [({"table_bits": 8}, 8), ({}, 4), ({"quantize_embedding": False}, 16), ({"table_bits": 16}, 16)])
def test_bits_of_the_table(raw: dict[str, Any], bits: int) -> None:
    fields = _config(raw).fields
    assert fields.stored_table_bits == bits
    assert fields.bits_of("model.embed_tokens") == (8 if bits == 8 else 4)
    assert fields.bits_of("model.layers.0.mlp.up_proj") == 4


def test_names_follow_a_renaming_model() -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    config = _config({"ignore": ["language_model.lm_head"], "group_size_overrides": {"language_model.x": 32}})
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"language_model.": "model."}))
    assert config.fields.ignore == ("model.lm_head",)
    assert config.fields.group_size_overrides == {"model.x": 32}


def test_names_follow_a_model_that_renames_tensors() -> None:
    """Phi-3.5-MoE calls its router otherwise than its checkpoint, by a rule for the tensor and not for the module."""
    from vllm.model_executor.models.utils import WeightsMapper

    config = _config({"ignore": ["model.layers.0.moe.gate"]})
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_substr={".moe.": ".mlp.", ".gate.weight": ".router.weight"}))
    assert config.ignores("model.layers.0.mlp.router")


PROBE = """
import vllm.plugins
vllm.plugins.load_general_plugins()
from appliance.vllm_plugin import register
if {again}: register(); register()
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
print(QUANTIZATION_METHODS.count("cpu_int4"), end=" ")
try:
    print(get_quantization_config("cpu_int4").__name__)
except ValueError:
    print("unknown")
"""


@pytest.mark.parametrize(("plugins", "again", "wanted"), [
    ("cpu_int4", True, "1 CpuInt4Config"), ("other", False, "0 unknown"),
])
def test_case_021_vllm_finds_the_plugin_by_itself(plugins: str, again: bool, wanted: str) -> None:
    """In a fresh process, by its entry point alone; an inherited VLLM_PLUGINS=other keeps it out."""
    env = {**os.environ, "VLLM_PLUGINS": plugins, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROBE.format(again=again)], env=env, text=True,
                          capture_output=True, timeout=180)
    assert done.stdout.splitlines()[-1:] == [wanted], done.stderr[-2000:]


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, appliance.vllm_plugin; print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
