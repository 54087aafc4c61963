"""`applianctl bench`: how fast the running service answers, from its socket, as a user would see it.

Decode, prefill, several answers at once, time to the first token and between tokens; and the share of the memory
roofline: bytes of weights for a token times tokens per second, against the bandwidth that was measured here. Rules: it
is load like any other and waits its turn; a busy service is measured with a warning, for the figures are then others'.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import click

from appliance import status as status_file
from appliance.cli.application import Application
from appliance.errors import ApplianceError, NotReachable

REPEATS = 3
USUAL_IDS = (1000, 30000)
"""Token ids for prompts where the model's vocabulary cannot be read."""


@click.command()
@click.option("--streams", type=click.IntRange(1, 256), default=4, show_default=True, metavar="N",
              help="Answers at once.")
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, metavar="TOKENS",
              help="Prompt length for prefill.")
@click.option("--tokens", type=click.IntRange(2), default=128, show_default=True, metavar="N",
              help="Length of an answer.")
@click.option("--json", "as_json", is_flag=True, help="All figures as JSON.")
@click.pass_obj
def bench(app: Application, streams: int, prompt: int, tokens: int, as_json: bool) -> None:
    """Measure the running service: decode, prefill, concurrency, latency, share of the roofline."""
    from appliance.tune.requests import Target

    current = status_file.read(app.service.runtime)
    if not status_file.is_ready(current):
        raise NotReachable("the service is not ready", why=current["sentence"], do="run `applianctl status --wait`")
    if current.get("running"):
        click.echo(f"applianctl: warning: {current['running']} requests are running; the figures are lower than alone",
                   err=True)
    model, read_gb_s = _known(app, current)
    ids = (model.vocab_size // 8, model.vocab_size * 7 // 8) if model is not None else USUAL_IDS
    target = Target(socket=app.agent_socket, model="default", ids=ids)
    prompt = min(prompt, int(current.get("context") or prompt) - 2)
    tokens = min(tokens, max(2, int(current.get("context") or tokens) - 64))
    found = measure(target, streams=streams, prompt=prompt, tokens=tokens)
    if model is not None and read_gb_s:
        from appliance.tune.charts import bytes_per_token

        roof = read_gb_s * 1e9 / bytes_per_token(model)
        found |= {"roofline tok/s": roof, "share of roofline": found["decode tok/s"] / roof,
                  "read bandwidth GB/s": read_gb_s}
    found = {name: round(value, 4) for name, value in found.items()}
    if as_json:
        click.echo(json.dumps({"model": current.get("model"), "streams": streams, "prompt tokens": prompt,
                               "answer tokens": tokens, **found}, indent=2))
        return
    click.echo(f"{current.get('model')}: {prompt} prompt tokens, {tokens} answer tokens, {streams} streams")
    for line in _lines(found, streams):
        click.echo(line)


def measure(target: Any, *, streams: int, prompt: int, tokens: int) -> dict[str, float]:
    """All figures of a running service; medians of REPEATS, percentiles over all pieces of all answers at once."""
    from appliance.tune.requests import percentile

    target.stream(32, 2, 1)
    decode, prefill, first_alone = [], [], []
    for number in range(REPEATS):
        answer = target.stream(32, tokens, 100 + number)
        decode.append(answer.decode_tok_s)
        first_alone.append(answer.first_s)
        prefill.append(target.prefill_tok_s(prompt, 200 + number))
    together, answers = [], []
    for number in range(REPEATS):
        speed, some = target.together(streams, 32, tokens, 300 + number)
        together.append(speed)
        answers += some
    first = [answer.first_s for answer in answers]
    between = [gap for answer in answers for gap in answer.between_s]
    return {
        "decode tok/s": statistics.median(decode), "prefill tok/s": statistics.median(prefill),
        "streams tok/s": statistics.median(together), "first token alone s": statistics.median(first_alone),
        **{f"first token p{share} s": percentile(first, share / 100) for share in (50, 95, 99)},
        **{f"between tokens p{share} s": percentile(between, share / 100) for share in (50, 95, 99)},
    }


def _known(app: Application, current: Mapping[str, Any]) -> tuple[Any, float]:
    """The model's facts and the measured bandwidth, where this account may read store and state."""
    from appliance import measured
    from appliance.probe.model import read_model
    from appliance.store import Store
    from appliance.tune import archive

    try:
        digest = str(current.get("digest") or "")
        stored = Store(app.directories.store).read(digest)
        model = read_model(stored.path, name=str(current.get("model")), digest=digest)
        record = archive.read(app.service.state / archive.FOLDER / f"{current.get('fingerprint')}.json")
        best = measured.bandwidth(record) if record else None
        return model, best.median(measured.GB_S) if best else 0.0
    except (ApplianceError, OSError):
        return None, 0.0


def _lines(found: Mapping[str, float], streams: int) -> Iterator[str]:
    def ms(name: str) -> str:
        return f"{found[name] * 1000:.1f}"

    def spread(name: str) -> str:
        return ", ".join(f"p{share} {ms(f'{name} p{share} s')}" for share in (50, 95, 99)) + " ms"

    yield f"  {'decode':<20}{found['decode tok/s']:.1f} tok/s, one stream"
    yield f"  {'prefill':<20}{found['prefill tok/s']:.1f} tok/s"
    yield f"  {f'{streams} streams':<20}{found['streams tok/s']:.1f} tok/s in all"
    yield f"  {'first token':<20}{ms('first token alone s')} ms alone; {streams} streams: {spread('first token')}"
    yield f"  {'between tokens':<20}{spread('between tokens')}"
    if "share of roofline" in found:
        yield f"  {'memory roofline':<20}{found['share of roofline']:.0%} of {found['roofline tok/s']:.0f} tok/s " \
              f"(memory reads {found['read bandwidth GB/s']:.1f} GB/s)"
    else:
        yield f"  {'memory roofline':<20}unknown: run `applianctl tune` first"
