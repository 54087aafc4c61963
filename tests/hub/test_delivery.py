"""From `hf:org/name` to a stored model: real children, a real quantization, a Hub on loopback that misbehaves."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.delivery import Delivery
from appliance.directories import Directories
from appliance.errors import ApplianceError, DoesNotFit, ModelError, UsageError
from appliance.hub.access import Access
from appliance.library import Recipe
from appliance.sources import Sources
from appliance.store import Store
from tests.hub.fake_hub import COMMIT, FakeHub, repo_of
from tests.quantize import models

CONFIG = {**models.LLAMA, "hidden_size": 256, "head_dim": 64, "vocab_size": 4000}
GGUF = os.environ.get("APPLIANCE_SMOLLM2_GGUF", "")
PATIENCE = {"tries": 3, "wait_s": 0.01, "silence_s": 5.0}
SECRET = "hf_thisIsAVerySecretToken"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository as people upload them: shards with an index, and much that is not needed."""
    place = tmp_path_factory.mktemp("repo") / "name"
    models.write_random(place, CONFIG, shards=3)
    for name in ("pytorch_model.bin", "README.md", "modeling_evil.py", "onnx/model.onnx", "original/consolidated.00.pth",
                 ".gitattributes", "optimizer.pt", "flax_model.msgpack"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(b"\x80\x02c" * 1000)
    return place


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    with FakeHub({"org/name": repo_of(folder)}) as one:
        yield one


def delivery(hub: FakeHub, home: Path, *, refused: Any = None, **access: Any) -> Delivery:
    plan = SimpleNamespace(refused=refused, rungs=(), peak_bytes=0, usable_bytes=0)
    places = Directories(store=home / "store", state=home / "state", cache=home / "cache", runtime=home / "run")
    return Delivery(
        access=Access(**{"endpoint": hub.endpoint, "token": None, "rate_bytes_s": None, "network": {}, **access}),
        store=Store(places.store), directories=places, worker_python=lambda: sys.executable, env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
        on_event=lambda _event: None, planner=lambda _facts: plan, layout=False, patience=PATIENCE,  # type: ignore[arg-type,return-value]
    )


def add(one: Delivery, source: str = "hf:org/name", **fields: Any) -> Any:
    fields = {"name": None, "recipe": Recipe(), "keep_source": False, "even_so": False, "now": time.time(), **fields}
    return one.add(source, **fields)


def test_a_model_comes_from_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    one = delivery(hub, tmp_path)
    added = add(one)
    stored = one.store.get("name")
    assert (added.name, added.cached) == ("name", False)
    assert stored.manifest["source"] == f"hf:org/name@{COMMIT}"
    assert {**stored.manifest["report"]["origin"], "contents": ""} == {"endpoint": hub.endpoint, "asked": "hf:org/name", "contents": ""}
    fetched = {one["path"].rpartition("/")[2] for one in hub.asked("/resolve/")}
    assert fetched == {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json",
                       *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))}, "only what is needed"
    assert Sources(one.store.root).list() == [], "what was fetched goes when the model is stored"
    assert not list((one.store.root / "tmp").iterdir())

    hub.requests.clear()
    assert add(one).cached
    assert [r["path"].partition("/")[2][:3] for r in hub.requests] == ["api"], "one question, nothing fetched"
    hub.requests.clear()
    assert add(one, f"hf:org/name@{COMMIT}", name="other").cached
    assert hub.requests == [], "a commit that is stored needs no network at all"
    assert one.store.names()["other"] == added.digest


def test_another_commit_does_not_take_a_name_that_nobody_chose(hub: FakeHub, tmp_path: Path) -> None:
    one = delivery(hub, tmp_path)
    add(one)
    hub.repos["org/name"].commit = "e" * 40
    hub.requests.clear()
    assert add(one).cached, "a new model card is no new model"
    assert not hub.asked("cdn")
    hub.repos["org/name"].commit = "f" * 40
    hub.repos["org/name"].files["generation_config.json"] = b'{"temperature": 0.5}'
    with pytest.raises(UsageError, match="belongs to hf:org/name@c0ffee"):
        add(one)
    assert add(one, name="name").name == "name"
    assert one.store.get("name").manifest["source"] == f"hf:org/name@{'f' * 40}"


def test_an_interrupted_fetch_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults += [{"match": "cdn", "times": 3}, {"match": "cdn", "times": 1}, {"match": "cdn", "times": 99, "cut_after": 100_000}]
    one = delivery(hub, tmp_path)
    one = dataclasses.replace(one, patience={**PATIENCE, "tries": 1})
    with pytest.raises(ApplianceError, match="what has come is kept") as caught:
        add(one)
    assert caught.value.exit_code == 75
    (left,) = Sources(one.store.root).list()
    assert 0 < left.bytes < left.wanted_bytes
    assert not left.busy
    assert left.source == f"hf:org/name@{COMMIT}"
    assert one.store.names() == {}
    hub.faults.clear()
    hub.requests.clear()
    hub.sent_bytes = 0
    add(one)
    weights = sum(len(data) for name, data in hub.repos["org/name"].files.items() if name.endswith(".safetensors"))
    assert hub.sent_bytes < weights - 90_000 + 400_000, "headers once more at most, never what was there"
    assert not any(r["path"].endswith("tokenizer.json") for r in hub.requests), "small files are not fetched again"
    assert Sources(one.store.root).list() == []


