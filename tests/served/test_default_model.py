"""The main job with real vLLM: an answer, a stream, log-probabilities against a reference, and the safety rule."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.served.conftest import ROOT, Served, environment, reference_logprobs

pytestmark = pytest.mark.served
LIMIT = 0.05
"""Mean absolute difference of log-probabilities between the served model and the fp32 reference."""
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = (ROOT / "LICENSE").read_text()[:6000]


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.base_url, api_key="none", timeout=600, max_retries=0)


def report(record: Callable[[str, object], None], name: str, value: float) -> None:
    record(name, value)
    print(f"{name}: {value:.4f}")


def test_the_service_said_ready_after_an_answer(served: Served) -> None:
    assert any("model smollm2: quantized in" in line for line in served.lines)
    assert "answered" in served.lines[-1]
    status = served.until(lambda status: (status.get("memory_bytes") or 0) > 500 << 20)
    assert status["state"] == "ready"
    assert status["model"] == "smollm2"
    assert status["last_answer_at"]
    assert status["agent_memory_bytes"] < 60 << 20
    assert served.applianctl("status", "--wait").returncode == 0


def test_chat_says_paris(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    assert "Paris" in (answer.choices[0].message.content or "")


def test_a_stream_arrives_in_pieces(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=40, stream=True)  # type: ignore[call-overload]
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices and chunk.choices[0].delta.content]
    assert len(pieces) > 3
    assert "Paris" in "".join(pieces)


def test_the_command_line_chats(served: Served) -> None:
    done = served.applianctl("chat", "--temperature", "0", "What is the capital of France?")
    assert done.returncode == 0
    assert "Paris" in done.stdout
    piped = served.applianctl("chat", "--temperature", "0", "--max-tokens", "8", stdin="Say hello.")
    assert piped.returncode == 0
    assert piped.stdout.strip()


def test_sampling_and_log_probabilities_compile_nothing(served: Served, client: openai.OpenAI) -> None:
    """vLLM's sampler would compile itself at the first such request: seconds of silence, an error without a compiler."""
    done: Any = client.completions.create(model="default", prompt="Once", max_tokens=8, temperature=0.8, top_p=0.9, logprobs=3,
                                          extra_body={"prompt_logprobs": 1, "top_k": 20, "min_p": 0.01, "seed": 7, "ignore_eos": True})
    assert done.usage.completion_tokens == 8
    done = client.completions.create(model="default", prompt="Once", max_tokens=8, temperature=0.8, extra_body={"ignore_eos": True})
    assert done.usage.completion_tokens == 8
    assert not [path for path in (served.home / "cache").rglob("*.so") if "inductor" in path.parts]


