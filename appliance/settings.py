"""What the operator asked for: defaults, and the reading of /etc/appliance/appliance.yaml.

`parse(text)` is pure: text in, settings and warnings out. Precedence is flag > APPLIANCE_* environment > file >
what the plan chooses (None here). An unknown key is a warning that names the nearest key; a wrong value is a
ConfigError. Nothing here touches the file system.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import ConfigError
from appliance.quantize.format import KERNELS, NATIVE_VARIANTS

DEFAULT_MODEL = "smollm2"
DEPTH = 2
"""How deep the file is read: keys have two parts; YAML aliases can nest without end."""


@dataclass(frozen=True, kw_only=True)
class Listen:
    host: str = "127.0.0.1"
    port: int = 8000


@dataclass(frozen=True, kw_only=True)
class Tls:
    cert: str | None = None
    key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """`ceiling`: lower bound put on the node's own ceiling; `reserve`: kept free below it. Bytes."""

    ceiling: int | None = None
    reserve: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cpu:
    threads: int | None = None
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Worker:
    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tune:
    upgrade_loss_pct: float = 10.0
    upgrade_rollback: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    model: str = DEFAULT_MODEL
    listen: Listen = Listen()
    tls: Tls = Tls()
    api_key_file: str | None = None
    store: str | None = None
    memory: Memory = Memory()
    cpu: Cpu = Cpu()
    context: int | None = None
    max_running: int | None = None
    max_queued: int = 16
    kernel: str = "auto"
    dtype: str | None = None
    compile: bool | None = None
    worker: Worker = Worker()
    trial_s: float = 600.0
    drain_s: float = 30.0
    probe_s: float = 15.0
    request_s: float = 3600.0
    max_body: int = 16 * 1024**2
    allow_prompt_logprobs: bool = False
    tune: Tune = Tune()


@dataclass(frozen=True, kw_only=True)
class Parsed:
    settings: Settings
    warnings: tuple[str, ...]
    sources: Mapping[str, str]
    """Dotted key -> `flag`, the environment variable's name, or the file's path; absent = default."""


def parse(text: str, *, origin: str = "appliance.yaml") -> Parsed:
    """Read the YAML text of a configuration file. Raises ConfigError on broken YAML or a wrong value."""
    import yaml

    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else "the text"
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise ConfigError(f"{origin} is not valid YAML", why=f"{where}: {problem}", do="correct the file") from None
    except (ValueError, ArithmeticError, AttributeError, LookupError, RecursionError):
        raise ConfigError(f"{origin} is not valid YAML", why="a value cannot be read", do="correct the file") from None
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin} is not a configuration", why="the top level is not `key: value` lines",
                          do="see docs/configuration.md")
    return _read(raw, origin)


def from_tree(tree: Mapping[str, Any], *, origin: str) -> Settings:
    """The inverse of `to_dict`, JSON in between included. Raises ConfigError on a wrong value."""
    return _read(tree, origin).settings


def _read(raw: Mapping[str, Any], origin: str) -> Parsed:
    values: dict[str, Any] = {}
    warnings: list[str] = []
    for dotted, value in _flatten(raw):
        if dotted not in KEYS:
            warnings.append(_unknown(dotted, origin))
        elif value is not None:
            values[dotted] = KEYS[dotted](dotted, value, origin)
    return _build(values, tuple(warnings), dict.fromkeys(values, origin))


def overlay(base: Parsed, *, env: Mapping[str, str], flags: Mapping[str, Any]) -> Parsed:
    """Put APPLIANCE_* variables and command-line flags (dotted key -> value, None = not given) over a file.

    Raises ConfigError when a variable or flag has a wrong value.
    """
    values = {key: get(base.settings, key) for key in base.sources}
    sources = dict(base.sources)
    for key, read in KEYS.items():
        name = env_name(key)
        if env.get(name):
            values[key], sources[key] = read(key, env[name], name), name
    for key, value in flags.items():
        if value is not None:
            option = OPTIONS.get(key, "--" + key.rsplit(".", 1)[-1])
            values[key], sources[key] = KEYS[key](key, value, option), "flag"
    return _build(values, base.warnings, sources)


OPTIONS: Mapping[str, str] = {"memory.ceiling": "--memory"}
"""Settings whose option has a name of its own."""


def env_name(key: str) -> str:
    """`listen.port` -> `APPLIANCE_LISTEN_PORT`."""
    return "APPLIANCE_" + key.replace(".", "_").upper()


def parse_size(text: str | int) -> int:
    """`6G`, `512M`, `1.5GiB`, `1048576` -> bytes; G and GiB are both 1024^3. Raises ValueError."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size such as 512M or 6G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def is_loopback(host: str) -> bool:
    """Whether this address or name is reached from this machine only."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def to_dict(settings: Settings) -> dict[str, Any]:
    """The settings as the tree that the YAML file holds."""
    return dataclasses.asdict(settings)


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and dotted not in KEYS and prefix.count(".") < DEPTH:
            yield from _flatten(value, dotted + ".")
        else:
            yield dotted, value


def _unknown(dotted: str, origin: str) -> str:
    near = difflib.get_close_matches(dotted, KEYS, n=1, cutoff=0.5)
    hint = f"; did you mean `{near[0]}`?" if near else "; see docs/configuration.md"
    shown = "".join(c if c.isprintable() else "?" for c in dotted)
    return f"{origin}: unknown key `{shown}` is ignored{hint}"


