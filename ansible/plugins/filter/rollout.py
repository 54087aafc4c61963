"""PURE: what a rollout and a rollback decide: order, gate, where to go back to, and one sentence for a failure.

Does not: reach a node, or show it (tables.py). Rules: a gate returns a sentence, empty when it passes; speeds are
compared only where hardware and model are the same: with the canary's where the settings are too, else with the node's
own before where those are the same, else with the canary's after all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

GENERIC = ("non-zero return code", "All items completed", "One or more items failed", "Task failed", "MODULE FAILURE")
"""Beginnings of messages that say nothing; the command's own last line does."""
SENTENCE = 400
MOVED_TOGETHER = ("appliance", "appliance-worker")
"""Packages of one version; a model's package has its own."""
OURS = (*MOVED_TOGETHER, "appliance-model-smollm2")
"""What the role installs; other packages of the appliance are somebody else's."""
SAME = ("packages", "config", "model", "digest")
"""What a rollout changes on a node, and brings back."""
LOST = "unreachable in the middle of its upgrade; run rollback.yml for it when it is back"

# ---- what tasks have said


def reason(result: Mapping[str, Any], host: str = "") -> str:
    """One sentence for a failed or unreachable task, from its result; without the name of its host before it."""
    for one in result.get("results") or ():
        if isinstance(one, Mapping) and (one.get("failed") or one.get("unreachable")):
            result = one
            break
    message = last_line(result.get("msg"))
    if not message or message.startswith(GENERIC):
        message = last_line(result.get("stderr")) or last_line(result.get("stdout")) or message
    for said_before in ("Task failed: ", "Action failed: ", f"{host}: ", "applianctl: "):
        message = message.removeprefix(said_before)
    message = message or "failed without a word"
    return message[:SENTENCE].rstrip(".")


def last_line(text: object) -> str:
    lines = [line.strip() for line in str(text or "").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def said(hosts: Sequence[str], hostvars: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, str]:
    """What the hosts have in a variable, where they have it and it is not empty."""
    found = {host: hostvars[host][name] for host in hosts if host in hostvars and name in hostvars[host]}
    return {host: str(text) for host, text in found.items() if text}


# ---- who is when


def order(hosts: Sequence[str], canary: str = "", absent: Sequence[str] = ()) -> list[str]:
    """The hosts of a rollout, the canary first; `absent` ones are left out."""
    left = [host for host in hosts if host not in absent]
    return [host for host in left if host == canary] + [host for host in left if host != canary]


def from_here(batch: Sequence[str], hosts: Sequence[str], after: bool = False) -> list[str]:
    """The hosts of a rollout from this batch on, or `after` it."""
    first = min(hosts.index(host) for host in batch)
    return list(hosts[first + len(batch) if after else first:])


def rollout_refusal(hosts: Sequence[str], wishes: Mapping[str, Any], refused: Mapping[str, str],
                    absent: Sequence[str] = ()) -> str:
    """Why nothing is rolled out at all. `wishes`: the variables rollout_canary, _batch and _unreachable; `refused`:
    host -> why it could not fetch what it needs; `absent`: hosts to be skipped."""
    if wishes["canary"] and wishes["canary"] not in hosts:
        return f"rollout_canary {wishes['canary']} is none of these hosts: {', '.join(hosts)}"
    if wishes["unreachable"] not in ("fail", "skip"):
        return f"rollout_unreachable is {wishes['unreachable']!r}; it is `fail` or `skip`"
    if not re.fullmatch(r"[1-9][0-9]*|[1-9][0-9]?%|100%", str(wishes["batch"])):
        return f"rollout_batch is {wishes['batch']!r}; it is a number of hosts or a share of them, such as 25%"
    if refused:
        return f"nothing was changed, because not every node could fetch what it needs: {_listed(refused)}"
    if not order(hosts, wishes["canary"], absent):
        return f"none of these hosts can be reached: {', '.join(hosts)}"
    if wishes["canary"] in absent:
        return f"the canary {wishes['canary']} cannot be reached; choose another with rollout_canary"
    return ""


# ---- the gate


def summary(node: Mapping[str, Any], decode_tok_s: float | None = None) -> dict[str, Any]:
    """What is stored of a node on the node, to come back to and to compare with."""
    return {**{key: node[key] for key in SAME}, "hardware": node["hardware"], "ready": node["ready"],
            "decode_tok_s": decode_tok_s or None}


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in SAME)


def stored_tok_s(node: Mapping[str, Any]) -> float | None:
    """The decode speed that was stored for exactly what the node is now; None when there is none."""
    now = node["record"].get("now") or {}
    return now.get("decode_tok_s") if same(now, node) and now.get("hardware") == node["hardware"] else None


