"""Signatures of bundles: OpenSSH's own (`ssh-keygen -Y`), with the keys that operators have already.

Does: sign a text with a private key or a key of the agent, read the public keys that a node trusts, check a signature.
Does not: keep keys, or do cryptography itself. Rules: a signature is made for the namespace `appliance-bundle`, so none
that was made for something else counts; where the check cannot be made, nothing is trusted.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from appliance import disk
from appliance.errors import ConfigError, ModelError, UsageError

NAMESPACE = "appliance-bundle"
PROGRAM = "ssh-keygen"
ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
MOST_KEY_BYTES = 1 << 20
_SIGNER = "bundle"
_KEY = re.compile(r"((?:sk-)?(?:ssh|ecdsa)-[A-Za-z0-9@.-]{3,60}) +([A-Za-z0-9+/]{40,20000}={0,2})(?: .*)?")


def sign(text: bytes, key: Path, *, env: dict[str, str]) -> bytes:
    """The signature of `text` by a private key file, or by the public key file of a key that ssh-agent holds. Asks for
    a passphrase on the terminal where the key has one. Raises UsageError."""
    if not key.is_file():
        raise UsageError(f"the key {key} cannot be used", why="no such file", do="give a private key of ssh-keygen")
    done = _run(["sign", "-n", NAMESPACE, "-f", str(key)], text, env={**ENV, **_agent(env)}, timeout_s=300)
    if done.returncode or b"SSH SIGNATURE" not in done.stdout:
        raise UsageError(f"the key {key} cannot sign", why=_last(done.stderr), do="give a private key of ssh-keygen")
    return done.stdout


def read_keys(place: str) -> tuple[str, ...]:
    """The trusted public keys: lines as in `id_ed25519.pub`, of a file, or of all `*.pub` of a folder. Raises
    ConfigError when there is none, or a line is no key."""
    path = Path(place)
    try:
        files = sorted(path.glob("*.pub")) if path.is_dir() else [path]
        texts = {file: file.read_bytes()[: MOST_KEY_BYTES + 1].decode() for file in files}
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError("bundle_keys cannot be read", why=f"{place}: {why}", do="correct it") from None
    keys = []
    for file, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            found = _KEY.fullmatch(line.strip())
            if found is None:
                raise ConfigError("bundle_keys cannot be used", why=f"{file}, line {number} is no key of OpenSSH",
                                  do="put one line of an `id_ed25519.pub` there")
            keys.append(f"{found[1]} {found[2]}")
    if not keys:
        raise ConfigError("bundle_keys cannot be used", why=f"{place} holds no public key", do="put one there")
    return tuple(keys)


def check(text: bytes, signature: bytes | None, keys: Sequence[str]) -> str:
    """The signer's fingerprint. Raises ModelError unless one of `keys` has signed `text`."""
    if signature is None:
        raise _unsigned("it has no signature")
    place = Path(os.environ.get("TMPDIR", "/tmp"))
    with disk.mapped("the signature cannot be checked", place), tempfile.TemporaryDirectory() as folder:
        signers, file = Path(folder) / "signers", Path(folder) / "signature"
        signers.write_text("".join(f'{_SIGNER} namespaces="{NAMESPACE}" {key}\n' for key in keys))
        file.write_bytes(signature)
        done = _run(["verify", "-f", str(signers), "-I", _SIGNER, "-n", NAMESPACE, "-s", str(file)], text, env=ENV,
                    timeout_s=60)
    said = done.stdout.decode(errors="replace")
    found = re.search(r"with (\S+ key \S+)", said)
    if done.returncode or found is None:
        raise _unsigned(f"no key of bundle_keys has made its signature ({_last(done.stderr or done.stdout)})")
    return found[1]


def _run(args: list[str], text: bytes, *, env: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run([PROGRAM, "-Y", *args], input=text, capture_output=True, env=env, timeout=timeout_s,
                              check=False)
    except FileNotFoundError:
        raise ConfigError(f"{PROGRAM} is missing", why="it makes and checks the signatures of bundles",
                          do="run `apt install openssh-client`") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{PROGRAM} did not end", why=f"no answer within {timeout_s:.0f} s") from None


def _agent(env: dict[str, str]) -> dict[str, str]:
    return {name: env[name] for name in ("SSH_AUTH_SOCK", "HOME", "DISPLAY", "SSH_ASKPASS") if name in env}


def _last(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it said nothing"


def _unsigned(why: str) -> ModelError:
    return ModelError("the bundle is refused", why=why, do="have it signed, or add its signer's public key")
