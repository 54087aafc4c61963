#!/usr/bin/python
"""One value that says what the appliance on a node is: packages, configuration, model, status, stored figures.

Changes nothing, and never fails for what is wrong with the service: a node without it is a value too. Rules: no secret
leaves the node (of the configuration only its digest) unless `settings` asks for the text; each command is bounded, so
that a stuck agent is a sentence; what this account may not read counts as absent.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCUMENTATION = r"""
module: node
short_description: What the appliance on a node is and says
description:
  - Reads installed packages, the configuration's digest, the model in use, the status, and what a rollout stored.
  - With O(prompt) it asks for a real completion as well.
  - Changes nothing.
options:
  prompt:
    description: Ask this of the running model; empty asks nothing.
    type: str
    default: ""
  expect:
    description: Text that the answer must hold, in any case of letters; empty takes every answer.
    type: str
    default: ""
  folder:
    description: Where rollouts keep what they know of the node.
    type: path
    default: /var/lib/appliance-fleet/rollout
  installation:
    description: Also what dpkg and systemd know of it, and what the role has noted.
    type: bool
    default: false
  port:
    description: Also the machine, and who listens at this port; 0 leaves that out, -1 leaves the port out.
    type: int
    default: 0
  settings:
    description:
      - Also the text of the configuration, what the agent says of it, and what the agent has not taken yet.
      - The text may hold a secret; the task needs C(no_log).
    type: bool
    default: false
  timeout_s:
    description: How long one command may take.
    type: int
    default: 60
author: [appliance]
"""

EXAMPLES = r"""
- name: Look at the node
  appliance.fleet.node:
    prompt: The capital of France is
    expect: Paris
  register: seen
"""

RETURN = r"""
node:
  description: What the node is; C(refusal) is empty when a completion was asked for and answered.
  type: dict
  returned: always
"""

CONFIG = Path("/etc/appliance/appliance.yaml")
ANSWER_TOKENS = 24
SOCKET = "/run/appliance/agent.sock"
"""Root needs no key there."""
PUSHED = Path("/var/cache/appliance-packages")
"""Where the role keeps the packages that the controller has pushed."""
UNIT = "appliance.service"
HOLD = Path("/run/systemd/system/appliance.service.d/50-not-configured-yet.conf")
"""With it the role holds the first start back."""
KEY = Path("/etc/credstore/appliance.api_key")
KEY_GIVEN = Path("/run/credentials/appliance.service/api_key")
"""The copy that systemd has made for the agent that runs."""
KEYS_MADE = Path("/var/lib/appliance/state/keys.json")
TLS = Path("/etc/appliance/tls")
ROLE_MARK = b"# Written by the Ansible role appliance.fleet.appliance;"
WARNING = "applianctl: warning: "
Run = Callable[[list[str]], tuple[int, str, str]]
Complete = Callable[[dict[str, Any]], tuple[int, str]]


class AgentConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(SOCKET)


def observe(run: Run, complete: Complete, *, config: Path, folder: Path, prompt: str, expect: str) -> dict[str, Any]:
    """`run`: command -> exit code, standard output and error; `complete`: request -> HTTP status (0: none) and body."""
    packages = installed(run)
    text = _bytes(config) or b""
    node: dict[str, Any] = {
        "packages": packages, "version": packages.get("appliance", ""),
        "worker_version": packages.get("appliance-worker", ""), "pushed": sorted(map(str, PUSHED.glob("*.deb"))),
        "config": hashlib.sha256(text).hexdigest() if text else "", "model": "", "digest": "",
        "in_use": "", "models": {}, "status": {},
        "mark": "", "on_trial": False, "ready": False, "state": "absent", "sentence": "the appliance is not installed",
        "answer": "", "refusal": "", "uid": os.geteuid(),
        "record": _object(folder / "record.json"), "pending": _object(folder / "pending.json"),
        "pending_age_s": _age_s(folder / "pending.json"),
    }
    code, out, err = run(["applianctl", "status", "--json"])
    status = _parsed(out)
    if isinstance(status, dict):
        node |= {"status": status, "state": str(status.get("state")), "sentence": str(status.get("sentence")),
                 "ready": code == 0, "mark": _mark(status), "on_trial": bool(status.get("trial"))}
    elif packages:
        node |= {"state": "stopped", "sentence": last_line(err) or f"applianctl ended with {code}"}
    rows = _parsed(run(["applianctl", "model", "list", "--json"])[1]) if packages else None
    for row in rows if isinstance(rows, list) else []:
        node["models"][row["name"]] = row["digest"]
        if row.get("in_use"):
            node |= {"model": row["name"], "digest": row["digest"], "in_use": row["name"]}
    # What answers: a name may stand for another model by now, and the agent may have gone back from another name.
    if node["status"].get("live") and node["status"].get("digest"):
        node |= {"model": str(node["status"]["model"]), "digest": str(node["status"]["digest"])}
    node["hardware"] = hardware(node["status"].get("tier"))
    if prompt:
        node["answer"], node["refusal"] = ask(complete, node, prompt=prompt, expect=expect)
    return node


def installed(run: Run) -> dict[str, str]:
    """Our packages that are installed, by name."""
    out = run(["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\n", "appliance", "appliance-*"])[1]
    found = (line.split() for line in out.splitlines())
    return {words[1]: words[2] for words in found if len(words) == 3 and words[0] in ("installed", "triggers-pending")}


def ask(complete: Complete, node: dict[str, Any], *, prompt: str, expect: str) -> tuple[str, str]:
    """The answer to a real completion, and why it is not good enough; empty when it is."""
    if not node["ready"]:
        return "", f"does not answer: {node['sentence']}"
    code, body = complete({"model": "default", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0})
    try:
        answer = " ".join(json.loads(body)["choices"][0]["text"].split())
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", f"did not answer a request: HTTP {code}: {last_line(body)[:200]}"
    if not answer:
        return answer, "answered a request with no text"
    if expect not in answer:
        return answer, f"answered {answer[:80]!r}, without {expect!r}"
    return answer, ""


def hardware(tier: object, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Hosts with equal text may be compared by speed."""
    lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    name = lines[0].split(":", 1)[1].strip() if lines else "unknown"
    return f"{name}, {os.cpu_count()} CPUs, {tier or 'unknown tier'}"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _mark(status: dict[str, Any]) -> str:
    """Differs once an agent has taken a restart or a reload; empty where none runs."""
    return f"{status['started_at']} {status.get('reloaded_at')}" if "started_at" in status else ""