def reference(after: Mapping[str, Any], before: Mapping[str, Any],
              canary: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a node's speed is compared with; a figure of 0 where there is nothing. `after`: the node now; `before` and
    `canary`: summaries."""
    canarys, own = {"whose": "the canary's", **(canary or {})}, {"whose": "its own before", **before}
    comparable = ("hardware", "digest")
    # A node may have settings of its own that make it slower on purpose, and always did.
    for what, keys in ((canarys, (*comparable, "config")), (own, (*comparable, "config")), (canarys, comparable)):
        if what.get("decode_tok_s") and all(what[key] == after[key] for key in keys):
            return {"decode_tok_s": what["decode_tok_s"], "whose": what["whose"]}
    return {"decode_tok_s": 0.0, "whose": "nothing"}


def floor_tok_s(against: Mapping[str, Any], loss_pct: float) -> float:
    return float(against["decode_tok_s"]) * (1 - float(loss_pct) / 100)


def speed_refusal(decode_tok_s: float, against: Mapping[str, Any], loss_pct: float) -> str:
    """Why a node is too slow after its upgrade; empty when it is not."""
    if decode_tok_s >= floor_tok_s(against, loss_pct):
        return ""
    loss = 100 * (1 - decode_tok_s / against["decode_tok_s"])
    return (f"too slow: {decode_tok_s:.1f} tok/s, {against['whose']} were {against['decode_tok_s']:.1f}: {loss:.0f} % "
            f"less, {float(loss_pct):g} % are allowed")


def health_refusal(node: Mapping[str, Any], version: str = "") -> str:
    """Why a node is not well; empty when it is. `version`: of the packages, where one was asked for."""
    if not node["ready"]:
        return f"does not answer: {node['sentence']}"
    if gave_up := node["status"].get("rolled_back"):
        return f"went back by itself: {gave_up}"
    if node["refusal"]:
        return str(node["refusal"])
    if version and node["version"] != version:
        return f"has version {node['version'] or 'none'}, not {version}"
    return ""


def problems(batch: Sequence[str], failures: Mapping[str, str], present: Sequence[str]) -> list[str]:
    """`host: reason` of each node of a batch that did not pass; one that is not present any more was lost."""
    told = {host: failures.get(host) or ("" if host in present else LOST) for host in batch}
    return [f"{host}: {text}" for host, text in told.items() if text]


def stopped(found: Sequence[str], back: Sequence[str], stuck: Mapping[str, str], untouched: Sequence[str],
            canary: bool, passed: Sequence[str] = ()) -> str:
    """The sentence with which a rollout ends early. `back`: hosts that are what they were before; `passed`: of batches
    before this one."""
    parts = [f"rollout stopped at {'the canary' if canary else 'a batch'}: {'; '.join(found)}"]
    if back:
        parts.append(f"as before and well: {', '.join(back)}")
    if stuck:
        parts.append(f"NOT as before: {_listed(stuck)}")
    if passed:
        parts.append(f"passed and stay: {', '.join(passed)}")
    parts.append(f"untouched: {', '.join(untouched) or 'none'}")
    return ". ".join(parts)


# ---- the way back


def rollback_target(node: Mapping[str, Any], version: str = "") -> dict[str, Any]:
    """What to bring a node back to; empty where nothing is known. `version`: agent and worker only, to this version."""
    if version and node["packages"]:
        moved = {name: version if name in MOVED_TOGETHER else kept for name, kept in node["packages"].items()}
        return {**summary(node), "packages": moved, "ready": True}
    return dict(node["pending"] or node["record"].get("before") or {})


def note_refusal(node: Mapping[str, Any], limit_s: float) -> str:
    """Why a node's note of an interrupted rollout is no way back without a word; empty when it is."""
    if not node["pending"] or node["pending_age_s"] <= float(limit_s):
        return ""
    hours, before = node["pending_age_s"] / 3600, _versions(node["pending"]["packages"])
    return (f"a rollout that was interrupted {hours:.0f} h ago has left a note; a failure would bring back what was "
            f"before it ({before}); run rollback.yml for it, or say rollout_forget=true")


def added_packages(node: Mapping[str, Any], packages: Mapping[str, str]) -> list[str]:
    """What the role has installed beyond these packages."""
    return [name for name in OURS if name in node["packages"] and name not in packages]


def apt_words(node: Mapping[str, Any], packages: Mapping[str, str]) -> list[str]:
    """What apt is told to install so that a node has these packages: what was pushed to it as a file, else a version;
    empty where it has them."""
    words = []
    for name, version in sorted(packages.items()):
        if node["packages"].get(name) != version:
            files = [path for path in node["pushed"] if path.rsplit("/", 1)[-1].startswith(f"{name}_{version}_")]
            words.append(files[0] if files else f"{name}={version}")
    return words


def restore_refusal(node: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    """Why a node is not what it was; empty when it is. One that did not answer before need not answer now."""
    if target["ready"] and (refusal := health_refusal(node)):
        return refusal
    known = {*OURS, *target["packages"]}
    if {name: version for name, version in node["packages"].items() if name in known} != target["packages"]:
        return f"has the packages {_versions(node['packages'])}, not {_versions(target['packages'])}"
    if target["config"] and node["config"] != target["config"]:
        return "has another configuration than before"
    if target["digest"] and node["digest"] != target["digest"]:
        return f"has the model {_model(node)}, not {_model(target)}"
    return ""


def _listed(sentences: Mapping[str, str]) -> str:
    return "; ".join(f"{host}: {text}" for host, text in sentences.items())


def _versions(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(packages.items())) or "none"


def _model(what: Mapping[str, Any]) -> str:
    return f"{what['model'] or 'none'} ({str(what['digest'])[:12]})"


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {
            "reason": reason, "said": said, "rollout_order": order, "from_here": from_here,
            "rollout_refusal": rollout_refusal, "summary": summary, "same_node": same, "stored_tok_s": stored_tok_s,
            "reference": reference, "floor_tok_s": floor_tok_s, "speed_refusal": speed_refusal,
            "health_refusal": health_refusal, "problems": problems, "stopped": stopped,
            "rollback_target": rollback_target, "apt_words": apt_words, "added_packages": added_packages,
            "note_refusal": note_refusal, "restore_refusal": restore_refusal}