def test_damage_on_the_way_is_never_stored(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults += [{"match": "cdn", "times": 3}, {"match": "cdn", "times": 99, "flip": 50_000}]
    one = delivery(hub, tmp_path)
    with pytest.raises(ApplianceError, match="checksum was wrong twice"):
        add(one)
    assert one.store.names() == {}
    assert not list((one.store.root / "sources").rglob("*.safetensors"))


def test_what_does_not_fit_is_not_fetched(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = SimpleNamespace(error=lambda: DoesNotFit("name does not fit", why="too large", do="use a smaller model"))
    with pytest.raises(DoesNotFit, match=r"was not fetched: name does not fit: too large; .* --force"):
        add(delivery(hub, tmp_path, refused=refusal))
    assert hub.sent_bytes < 1_200_000, "headers and small files only"
    assert hub.asked("cdn")
    assert all(r["range"] for r in hub.asked("cdn"))
    assert add(delivery(hub, tmp_path, refused=refusal), even_so=True).name == "name"
    full = shutil.disk_usage(tmp_path)._replace(free=(64 << 20) + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: full)
    with pytest.raises(ApplianceError, match=r"is too full: about .* are needed") as caught:
        add(delivery(hub, tmp_path / "other"))
    assert caught.value.exit_code == 73


@pytest.mark.parametrize(("name", "content", "says"), [
    ("config.json", b"[]", "is not a model configuration"),
    ("config.json", json.dumps({**CONFIG, "quantization_config": {"quant_method": "gptq"}}).encode(), "already quantized: GPTQ"),
    ("tokenizer.json", None, "has no tokenizer"),
    ("model-00002-of-00003.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ("model-00002-of-00003.safetensors", b"<html>no</html>" * 10, "web page"),
    ("model-00002-of-00003.safetensors", (1 << 40).to_bytes(8, "little") * 9, "claims a header"),
    ("model-00003-of-00003.safetensors", None, "weight files of its index are not there"),
    ("model.safetensors.index.json", b'{"weight_map": {"a": "../../etc/passwd"}}', "is no weight file"),
    ("model.safetensors.index.json", b'{"weight_map": {"a": "pytorch_model.bin"}}', "is no weight file"),
    ("model.safetensors.index.json", b'{"weight_map": {}}', "has no weight_map"),
    ("model.safetensors.index.json", b'{"weight_map": [' * 10_000, "has no weight_map"),
])
def test_what_is_wrong_is_known_before_the_first_large_byte(hub: FakeHub, tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    files = hub.repos["org/name"].files
    if content is None:
        del files[name]
    else:
        files[name] = content
    one = delivery(hub, tmp_path)
    with pytest.raises(ModelError, match=says) as caught:
        add(one)
    assert str(tmp_path) not in caught.value.line.replace(str(one.store.root), ""), caught.value.line
    assert hub.sent_bytes < 1_500_000
    assert one.store.names() == {}


def test_a_repository_of_pickles_or_of_gguf_files_says_so(hub: FakeHub, tmp_path: Path) -> None:
    files = hub.repos["org/name"].files
    for name in [name for name in files if "safetensors" in name]:
        del files[name]
    with pytest.raises(ModelError, match="pickled weights can run code"):
        add(delivery(hub, tmp_path))
    files["name-Q4_K_M.gguf"] = files["name-Q8_0.gguf"] = b"GGUF"
    with pytest.raises(ModelError, match=r"it holds GGUF files: Q4_K_M, Q8_0; name one after the colon, such as hf:org/name:Q8_0"):
        add(delivery(hub, tmp_path))


@pytest.mark.skipif(not GGUF, reason="APPLIANCE_SMOLLM2_GGUF is not set")
@pytest.mark.parametrize("wanted", ["hf:org/gguf:Q4_1", "hf:org/gguf@main:q4_1", "hf:org/gguf:sub/SmolLM2-Q4_1.gguf"])
def test_a_gguf_file_is_judged_by_its_header(hub: FakeHub, tmp_path: Path, wanted: str) -> None:
    from tests.hub.fake_hub import Repo

    data = Path(GGUF).read_bytes()
    hub.repos["org/gguf"] = Repo(files={"sub/SmolLM2-Q4_1.gguf": data, "mmproj-Q4_1.gguf": b"GGUF", "SmolLM2-F16.gguf": b"GGUF"})
    verdict = delivery(hub, tmp_path).judge(wanted, name=None, recipe=Recipe())
    assert verdict.facts is not None
    assert verdict.facts.architecture == "LlamaForCausalLM"
    assert verdict.fetch_bytes == len(data)
    assert verdict.source == f"hf:org/gguf@{COMMIT}:sub/SmolLM2-Q4_1.gguf"
    assert hub.sent_bytes < len(data) // 4
    assert abs(verdict.stored_bytes / 97_000_000 - 1) < 0.2


def test_the_verdict_is_what_will_be_stored(hub: FakeHub, tmp_path: Path) -> None:
    one = delivery(hub, tmp_path)
    verdict = one.judge("hf:org/name", name=None, recipe=Recipe(group_size=64))
    assert not list((tmp_path / "store" / "tmp").iterdir())
    assert one.store.digests() == []
    add(one, recipe=Recipe(group_size=64))
    assert verdict.stored_bytes == one.store.get("name").bytes
    assert verdict.facts is not None
    assert verdict.facts.bits_per_weight == one.store.get("name").manifest["report"]["bits_per_weight"]


def test_the_files_of_a_stored_model_can_be_had_again(hub: FakeHub, tmp_path: Path) -> None:
    """For a repair: the recorded commit, in its files, for as long as they are needed; kept ones are not fetched."""
    one = delivery(hub, tmp_path)
    added = add(one, keep_source=True)
    source = str(one.store.read(added.digest).manifest["source"])
    hub.repos["org/name"].revisions = ()
    for fetched in (0, 3):
        hub.requests.clear()
        with one.files(source) as place:
            assert place.is_dir()
            assert (place / "model-00001-of-00003.safetensors").read_bytes() == hub.repos["org/name"].files["model-00001-of-00003.safetensors"]
        assert len([r for r in hub.asked("cdn") if r["range"] is None]) == fetched
        assert place.is_dir() == (fetched == 0)
        assert Sources(one.store.root).prune() >= 0


def test_two_at_once_fetch_once(hub: FakeHub, tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        "from tests.hub import test_delivery as t\n"
        "print(t.add(t.delivery(SimpleNamespace(endpoint=sys.argv[1]), Path(sys.argv[2]))).digest)\n")
    command = [sys.executable, str(script), hub.endpoint, str(tmp_path / "home")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {one.communicate(timeout=120)[0].strip().splitlines()[-1] for one in both}
    assert len(said) == 1
    assert len([r for r in hub.asked("cdn") if r["range"] is None]) == 3, "each weight file came once"


def test_an_interrupt_keeps_what_has_come(hub: FakeHub, tmp_path: Path) -> None:
    """Ctrl-C in the command line: the child goes, the part stays, exit 130, and the second run goes on."""
    config = tmp_path / "appliance.yaml"
    config.write_text(f"hub:\n  endpoint: {hub.endpoint}\nworker:\n  python: {sys.executable}\n")
    env = {"PATH": os.environ["PATH"], "APPLIANCE_HOME": str(tmp_path / "home"), "HF_TOKEN": SECRET,
           "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    command = [sys.executable, "-m", "appliance.cli.main", "--config", str(config), "model", "add", "hf:org/name"]
    child = subprocess.Popen([*command, "--limit-rate", "400K"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    place = tmp_path / "home" / "store" / "sources"
    deadline = time.monotonic() + 60
    while not list(place.glob("*/*.part")) and time.monotonic() < deadline:
        time.sleep(0.05)
    seen = subprocess.run(["ps", "axeww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert "appliance.hub fetch" in seen
    assert not [line for line in seen.splitlines() if SECRET in line and "appliance.hub" in line], "never in ps"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "what has come is kept" in err
    assert SECRET not in out + err
    assert list(place.glob("*/*.part"))
    left = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in left.splitlines() if "appliance.hub" in line and hub.endpoint in line]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "name: stored" in done.stdout
    assert {r["authorization"] for r in hub.asked("/resolve/")} == {f"Bearer {SECRET}"}
    text = "".join(p.read_text("utf-8", "replace") for p in (tmp_path / "home").rglob("*") if p.is_file() and p.suffix in (".json", "", ".log"))
    assert SECRET not in text


def test_case_015_an_offline_node_never_tries(hub: FakeHub, tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "APPLIANCE_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.endpoint}
    for extra, says in (({"APPLIANCE_HUB_OFFLINE": "1"}, "hub.offline is set"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")):
        for more in ((), ("--dry-run",)):
            done = subprocess.run([sys.executable, "-m", "appliance.cli.main", "model", "add", "hf:org/name", *more],
                                  env={**env, **extra, "APPLIANCE_WORKER_PYTHON": sys.executable}, capture_output=True, text=True, check=False)
            assert (done.returncode, len(done.stderr.splitlines())) == (78, 1), done.stderr
            assert says in done.stderr
    assert hub.requests == []


def test_no_network_is_one_line(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "APPLIANCE_HOME": str(tmp_path / "home"), "HF_ENDPOINT": "http://127.0.0.1:9",
           "APPLIANCE_WORKER_PYTHON": sys.executable}
    one = Delivery(**{**{f.name: getattr(delivery(SimpleNamespace(endpoint="http://127.0.0.1:9"), tmp_path), f.name)  # type: ignore[arg-type]
                         for f in dataclasses.fields(Delivery)}, "env": env})
    with pytest.raises(ApplianceError, match=r"http://127.0.0.1:9 cannot be reached: .*; check the network") as caught:
        add(one)
    assert caught.value.exit_code == 69
