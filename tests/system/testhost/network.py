"""A host's network: a veth pair (or a tap device), 10.213.N.1 here and 10.213.N.2 in the guest, nothing further.

The guest answers this machine; it can open no connection to it, because this machine's services are not the guest's.
"""

from __future__ import annotations

import os
from typing import Any

from tests.system.testhost.base import BASE
from tests.system.testhost.kernel import run

NET = os.environ.get("TESTHOST_NET", "10.213")


def address(number: int) -> str:
    return f"{NET}.{number}.2"


def gateway(number: int) -> str:
    return f"{NET}.{number}.1"


def up(cfg: dict[str, Any], outer: tuple[str, ...], *, tap: bool = False) -> None:
    """Called in the host's network namespace; `outer` is the command that leads back to this machine's."""
    number = cfg["n"]
    device = f"th{number}"
    if tap:
        run("ip", "tuntap", "add", device, "mode", "tap")
    else:
        run(*outer, "ip", "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", os.getpid())
    run(*outer, "ip", "addr", "add", f"{gateway(number)}/30", "dev", device)
    run(*outer, "ip", "link", "set", device, "up")
    if not tap:
        run("ip", "link", "set", "lo", "up")
        run("ip", "addr", "add", f"{address(number)}/30", "dev", "eth0")
        run("ip", "link", "set", "eth0", "up")
        run("ip", "route", "add", "default", "via", gateway(number))
    rules = f"""table inet {device} {{
      chain input {{ type filter hook input priority 0;
        iifname "{device}" ct state established,related accept
        iifname "{device}" icmp type echo-request accept
        iifname "{device}" drop
      }}
    }}"""
    run(*outer, "chroot", BASE, "nft", "-f", "-", input=rules)


def down(number: int) -> None:
    run("ip", "link", "del", f"th{number}", check=False)
    run("chroot", BASE, "nft", "delete", "table", "inet", f"th{number}", check=False)
