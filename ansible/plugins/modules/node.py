#!/usr/bin/python
"""One value that says what the appliance on a node is: packages, configuration, model, status, stored figures.

Changes nothing, and never fails for what is wrong with the service: a node without it is a value too. Rules: no secret
leaves the node (of the configuration only its digest); each command is bounded, so that a stuck agent is a sentence.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import time
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
    text = config.read_bytes() if config.is_file() else b""
    node: dict[str, Any] = {
        "packages": packages, "version": packages.get("appliance", ""),
        "worker_version": packages.get("appliance-worker", ""), "pushed": sorted(map(str, PUSHED.glob("*.deb"))),
        "config": hashlib.sha256(text).hexdigest() if text else "", "model": "", "digest": "",
        "in_use": "", "models": {}, "status": {},
        "mark": "", "on_trial": False, "ready": False, "state": "absent", "sentence": "the appliance is not installed",
        "answer": "", "refusal": "",
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


def _age_s(path: Path) -> int:
    """Since it was written; 0 where there is none."""
    return max(0, int(time.time() - path.stat().st_mtime)) if path.is_file() else 0


def _object(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty where there is none."""
    found = _parsed(path.read_text()) if path.is_file() else None
    return found if isinstance(found, dict) else {}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def main() -> None:
    # Not at the top, so that the rest can be tested where there is no Ansible.
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(argument_spec={
        "prompt": {"type": "str", "default": ""}, "expect": {"type": "str", "default": ""},
        "folder": {"type": "path", "default": "/var/lib/appliance-fleet/rollout"},
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

    node = observe(run, complete, config=CONFIG, folder=Path(module.params["folder"]), prompt=module.params["prompt"],
                   expect=module.params["expect"])
    module.exit_json(changed=False, node=node)


if __name__ == "__main__":
    main()
