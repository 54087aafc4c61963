"""PURE: what is wrong with the variables of the role `appliance` before any node is asked; and which tags go with them.

Does not: judge settings (the agent on the node does), or a node (the role's preflight). Rules: a gate returns one
sentence, empty when it passes; the first one counts; nothing of a secret is in a sentence; what a file of the node will
hold (a line of a package source, a header) cannot leave its line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

URI = re.compile(r"[a-z][a-z0-9+.-]*:[!-~]+")
SUITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~+/-]*")
VERSION = re.compile(r"[0-9][A-Za-z0-9.+~:-]*")
HUB = re.compile(r"hf:[\w.-]+/[\w.-]+(@[\w./-]+)?(:[!-~]+)?", re.ASCII)
MODEL_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
ARMOUR = "-----BEGIN PGP PUBLIC KEY BLOCK-----"
HEADER_WORD = re.compile(r"[!-~]+")
TAGS = ("preflight", "install", "model", "configure", "verify")
"""Of the files of the role, in their order."""
FOREIGN = ("appliance_hosts", "appliance_facts")
"""Variables that begin like the role's and are a playbook's, or what the role returns."""


def wishes_refusal(wishes: Mapping[str, Any]) -> str:
    """Why these variables cannot be meant. `wishes`: the role's variables without `appliance_`, and `key_text` (of the
    repository), `model_kind`, `stored_as` (the model's name in the store)."""
    if wishes["state"] != "present":
        return ""
    return next((say for gate in (_kinds, _source, _model, _door, _rest) for say in gate(wishes)), "")


def _kinds(wishes: Mapping[str, Any]) -> Iterator[str]:
    """What Ansible's own check of the arguments lets through and the role cannot use."""
    config = wishes["config"]
    if not isinstance(config, Mapping):
        yield ("appliance_config is a text and no mapping; give it in the inventory, or with -e "
               "'{\"appliance_config\": {...}}'")
    elif odd := [key for key in config if not isinstance(key, str)]:
        yield f"appliance_config has a key that is no text: {odd[0]!r}; see docs/configuration.md for the keys"
    for name, least in (("wait_s", 1), ("min_memory_mb", 0), ("min_disk_mb", 0)):
        if int(wishes[name]) < least:
            yield f"appliance_{name} is {wishes[name]}; it is {least} or more"


def _source(wishes: Mapping[str, Any]) -> Iterator[str]:
    version, uri, suite = str(wishes["version"]), wishes["repository_uri"], wishes["repository_suite"]
    if version and not VERSION.fullmatch(version):
        yield (f"appliance_version {_shown(version)} is no version of a package; give one such as 0.1.0~deb12, or "
               "leave it empty")
    if wishes["source"] == "packages":
        if not wishes["packages_dir"]:
            yield ("appliance_source is packages and appliance_packages_dir is empty; name the folder of the "
                   "controller that holds them")
        return
    if bool(uri) != bool(wishes["repository_key"]):
        yield ("only one of appliance_repository_uri and appliance_repository_key is set: nodes need both; set both, "
               "or none where the node's sources have the packages")
    if not uri:
        return
    if not URI.fullmatch(uri):
        yield (f"appliance_repository_uri {_shown(uri)} is no address; give one such as https://apt.example.org, "
               "without spaces")
    if suite and not SUITE.fullmatch(suite):
        yield (f"appliance_repository_suite {_shown(suite)} is no name of a suite; give one such as bookworm, or "
               "leave it out")
    if reason := _key_reason(wishes["repository_key"], wishes["key_text"]):
        yield (f"appliance_repository_key {reason}; give an ASCII-armoured public key, or a file of the controller "
               "that holds one")


def _key_reason(given: str, text: str) -> str:
    if "PRIVATE KEY BLOCK" in text:
        return "is a private key, which no node may get"
    if text.strip().startswith(ARMOUR):
        return ""
    if "\n" in given or given.lstrip().startswith("-----"):
        return "is a text and no public key"
    return f"{_shown(given)} {'holds no armoured public key' if text else 'cannot be read on the controller'}"


def _model(wishes: Mapping[str, Any]) -> Iterator[str]:
    model, kind, name = wishes["model"], wishes["model_kind"], wishes["stored_as"]
    if model and _setting(wishes, "model"):
        yield "the model is set twice: appliance_model and appliance_config.model; leave one of them out"
    if kind == "hub" and not HUB.fullmatch(model):
        yield f"appliance_model {_shown(model)} is no model of the Hub; give hf:org/name[@revision][:file]"
    if kind in ("file", "bundle") and not model.removeprefix("bundle:").isprintable():
        yield f"appliance_model {_shown(model)} is no path on one line; give a file of the controller"
    if not MODEL_NAME.fullmatch(name):
        yield (f"{_shown(name)} is no name for a model: lower-case letters, digits and . _ - only; set "
               f"{'appliance_model' if kind == 'stored' else 'appliance_model_name'}")
    if wishes["model_name"] and kind in ("default", "stored"):
        yield ("appliance_model_name is set and appliance_model adds no model (it is empty, or the name of a stored "
               "one); leave appliance_model_name out")


def _door(wishes: Mapping[str, Any]) -> Iterator[str]:
    key, cert, cert_key = (str(wishes[name]) for name in ("api_key", "tls_cert", "tls_key"))
    if key and not HEADER_WORD.fullmatch(key.strip()):
        yield ("appliance_api_key cannot be sent in a header: it is blank, or has spaces, line breaks or letters "
               "beyond ASCII; set another")
    if key and _setting(wishes, "api_key_file"):
        yield ("the API key is set twice: appliance_api_key and appliance_config.api_key_file, which would win; "
               "leave one of them out")
    if bool(cert) != bool(cert_key):
        yield "only one of appliance_tls_cert and appliance_tls_key is set: TLS needs both; set both or none"
    if cert and "tls" in wishes["config"]:
        yield "TLS is set twice: appliance_tls_cert and appliance_config.tls; leave one of them out"
    if cert and "-----BEGIN CERTIFICATE-----" not in cert:
        yield ("appliance_tls_cert is no certificate: it is a PEM text with -----BEGIN CERTIFICATE-----, and not the "
               "name of a file")
    if cert and "PRIVATE KEY-----" not in cert_key:
        yield ("appliance_tls_key is no key: it is a PEM text with -----BEGIN PRIVATE KEY-----, and not the name of a "
               "file")


def _rest(wishes: Mapping[str, Any]) -> Iterator[str]:
    if not str(wishes["verify_prompt"]).strip():
        yield "appliance_verify_prompt is blank, and the node is asked it in the end; give a text, or leave it out"


def _setting(wishes: Mapping[str, Any], key: str) -> bool:
    return wishes["config"].get(key) not in (None, "")


def _shown(text: str) -> str:
    """A wrong value on one line, and not more of it than shows which."""
    return repr(str(text)[:80])


# ---- what is meant by what was given


def listening(config: object) -> dict[str, Any]:
    """Host and port of these settings, the defaults where they are not set; a port that is none is -1, and the agent
    says what is wrong."""
    listen = section(config, "listen")
    host, port = listen.get("host"), listen.get("port")
    number = 8000 if port is None else int(port) if re.fullmatch(r"[0-9]{1,5}", str(port)) else -1
    return {"host": host if isinstance(host, str) and host else "127.0.0.1", "port": number or -1}


def section(tree: object, name: str) -> Mapping[str, Any]:
    """A section of settings; an empty one where it is missing, or no mapping."""
    found = tree.get(name) if isinstance(tree, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def tags_refusal(tags: Sequence[str], state: str) -> str:
    """Why a run with these tags (`all`: without --tags) would do nothing of what the variables ask for."""
    ours = [tag for tag in tags if tag in (*TAGS, "remove")]
    if state == "present" and ours == ["remove"]:
        return "--tags remove does nothing while appliance_state is present; set absent or purged"
    if state != "present" and ours and "remove" not in ours:
        return (f"--tags {','.join(ours)} does nothing while appliance_state is {state}; run without --tags, or with "
                "--tags remove")
    return ""


def unknown_variables(names: Sequence[str], options: Sequence[str]) -> list[str]:
    """Sentences on variables that are none of the role's `options`, and look like one."""
    near = {name: difflib.get_close_matches(name, options, n=1, cutoff=0.85) for name in sorted(names)}
    return [f"{name} is no variable of this role; did you mean {found[0]}?" for name, found in near.items()
            if found and name not in (*options, *FOREIGN)]


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"wishes_refusal": wishes_refusal, "listening": listening, "tags_refusal": tags_refusal,
                "unknown_variables": unknown_variables}
