"""`applianctl tune`: measure this node with the model in use; show, compare and draw what was measured.

Rules: nothing that serves is changed; the figures count at the next start. With --apply they go on trial now, as a
change by `applianctl apply` does, and what served before comes back if they fail. An interrupted run keeps what it has
and goes on from there; the plan before and after is shown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from appliance.cli.application import Application
from appliance.errors import ConfigError, ModelError, StoreError
from appliance.facts import ModelFacts, to_json
from appliance.measured import CANARY, PREFILL_TOK_S, SERVED, STREAMS_TOK_S, TOK_S, Record, Trial, changes

SHOWN_CHOICES = ("threads", "cpus", "kernel variant", "batch tokens", "block size", "dequant_threshold",
                 "read bandwidth", "measurements")
FOLLOW_S = 3600.0
"""So long a trial is followed at most."""


@click.group(invoke_without_command=True)
@click.option("--quick", is_flag=True, help="At most 3 minutes (the default).")
@click.option("--full", is_flag=True, help="At most 15 minutes: every row count, batches, blocks, the canary.")
@click.option("--model", metavar="NAME", help="A stored model (default: the one in use).")
@click.option("--budget", type=click.FloatRange(min=5), metavar="SECONDS",
              help="Another limit of time; below 63 whole workers may not fit.")
@click.option("--apply", "apply_now", is_flag=True, help="Then put the running service on trial with the new plan.")
@click.option("--wait", is_flag=True, help="With --apply: follow the trial until it is kept, rolled back or failed.")
@click.option("--json", "as_json", is_flag=True, help="All figures and the plan as JSON.")
@click.pass_context
def tune(ctx: click.Context, quick: bool, full: bool, model: str | None, budget: float | None, apply_now: bool,
         wait: bool, as_json: bool) -> None:
    """Measure what the plan cannot know: memory, threads, kernels, whole workers."""
    if ctx.invoked_subcommand is not None:
        return
    if quick and full:
        raise click.UsageError("Give --quick or --full, not both.")
    if wait and (as_json or not apply_now):
        raise click.UsageError("--wait follows a trial, in words: give --apply, and not --json.")
    from appliance import jobs
    from appliance.tune import archive, session
    from appliance.tune.child import Bench
    from appliance.tune.subject import read_subject

    app: Application = ctx.obj
    python, parsed = app.worker_python(), app.parsed
    app.become_owner()  # what is measured is the service's
    subject = read_subject(parsed, app.directories, python, env=app.env, model_name=model)
    state, cpus = app.directories.state, subject.host.topology.allowed
    bench = Bench(worker_python=python, env=app.env, cpus=cpus, runtime=app.service.runtime)
    began = time.monotonic()
    with archive.only_one(state):
        run = session.Session(
            subject=subject, bench=bench, state=state, full=full, say=_say, env=app.env,
            budget_s=budget or (session.FULL_S if full else session.QUICK_S),
            record=archive.current(state, subject.host))
        try:
            with jobs.ending_on_sigterm():  # a whole worker would be left over
                record = run.run()
        except KeyboardInterrupt:
            click.echo(f"\ninterrupted; {_kept(run.record)} are kept, the next `applianctl tune` goes on from here",
                       err=True)
            raise
    seconds = time.monotonic() - began
    places = _places(app, subject)
    before, after = subject.plan(None, places), subject.plan(record, places)
    gain = gains(record, subject.model)
    lost = archive.lost(state, record, loss_pct=parsed.settings.tune.upgrade_loss_pct)
    if as_json:
        click.echo(json.dumps({"seconds": round(seconds, 1), "record": to_json(record), "left_out": run.left_out,
                               "lost": lost, "gain": gain, "plan": to_json(after.choices)}, indent=2))
    else:
        from appliance.tune import charts

        for line in (*charts.lines(record, subject.model), *_workers(record, subject.model), *_gain_lines(gain),
                     *([lost] if lost else []), *_difference(before.choices, after.choices)):
            click.echo(line)
        click.echo(f"measured in {seconds:.0f} s" + ("" if apply_now else "; it counts at the next start"))
    if apply_now:
        if after.refused is not None:
            raise after.refused.error()
        _stage(app, subject.model, after.tuned, wait=wait, err=as_json)


@tune.command()
@click.option("--model", metavar="NAME", help="A stored model (default: the one in use).")
@click.option("--json", "as_json", is_flag=True, help="The record as JSON.")
@click.option("--png", type=click.Path(path_type=Path), metavar="FILE", help="Draw it, where matplotlib is installed.")
@click.pass_obj
def show(app: Application, model: str | None, as_json: bool, png: Path | None) -> None:
    """What was measured here, and whether it still counts."""
    from appliance.tune import archive, charts
    from appliance.tune.subject import read_subject

    subject = read_subject(app.parsed, app.directories, app.worker_python(), env=app.env, model_name=model)
    record = archive.load(app.directories.state, subject.host)
    if record is None:
        raise ModelError("nothing was measured on this host", do="run `applianctl tune`")
    if record.damaged:
        raise StoreError("what was measured cannot be shown", why=record.damaged,
                         do="run `applianctl tune` to measure anew")
    if as_json:
        click.echo(json.dumps(to_json(record), indent=2))
        return
    click.echo(f"host {record.fingerprint}: " + ("stale: " + "; ".join(record.stale) if record.stale else
               "fresh, the plan uses it") + (" (a run was interrupted)" if record.open_since else ""))
    for line in (*charts.lines(record, subject.model), *_workers(record, subject.model), *_canaries(record)):
        click.echo(line)
    if png is not None:
        charts.write_png(record, subject.model, png)
        click.echo(f"drawn: {png}")
    earlier = [path.stem for path in archive.names(app.directories.state)]
    click.echo(f"records: {', '.join(earlier)}")


@tune.command()
@click.argument("a")
@click.argument("b")
@click.pass_obj
def compare(app: Application, a: str, b: str) -> None:
    """Two records (names of `tune show`, or files): what differs in the host, and every figure that both have."""
    from appliance.tune import archive

    one, two = (archive.named(app.directories.state, name) for name in (a, b))
    for change in changes(one.inputs, two.inputs):
        click.echo(change)
    for line in differences(one, two):
        click.echo(line)


def differences(one: Record, two: Record) -> Iterator[str]:
    """Every figure of both, and their ratio; a difference within the spread of either is called none."""
    for trial in one.trials:
        other = two.find(trial.id)
        if other is None:
            continue
        if trial.failure or other.failure:
            if trial.failure != other.failure:
                yield f"  {title(trial)}: {trial.failure or 'ended well'}, then {other.failure or 'ended well'}"
            continue
        for name, figure in trial.figures.items():
            then = other.figures.get(name)
            if then is not None and figure.median:
                ratio = then.median / figure.median
                noise = max(figure.spread, then.spread) / 2
                word = "" if abs(ratio - 1) > noise else " (within the spread)"
                yield f"  {title(trial)}: {figure.median:.1f} -> {then.median:.1f} {name}, {ratio:.2f}{word}"


def gains(record: Record, model: ModelFacts) -> dict[str, Any]:
    """Each whole worker measured against the first of them; empty where fewer than two were."""
    workers = [trial for trial in record.of(SERVED, model.digest) if trial.median(TOK_S) > 0]
    if len(workers) < 2:
        return {}
    names = (TOK_S, PREFILL_TOK_S, STREAMS_TOK_S)
    return {title(other): {name: round(workers[0].figures[name].median / other.figures[name].median, 3)
                           for name in names if name in other.figures and other.figures[name].median}
            for other in workers[1:]}


def _gain_lines(gain: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for other, ratios in gain.items():
        yield f"  the first against {other}: " + ", ".join(f"{ratio:.2f} {name}" for name, ratio in ratios.items())


def title(trial: Trial) -> str:
    """`weights, threads 2, variant avx2`: a trial in a few words."""
    return ", ".join([trial.kind, *(f"{name} {value}" for name, value in trial.settings.items() if value not in ("",))])


def line_of(trial: Trial) -> str:
    """One trial with its figures, for people."""
    if trial.failure:
        return f"{title(trial)}: {trial.failure}"
    said = ", ".join(f"{figure.median:.1f} {name}" + (f" ±{figure.spread / 2:.0%}" if figure.repeats > 1 else "")
                     for name, figure in trial.figures.items())
    beside = trial.notes.get("disturbed")
    return f"{title(trial)}: {said}" + (f"; others used {beside:.0%} of the CPUs: decides nothing" if beside else "")


def _say(event: Mapping[str, Any]) -> None:
    if event["event"] == "phase":
        note = f" ({event['note']})" if event.get("note") else ""
        click.echo(f"{event['phase']}{note}, {event['left_s']:.0f} s left", err=True)
    elif event["event"] == "trial":
        click.echo(f"  {line_of(event['trial'])}", err=True)
    else:
        click.echo(f"  left out: {event['what']}", err=True)


def _workers(record: Record, model: ModelFacts) -> Iterator[str]:
    trials = record.of(SERVED, model.digest)
    if trials:
        yield "whole workers"
        yield from (f"  {line_of(trial)}" for trial in trials)


def _canaries(record: Record) -> Iterator[str]:
    for trial in record.of(CANARY):
        yield f"canary: {trial.failure or 'passed: several rows in the int4 kernel of torch are safe here'}"


def _difference(before: Any, after: Any) -> Iterator[str]:
    yield "plan"
    old = {choice.name: choice for choice in before}
    for choice in after:
        if choice.name in SHOWN_CHOICES:
            was = old.get(choice.name)
            changed = f" (was {was.value})" if was is not None and was.value != choice.value else ""
            yield f"  {choice.name:<18}{choice.value!s:<14}{changed} {choice.reason}  [{choice.evidence}]"


def _places(app: Application, subject: Any) -> Any:
    from appliance import node

    return node.places(app.directories, model_path=subject.stored, fingerprint=subject.host.fingerprint,
                       prepared=subject.prepared)


def _kept(record: Record) -> str:
    return f"{sum(trial.at >= record.open_since for trial in record.trials)} trials"


def _stage(app: Application, model: ModelFacts, figures: Mapping[str, Any], *, wait: bool, err: bool) -> None:
    """Have the running service try what the measurements decide; nothing where it serves so already. `err`: say it on
    standard error."""
    from appliance import client, measured, record, status
    from appliance.cli.apply import follow
    from appliance.tune import archive

    running = status.current(app.service.runtime)
    if running is None or running.get("digest") != model.digest:
        who = "the service is not running" if running is None else f"the service does not serve {model.name} now"
        click.echo(f"{who}: this counts at its next start", err=err)
        return
    if running.get("figures") == figures:
        click.echo("nothing to apply: the service runs by these choices already", err=err)
        return
    known = record.load(app.directories.state, keep=True)
    if (given_up := known.refused.get(measured.decision(model.digest, figures))) is not None:
        raise ConfigError("these choices were given up before", why=given_up,
                          do="run `applianctl reset` to have them tried again")
    archive.apply(app.directories.state, digest=model.digest, figures=figures)
    client.command(app.agent_socket, "reload")
    click.echo("the running service takes it now; `applianctl status` shows its trial", err=err)
    if wait:
        follow(app, running, timeout_s=FOLLOW_S, figures=True)
