"""PURE: the agent's figures in Prometheus' text format, from its status and the front door's traffic.

Does not: read clocks or the worker's own metrics (the front door appends those). Rules: every name begins with
`appliance_`; bytes, seconds and totals are said in the name; what is unknown (None) is left out, never zero; labels are
few and bounded, so that a scraper's series do not grow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from appliance.board import Traffic

STATES = ("starting", "preparing", "loading", "answering", "ready", "busy", "draining", "restarting", "waiting",
          "stopping", "stopped", "failed")
TOPICS: Mapping[str, str] = {
    "reload": "a changed configuration was not taken, or not all of it", "limits": "limits changed while it runs",
    "strain": "throttled, or short of memory", "mended": "a damaged model was made again",
    "worker": "its own checks found damaged weights", "record": "the record cannot be written",
    "settings": "keys that are ignored, or stand there twice", "access": "certificate or keys",
}
"""What the status can warn of, and what that means."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGES: tuple[tuple[str, str, str], ...] = (
    # key of the status, name, help
    ("started_at", "appliance_started_time_seconds", "When the agent started (unix time)."),
    ("ready_at", "appliance_ready_time_seconds", "When the service became ready last (unix time)."),
    ("ready_after_s", "appliance_ready_after_seconds",
     "To the first answer, from the start of the agent, or of the worker after a fault."),
    ("last_answer_at", "appliance_last_answer_time_seconds", "When the model answered last, a user or a probe."),
    ("tokens_per_s", "appliance_tokens_per_second", "Tokens generated per second, over the last 10 s."),
    ("memory_bytes", "appliance_worker_memory_bytes", "Proportional set size of the worker's processes."),
    ("agent_memory_bytes", "appliance_agent_memory_bytes", "Resident memory of the agent."),
    ("ceiling_bytes", "appliance_memory_ceiling_bytes", "The lowest memory limit that applies."),
    ("usable_bytes", "appliance_memory_usable_bytes", "The part of the ceiling that the plan may use."),
    ("cache_bytes", "appliance_cache_bytes", "Compiled code and kernel caches on disk."),
    ("store_bytes", "appliance_store_bytes", "Stored models on disk."),
    ("context", "appliance_context_tokens", "Longest context served."),
    ("threads", "appliance_threads", "Threads that compute, of each engine."),
    ("engines", "appliance_engines", "Engines of the worker: each computes its own requests."),
    ("max_running", "appliance_requests_running_limit", "Requests that may run at once."),
    ("max_queued", "appliance_requests_queued_limit", "Requests that may wait."),
)
TRAFFIC: tuple[tuple[str, str, str, str], ...] = (
    # field, name, type, help
    ("running", "appliance_requests_running", "gauge", "Requests in work."),
    ("queued", "appliance_requests_queued", "gauge", "Requests that wait."),
    ("oldest_running_s", "appliance_request_oldest_seconds", "gauge", "Age of the oldest request in work."),
    ("accepted_total", "appliance_requests_accepted_total", "counter", "Requests let in."),
    ("refused_total", "appliance_requests_refused_total", "counter", "Requests refused with 429 or 503."),
    ("failed_total", "appliance_requests_failed_total", "counter", "Requests let in that ended in an error."),
    ("answered_total", "appliance_requests_answered_total", "counter", "Requests answered whole."),
    ("bytes_total", "appliance_relayed_bytes_total", "counter", "Bytes relayed from the worker."),
    ("chunks_total", "appliance_relayed_chunks_total", "counter", "Pieces of answers relayed from the worker."),
)
PROBE: tuple[tuple[str, str, str], ...] = (
    ("seconds", "appliance_probe_seconds", "How long the last deep probe took."),
    ("deadline_s", "appliance_probe_deadline_seconds", "How long a deep probe may take, from measured speed."),
    ("failed", "appliance_probe_failed", "Deep probes in a row that failed."),
)


def render(status: Mapping[str, Any], traffic: Traffic, *, live: bool | None = None) -> str:
    """The whole text, ending with a newline. `status` may be empty or lack any field; `live`: the loop turns."""
    return "\n".join(_lines(status, traffic, live)) + "\n"


def _lines(status: Mapping[str, Any], traffic: Traffic, live: bool | None) -> Iterator[str]:
    named = {key: status.get(key) for key in ("version", "model", "digest", "tier", "kernel", "rung", "fingerprint")}
    yield from _metric("appliance_info", "gauge", "What is served and how; always 1.",
                       [({key: str(value) for key, value in named.items() if value is not None}, 1)])
    state = status.get("state")
    yield from _metric("appliance_state", "gauge", "1 for the state the service is in.",
                       [({"state": name}, int(name == state)) for name in STATES])
    yield from _number("appliance_live", "gauge", "1 when the agent's loop turns.", None if live is None else int(live))
    yield from _metric("appliance_ready", "gauge", "1 when a real answer is recent enough.",
                       [({}, int(bool(status.get("ready"))))])
    for key, name, text in GAUGES:
        yield from _number(name, "gauge", text, status.get(key))
    probe = status.get("probe")
    for key, name, text in PROBE:
        yield from _number(name, "gauge", text, probe.get(key) if isinstance(probe, Mapping) else None)
    for field, name, kind, text in TRAFFIC:
        yield from _number(name, kind, text, getattr(traffic, field, None))
    yield from _restarts(status.get("restarts_total"))
    rung = status.get("rung")
    yield from _number("appliance_stepped_down", "gauge", "1 when a lower rung than `full` is served.",
                       None if rung is None else int(rung != "full"))
    yield from _number("appliance_on_trial", "gauge", "1 while a new model or setting is on trial.",
                       int(bool(status.get("trial"))))
    yield from _number("appliance_rolled_back", "gauge", "1 while the last known good is served instead of the wanted.",
                       int(bool(status.get("rolled_back"))))
    yield from _number("appliance_figures_given_up", "gauge",
                       "1 while the node's measurements lead to what has failed its trial, and others are served.",
                       int(bool(status.get("figures_given_up"))))
    yield from _number("appliance_warnings", "gauge", "Warnings in the status.", len(status.get("warnings") or ()))
    warned = status.get("warned")
    if isinstance(warned, Sequence):
        yield from _metric("appliance_warning", "gauge", "1 while the status has a warning about this.",
                           [({"about": topic}, int(topic in warned)) for topic in TOPICS])


def _restarts(total: Any) -> Iterator[str]:
    """A number, or a number for each fault's name."""
    text = "Faults, by name, of worker lives and of what comes before one."
    if isinstance(total, Mapping):
        samples: list[tuple[dict[str, str], float]] = [
            ({"fault": str(name)}, count) for name, count in sorted(total.items()) if _is_number(count)]
        yield from _metric("appliance_restarts_total", "counter", text, samples or [({}, 0)])
    else:
        yield from _number("appliance_restarts_total", "counter", text, total)


def _number(name: str, kind: str, text: str, value: Any) -> Iterator[str]:
    if _is_number(value):
        yield from _metric(name, kind, text, [({}, value)])


def _metric(name: str, kind: str, text: str, samples: list[tuple[dict[str, str], float]]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        inner = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
        yield f"{name}{{{inner}}} {value}" if inner else f"{name} {value}"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value and abs(value) != float("inf")
