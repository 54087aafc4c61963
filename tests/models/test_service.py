"""Some rows of the table through the whole service: `applianctl model add`, `serve`, an HTTP client. Runs in the agent's environment."""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from tests.models.zoo import ROWS, Row  # noqa: E402  # after the guard for the worker's environment
from tests.served.conftest import ROOT, WORKER, run_applianctl, serve  # noqa: E402

pytestmark = pytest.mark.served
LIMIT = 0.05
TEXT = (ROOT / "LICENSE").read_text()[:400]


def worker(*args: str, stdin: str = "") -> str:
    done = subprocess.run([WORKER, "-W", "ignore", "-m", *args], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=300, check=False,
                          env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("row", [row for row in ROWS if row.whole], ids=lambda row: row.name)
def test_added_served_and_asked_by_a_client(tmp_path: Path, row: Row) -> None:
    home, source = tmp_path / "home", tmp_path / "source"
    worker("tests.models.maker", row.name, str(source))
    home.mkdir()
    (home / "appliance.yaml").write_text("")
    added = run_applianctl(home, "model", "add", str(source), "--name", "tiny")
    assert added.returncode == 0, added.stderr
    shown = json.loads(run_applianctl(home, "model", "show", "tiny", "--json").stdout)
    service = serve(home, settings="model: tiny\nallow_prompt_logprobs: true\n")
    try:
        client = openai.OpenAI(base_url=service.base_url, api_key="none", timeout=600, max_retries=0)
        done: Any = client.completions.create(model="tiny", prompt=TEXT, max_tokens=8, temperature=0, logprobs=0,
                                              extra_body={"prompt_logprobs": 0, "return_token_ids": True, "ignore_eos": True})
        with pytest.raises(openai.BadRequestError):  # case 41: an id that no row stands for
            client.completions.create(model="tiny", prompt=[3, shown["vocab_size"]], max_tokens=1)
    finally:
        service.stop()
    choice = done.choices[0]
    ids = choice.prompt_token_ids
    got = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], choice.prompt_logprobs[1:], strict=True)] + choice.logprobs.token_logprobs
    want = json.loads(worker("tests.models.reference", shown["path"], stdin=json.dumps({"sequences": [ids + choice.token_ids]})))["logprobs"][0]
    difference = statistics.fmean(abs(a - b) for a, b in zip(got, want, strict=True))
    print(f"{row.name}: {difference:.4f}")
    assert difference <= LIMIT


@pytest.mark.parametrize(("config", "words"), [
    ({"architectures": ["BaichuanForCausalLM"]}, "until version 0.23.0"),
    ({"architectures": ["BertForSequenceClassification"]}, "not a model of text alone"),
    ({"architectures": ["InventedForCausalLM"]}, "knows no architecture InventedForCausalLM"),
    ({"model_type": "somebodys_own"}, "code in its own folder"),
    ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
     "windows in some of its layers only"),
])
def test_what_vllm_does_not_serve_is_refused_before_any_work(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    from tests.quantize.models import LLAMA, write_folder

    home = tmp_path / "home"
    home.mkdir()
    (home / "appliance.yaml").write_text("")
    done = run_applianctl(home, "model", "add", str(write_folder(tmp_path / "m", LLAMA | config)))
    assert done.returncode == 65
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (home / "store").exists()
