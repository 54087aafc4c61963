"""PURE: by which way the role `appliance` puts settings, key and certificate into force: the mildest one that does.

    nothing   what is there says it already
    apply     the service runs: on trial, with the model where that changes too
    restart   what an agent reads at its start only: an address, TLS on or off, the store, an API key
    write     the service does not run: the file is written, and `model` starts the service

Does not: reach a node (modules/node.py), or check settings (the agent does). Rules: what is compared is contents, not
what this run has written, because a run before may have ended in between; a time counts only where the agent shows
nothing to compare, and never one that lies ahead of the node's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

DEFAULT_MODEL = "smollm2"
RUNNING = ("active", "activating", "reloading")
TLS_FILES = ("server.crt", "server.key")


def settings_text(tree: Mapping[str, Any], mark: str) -> str:
    """The configuration file with these settings. Values of a vault are written as what they say, which Ansible's own
    filters do not always do."""
    said = yaml.safe_dump(plain(tree), sort_keys=False, allow_unicode=True) if tree else ""
    return f"{mark}\n# All keys: /usr/share/doc/appliance/configuration.md\n{said}"


def plain(value: Any) -> Any:
    """The same without Ansible's own types."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool):
        return value
    kind = next((kind for kind in (int, float) if isinstance(value, kind)), str)
    return kind(value)


def course(node: Mapping[str, Any], wish: Mapping[str, Any]) -> dict[str, Any]:
    """`node`: what the module says with `installation` and `settings`. `wish`: `settings` (the tree), `text` and `mark`
    (of the file), `model` (its name; empty where the settings decide), `api_key` and `tls` (whether they are given),
    `tls_dir`."""
    there, status, before = node["settings"], node["status"], node["settings"]["text"]
    active, live = node["unit"].get("ActiveState") in RUNNING, bool(status.get("live"))
    managed = bool(wish["settings"]) or before.startswith(wish["mark"])
    old = tree_of(before) if there["right"] else {}
    differs = managed and before != wish["text"]
    # A reload that the agent refused has taken nothing.
    refused = not differs and "reload" in status.get("warned", ())
    late = managed and (refused or _taken_at(status) < there["changed_at"] <= there["now"])
    late = bool(late or (wish["api_key"] and there["key_unread"]))
    at_start = managed and at_its_start(old) != at_its_start(wish["settings"])
    if not active:
        way = "write"
    elif late or at_start or not live or not there["right"]:
        way = "restart"
    else:
        way = "apply"
    secret = "worker" in wish["settings"]
    return {
        "managed": managed, "differs": differs, "way": way, "restart": active and late,
        "reload": bool(live and wish["tls"] and there["pair_unread"]),
        "planned": active and there["right"],
        "model": ["--model", wish["model"]] if model_changes(node, old, wish["model"]) else [],
        "old_names_model": old.get("model") is not None,
        # What may hold a secret, or was taken from everybody, is not for everybody. A difference shows the old one too.
        "closed": secret or there["mode"][-1:] in ("0", "1", "2", "3"), "secret": secret,
        "hidden": secret or "worker" in before,
        "left_over": left_over(node, wish) if managed else [],
    }


def model_changes(node: Mapping[str, Any], old: Mapping[str, Any], name: str) -> bool:
    """Whether the model has to be named beside the settings, so that both are one trial, or none at all."""
    if not name or name not in (*node["models"], DEFAULT_MODEL):
        return False
    # It may be in use only because of the settings before.
    return old.get("model") is not None or name != (node["in_use"] or DEFAULT_MODEL) or outdated(node, name)


def outdated(node: Mapping[str, Any], name: str) -> bool:
    """Whether the name has got another model since the agent has taken it."""
    status = node["status"]
    served = status.get("digest") if status.get("live") and status.get("model") == name else None
    return bool(served) and name in node["models"] and node["models"][name] != served


def left_over(node: Mapping[str, Any], wish: Mapping[str, Any]) -> list[str]:
    """What an earlier run has left of a certificate and its key that nothing refers to any more; the folder where
    nothing else is in it."""
    folder, files = str(wish["tls_dir"]), node["settings"]["tls_files"]
    if wish["tls"] or node["settings"]["tls_noted"] or f"{folder}/" in wish["text"] or not set(files) & set(TLS_FILES):
        return []
    return [folder] if set(files) <= set(TLS_FILES) else [f"{folder}/{name}" for name in TLS_FILES if name in files]


def at_its_start(tree: Mapping[str, Any]) -> tuple[str, str, str, bool]:
    """What counts at the start of an agent only."""
    listen, tls = _section(tree, "listen"), _section(tree, "tls")
    return (str(listen.get("host") or "127.0.0.1"), str(listen.get("port") or 8000), str(tree.get("store") or ""),
            bool(tls.get("cert")))


def tree_of(text: str) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def _taken_at(status: Mapping[str, Any]) -> float:
    """When the agent has read its configuration last."""
    return max(float(status.get("started_at") or 0), float(status.get("reloaded_at") or 0))


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"settings_text": settings_text, "course": course}
