"""What every command needs: settings in force, directories, the worker's Python - each read when first asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from appliance import configfile
from appliance import settings as settings_module
from appliance.directories import AGENT_SOCKET, Directories, from_process, of_service, sockets, usable_home
from appliance.errors import ConfigError
from appliance.settings import Parsed, Settings

DEFAULT_CONFIG = "/etc/appliance/appliance.yaml"


class Application:
    """The command line's context object. `flags`: dotted settings given as options (set by the command)."""

    def __init__(self, *, env: Mapping[str, str], config_file: str | None = None) -> None:
        self.env = env
        self.config_file = config_file
        self.flags: dict[str, Any] = {}

    @cached_property
    def parsed(self) -> Parsed:
        """Settings with their sources and warnings; warnings are printed once. Raises ConfigError."""
        parsed = self.read_settings()
        for warning in parsed.warnings:
            click.echo(f"applianctl: warning: {warning}", err=True)
        return parsed

    def read_settings(self) -> Parsed:
        """The same without a word. Raises ConfigError."""
        return settings_module.overlay(self._file(), env=self.env, flags=self.flags)

    @property
    def settings(self) -> Settings:
        return self.parsed.settings

    @cached_property
    def directories(self) -> Directories:
        return from_process(self.env, store=self.settings.store)

    @cached_property
    def service(self) -> Directories:
        """State and runtime folders of the service that this command speaks about, without reading any settings."""
        return of_service(self.env, uid=os.geteuid(), home=usable_home(self.env))

    @cached_property
    def agent_socket(self) -> Path:
        return sockets(self.service.runtime) / AGENT_SOCKET

    @cached_property
    def config_path(self) -> Path:
        return Path(self.config_file or self.env.get("APPLIANCE_CONFIG") or DEFAULT_CONFIG)

    @property
    def settings_closed(self) -> bool:
        """Whether there is a configuration file that this ordinary account may not read."""
        if os.geteuid() == 0:
            return False
        try:
            return self.config_path.is_file() and not os.access(self.config_path, os.R_OK, effective_ids=True)
        except PermissionError:  # nor look into its folder
            return True

    def become_owner(self) -> None:
        """As root: become the account that owns the service's state, for good, so that no file there is ever root's.

        Call it before the first write to state or store, and after what only root may do (the configuration file).
        """
        places = self.directories  # chosen as root; they stay the ones that are meant
        self.service  # noqa: B018  # likewise
        if os.geteuid() != 0:
            return
        # The folder above: on a fresh installation a command may come before the start that makes the other two.
        for folder in (places.state, places.store, places.state.parent):
            if folder.exists():
                owner = folder.stat()
                if owner.st_uid != 0:
                    _become(owner.st_uid, owner.st_gid)
                return

    def worker_python(self) -> str:
        """Path of the worker's interpreter. Raises ConfigError when there is none."""
        from appliance.jobs import find_worker_python

        return find_worker_python(self.settings)

    def versions(self) -> dict[str, str]:
        """Versions of this package and of the worker's, as far as a worker is installed; part of the fingerprint."""
        from appliance import __version__
        from appliance.jobs import worker_contract

        try:
            found = worker_contract(self.worker_python(), env=self.env)["versions"]
        except ConfigError:
            return {"appliance": __version__}
        return {name: str(version) for name, version in found.items() if version}

    def _file(self) -> Parsed:
        named = self.config_file is not None or bool(self.env.get("APPLIANCE_CONFIG"))
        try:
            text = configfile.text_of(
                self.config_path, closed="let this account's group read it, or run the command with sudo")
        except FileNotFoundError:
            if named:
                raise ConfigError(f"{self.config_path} does not exist", do="create it or leave out --config") from None
            text = ""
        return settings_module.parse(text, origin=str(self.config_path))


def _become(uid: int, gid: int) -> None:
    """Give up root: groups first, the user last, because the order back is closed by each step."""
    import pwd

    try:
        os.initgroups(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:  # a uid without a passwd entry has no other groups
        os.setgroups([gid])
    os.setgid(gid)
    os.setuid(uid)