def installation(run: Run, *, notes: Path, config: Path = CONFIG, hold: Path = HOLD) -> dict[str, Any]:
    """What dpkg and systemd know of the service, and what the role has noted of models. `known`: packages that are, or
    have left something; `interrupted`: dpkg has something to finish; `own_model`: the model that a configuration names
    which the role has not written."""
    said = run(["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", "appliance*"])[1]
    rows = [line.split() for line in said.splitlines()]
    shown = run(["systemctl", "show", UNIT, "--property=LoadState,ActiveState,UnitFileState,MainPID"])[1].splitlines()
    return {
        "known": [row[1] for row in rows if len(row) == 2 and row[0] not in ("not-installed", "unknown")],
        "interrupted": bool(run(["dpkg", "--audit"])[1].strip()), "held": _there(hold),
        "own_model": "" if (_bytes(config) or b"").startswith(ROLE_MARK) else settings_model(run),
        "unit": dict(line.split("=", 1) for line in shown if "=" in line),
        "notes": {path.stem: _object(path) for path in sorted(notes.glob("*.json"))},
    }


def settings_model(run: Run) -> str:
    """The model that the configuration names; empty where it leaves that to the service."""
    said = _parsed(run(["applianctl", "config", "show", "--json"])[1])
    if not isinstance(said, dict) or "model" not in said.get("sources", {}):
        return ""
    return str(said["settings"]["model"])


