"""PURE: text and JSON without secrets, for what leaves the node in a support bundle.

    Scrubber(secrets, hidden_names).text(...)   known secrets, and whatever looks like one, become `[secret]`
    .tree(...)                                  the same for JSON values; values of hidden variables become `[hidden]`

Rules: in doubt something harmless is hidden rather than a secret shown; a line that holds a request's words is left
out whole, because prompts are private; names (of keys, variables, files) are kept, values are not.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

SECRET, HIDDEN, REQUEST = "[secret]", "[hidden]", "[a line with a request's words was left out]"
SHORTEST_SECRET = 6
"""Shorter texts occur by chance: replacing them would ruin everything else."""
SAFE_VARIABLES = ("APPLIANCE_", "OMP_", "KMP_", "GOMP_", "ATEN_", "DNNL_", "ONEDNN_", "MALLOC_", "VLLM_CPU_",
                  "VLLM_LOGGING_", "TORCHINDUCTOR_")
TELLING = r"(?:password|passwd|passphrase|pass|_pwd|secret|token|credential|api[_-]?key|private[_-]?key)"
"""How the name of a secret ends."""
PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN ([A-Z ]*)PRIVATE KEY-----.*?(?:-----END \1PRIVATE KEY-----|\Z)", re.DOTALL), SECRET),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{8,}"), SECRET),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), SECRET),
    (re.compile(r"(?i)(authorization[\"']?\s*[:=]\s*[\"']?)(?:(?:bearer|basic|digest)\s+)?[^\s\"',;]+"),
     rf"\1{SECRET}"),
    (re.compile(r"(?i)\b((?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\1{SECRET}"),
    (re.compile(r"(://)[^/\s:@\"']*:[^/\s@\"']+@"), rf"\1{SECRET}@"),
    (re.compile(rf"(?i)\b([a-z0-9_-]*{TELLING}[\"']?\s*[=:]\s*[\"']?)(?!\[secret\]|\[hidden\])[^\s\"',;}}\]]+"),
     rf"\1{SECRET}"),
)
REQUESTS = re.compile(r"(?i)[\"']?\bprompt[\"']?\s*[:=]\s*[\"'\[{]|[\"']messages[\"']\s*[:=]\s*[\"'\[{]"
                      r"|[\"'](?:content|input)[\"']\s*[:=]\s*[\"'\[{]|\breceived request\b")
SECRET_NAME = re.compile(rf"(?i){TELLING}$|key$|auth$")


class Scrubber:
    """`secrets`: texts that must not appear; `hidden_names`: variables whose values are not shown."""

    def __init__(self, secrets: Iterable[str] = (), hidden_names: Iterable[str] = ()) -> None:
        # The longest first: one may be a part of another.
        known = sorted({one for one in secrets if len(one) >= SHORTEST_SECRET}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None
        self._hidden = frozenset(hidden_names)

    def text(self, text: str) -> str:
        """The text without secrets and without lines that hold a request's words."""
        if self._known is not None:
            text = self._known.sub(SECRET, text)
        for pattern, by in PATTERNS:
            text = pattern.sub(by, text)
        return "\n".join(REQUEST if REQUESTS.search(line) else line for line in text.split("\n"))

    def unit(self, text: str) -> str:
        """A unit file, or what `systemctl show` says: variables keep their names."""
        return self.text("\n".join(_environment(line) for line in text.split("\n")))

    def tree(self, value: Any, *, key: str = "") -> Any:
        """A JSON value of the same shape without secrets."""
        if isinstance(value, Mapping):
            own = key in ("env", "worker.env")
            return {str(name): HIDDEN if own and self._hides(str(name), key) else self.tree(inner, key=str(name))
                    for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.tree(inner, key=key) for inner in value]
        return self.text(value) if isinstance(value, str) else value

    def _hides(self, name: str, key: str) -> bool:
        return name in self._hidden or bool(SECRET_NAME.search(name)) or (key == "worker.env" and not is_safe(name))


def is_safe(variable: str) -> bool:
    """Whether a variable's value may be shown: it steers threads or kernels, and is no key."""
    return variable.startswith(SAFE_VARIABLES) and not SECRET_NAME.search(variable)


def _environment(line: str) -> str:
    name, separator, rest = line.partition("=")
    if not separator or not re.fullmatch(r"\s*(?:Environment|SetCredential\w*)", name):
        return line
    if name.strip() != "Environment":
        return f"{name}={HIDDEN}"
    try:
        words = shlex.split(rest)
    except ValueError:
        return f"{name}={HIDDEN}"
    pairs = (word.partition("=") for word in words)
    return f"{name}=" + " ".join(f"{own}={value if is_safe(own) else HIDDEN}" for own, _, value in pairs)
