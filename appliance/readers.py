"""How the value of a setting is read: one function a kind, from what YAML or a variable holds to what is kept.

PURE. Each takes the key, the raw value and where it came from, and raises ConfigError, which names all three and what
is wanted. Knows no key.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

from appliance.errors import ConfigError

Reader = Callable[[str, Any, str], Any]


def parse_size(text: str | int) -> int:
    """`6G`, `512M`, `1.5GiB`, `1048576` -> bytes; G and GiB are both 1024^3. Raises ValueError."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size such as 512M or 6G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _wrong(key: str, value: Any, origin: str, want: str) -> ConfigError:
    return ConfigError(f"{origin}: {key} has a wrong value", why=f"{value!r} is not {want}", do=f"set {key} to {want}")


def _secret(key: str, value: Any, origin: str, want: str, example: str) -> ConfigError:
    """The same for what may hold a secret: the value is not said."""
    return ConfigError(f"{origin}: {key} has a wrong value", why=f"what stands there ({kind(value)}) is not {want}",
                       do=f"set {key} to {want} such as {example}")


def no_section(key: str, value: Any, origin: str, *, example: str) -> ConfigError:
    """The error for a key that should hold others and holds something else."""
    return ConfigError(f"{origin}: {key} has a wrong value", why=f"{kind(value)} stands where keys and their values "
                       "belong", do=f"write it as `{key}: {example}`, or its keys below it, each indented")


def kind(value: Any) -> str:
    """What a value is, without the value: it may be a secret."""
    kinds = ((bool, "true or false"), ((int, float), "a number"), (str, "a text"), (list, "a list"),
             (Mapping, "a mapping"))
    return next((name for types, name in kinds if isinstance(value, types)), "a date or something else")


def whole(low: int, high: int) -> Reader:
    def read(key: str, value: Any, origin: str) -> int:
        text = str(value).strip()
        if isinstance(value, bool) or not re.fullmatch(r"-?[0-9]{1,20}", text) or not low <= int(text) <= high:
            raise _wrong(key, value, origin, f"a whole number from {low} to {high}")
        return int(text)

    return read


def whole_or_auto(low: int, high: int) -> Reader:
    """A whole number; `auto`, which is None, leaves it to the plan."""
    number = whole(low, high)

    def read(key: str, value: Any, origin: str) -> int | None:
        if value == "auto":
            return None
        try:
            return int(number(key, value, origin))
        except ConfigError:
            raise _wrong(key, value, origin, f"a whole number from {low} to {high}, or auto") from None

    return read


def seconds(key: str, value: Any, origin: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if isinstance(value, bool) or not 0 <= number < 1e6:
        raise _wrong(key, value, origin, "a number of seconds of at least 0")
    return number


def positive_seconds(key: str, value: Any, origin: str) -> float:
    number = seconds(key, value, origin)
    if number < 0.1:
        raise _wrong(key, value, origin, "a number of seconds of at least 0.1")
    return number


def line(key: str, value: Any, origin: str) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise _wrong(key, value, origin, "a text on one line")
    return value.strip()


def host(key: str, value: Any, origin: str) -> str:
    text = line(key, value, origin)
    try:
        ipaddress.ip_address(text)
    except ValueError:
        name = re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*", text)
        if not name or text.replace(".", "").isdigit():
            raise _wrong(key, value, origin, "an IP address or a host name") from None
    return text


def size(key: str, value: Any, origin: str) -> int:
    try:
        number = parse_size(value)
    except (ValueError, OverflowError):
        number = -1
    if isinstance(value, bool) or not 0 < number < 1 << 62:
        raise _wrong(key, value, origin, "a size such as 512M or 6G")
    return number


def cpus(key: str, value: Any, origin: str) -> tuple[int, ...]:
    want = "a list of CPU numbers such as 0-3,8"
    parts = [str(v) for v in value] if isinstance(value, list) else str(value).split(",")
    found: set[int] = set()
    for part in parts:
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise _wrong(key, value, origin, want)
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not found:
        raise _wrong(key, value, origin, want)
    return tuple(sorted(found))


def choice(*names: str) -> Reader:
    def read(key: str, value: Any, origin: str) -> str:
        if value not in names:
            raise _wrong(key, value, origin, " or ".join(names))
        return str(value)

    return read


def switch(key: str, value: Any, origin: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if str(value).lower() not in words:
        raise _wrong(key, value, origin, "true or false")
    return words[str(value).lower()]


def percent(key: str, value: Any, origin: str) -> float:
    number = seconds(key, value, origin)
    if number > 100:
        raise _wrong(key, value, origin, "a percentage from 0 to 100")
    return number


def _passable(text: str) -> bool:
    """Whether a program can be given this text: no NUL, and nothing that has no bytes (a lone surrogate)."""
    try:
        return "\0" not in text and bool(text.encode() or True)
    except UnicodeEncodeError:
        return False


def environment(key: str, value: Any, origin: str) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(k, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", k)
        and isinstance(v, (str, int, float)) and _passable(str(v))
        for k, v in value.items()
    ):
        raise _secret(key, value, origin, "a mapping of variable names to texts or numbers",
                      "{VLLM_LOGGING_LEVEL: INFO}")
    return {k: str(v) for k, v in value.items()}


def words(key: str, value: Any, origin: str) -> tuple[str, ...]:
    given = value
    if isinstance(value, str):
        import shlex

        try:
            given = shlex.split(value)
        except ValueError:
            raise _secret(key, value, origin, "a list of arguments", "[--seed, '3']") from None
    if not isinstance(given, list) or not all(isinstance(v, (str, int, float)) and _passable(str(v)) for v in given):
        raise _secret(key, value, origin, "a list of arguments", "[--seed, '3']")
    return tuple(str(v) for v in given)
