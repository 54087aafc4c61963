"""A gateway host before two nodes, each a booted host, put up by the playbook gateway.yml; and what is done to a node.

Nodes have our packages, put there by the role (tests.ansible.fleet), and are reachable from their network with a key; the
gateway host has Debian's HAProxy in a package source of its own and no other way out. Names are n1, n2 and gw.
"""

from __future__ import annotations

import csv
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.ansible import figures
from tests.ansible.controller import Controller, Ran
from tests.ansible.fleet import BOOT_S, KEY_TEXT, TWO, booted
from tests.ansible.load import Load
from tests.packages.node import Node
from tests.system.testhost.base import KEY
from tests.system.testhost.host import Host

NODES = ("n1", "n2")
PORT = 8443
CONFIG = "/etc/haproxy/haproxy.cfg"
PACKAGES = ("haproxy", "liblua5.3-0", "libopentracing1", "libopentracing-c-wrapper0")
SOURCE = "deb [trusted=yes] file:/srv/haproxy ./\n"


def packages(folder: Path) -> str | None:
    """A flat package source of HAProxy and what it needs beyond the test hosts' base; why there is none, else."""
    fetched = subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=folder, capture_output=True, text=True, check=False)
    if fetched.returncode:
        return f"this machine's apt cannot fetch {' '.join(PACKAGES)}: {fetched.stderr.strip()[-200:]}"
    listed = subprocess.run(["dpkg-scanpackages", "."], cwd=folder, capture_output=True, text=True, check=False)
    if listed.returncode:
        return "dpkg-scanpackages is missing (package dpkg-dev)"
    (folder / "Packages").write_text(listed.stdout)
    return None


def certificates(folder: Path, *addresses: str) -> tuple[Path, Path]:
    """A self-signed pair for these addresses."""
    cert, key = folder / "front.crt", folder / "front.key"
    names = ",".join(f"IP:{address}" for address in addresses)
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "3", "-subj", "/CN=gateway",
                    "-addext", f"subjectAltName={names}", "-out", str(cert), "-keyout", str(key)], check=True, capture_output=True)
    return cert, key


class Balanced(Controller):
    """`gateway`, `nodes`: the hosts; `of_nodes`: the nodes' variables, the others are the gateway's."""

    def __init__(self, folder: Path, gateway: Host, nodes: Mapping[str, Host], of_nodes: Mapping[str, Any], **variables: Any) -> None:
        super().__init__(folder, {"gw": gateway, **nodes}, **variables)
        self.gateway, self.nodes, self.of_nodes = gateway, dict(nodes), of_nodes

    def inventory(self) -> Path:
        def groups(hosts: Mapping[str, Host]) -> dict[str, Any]:
            return {name: {"ansible_host": host.ip, "ansible_user": "root", "ansible_ssh_private_key_file": str(KEY)} for name, host in hosts.items()}

        path = self.folder / "inventory.yml"
        path.write_text(json.dumps({"all": {"children": {
            "appliance": {"hosts": groups(self.nodes), "vars": self.of_nodes}, "gateway": {"hosts": groups({"gw": self.gateway}), "vars": self.variables}}}}))
        return path

    def put_up(self, *words: str, **extra: Any) -> Ran:
        return self.play("gateway.yml", *words, timeout_s=240, **extra)

    def load(self, **options: Any) -> Load:
        tls = {"authority": str(self.folder / "front.crt")} if self.variables["gateway_tls"] else {}
        return Load(host=self.gateway.ip, port=PORT, key=KEY_TEXT, **tls, **options)

    def config(self) -> str:
        return self.gateway.run(["cat", CONFIG], check=True).out

    def journal(self) -> str:
        return self.gateway.run(["journalctl", "-u", "haproxy", "--no-pager", "-o", "cat"]).out

    def main_pid(self) -> str:
        return self.gateway.run(["systemctl", "show", "haproxy", "-p", "MainPID,ActiveEnterTimestampMonotonic"], check=True).out

    def servers(self) -> dict[str, dict[str, str]]:
        """HAProxy's own view of the nodes: name -> its row of `show stat`."""
        script = "import socket as s;c=s.socket(s.AF_UNIX);c.connect('/run/haproxy/admin.sock');c.send(b'show stat\\n');print(c.makefile().read())"
        out = self.gateway.run(["python3", "-c", script], check=True).out
        return {row["svname"]: row for row in csv.DictReader(out.lstrip("# ").splitlines()) if row["pxname"] == "nodes"}

    def wait_for(self, node: str, *states: str, timeout_s: float = 30) -> float:
        """Until HAProxy sees the node so; seconds that it took."""
        began = time.monotonic()
        while (seen := self.servers()[node]["status"]).split()[0] not in states:
            assert time.monotonic() - began < timeout_s, f"{node} is {seen}, not {states}\n{self.journal()[-2000:]}"
            time.sleep(0.05)
        return time.monotonic() - began

    def node(self, name: str) -> Node:
        return Node(self.nodes[name])

    def join(self) -> None:
        """Hosts reach each other: this machine passes their packets on. A device is new after each power-on."""
        for host in self.hosts.values():
            Path(f"/proc/sys/net/ipv4/conf/th{host.cfg['n']}/forwarding").write_text("1")


