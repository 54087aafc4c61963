"""Names of the Hub, the choice of files, the way there, and the folder of fetched sources; fetching is in tests/hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from appliance.delivery import hub_name
from appliance.errors import ConfigError, ModelError, TransientError, UsageError
from appliance.hub import fetching
from appliance.hub.access import ENDPOINT, endpoint_refusal, read_access, read_token, token_pipe
from appliance.hub.orders import Order
from appliance.hub.reference import Reference, is_hub, parse
from appliance.hub.selection import RemoteFile, gguf_files, quant_of, read_listing, small_files, weight_files
from appliance.settings import Settings
from appliance.settings import parse as parse_settings
from appliance.sources import Sources, key_of
from appliance.store import name_refusal


@pytest.mark.parametrize(("text", "repo", "revision", "file"), [
    ("hf:Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main", None),
    ("hf:a/b@v1.0", "a/b", "v1.0", None),
    ("hf:a/b@refs/pr/1", "a/b", "refs/pr/1", None),
    ("hf:a/b:Q4_K_M", "a/b", "main", "Q4_K_M"),
    ("hf:a/b@main:sub/x-Q8_0.gguf", "a/b", "main", "sub/x-Q8_0.gguf"),
    ("hf:a/b@" + "0" * 40, "a/b", "0" * 40, None),
])
def test_a_reference(text: str, repo: str, revision: str, file: str | None) -> None:
    found = parse(text)
    assert found == Reference(repo=repo, revision=revision, file=file)
    assert parse(str(found)) == found
    assert found.pinned == (len(revision) == 40)
    assert is_hub(text)
    assert name_refusal(hub_name(text)) is None


@pytest.mark.parametrize("text", [
    "hf:", "hf:name", "hf:a/b/c", "hf:/b", "hf:a/", "hf:../b", "hf:a/..", "hf:a/b@", "hf:a/b@../x", "hf:a/b@x/../y", "hf:a/b:",
    "hf:a/b:../x.gguf", "hf:a/b:/x", "hf:a/b@main:x:y", "hf:a/b?x=1", "hf:a/b#x", "hf:a b/c", "hf:a/b@x y", "hf:a/b\n", "hf:a/\u00fc",
    "hf:-a/b", "hf:a/b:x//y", "hf:" + "a" * 200 + "/b", "hf:a/b:./x", "hf:a/.b",
])
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(UsageError, match="write hf:org/name"):
        parse(text)


@pytest.mark.parametrize(("source", "name"), [
    ("hf:Qwen/Qwen3-0.6B", "qwen3-0.6b"), ("hf:a/B-GGUF:Q8_0", "b-gguf-q8_0"), ("hf:a/b:sub/X-Q8_0.gguf", "x-q8_0"),
])
def test_a_name_from_the_hub(source: str, name: str) -> None:
    assert hub_name(source) == name


@pytest.mark.parametrize(("name", "quant"), [
    ("SmolLM2-1.7B-Instruct-Q4_K_M.gguf", "Q4_K_M"), ("x.q8_0.gguf", "Q8_0"), ("x-IQ4_XS.gguf", "IQ4_XS"), ("x-BF16-00001-of-00002.gguf", "BF16"),
    ("x-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"), ("Q2_K/x-Q2_K.gguf", "Q2_K"), ("Qwen2.5-7B-f16.gguf", "F16"), ("model.gguf", None), ("q3model.gguf", None),
])
def test_the_quantization_of_a_file_name(name: str, quant: str | None) -> None:
    assert quant_of(name) == quant


def listing(*names: str, **fields: Any) -> Any:
    files = [{"name": name, "bytes": 10, "sha256": None, "git_sha1": "0" * 40, **fields} for name in names]
    return read_listing("org/name", "c" * 40, files)


def names(files: tuple[RemoteFile, ...]) -> list[str]:
    return [file.name for file in files]


def test_only_what_is_needed_is_chosen() -> None:
    whole = listing("config.json", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx", "original/consolidated.00.pth", "tokenizer.json",
                    "consolidated.safetensors", "modeling_x.py", "README.md", "chat_template.jinja", "generation_config.json", "sub/model.safetensors")
    assert names(small_files(whole)) == ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"]
    assert names(weight_files(whole, None)) == ["model.safetensors"]
    two = listing("config.json", "a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors", "other.safetensors")
    index = {"weight_map": {"x": "a-00001-of-00002.safetensors", "y": "a-00002-of-00002.safetensors"}}
    assert names(weight_files(two, index)) == ["a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors"]


@pytest.mark.parametrize("odd", ["../config.json", "/config.json", "a\\config.json", "a/../x.gguf", "./x.gguf", "x\n.gguf", "", "a//x.gguf", ". /x.gguf"])
def test_a_name_that_leaves_its_folder_is_never_taken(odd: str) -> None:
    assert listing(odd).files == ()


@pytest.mark.parametrize(("index", "says"), [
    ({}, "no weight_map"), ([], "no weight_map"), ({"weight_map": {}}, "no weight_map"), ({"weight_map": {"a": 1}}, "no weight_map"),
    ({"weight_map": {"a": "../model.safetensors"}}, "is no weight file"), ({"weight_map": {"a": "model.bin"}}, "is no weight file"),
    ({"weight_map": {"a": "b.safetensors"}}, "first b.safetensors"),
])
def test_an_index_is_not_believed_blindly(index: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        weight_files(listing("config.json", "model.safetensors", "model.bin"), index)


def test_the_gguf_file_that_is_meant() -> None:
    many = listing("x-Q8_0.gguf", "x-Q4_K_M-00001-of-00002.gguf", "x-Q4_K_M-00002-of-00002.gguf", "mmproj-Q8_0.gguf", "y-F16.gguf", "z-F16.gguf")
    assert names(gguf_files(many, "q8_0")) == ["x-Q8_0.gguf"]
    assert names(gguf_files(many, "Q4_K_M")) == ["x-Q4_K_M-00001-of-00002.gguf", "x-Q4_K_M-00002-of-00002.gguf"]
    assert names(gguf_files(many, "x-Q4_K_M-00001-of-00002.gguf")) == ["x-Q4_K_M-00001-of-00002.gguf", "x-Q4_K_M-00002-of-00002.gguf"]
    assert names(gguf_files(many, "z-F16.gguf")) == ["z-F16.gguf"]
    with pytest.raises(ModelError, match=r"F16 means 2 files: y-F16, z-F16"):
        gguf_files(many, "F16")
    with pytest.raises(ModelError, match=r"no GGUF file is called 'Q2_K'; it has F16, Q4_K_M, Q8_0"):
        gguf_files(many, "Q2_K")
    with pytest.raises(ModelError, match="1 of 3 parts"):
        gguf_files(listing("x-Q8_0-00002-of-00003.gguf"), "Q8_0")


@pytest.mark.parametrize(("address", "token", "why"), [
    ("https://huggingface.co", True, None), ("http://127.0.0.1:8080", True, None), ("http://mirror.lan/hf", False, None),
    ("http://mirror.lan", True, "not sent unencrypted"), ("ftp://x", False, "not an http"), ("huggingface.co", False, "not an http"),
    ("https://user:pass@x", False, "a password"), ("https://x?y=1", False, "a query"), ("https://x:99999", False, "not an http"), ("", False, "not an http"),
    ("https://x y", False, "not an http"),
])
def test_the_address_of_the_hub(address: str, token: bool, why: str | None) -> None:
    reason = endpoint_refusal(address, with_token=token)
    assert reason is None if why is None else reason is not None and why in reason


def test_where_the_hub_and_the_token_come_from(tmp_path: Path) -> None:
    plain = Settings()
    assert read_access(plain, {}).endpoint == ENDPOINT
    assert read_access(plain, {"HF_ENDPOINT": "https://mirror/"}).endpoint == "https://mirror"
    (tmp_path / "file").write_text("hf_file\n")
    (tmp_path / "hub_token").write_text("hf_credential\n")
    chosen = parse_settings(f"hub:\n  endpoint: https://own\n  token_file: {tmp_path / 'file'}\n  limit_rate: 2M\n").settings
    access = read_access(chosen, {"HF_ENDPOINT": "https://mirror", "HF_TOKEN": "hf_env", "HTTPS_PROXY": "http://p", "SECRET": "x"})
    assert (access.endpoint, access.token, access.rate_bytes_s) == ("https://own", "hf_file", 2 << 20)
    assert access.network == {"HTTPS_PROXY": "http://p"}
    assert "hf_file" not in repr(access)
    assert read_token(plain, {"CREDENTIALS_DIRECTORY": str(tmp_path), "HF_TOKEN": "hf_env"}) == "hf_credential"
    assert read_token(plain, {"HF_TOKEN": "hf_env"}) == "hf_env"
    assert read_token(plain, {"HF_TOKEN": "  "}) is None


@pytest.mark.parametrize("content", [b"", b"\n", b"two words\n", b"\xff\xfe", "hf_ü\n".encode(), b"a\x00b"])
def test_a_token_that_cannot_be_used(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    settings = parse_settings(f"hub: {{token_file: {tmp_path / 'token'}}}").settings
    with pytest.raises(ConfigError) as caught:
        read_token(settings, {})
    assert "words" not in caught.value.line
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(parse_settings(f"hub: {{token_file: {tmp_path / 'missing'}}}").settings, {})


def test_a_token_goes_through_a_pipe() -> None:
    for token in ("hf_x", None):
        descriptor = token_pipe(token)
        assert not os.get_inheritable(descriptor)
        assert os.read(descriptor, 100).decode() == (token or "")
        assert os.read(descriptor, 100) == b""
        os.close(descriptor)


@pytest.mark.parametrize(("settings", "env"), [("hub: {offline: true}", {}), ("", {"HF_HUB_OFFLINE": "1"}), ("", {"HF_HUB_OFFLINE": "yes"})])
def test_case_015_an_offline_node_says_so(settings: str, env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="this node does not fetch models"):
        read_access(parse_settings(settings).settings, env)


def describe(sources: Sources, key: str, size: int, *, kept: bool = False) -> None:
    files = {"a.safetensors": {"bytes": 100, "sha256": "0" * 64, "git_sha1": None}}
    with sources.hold(key) as held:
        sources.describe(held, source="hf:org/name@x", commit="c" * 40, files=files, kept=kept)
        (held.path / "a.safetensors.part").write_bytes(bytes(size))


def test_fetched_sources_are_listed_kept_and_pruned(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    assert sources.list() == []
    assert sources.prune() == 0
    key = key_of("org/name", "c" * 40, None)
    describe(sources, key, 60)
    describe(sources, "kept", 100, kept=True)
    by_key = {one.key: one for one in sources.list()}
    assert (by_key[key].bytes, by_key[key].wanted_bytes, by_key[key].whole, by_key[key].busy) == (60, 100, False, False)
    assert (by_key["kept"].whole, by_key["kept"].kept) == (True, True)
    with sources.hold(key):
        assert {one.key: one.busy for one in sources.list()} == {key: True, "kept": False}
        assert sources.prune(wanted=["hf:org/name@x"]) == 0
        with pytest.raises(TransientError, match="another process is fetching"), sources.hold(key):
            pass
    assert sources.find("hf:org/name@x") == tmp_path / "sources" / "kept"
    assert sources.find("hf:org/name@y") is None
    assert sources.prune(wanted=["hf:org/name@x"]) == 60
    assert [one.key for one in sources.list()] == ["kept"]
    assert sources.prune() == 100
    assert sources.list() == []


def test_long_names_have_folders_of_their_own() -> None:
    keys = {key_of("o" * 96 + "/" + "n" * 96, commit * 40, file) for commit in "ab" for file in (None, "x" * 200, "x" * 199 + "y")}
    assert len(keys) == 6
    assert max(map(len, keys)) <= 200


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "source": "", "commit": "", "files": {}}', '{"files": {"a": 1}}', "[" * 100_000])
def test_a_broken_record_is_no_record(tmp_path: Path, text: str) -> None:
    sources = Sources(tmp_path)
    (tmp_path / "sources" / "x").mkdir(parents=True)
    (tmp_path / "sources" / "x" / "source.json").write_text(text)
    assert sources.described("x") is None
    assert sources.list()[0].source == "?"


def test_keys_stay_apart_and_inside() -> None:
    keys = {key_of("a/b", "c" * 40, None), key_of("a/b", "d" * 40, None), key_of("a/b", "c" * 40, "x.gguf"), key_of("a/c", "c" * 40, None)}
    assert len(keys) == 4
    assert not [key for key in keys if "/" in key or key.startswith(".")]


class SlowHub:
    def download(self, _listing: Any, file: RemoteFile, target: Path, on_bytes: Any) -> None:
        target.write_bytes(bytes(file.bytes))
        on_bytes(1)
        on_bytes(file.bytes - 1)


def test_a_slow_fetch_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of the progress of a large model may take an hour; a job that says nothing is ended after 15 minutes."""
    sources = Sources(tmp_path)
    describe(sources, "x", 0)
    order = Order(endpoint="http://x", repo="org/name", revision="c" * 40, file=None, folder=str(tmp_path / "sources" / "x"))
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(fetching, "ALIVE_S", -1.0)
    report = fetching.fetch(SlowHub(), order, tmp_path / "sources" / "x", said.append)  # type: ignore[arg-type]
    assert report == {"fetched_bytes": 100, "files": 1}
    assert [one["event"] for one in said] == ["phase", "alive", "progress", "alive", "progress"]
    assert said[-1] == {"event": "progress", "done_bytes": 100, "total_bytes": 100, "item": "a.safetensors"}
    assert fetching.fetch(SlowHub(), order, tmp_path / "sources" / "x", said.append)["fetched_bytes"] == 0  # type: ignore[arg-type]
