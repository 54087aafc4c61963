"""Every architecture of the table, served by real vLLM and compared with transformers; the list of architectures; what is refused.

`python -m tests.models.table` runs once for the rows that are asked for; its results go to build/models/results.json, from which docs/models.md is made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.models import architectures  # noqa: E402  # after the guard for the agent's environment
from tests.models.table import SERVED_DAMAGED  # noqa: E402
from tests.models.zoo import ROWS  # noqa: E402

pytestmark = [pytest.mark.worker, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "models" / "results.json"
LIMIT = 0.05
"""Mean |difference| of log-probabilities, served 4-bit model against fp32 transformers on the same dequantized weights."""
LEAST_SPREAD = 1.5


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of all rows that this session tests."""
    # A control needs a row that has what it breaks; asked for alone, it runs all.
    wanted = [item.callspec.params["name"] for item in request.session.items if hasattr(item, "callspec") and "name" in item.callspec.params]
    names = list(dict.fromkeys(wanted))
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.models.table", str(tmp_path_factory.mktemp("models")), *names], cwd=ROOT,
                          capture_output=True, text=True, check=False, timeout=3600, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-3000:]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(before | {row["name"]: row for row in rows}, indent=1))
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_the_served_model_agrees_with_transformers(results: dict[str, dict[str, Any]], name: str) -> None:
    row = results[name]
    assert "error" not in row, row["error"]
    assert row["spread"] >= LEAST_SPREAD
    assert row["difference"] <= LIMIT


@pytest.mark.parametrize("control", ["bias doubled", "q and k swapped", "one scale x 1.1", "window off", SERVED_DAMAGED])
def test_what_is_broken_on_either_side_is_told(results: dict[str, dict[str, Any]], control: str) -> None:
    found = {name: row["controls"][control] for name, row in results.items() if control in row.get("controls", {})}
    assert found
    assert all(value > LIMIT for value in found.values()), found


def test_the_list_of_architectures_is_that_of_the_installed_vllm() -> None:
    assert architectures.TARGET.read_text() == architectures.text(), "run `python -m tests.models.architectures` and read the difference"


def test_every_row_is_of_an_architecture_that_is_not_refused(results: dict[str, dict[str, Any]]) -> None:
    from appliance.quantize.layers import architecture_refusal
    from appliance.quantize.served import COMPARED

    for row in results.values():
        assert architecture_refusal({"architectures": [row["architecture"]]}) is None
        assert row["architecture"] in COMPARED
