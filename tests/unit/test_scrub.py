"""What may not leave the node: known secrets, what looks like one, requests' words. What helps stays."""

from __future__ import annotations

import pytest

from appliance.scrub import HIDDEN, REQUEST, SECRET, SECRET_NAME, Scrubber

SENTINEL = "Zq8sentinel-Vx2"


@pytest.mark.parametrize("line", [
    f"the key is {SENTINEL}!", f"x{SENTINEL}x", f"url?key={SENTINEL}&b=1", f"{SENTINEL}\n{SENTINEL}",
])
def test_a_known_secret_appears_nowhere(line: str) -> None:
    assert SENTINEL not in Scrubber([SENTINEL]).text(line)


@pytest.mark.parametrize("line", [
    f"sk-appl-{SENTINEL}", f"hf_{'a' * 20}Zq8sentinel", f"Authorization: Bearer {SENTINEL}", f'"authorization": "Basic {SENTINEL}"', f"authorization={SENTINEL}",
    f"bearer {SENTINEL}", f"https://me:{SENTINEL}@host/x", f"http://:{SENTINEL}@host", f"HF_TOKEN={SENTINEL}", f"my_password: {SENTINEL}", f"'api_key': '{SENTINEL}'",
    f'"client-secret": "{SENTINEL}"', f"--api-key={SENTINEL}", f"-----BEGIN RSA PRIVATE KEY-----\nMII{SENTINEL}\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\nMII{SENTINEL}", f"prompt: 'tell me of {SENTINEL}'", f'{{"messages": [{{"content": "{SENTINEL}"}}]}}', f"Received request cmpl-1: {SENTINEL}",
    f"{{'input': '{SENTINEL}'}}",
])
def test_what_looks_like_a_secret_goes_though_nobody_knew_it(line: str) -> None:
    scrubbed = Scrubber().text(line)
    assert "sentinel" not in scrubbed
    assert SECRET in scrubbed or REQUEST in scrubbed


@pytest.mark.parametrize("line", [
    "INFO 11-29 20:12:01 [core.py:1] init engine took 3.2 s", "prompt_tokens: 12, completion_tokens: 3", "max_tokens=32", "api_key_file: /etc/appliance/key",
    "GET http://127.0.0.1:8000/v1/models 200", "ready: serving smollm2", "tokens/s: 23.4", "vllm:prompt_tokens_total{model=\"x\"} 12", "keys: 3",
    "Avg prompt throughput: 12.0 tokens/s", "basic checks passed", "hf_overrides=1 and 'hf_overrides': {}", "PWD=/work OLDPWD=/x", "the certificate ends in 3 days", "LoadCredential is set",
])
def test_what_helps_stays(line: str) -> None:
    assert Scrubber([SENTINEL, "short"[:3], ""]).text(line) == line


def test_which_variables_hold_secrets() -> None:
    names = ("PWD", "OLDPWD", "PATH", "HOME", "APPLIANCE_API_KEY_FILE", "APPLIANCE_MODEL", "TOKENIZERS_PARALLELISM", "XAUTHORITY")
    assert [name for name in names if SECRET_NAME.search(name)] == []
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PWD", "DB_PASSWORD", "APPLIANCE_API_KEY", "MY_PASS", "BASIC_AUTH"):
        assert SECRET_NAME.search(name), name


def test_trees_keep_their_shape() -> None:
    tree = {"env": {"OMP_NUM_THREADS": "2", "MY_TOKEN": "abcdefgh", "EXTRA": "plain"}, "worker.env": {"OMP_X": "1", "FOO": "bar"},
            "list": [f"a {SENTINEL}", 1, None, True], "settings": {"worker.env": {"FOO": "x"}}}
    assert Scrubber([SENTINEL], ["EXTRA"]).tree(tree) == {
        "env": {"OMP_NUM_THREADS": "2", "MY_TOKEN": HIDDEN, "EXTRA": HIDDEN}, "worker.env": {"OMP_X": "1", "FOO": HIDDEN},
        "list": [f"a {SECRET}", 1, None, True], "settings": {"worker.env": {"FOO": HIDDEN}}}


def test_unit_files_keep_the_names_of_variables() -> None:
    text = f"[Service]\nEnvironment=\"FOO={SENTINEL} two\" OMP_NUM_THREADS=2\nSetCredential=k:{SENTINEL}\nEnvironment='broken\nWatchdogSec=30\n"
    assert Scrubber().unit(text) == (
        f"[Service]\nEnvironment=FOO={HIDDEN} OMP_NUM_THREADS=2\nSetCredential={HIDDEN}\nEnvironment={HIDDEN}\nWatchdogSec=30\n")


def test_a_long_log_is_quick() -> None:
    import time

    text = "INFO 11-29 20:12:01 [core.py:1] a usual line with some words and a number 1234567890\n" * 25000
    began = time.monotonic()
    Scrubber([SENTINEL]).text(text)
    assert time.monotonic() - began < 10