def machine(run: Run, port: int, *, cpuinfo: Path = Path("/proc/cpuinfo"), folders: tuple[str, ...] = ("/usr", "/var"),
            keys: tuple[Path, ...] = (KEY, KEYS_MADE)) -> dict[str, Any]:
    """`userland`: dpkg's architecture; `holders`: what `ss` says of who listens at the port; `key`: there is one."""
    flags = [line.split()[2:] for line in cpuinfo.read_text().splitlines() if line.startswith("flags")]
    free = [os.statvfs(folder) for folder in folders if Path(folder).is_dir()]
    held = run(["ss", "-ltnpH", f"sport = :{port}"])[1] if port > 0 else ""
    return {"userland": run(["dpkg", "--print-architecture"])[1].strip(), "flags": flags[0] if flags else [],
            "free_mb": [one.f_bavail * one.f_frsize // 2**20 for one in free], "holders": held.splitlines(),
            "key": any(map(_there, keys))}


def settings(run: Run, served: Callable[[str], bytes | None], address: str, *, config: Path = CONFIG, key: Path = KEY,
             given: Path = KEY_GIVEN, tls: Path = TLS, folder: Path) -> dict[str, Any]:
    """The configuration's text and what the agent says of it; whether key and certificate are other ones than what the
    agent took; what of `tls` is there, and whether a way back refers to it. `served`: address -> certificate (DER)."""
    code, _, err = run(["applianctl", "config", "check"])
    mode = oct(config.stat().st_mode & 0o7777)[2:] if _there(config) else ""
    wanted = _bytes(key)
    backs = [_bytes(folder / name) or b"" for name in ("pending.yaml", "before.yaml")]
    return {
        "text": (_bytes(config) or b"").decode(errors="replace"), "right": code == 0, "mode": mode,
        "warnings": [line.removeprefix(WARNING) for line in err.splitlines() if line.startswith(WARNING)],
        "changed_at": config.stat().st_mtime if mode else 0.0, "now": time.time(),
        "key_unread": wanted is not None and wanted != _bytes(given),
        "pair_unread": address.startswith("https:") and _first_certificate(tls / "server.crt") != served(address),
        "tls_files": sorted(path.name for path in tls.glob("*")),
        "tls_noted": any(str(tls).encode() + b"/" in back for back in backs),
    }


def _first_certificate(path: Path) -> bytes | None:
    text = (_bytes(path) or b"").decode(errors="replace")
    try:
        end = text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        return ssl.PEM_cert_to_DER_cert(text[text.index(ssl.PEM_HEADER):end])
    except ValueError:
        return None


def served_certificate(address: str, timeout_s: float = 10.0) -> bytes | None:
    """What the service at this address shows; None where it shows nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        parts = urllib.parse.urlsplit(address)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(parts.hostname or "", parts.hostname or "")
        with (socket.create_connection((host, parts.port or 443), timeout_s) as plain,
              context.wrap_socket(plain) as secure):
            return secure.getpeercert(binary_form=True)
    except (OSError, ValueError):
        return None


def _age_s(path: Path) -> int:
    """Since it was written; 0 where there is none."""
    return max(0, int(time.time() - path.stat().st_mtime)) if _bytes(path) is not None else 0


def _there(path: Path) -> bool:
    try:
        path.stat()
    except OSError:
        return False
    return True


def _bytes(path: Path) -> bytes | None:
    """A file's contents; None where there is none, or none that this account may read."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


def _object(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty where there is none."""
    found = _parsed((_bytes(path) or b"").decode(errors="replace"))
    return found if isinstance(found, dict) else {}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def main() -> None:
    # Not at the top, so that the rest can be tested where there is no Ansible.
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(argument_spec={
        "prompt": {"type": "str", "default": ""}, "expect": {"type": "str", "default": ""},
        "folder": {"type": "path", "default": "/var/lib/appliance-fleet/rollout"},
        "installation": {"type": "bool", "default": False}, "port": {"type": "int", "default": 0},
        "settings": {"type": "bool", "default": False},
        "timeout_s": {"type": "int", "default": 60},
    }, supports_check_mode=True)
    limit_s = module.params["timeout_s"]

    def run(command: list[str]) -> tuple[int, str, str]:
        code, out, err = module.run_command(["timeout", str(limit_s), *command])
        return code, out, err if code != 124 else f"no answer within {limit_s} s"

    def complete(request: dict[str, Any]) -> tuple[int, str]:
        connection = AgentConnection("localhost", timeout=limit_s)
        try:
            connection.request("POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error) or type(error).__name__
        finally:
            connection.close()

    folder = Path(module.params["folder"])
    node = observe(run, complete, config=CONFIG, folder=folder, prompt=module.params["prompt"],
                   expect=module.params["expect"])
    if module.params["installation"]:
        node |= installation(run, notes=folder.parent)
    if port := module.params["port"]:
        node["machine"] = machine(run, port)
    if module.params["settings"]:
        address = str(node["status"].get("address") or "") if node["status"].get("live") else ""
        node["settings"] = settings(run, served_certificate, address, folder=folder)
    module.exit_json(changed=False, node=node)


if __name__ == "__main__":
    main()
