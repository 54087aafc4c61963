"""`applianctl bundle`: a stored model as one file, for nodes without a network."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import click

from appliance.budget import show as show_size
from appliance.cli.application import Application
from appliance.errors import ModelError
from appliance.store import Store

_application = click.make_pass_decorator(Application)
_FILE = click.Path(path_type=Path)


@click.group()
def bundle() -> None:
    """Carry stored models to nodes without a network, as one file."""


@bundle.command("export")
@click.argument("name", metavar="MODEL")
@click.argument("file", type=_FILE)
@click.option("--with-kernel-cache", is_flag=True, help="With the weights as the kernels map them.")
@click.option("--sign", "key", type=_FILE, metavar="KEY", help="Sign it with this private key of ssh-keygen.")
@_application
def export_command(app: Application, name: str, file: Path, with_kernel_cache: bool, key: Path | None) -> None:
    """Write the stored MODEL to FILE; a damaged one is refused."""
    from appliance import library
    from appliance.airgap.export import export
    from appliance.cli.progress import Progress

    called = library.active_name(app.parsed, app.directories) if name == "default" else name
    with Progress() as progress:
        listed = export(Store(app.directories.store), called, file, with_layout=with_kernel_cache, sign_key=key,
                        env=dict(app.env), on_event=progress)
    click.echo(f"{file}: {called}, {show_size(listed.bytes)} in {len(listed.members)} files"
               f"{', signed' if key else ', not signed'}")


@bundle.command("import")
@click.argument("file", type=_FILE)
@click.option("--name", help="Name in the store (default: the one it was exported under).")
@_application
def import_command(app: Application, file: Path, name: str | None) -> None:
    """Check FILE and put its model into the store.

    Where the setting `bundle_keys` is set, only what one of those keys has signed is taken.
    """
    from appliance.airgap.intake import take
    from appliance.cli.add import lay_out
    from appliance.cli.progress import Progress

    keys = _keys(app)
    store = Store(app.directories.store)
    with _open(file) as reading, Progress() as progress:  # opened and read by whoever asks, stored by the store's owner
        app.become_owner()
        done = take(reading, store=store, name=name, keys=keys, on_event=progress,
                    on_wait=lambda: progress({"event": "phase", "phase": "waiting"}))
        reason = lay_out(app, store, done.digest, progress)
    if reason:
        click.echo(f"applianctl: warning: the weights are not laid out yet ({reason}); `serve` tries again", err=True)
    if done.cached:
        click.echo(f"{done.name}: in the store already, nothing to do")
        return
    with_layout = ", with the kernels' layout" if done.layout else ""
    click.echo(f"{done.name}: stored, {show_size(store.read(done.digest).bytes)}{with_layout}, {_trust(done.signer)}")


@bundle.command("show")
@click.argument("file", type=_FILE)
@_application
def show_command(app: Application, file: Path) -> None:
    """Say what FILE holds and who has signed it; nothing is stored, and only its list is read."""
    from appliance.airgap.intake import read_front

    keys = _keys(app)
    with _open(file) as reading:
        front = read_front(reading, keys=keys)
    listed = front.content
    signed = _trust(front.signer) if front.signer else "signed, not checked: bundle_keys is not set" \
        if front.signed else "not signed"
    lines = [("name", repr(listed.name)[1:-1]), ("digest", listed.digest), ("size", show_size(listed.bytes)),
             ("files", str(len(listed.members))), ("layout", listed.layout or "-"), ("signature", signed)]
    click.echo("\n".join(f"{label:<12}{value}" for label, value in lines))


def _keys(app: Application) -> tuple[str, ...] | None:
    from appliance.airgap.signature import read_keys

    place = app.settings.bundle_keys
    return read_keys(place) if place is not None else None


def _open(file: Path) -> IO[bytes]:
    try:
        return open(file, "rb")
    except OSError as error:
        raise ModelError(f"{file} cannot be read", why=error.strerror or str(error),
                         do="give the path of a bundle") from None


def _trust(signer: str | None) -> str:
    return f"signed by {signer}" if signer else "its signature was not asked for"