def test_models_are_listed_by_store_name_and_alias(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {"smollm2", "default"}


def test_an_over_long_prompt_is_an_error_never_cut(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="default", prompt="word " * 9000, max_tokens=1)


def test_case_073_the_engine_holds_what_the_plan_says(served: Served) -> None:
    """The engine's own figure for its cache within 5 %, and its memory no more than planned by more than 10 %."""
    plan = json.loads(served.applianctl("plan", "--json").stdout)
    log = (served.home / "state" / "worker.log").read_text()
    found = re.search(r"KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens", log)
    assert found
    tokens, context = (int(number.replace(",", "")) for number in found.groups())
    assert context == plan["rungs"][0]["context"]
    a_token = plan["rungs"][0]["kv_bytes"] / tokens
    assert a_token == pytest.approx(2 * 30 * 3 * 64 * 2, rel=0.05)
    memory = json.loads(served.applianctl("status", "--json").stdout)["memory_bytes"]
    assert memory <= 1.1 * plan["peak_bytes"]


def test_many_rows_prompt_logprobs_agree_with_the_reference(
    served: Served, client: openai.OpenAI, record_property: Callable[[str, object], None]
) -> None:
    ids, got = prompt_logprobs(client, TEXT)
    assert len(ids) >= 512
    want = reference_logprobs(served.model, [ids])[0]
    difference = statistics.fmean(abs(a - b) for a, b in zip(got, want, strict=True))
    report(record_property, "many rows, mean |difference|", difference)
    assert difference <= LIMIT


def test_one_row_generation_agrees_with_the_reference(
    served: Served, client: openai.OpenAI, record_property: Callable[[str, object], None]
) -> None:
    difference, count = generated_difference(served, [generate(client, "Once upon a time there was a small village")])
    assert count >= 256
    report(record_property, "one row, mean |difference|", difference)
    assert difference <= LIMIT


def test_eight_in_parallel_agree_with_the_reference(
    served: Served, client: openai.OpenAI, record_property: Callable[[str, object], None]
) -> None:
    prompts = [f"Chapter {n}. The {thing} was" for n, thing in enumerate(
        ("river", "castle", "engine", "letter", "garden", "winter", "market", "teacher"), 1)]
    with ThreadPoolExecutor(8) as pool:
        generated = list(pool.map(lambda prompt: generate(client, prompt), prompts))
    difference, count = generated_difference(served, generated)
    assert count >= 8 * 256
    report(record_property, "eight rows, mean |difference|", difference)
    assert difference <= LIMIT


@pytest.mark.parametrize("users", [1, 2, 7])
def test_several_users_never_reach_torchs_int4_kernel(served: Served, client: openai.OpenAI, users: int) -> None:
    start = threading.Barrier(users)

    def ask(number: int) -> int:
        start.wait()
        done = client.completions.create(model="default", prompt=f"User {number} asks about", max_tokens=24, temperature=0,
                                         extra_body={"ignore_eos": True})
        return done.usage.completion_tokens if done.usage else 0

    with ThreadPoolExecutor(users) as pool:
        assert list(pool.map(ask, range(users))) == [24] * users
    assert served.record() == [], "the native kernel serves the default model (test_torch_kernel.py has the other one)"


@pytest.mark.last
def test_stop_leaves_nothing_and_the_next_start_uses_the_cache(served: Served, home: Path) -> None:
    code, rest = served.stop()
    assert code == 0
    assert "stopped: no worker process is left" in rest
    assert json.loads((home / "run" / "status.json").read_text())["state"] == "stopped"


@pytest.mark.last
def test_case_009_014_015_offline_without_compiler_or_account(served: Served, home: Path) -> None:
    """Only loopback, no g++ on PATH, HOME=/, a uid that no passwd file knows: serves from the cache, connects nowhere."""
    if os.geteuid() != 0:
        pytest.skip("needs root to drop to another uid and to leave the network")
    uid = "48213"
    tools = home.parent / "bin"
    tools.mkdir()
    for tool in ("sh", "lscpu", "env", "uname"):
        (tools / tool).symlink_to(f"/usr/bin/{tool}")
    for parent in (home.parent, *home.parent.parents[:2]):
        parent.chmod(0o755)
    subprocess.run(["chown", "-R", uid, str(home)], check=True)
    # It may read everything (this checkout can lie in a folder of root's own), and write nothing but its home.
    drop = "setpriv --reuid 48213 --regid 48213 --clear-groups --inh-caps +dac_read_search --ambient-caps +dac_read_search"
    command = ("unshare", "--net", "sh", "-c", f'ip link set lo up && exec {drop} "$@"', "sh")
    code, out = _serve_apart(home, command, tools)
    assert code == 0, out
    assert "quantized" not in out
    assert "] ready: " in out
    assert json.loads((home / "run" / "status.json").read_text())["state"] == "stopped"
    # Whatever the account owns outside its home lies in the short socket folder, and no socket is left there.
    outside = [path for top in ("/tmp", "/var/tmp", "/dev/shm") for path in owned(Path(top), int(uid))
               if not str(path).startswith("/tmp/pytest-of-")]
    assert all(path.name.startswith(f"appliance-{uid}-") and path.is_dir() for path in outside), outside


def owned(top: Path, uid: int) -> list[Path]:
    found = subprocess.run(["find", str(top), "-xdev", "-uid", str(uid)], capture_output=True, text=True, check=False)
    return [Path(line) for line in found.stdout.splitlines()]


def _serve_apart(home: Path, command: tuple[str, ...], tools: Path) -> tuple[int, str]:
    """Serve behind `command` until ready, then stop; returns exit code and output."""
    env = environment(home, HOME="/")
    process = subprocess.Popen(
        [*command, "env", f"PATH={tools}", sys.executable, "-m", "appliance.cli.main", "serve", "--port", "8099"], env=env,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True)
    lines = []
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "] ready: " in line:
                process.send_signal(signal.SIGTERM)
    return process.returncode, "".join(lines)


def prompt_logprobs(client: openai.OpenAI, text: str) -> tuple[list[int], list[float]]:
    """Token ids of `text` and the log-probability of each from the second on."""
    done: Any = client.completions.create(model="default", prompt=text, max_tokens=1, temperature=0,
                                          extra_body={"prompt_logprobs": 0, "return_token_ids": True})
    ids = done.choices[0].prompt_token_ids
    return ids, [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], done.choices[0].prompt_logprobs[1:], strict=True)]


def generate(client: openai.OpenAI, prompt: str) -> tuple[list[int], list[int], list[float]]:
    """Prompt ids, 256 generated ids and their log-probabilities at temperature 0."""
    done: Any = client.completions.create(model="default", prompt=prompt, max_tokens=256, temperature=0, logprobs=0,
                                          extra_body={"return_token_ids": True, "ignore_eos": True})
    choice = done.choices[0]
    return choice.prompt_token_ids, choice.token_ids, choice.logprobs.token_logprobs


def generated_difference(served: Served, generated: list[tuple[list[int], list[int], list[float]]]) -> tuple[float, int]:
    """Mean absolute difference over all generated tokens, and their number."""
    scored = reference_logprobs(served.model, [prompt + tokens for prompt, tokens, _ in generated])
    differences = [abs(a - b) for (_, tokens, got), want in zip(generated, scored, strict=True)
                   for a, b in zip(got, want[-len(tokens):], strict=True)]
    return statistics.fmean(differences), len(differences)
