"""The list of the worker's routes that tests/process checks against the front door is whole: read from vLLM's app."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.worker, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # vLLM's own imports
LISTED = {tuple(entry) for entry in json.loads((Path(__file__).parents[1] / "process" / "worker_routes.json").read_text())}


def test_every_route_of_the_worker_is_listed() -> None:
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--disable-fastapi-docs", "--enable-server-load-tracking"])
    app = build_app(arguments, ("generate", "render"))
    found = {(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ()}
    mounted = {route.path for route in app.routes if not getattr(route, "methods", None)}
    assert found <= LISTED, "new routes: decide for each whether appliance.front.routes lets it through"
    assert mounted == {"/metrics"}