def get(settings: Settings, dotted: str) -> Any:
    """The value of one key, as `listen.port`."""
    value: Any = settings
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def _build(values: Mapping[str, Any], warnings: tuple[str, ...], sources: Mapping[str, str]) -> Parsed:
    top: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for dotted, value in values.items():
        head, _, tail = dotted.partition(".")
        if tail:
            groups.setdefault(head, {})[tail] = value
        else:
            top[head] = value
    for head, fields in groups.items():
        top[head] = dataclasses.replace(getattr(Settings(), head), **fields)
    settings = Settings(**top)
    if (settings.tls.cert is None) != (settings.tls.key is None):
        raise ConfigError("tls needs both cert and key", why="only one of them is set", do="set tls.cert and tls.key")
    return Parsed(settings=settings, warnings=warnings, sources=sources)


Reader = Callable[[str, Any, str], Any]


def _wrong(key: str, value: Any, origin: str, want: str) -> ConfigError:
    return ConfigError(f"{origin}: {key} has a wrong value", why=f"{value!r} is not {want}", do=f"set {key} to {want}")


def _whole(low: int, high: int) -> Reader:
    def read(key: str, value: Any, origin: str) -> int:
        text = str(value).strip()
        if isinstance(value, bool) or not re.fullmatch(r"-?[0-9]{1,20}", text) or not low <= int(text) <= high:
            raise _wrong(key, value, origin, f"a whole number from {low} to {high}")
        return int(text)

    return read


def _seconds(key: str, value: Any, origin: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if isinstance(value, bool) or not 0 <= number < 1e6:
        raise _wrong(key, value, origin, "a number of seconds of at least 0")
    return number


def _positive_seconds(key: str, value: Any, origin: str) -> float:
    number = _seconds(key, value, origin)
    if number < 0.1:
        raise _wrong(key, value, origin, "a number of seconds of at least 0.1")
    return number


def _text(key: str, value: Any, origin: str) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise _wrong(key, value, origin, "a text on one line")
    return value.strip()


def _host(key: str, value: Any, origin: str) -> str:
    text = _text(key, value, origin)
    try:
        ipaddress.ip_address(text)
    except ValueError:
        name = re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*", text)
        if not name or text.replace(".", "").isdigit():
            raise _wrong(key, value, origin, "an IP address or a host name") from None
    return text


def _size(key: str, value: Any, origin: str) -> int:
    try:
        number = parse_size(value)
    except (ValueError, OverflowError):
        number = -1
    if isinstance(value, bool) or not 0 < number < 1 << 62:
        raise _wrong(key, value, origin, "a size such as 512M or 6G")
    return number


def _cpus(key: str, value: Any, origin: str) -> tuple[int, ...]:
    want = "a list of CPU numbers such as 0-3,8"
    parts = [str(v) for v in value] if isinstance(value, list) else str(value).split(",")
    found: set[int] = set()
    for part in parts:
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise _wrong(key, value, origin, want)
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


def _choice(*names: str) -> Reader:
    def read(key: str, value: Any, origin: str) -> str:
        if value not in names:
            raise _wrong(key, value, origin, " or ".join(names))
        return str(value)

    return read


def _switch(key: str, value: Any, origin: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if str(value).lower() not in words:
        raise _wrong(key, value, origin, "true or false")
    return words[str(value).lower()]


def _percent(key: str, value: Any, origin: str) -> float:
    number = _seconds(key, value, origin)
    if number > 100:
        raise _wrong(key, value, origin, "a percentage from 0 to 100")
    return number


def _passable(text: str) -> bool:
    """Whether a program can be given this text: no NUL, and nothing that has no bytes (a lone surrogate)."""
    try:
        return "\0" not in text and bool(text.encode() or True)
    except UnicodeEncodeError:
        return False


def _environment(key: str, value: Any, origin: str) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(k, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", k)
        and isinstance(v, (str, int, float)) and _passable(str(v))
        for k, v in value.items()
    ):
        raise _wrong(key, value, origin, "a mapping of variable names to values")
    return {k: str(v) for k, v in value.items()}


def _words(key: str, value: Any, origin: str) -> tuple[str, ...]:
    if isinstance(value, str):
        import shlex

        try:
            return tuple(shlex.split(value))
        except ValueError:
            raise _wrong(key, value, origin, "a list of arguments") from None
    if not isinstance(value, list) or not all(isinstance(v, (str, int, float)) and _passable(str(v)) for v in value):
        raise _wrong(key, value, origin, "a list of arguments")
    return tuple(str(v) for v in value)


KEYS: Mapping[str, Reader] = {
    "model": _text,
    "listen.host": _host,
    "listen.port": _whole(1, 65535),
    "tls.cert": _text,
    "tls.key": _text,
    "api_key_file": _text,
    "store": _text,
    "memory.ceiling": _size,
    "memory.reserve": _size,
    "cpu.threads": _whole(1, 1024),
    "cpu.cpus": _cpus,
    "context": _whole(16, 100_000_000),
    "max_running": _whole(1, 4096),
    "max_queued": _whole(0, 1_000_000),
    "kernel": _choice(*KERNELS, *NATIVE_VARIANTS),
    "dtype": _choice("bfloat16", "float16", "float32", "auto"),
    "compile": _switch,
    "worker.python": _text,
    "worker.env": _environment,
    "worker.extra_args": _words,
    "trial_s": _seconds,
    "drain_s": _seconds,
    "probe_s": _positive_seconds,
    "request_s": _positive_seconds,
    "max_body": _size,
    "allow_prompt_logprobs": _switch,
    "tune.upgrade_loss_pct": _percent,
    "tune.upgrade_rollback": _switch,
}
"""Every key of the configuration file, with the function that reads its value."""
