"""`applianctl eval`: how well a stored model predicts a text, and how far it is from the model it was made from.

Rules: nothing is changed; the work is done by a child that gives way to a running service; where the source is gone or
has changed, only the perplexity is told, and why.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from appliance import library
from appliance.budget import show as show_size
from appliance.cli.application import Application
from appliance.errors import ApplianceError, ModelError
from appliance.store import Store, Stored


@click.command("eval")
@click.argument("model", required=False)
@click.option("--text", type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
              help="A UTF-8 text (default: the language reference of Python).")
@click.option("--tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="How many are scored.")
@click.option("--source", help="Where the model was made from, if that has moved.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.make_pass_decorator(Application)
def evaluate(app: Application, model: str | None, text: Path | None, tokens: int, source: str | None,
             as_json: bool) -> None:
    """Perplexity of MODEL (default: the one in use), and how often its first choice is its source's."""
    from appliance import jobs
    from appliance.cli.progress import Progress

    name = library.active_name(app.parsed, app.directories) if model in (None, "default") else str(model)
    stored = Store(app.directories.store).get(name)
    args = ["-m", "appliance.evaluate", str(stored.path.absolute()), "--tokens", str(tokens)]
    if text:
        args += ["--text", str(text.absolute())]
    with Progress() as progress, tempfile.TemporaryDirectory(prefix="appliance-eval-") as scratch, \
            jobs.ending_on_sigterm():
        found, missing = _source(app, stored, source, progress)
        if found:
            args += ["--source", str(found.absolute())]
        report = jobs.run_job(
            app.worker_python(), args, on_event=progress, cwd=Path(scratch),
            env=jobs.job_env(app.env, home=Path(scratch), extra=app.settings.worker.env),
        )
    made = stored.manifest["report"]
    result = {"model": name, "digest": stored.digest, "bits_per_weight": made.get("bits_per_weight"),
              "grid": stored.manifest["recipe"].get("grid"), "source": str(found) if found else None,
              "source_missing": missing, **report}
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    click.echo("\n".join(f"{label:<19}{value}" for label, value in _lines(result)))


def _source(app: Application, stored: Stored, given: str | None, on_event: Any) -> tuple[Path | None, str | None]:
    """The files that the model was made from, or why they cannot be compared with. A given source must be right."""
    from appliance.digests import source_digest
    from appliance.importing.source import inspect
    from appliance.repair import source_path

    told = given or str(stored.manifest["source"])

    def progress(done: int, total: int) -> None:
        on_event({"event": "progress", "done_bytes": done, "total_bytes": total, "item": told})

    try:
        found = inspect(source_path(Store(app.directories.store), told, env=app.env))
        on_event({"event": "phase", "phase": "checking", "note": ""})
        # No cache: this command writes nothing, and what is compared with must be what the model was made from.
        digest = source_digest(found, cache=None, now=0.0, on_progress=progress)
    except ApplianceError as error:
        if given:
            raise
        return None, error.what if not error.why else f"{error.what}: {error.why}"
    if digest == stored.manifest["source_digest"]:
        return found.path, None
    if given:
        raise ModelError(f"{told} is not what the model was made from", why="its digest is another",
                         do="give the files that were added")
    return None, f"{told} has changed since the model was made from it"


def _lines(r: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        ("model", f"{r['model']}, {r['bits_per_weight']} bits per weight"),
        ("text", f"{r['text']} ({r['text_digest']}), {r['tokens']} tokens scored"),
        ("perplexity", f"{r['perplexity']:.3f}"),
    ]
    if r["source_perplexity"] is None:
        lines.append(("source", f"not compared: {r['source_missing']}"))
    else:
        increase = r["perplexity"] / r["source_perplexity"] - 1
        lines += [
            ("  of its source", f"{r['source_perplexity']:.3f} ({increase:+.2%})"),
            ("same first choice", f"{r['same_first_choice']:.2%}"),
            ("divergence", f"{r['divergence']:.4f} nats (KL, mean)"),
            ("difference", f"{r['mean_difference']:.4f} nats a token (mean), at most {r['largest_difference']:.2f}"),
        ]
    held = "layer by layer" if r["streamed"] else "whole in memory (its weights have other names in transformers)"
    lines.append(("evaluated", f"{held}, peak {show_size(r['peak_bytes'])}"))
    return lines


