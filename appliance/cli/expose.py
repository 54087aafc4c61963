"""`applianctl expose`: the safe way to serve other machines: a key first, then the address, then what is left to do."""

from __future__ import annotations

import click

from appliance.cli.application import Application
from appliance.cli.key import ring_of
from appliance.errors import UsageError
from appliance.keys import KeyRing

LOOPBACK = "127.0.0.1"


@click.command()
@click.argument("host", required=False)
@click.option("--port", type=click.IntRange(1, 65535), metavar="PORT", help="Another port too.")
@click.option("--off", is_flag=True, help="Serve this machine only: the same as `expose 127.0.0.1`.")
@click.pass_obj
def expose(app: Application, host: str | None, port: int | None, off: bool) -> None:
    """Listen on HOST (an address of this machine, or 0.0.0.0 for all), with an API key.

    Writes listen.host to the configuration file; comments stay. In force from the next start of the agent.
    """
    from appliance import configfile
    from appliance.cli.apply import NEXT_START
    from appliance.settings import is_loopback

    if off == (host is not None):
        raise UsageError("expose needs one of HOST and --off", do="see `applianctl expose --help`")
    host = host or LOOPBACK
    settings = app.settings
    changes: dict[str, object] = {}
    if host != settings.listen.host:
        changes["listen.host"] = host
    if port is not None and port != settings.listen.port:
        changes["listen.port"] = port
    # Everything that can be wrong is found before anything is written.
    text = configfile.edited(configfile.read(app.config_path), changes, origin=str(app.config_path))
    open_to_others = not is_loopback(host)
    ring = ring_of(app)
    if changes:
        configfile.write(app.config_path, text)
    if open_to_others:
        _make_sure_of_a_key(app, ring)
    if not changes:
        click.echo(f"nothing to change: {_address(host, settings.listen.port)} is what the settings say already")
        return
    click.echo(f"{app.config_path}: {', '.join(f'{name} = {value}' for name, value in changes.items())}")
    if open_to_others and settings.tls.cert is None:
        click.echo("warning: without TLS the key and every answer can be read on the network; set tls.cert and tls.key",
                   err=True)
    for name in changes:
        source = app.parsed.sources.get(name, "")
        if source.startswith("APPLIANCE_"):
            click.echo(f"warning: the variable {source} wins over the file", err=True)
    click.echo(f"it listens on {_address(host, port or settings.listen.port)} from {NEXT_START}")


def _make_sure_of_a_key(app: Application, ring: KeyRing) -> None:
    """There is one, or a new one is shown. After the configuration file: only root may write that, and keys are the
    service's. In between, the agent would refuse to start without a key."""
    app.become_owner()
    if ring.required:
        return
    key_id, secret = ring.new("expose")
    click.echo(secret)
    click.echo(f"This is API key {key_id}, made because there was none. It is not stored and cannot be shown again;"
               " send it as `Authorization: Bearer KEY`.", err=True)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
