"""Each field of `quantization_config` off its default, served against a compile cache that is warm for the default.

Many vLLM starts (about 20 minutes on two cores): `make test-fields`. A field that changes the compiled graph must reach
the compile key; if it did not, a start would load code built for the other graph.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from appliance import jobs
from appliance.supervisor.health import listening
from tests.served.conftest import RECORDER, ROOT, WORKER, environment, reference_logprobs, run_applianctl
from tests.served.test_default_model import LIMIT, prompt_logprobs

pytestmark = [pytest.mark.served, pytest.mark.heavy]
TEXT = (ROOT / "LICENSE").read_text()[:2500]
MODELS = {"plain": (), "table4": ("--table-bits", "4"), "ignored": ("--ignore", "o_proj"), "group64": ("--group-size", "64", "--table-bits", "4")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with four recipes of the default model, and a compile cache warmed by one start of the default."""
    home = tmp_path_factory.mktemp("fields") / "home"
    home.mkdir()
    (home / "appliance.yaml").write_text("")
    for name, flags in MODELS.items():
        added = run_applianctl(home, "model", "add", "smollm2", "--name", name, *flags)
        assert added.returncode == 0, added.stderr
    with worker(home, "plain", {}) as client:
        prompt_logprobs(client, TEXT)
    return home


@contextmanager
def worker(home: Path, model: str, fields: dict[str, Any], *, model_folder: Path | None = None, **env: str) -> Iterator[openai.OpenAI]:
    """The planned worker with some config fields changed, until the block ends."""
    plan = json.loads(run_applianctl(home, "plan", "--model", model, "--json").stdout)
    rung = plan["rungs"][0]
    argv = list(rung["argv"])
    socket = Path(argv[argv.index("--uds") + 1])
    where = argv.index("--hf-overrides") + 1
    overrides = json.loads(argv[where])
    overrides["quantization_config"] |= fields
    if fields.get("kernel") == "aten":
        rung["env"].pop("APPLIANCE_PREPARED", None)
        rung["env"]["APPLIANCE_PLANNED_KERNEL"] = "aten"
    if not overrides["quantization_config"]["wide_residual"]:
        overrides.pop("head_dtype", None)
    argv[where] = json.dumps(overrides)
    if model_folder:
        argv[argv.index("--model") + 1] = str(model_folder)
    for folder in ("TMPDIR", "VLLM_RPC_BASE_PATH"):
        Path(rung["env"][folder]).mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)
    log = home / "worker.log"
    with open(log, "w") as out:
        process = subprocess.Popen([WORKER, "-m", "appliance.worker", "serve", *argv], stdout=out, stderr=subprocess.STDOUT,
                                   env={"PATH": os.environ["PATH"], **rung["env"], **env}, start_new_session=True)
    try:
        deadline = time.monotonic() + 600
        while not listening(socket):
            assert process.poll() is None, log.read_text()[-20000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(socket)), timeout=600) as client:
            yield openai.OpenAI(base_url="http://worker/v1", api_key="none", timeout=600, max_retries=0, http_client=client)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def difference(home: Path, model: str, client: openai.OpenAI) -> float:
    ids, got = prompt_logprobs(client, TEXT)
    digest = (home / "store" / "names" / model).read_text().strip()
    want = reference_logprobs(home / "store" / "objects" / digest, [ids])[0]
    return statistics.fmean(abs(a - b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("plain", {"wide_residual": False}),
        ("plain", {"direct_dequant": False}),
        ("plain", {"use_custom_op": False}),
        ("plain", {"dequant_threshold": 8}),
        ("plain", {"prefill_dequant": False}),
        ("plain", {"kernel": "auto"}),
        ("plain", {"kernel": "aten"}),
        ("plain", {"kernel": "aten", "direct_dequant": False}),
        ("table4", {}),
        ("ignored", {}),
        ("group64", {}),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(f"{a}={b}" for a, b in v.items()),
)
def test_a_field_off_its_default_on_a_warm_cache(home: Path, model: str, fields: dict[str, Any]) -> None:
    with worker(home, model, fields) as client:
        value = difference(home, model, client)
    print(f"{model} {fields}: mean |difference| {value:.4f}")
    assert value <= LIMIT


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_environment_override_wins(home: Path, value: str) -> None:
    with worker(home, "plain", {"direct_dequant": value == "0"}, VLLM_OMNI_CPU_INT4_DIRECT_DEQUANT=value) as client:
        assert difference(home, "plain", client) <= LIMIT


def test_no_call_of_an_int4_head_has_more_than_one_row(home: Path) -> None:
    """Torch's kernel, with table and head in 4 bits: the head obeys the same rule as the linears."""
    record = home / "record.jsonl"
    env = {"PYTHONPATH": str(RECORDER), "VLLM_PLUGINS": "cpu_int4,int4_recorder", "INT4_RECORD": str(record)}
    with worker(home, "table4", {"kernel": "aten"}, **env) as client:
        def ask(number: int) -> None:
            client.completions.create(model="default", prompt=f"User {number} asks about", max_tokens=16, temperature=0,
                                      extra_body={"ignore_eos": True})

        for users in (1, 2, 7):
            with ThreadPoolExecutor(users) as pool:
                list(pool.map(ask, range(users)))
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    assert {call["rows"] for call in calls} == {1}
    assert 49152 in {call["channels"] for call in calls}


def test_case_029_a_missing_tensor_is_refused(home: Path, tmp_path: Path) -> None:
    """A tensor that the file lacks would be served as zeros; the start ends and names it. (A mapped weight
    would not need the tensor at all.)"""
    code = ("import sys; from safetensors.torch import load_file, save_file; t = load_file(sys.argv[1]); "
            "t.pop('model.layers.3.mlp.down_proj.weight_scale'); save_file(t, sys.argv[1])")
    digest = (home / "store" / "names" / "plain").read_text().strip()
    shutil.copytree(home / "store" / "objects" / digest, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").chmod(0o644)
    subprocess.run([WORKER, "-c", code, str(tmp_path / "model" / "model.safetensors")], check=True)
    with pytest.raises(AssertionError, match=r"down_proj\.weight_scale"), worker(home, "plain", {}, model_folder=tmp_path / "model", APPLIANCE_PREPARED=""):
        pass


def test_the_contract_is_what_the_agent_expects() -> None:
    assert jobs.worker_contract(str(WORKER), env=environment(Path("/nonexistent")))["contract"]["major"] == jobs.CONTRACT
