"""What the operator asked for: defaults, and the reading of /etc/appliance/appliance.yaml.

`parse(text)` is pure: text in, settings and warnings out. Precedence is flag > APPLIANCE_* environment > file >
what the plan chooses (None here). An unknown key is a warning that names the nearest key; a wrong value, and another
shape than a section's, is a ConfigError: never is a default taken for something that is there. Nothing here touches the
file system.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance import readers
from appliance.errors import ConfigError
from appliance.parsers import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from appliance.quantize.format import KERNELS, NATIVE_VARIANTS

DEFAULT_MODEL = "smollm2"
DEPTH = 2
"""How deep the file is read: keys have two parts."""
MOST_BYTES = 256 << 10
MOST_VALUES, MOST_DIGITS = 10_000, 60
"""What a configuration may hold: values, each alias counted as what it stands for (a few lines of YAML can stand for
more than any memory), and digits of one number."""


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
    """`threads`: of each engine; `engines`: how many, None = the plan decides."""

    threads: int | None = None
    cpus: tuple[int, ...] | None = None
    engines: int | None = None


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
class Hub:
    """Where models are fetched from. `limit_rate`: bytes a second at most; `offline`: never try."""

    endpoint: str | None = None
    token_file: str | None = None
    limit_rate: int | None = None
    offline: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    model: str = DEFAULT_MODEL
    listen: Listen = Listen()
    tls: Tls = Tls()
    api_key_file: str | None = None
    store: str | None = None
    bundle_keys: str | None = None
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
    tools: str = AUTO
    reasoning: str = AUTO
    """vLLM's parsers of tool calls and of thinking: by the chat template, `none`, or a name."""
    tune: Tune = Tune()
    hub: Hub = Hub()


@dataclass(frozen=True, kw_only=True)
class Parsed:
    settings: Settings
    warnings: tuple[str, ...]
    sources: Mapping[str, str]
    """Dotted key -> `flag`, the environment variable's name, or the file's path; absent = default."""


def parse(text: str, *, origin: str = "appliance.yaml") -> Parsed:
    """Read the YAML text of a configuration file. Raises ConfigError on broken YAML or a wrong value."""
    raw, twice = yaml_tree(text, origin=origin)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin} is not a configuration", why="the top level is not `key: value` lines",
                          do="see docs/configuration.md")
    parsed = _read(raw, origin)
    said = (f"{origin}: `{key}` stands there twice (line {line}): only the last one counts" for key, line in twice)
    return dataclasses.replace(parsed, warnings=(*parsed.warnings, *said))


def yaml_tree(text: str, *, origin: str) -> tuple[Any, tuple[tuple[str, int], ...]]:
    """The value of a YAML text, and the keys that it has more than once, each with its later line. Raises ConfigError
    for what is no YAML, or more than a configuration can be."""
    import yaml

    wrong = f"{origin} is not valid YAML"
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{origin} is no configuration", why=f"it is larger than {MOST_BYTES >> 10} KiB",
                          do="correct the file")
    try:
        nodes = yaml.compose(text, Loader=yaml.SafeLoader)
        if nodes is not None:
            _count(nodes, {})
        return yaml.safe_load(text), tuple(_twice(nodes))
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(wrong, why=where + (error.problem or "not valid YAML"), do="correct the file") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise ConfigError(wrong, why=f"line {line}: a character that no text has", do="correct the file") from None
    except (yaml.YAMLError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError):
        raise ConfigError(wrong, why="a value cannot be read", do="correct the file") from None


def _count(node: Any, known: dict[Any, int | None]) -> int:
    """How many values a node stands for. Raises yaml.MarkedYAMLError where that is more than can be used or shown."""
    import yaml

    def too_much(problem: str) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)

    if node in known:
        count = known[node]
        if count is None:
            raise too_much("a value that holds itself")
        return count
    if node.id == "scalar":
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS:
            raise too_much(f"a number of {len(node.value)} digits")
        return 1
    known[node] = None
    inner = node.value if node.id == "sequence" else [one for pair in node.value for one in pair]
    count = 1 + sum(_count(one, known) for one in inner)
    if count > MOST_VALUES:
        raise too_much(f"more than {MOST_VALUES} values")
    known[node] = count
    return count