@contextmanager
def balanced(folder: Path, make_host: Callable[..., Host], source: Path, layer: str, repository: Path, variables: Mapping[str, Any]) -> Iterator[Balanced]:
    """Gateway and nodes, the nodes ready, the gateway not put up. `variables`: of the nodes, as they were installed."""
    with ExitStack() as stack:
        gateway = stack.enter_context(make_host(binds=((str(source), "/srv/haproxy"),)))
        gateway.write("/etc/apt/sources.list.d/haproxy.list", SOURCE)
        nodes = booted(stack, NODES, layer, make_host, repository)
        for host in nodes.values():
            Node(host).wait_ready(BOOT_S)
        cert, key = certificates(folder, gateway.ip)
        made = Balanced(folder, gateway, nodes, variables, gateway_port=PORT, gateway_tls=True, gateway_tls_cert=cert.read_text(), gateway_tls_key=key.read_text())
        made.join()
        yield made


Hurt = Callable[[Node], None]


def hurt_under_load(made: Balanced, hurt: Hurt, *, drill: str, back_s: float = 90, after_s: float = 2, **options: Any) -> Load:
    """Load while `hurt`, one of the functions below, is done to n1, and until it is back."""
    node = made.node("n1")
    with made.load(**options) as load:
        time.sleep(3)
        began = time.monotonic()
        hurt(node)
        made.join()
        if hurt.__name__.startswith("kill_"):
            made.wait_for("n1", "NOLB", "DOWN")  # else its last status still says ready
        node.wait_ready(back_s)
        made.wait_for("n1", "UP", timeout_s=60)
        back = time.monotonic() - began
        time.sleep(after_s)
    keep(drill, load, node_back_s=round(back, 1))
    return load


def keep(drill: str, load: Load, **facts: object) -> None:
    """The row of the table in docs/gateway.md."""
    figures.keep(drill, requests=len(load.ends), **load.kinds(), lost=len(load.lost()), lost_unbegun=len(load.lost(unbegun=True)),
                 longest_gap_s=round(load.longest_gap_s(), 1), slowest_s=round(load.slowest_s(), 1), **facts)


# ---- what is done to a node; each leaves it as it is, and `heal` brings it back -----------------------------------------


def kill_worker(node: Node) -> None:
    node.kill(node.leader(), "KILL")


def kill_engine(node: Node) -> None:
    node.kill(node.engine(), "KILL")


def kill_agent(node: Node) -> None:
    node.kill(node.agent(), "KILL")


def drain(node: Node) -> None:
    node.control("drain")
    time.sleep(6)
    node.control("start")


def restart(node: Node) -> None:
    node.host.run(["systemctl", "restart", "appliance"], timeout_s=120, check=True)


def upgrade(node: Node) -> None:
    """The packages, as an administrator's apt does it; the service restarts by itself, and the new worker is on trial."""
    before = node.status()["started_at"]
    node.apt("update").ok()
    node.apt("install", "--no-install-recommends", f"appliance={TWO}", f"appliance-worker={TWO}").ok()
    node.wait_for(lambda status: status.get("started_at", before) != before, BOOT_S, "restarted")


def reboot(node: Node) -> None:
    node.host.reboot()


def kill_host(node: Node) -> None:
    node.host.kill()
    node.host.boot(wait=False)


def powercut(node: Node) -> None:
    """The host is silent for a while, as a machine without power is."""
    node.host.powercut()
    time.sleep(8)
    node.host.boot(wait=False)


def cut_network(node: Node) -> None:
    """Packets vanish: nothing is refused, nothing is closed."""
    rules = "table inet cut { chain i { type filter hook input priority -300; policy drop; }; chain o { type filter hook output priority -300; policy drop; }; }"
    node.host.run(["nft", "-f", "-"], input=rules, check=True)
    time.sleep(12)
    node.host.run(["nft", "delete", "table", "inet", "cut"], check=True)


def freeze(node: Node) -> None:
    """The agent stands still for a while: connections are taken and nothing is said."""
    node.host.run(["sh", "-c", f"kill -STOP {node.agent()}; sleep 12; kill -CONT {node.agent()}"], timeout_s=60)

