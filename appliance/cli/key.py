"""`applianctl key`: make, list and revoke API keys. A running service knows at once; nothing has to be restarted."""

from __future__ import annotations

import json
import os

import click

from appliance.cli.application import Application
from appliance.keys import FILE, KeyRing, configured_key


@click.group()
def key() -> None:
    """Make, list and revoke API keys."""


@key.command()
@click.option("--name", metavar="NAME", default="", help="Who or what it is for; shown by `key list`.")
@click.pass_obj
def new(app: Application, name: str) -> None:
    """Make a key and print it: the only time it can be seen."""
    if not name.isprintable() or len(name) > 100:
        raise click.BadParameter("a name is at most 100 printable characters", param_hint="--name")
    ring = ring_of(app)
    app.become_owner()
    first = not ring.required
    key_id, secret = ring.new(name)
    click.echo(secret)
    click.echo(f"This is key {key_id}. It is not stored and cannot be shown again.", err=True)
    if first:
        click.echo("From now on every request needs a key; send it as `Authorization: Bearer KEY`.", err=True)


@key.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_obj
def list_command(app: Application, as_json: bool) -> None:
    """Keys by id, day and name; never the keys themselves."""
    ring = ring_of(app)
    keys = ring.list()
    if as_json:
        known = [{"id": one.id, "name": one.name, "created_at": one.created_at} for one in keys]
        click.echo(json.dumps({"keys": known, "configured": ring.extra is not None}, indent=2))
        return
    for one in keys:
        click.echo(f"{one.id}  {one.created_at}  {one.name}".rstrip())
    if ring.extra is not None:
        click.echo("one more from api_key_file or the service's credential")
    elif not keys:
        click.echo("no keys: the service answers this machine only, to everybody on it")


@key.command()
@click.argument("key_id", metavar="ID")
@click.pass_obj
def revoke(app: Application, key_id: str) -> None:
    """Remove the key with this id; requests with it are refused from now on."""
    ring = ring_of(app)
    app.become_owner()
    gone = ring.revoke(key_id)
    click.echo(f"revoked {gone.id}" + (f" ({gone.name})" if gone.name else ""))
    if not ring.required:
        click.echo("That was the last key: on a loopback address requests need none now, and a service that other "
                   "machines can reach refuses everybody, and does not start again, until there is one.", err=True)


def ring_of(app: Application) -> KeyRing:
    """The keys of the service that this command speaks about. A credential of a unit cannot be seen from here."""
    return KeyRing(app.service.state / FILE, configured_key(app.settings.api_key_file, os.environ))