def from_tree(tree: Mapping[str, Any], *, origin: str) -> Settings:
    """The inverse of `to_dict`, JSON in between included. Raises ConfigError on a wrong value."""
    return _read(tree, origin).settings


def _read(raw: Mapping[str, Any], origin: str) -> Parsed:
    values: dict[str, Any] = {}
    warnings: list[str] = []
    for dotted, value in _flatten(raw):
        if dotted in SECTIONS:
            if value is not None:
                raise readers.no_section(dotted, value, origin, example=SECTIONS[dotted])
        elif dotted not in KEYS:
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


OPTIONS: Mapping[str, str] = {"memory.ceiling": "--memory", "hub.limit_rate": "--limit-rate"}
"""Settings whose option has a name of its own."""


def env_name(key: str) -> str:
    """`listen.port` -> `APPLIANCE_LISTEN_PORT`."""
    return "APPLIANCE_" + key.replace(".", "_").upper()


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


def _twice(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Keys that a YAML mapping has more than once, each with its later line: YAML's reader drops the first silently."""
    seen: set[str] = set()
    for key, value in node.value if node is not None and node.id == "mapping" else ():
        if not isinstance(key.value, str) or key.tag == "tag:yaml.org,2002:merge":  # each merge counts
            continue
        dotted = prefix + key.value
        if dotted in seen:
            yield _printable(dotted), key.start_mark.line + 1
        seen.add(dotted)
        if dotted in SECTIONS or dotted in KEYS:
            yield from _twice(value, f"{dotted}.")


def _unknown(dotted: str, origin: str) -> str:
    near = difflib.get_close_matches(dotted, KEYS, n=1, cutoff=0.5)
    hint = f"; did you mean `{near[0]}`?" if near else "; see docs/configuration.md"
    return f"{origin}: unknown key `{_printable(dotted)}` is ignored{hint}"


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name[:100])


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


KEYS: Mapping[str, readers.Reader] = {
    "model": readers.line,
    "listen.host": readers.host,
    "listen.port": readers.whole(1, 65535),
    "tls.cert": readers.line,
    "tls.key": readers.line,
    "api_key_file": readers.line,
    "store": readers.line,
    "bundle_keys": readers.line,
    "memory.ceiling": readers.size,
    "memory.reserve": readers.size,
    "cpu.threads": readers.whole(1, 1024),
    "cpu.cpus": readers.cpus,
    "cpu.engines": readers.whole_or_auto(1, 64),
    "context": readers.whole(16, 100_000_000),
    "max_running": readers.whole(1, 4096),
    "max_queued": readers.whole(0, 1_000_000),
    "kernel": readers.choice(*KERNELS, *NATIVE_VARIANTS),
    "dtype": readers.choice("bfloat16", "float16", "float32", "auto"),
    "compile": readers.switch,
    "worker.python": readers.line,
    "worker.env": readers.environment,
    "worker.extra_args": readers.words,
    "trial_s": readers.seconds,
    "drain_s": readers.seconds,
    "probe_s": readers.positive_seconds,
    "request_s": readers.positive_seconds,
    "max_body": readers.size,
    "allow_prompt_logprobs": readers.switch,
    "tools": readers.choice(AUTO, NONE, *TOOL_PARSERS),
    "reasoning": readers.choice(AUTO, NONE, *REASONING_PARSERS),
    "tune.upgrade_loss_pct": readers.percent,
    "tune.upgrade_rollback": readers.switch,
    "hub.endpoint": readers.line,
    "hub.token_file": readers.line,
    "hub.limit_rate": readers.size,
    "hub.offline": readers.switch,
}
"""Every key of the configuration file, with the function that reads its value."""
SECTIONS: Mapping[str, str] = {
    "listen": "{host: 127.0.0.1, port: 8000}",
    "tls": "{cert: /etc/appliance/tls/server.crt, key: /etc/appliance/tls/server.key}",
    "memory": "{ceiling: 6G}",
    "cpu": "{threads: 4}",
    "worker": "{env: {VLLM_LOGGING_LEVEL: INFO}}",
    "tune": "{upgrade_loss_pct: 10}",
    "hub": "{offline: true}",
}
"""Every key that holds others, with an example. One without a value is no mistake: its lines are commented out."""
