"""`python -m appliance.hub survey|fetch ORDER TOKEN_FD`: the child of the agent that speaks with the Hub.

`survey` pins the revision, fetches the small files and outlines the large ones: files of their full size that hold
their headers and nothing else, from which everything but the weights can be judged. `fetch` brings what is missing.
Events and the result are JSON lines (`appliance.report`); the token is read from the descriptor TOKEN_FD.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from appliance.hub.orders import Order, read_order
from appliance.report import Event, reporting


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m appliance.hub")
    parser.add_argument("work", choices=("survey", "fetch"))
    parser.add_argument("order")
    parser.add_argument("token_fd", type=int)
    args = parser.parse_args()
    with open(args.token_fd, encoding="ascii") as pipe:
        token = pipe.read() or None
    # Nothing but what is asked for here may go over the network, and everything over plain HTTP ranges.
    os.environ.update(HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1",
                      HF_HUB_DISABLE_IMPLICIT_TOKEN="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    return reporting(lambda event: _run(args.work, args.order, token, event), noun="fetched model")


def _run(work: str, text: str, token: str | None, event: Event) -> dict[str, Any]:
    from appliance.hub import fetching
    from appliance.hub.transfer import Hub

    order: Order = read_order(text)
    folder = Path(order.folder)

    def waiting(pause_s: float, why: str) -> None:
        note = f"{why}, next try in {pause_s:.0f} s" if pause_s else why
        event({"event": "phase", "phase": "retrying", "note": note})

    hub = Hub(order, token, on_wait=waiting)
    if work == "survey":
        return fetching.survey(hub, order, folder, event)
    return fetching.fetch(hub, order, folder, event)


if __name__ == "__main__":
    sys.exit(main())
