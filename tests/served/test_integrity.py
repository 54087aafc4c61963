"""Stored weights that change while real vLLM serves them: found by the patrol, laid out again, the same answers.

Damage is real: bytes of the file that the worker maps are changed in place. About two minutes on two cores.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from appliance import patrol, prepared
from appliance.store import Store
from tests.served.conftest import Served, serve

pytestmark = [pytest.mark.served, pytest.mark.heavy]


def answer(service: Served) -> str:
    done = service.applianctl("chat", "--max-tokens", "12", "Say hello.")
    assert done.returncode == 0, done.stderr
    return done.stdout


def damage(file: Path, first: int, count: int) -> None:
    """Change bytes where they are: whoever maps the file has them at once."""
    file.chmod(0o644)
    with open(file, "r+b", buffering=0) as weights:
        weights.seek(first)
        data = weights.read(count)
        weights.seek(first)
        weights.write(bytes(byte ^ 0x5A for byte in data))
        os.fsync(weights.fileno())


def test_damage_is_found_while_serving_and_at_a_start(tmp_path: Path) -> None:
    service = serve(tmp_path / "home", settings="probe_s: 5\n")
    try:
        store = Store(tmp_path / "home" / "store")
        digest = store.names()["smollm2"]
        before = answer(service)
        weights = store.prepared_folder(digest) / prepared.WEIGHTS
        whole = weights.read_bytes()
        worker = service.status()["worker_pid"]
        damage(weights, 0, 64)
        pieces = sum(max(1, len(one.get("pieces", ()))) for one in store.read(digest).manifest["files"].values())
        (tmp_path / "home" / "state" / patrol.FILE).write_text(json.dumps({digest: pieces}))  # spare the test a round
        service.until(lambda status: any(one["fault"] == "damaged-weights" for one in status["restarts"]), timeout=90)
        found = service.until(lambda status: bool(status["ready"]) and status["worker_pid"] != worker, timeout=120)
        assert any("are made again" in warning for warning in found["warnings"])
        assert "weights.bin: contents changed between bytes 0 and 16777216" in found["restarts"][-1]["sentence"]
        assert weights.read_bytes() == whole
        assert answer(service) == before
        service.stop()

        damage(weights, len(whole) // 2, 1)
        service = serve(tmp_path / "home", settings="probe_s: 5\n")
        assert any("its laid out weights could not be used" in warning for warning in service.status()["warnings"])
        assert weights.read_bytes() == whole
        assert answer(service) == before
        service.stop()

        model = store.get("smollm2").path / "model.safetensors"
        data = model.read_bytes()
        damage(model, len(data) // 2, 1)
        service = serve(tmp_path / "home", settings="probe_s: 5\n")
        assert any("was made again from smollm2" in warning for warning in service.status()["warnings"])
        assert model.read_bytes() == data
        assert answer(service) == before
        assert service.applianctl("model", "verify").returncode == 0
    finally:
        if service.process.poll() is None:
            service.stop()
