"""A command of `applianctl` in this process: what it printed and its exit code; a defect is raised as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click
from click.testing import CliRunner, Result

from appliance.cli.application import Application


def invoke(command: click.Command, args: Sequence[str], app: Application, *, env: Mapping[str, str] | None = None) -> Result:
    result = CliRunner().invoke(command, args, obj=app, env=env)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
