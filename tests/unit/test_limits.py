"""What changed since the plan, and what strains the service: sentences as data."""

from __future__ import annotations

import pytest

from appliance.probe.strain import Strain
from appliance.supervisor.limits import Limits, difference, strain_warning

GIB = 1024**3
FOUR = {"ceiling_bytes": 4 * GIB, "ceiling_source": "/a/memory.max", "quota_cpus": None, "allowed": (0, 1, 2, 3)}
CALM = {"throttled_share": None, "stalled_percent": None, "high_bytes": None, "oom_kills": 0, "governor": None}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"ceiling_bytes": 4 * GIB - GIB // 64}, ""),
        ({"ceiling_bytes": None}, ""),
        ({"ceiling_bytes": 2 * GIB}, "memory ceiling 4.00 GiB -> 2.00 GiB (/a/memory.max)"),
        ({"quota_cpus": 1.5}, "CPU quota none -> 1.5"),
        ({"allowed": (0, 1)}, "CPUs 4 -> 2"),
        ({"ceiling_bytes": 8 * GIB, "allowed": (0,)}, "memory ceiling 4.00 GiB -> 8.00 GiB (/a/memory.max); CPUs 4 -> 1"),
    ],
)
def test_case_046_a_limit_that_moved_is_named(change: dict[str, object], says: str) -> None:
    assert difference(Limits(**FOUR), Limits(**{**FOUR, **change})) == says  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strain", "before", "says"),
    [
        ({}, None, ""),
        ({"periods": ((1000, 900),), "stalled_percent": 3.0}, None, ""),
        ({"periods": ((1000, 900),)}, {"periods": ((850, 890),)}, ""),  # it was throttled once, it is not now
        ({"periods": ((1000, 100),)}, {"periods": ((850, 25),)}, "the CPU quota slows the service down in 50% of its periods"),
        ({"periods": ((1000, 0), (90, 80))}, {"periods": ((850, 0), (30, 20))}, "in 100% of its periods"),
        ({"periods": ((20, 20),)}, {"periods": ((0, 0),)}, ""),  # too few to tell
        ({"periods": ()}, {"periods": ((850, 25),)}, ""),
        ({"too_hot": 12}, {"too_hot": 12}, ""),
        ({"too_hot": 15}, {"too_hot": 12}, "the CPU is too hot: it lowered its clock 3 times just now"),
        ({"too_hot": 15}, {}, ""),
        ({"stalled_percent": 40.0}, {}, "memory is short"),
        ({"oom_kills": 1}, {}, "killed a process"),
        ({"oom_kills": 1}, {"oom_kills": 1}, ""),
        ({"oom_kills": 1}, None, ""),
    ],
)
def test_case_044_what_strains_is_a_warning(strain: dict[str, object], before: dict[str, object] | None, says: str) -> None:
    earlier = None if before is None else Strain(**{**CALM, **before})  # type: ignore[arg-type]
    found = strain_warning(Strain(**{**CALM, **strain}), earlier)  # type: ignore[arg-type]
    assert says in found
    assert bool(found) == bool(says)
