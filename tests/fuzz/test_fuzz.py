"""A slice of the cases in the fast suite; all of them by `make test-fuzz`. Each batch is read by a child with a memory limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.cases import KINDS

CASES = int(os.environ.get("FUZZ_CASES", "10000"))


def read(kind: str, first: int, count: int) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "tests.fuzz.run", kind, str(first), str(count)], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2], timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(json.dumps({key: value for key, value in said.items() if key != "failures"}))
    return said


def check(said: dict[str, Any], count: int) -> None:
    assert said["failures"] == [], said["failures"][:5]
    assert said.get("accepted", 0) + said.get("refused", 0) == count
    assert said.get("refused", 0) > count // 4, "cases that damage nothing test nothing"
    assert said.get("accepted", 0) > count // 100, "cases that all end at the outer checks test little"
    assert said["grown_mb"] < 512


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files_end_in_one_line(kind: str) -> None:
    check(read(kind, 0, 400), 400)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_many_hostile_files_end_in_one_line(kind: str) -> None:
    check(read(kind, 0, CASES // len(KINDS)), CASES // len(KINDS))
