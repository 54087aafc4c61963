"""Reading the configuration: right values, wrong values, precedence."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigError
from appliance.readers import parse_size
from appliance.settings import KEYS, Settings, env_name, overlay, parse

EMPTY = parse("")


def test_an_empty_file_gives_the_defaults() -> None:
    assert parse("# nothing\n").settings == Settings()


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("memory: {ceiling: 6G}", "memory.ceiling", 6 * 1024**3),
        ("memory: {reserve: 512MiB}", "memory.reserve", 512 * 1024**2),
        ("cpu: {cpus: '0-3,8'}", "cpu.cpus", (0, 1, 2, 3, 8)),
        ("cpu: {cpus: [1, 2]}", "cpu.cpus", (1, 2)),
        ("listen: {host: '::1'}", "listen.host", "::1"),
        ("worker: {env: {A: 1}}", "worker.env", {"A": "1"}),
        ("worker: {extra_args: --seed 3}", "worker.extra_args", ("--seed", "3")),
        ("compile: false", "compile", False),
        ("trial_s: 2.5", "trial_s", 2.5),
    ],
)
def test_values(text: str, key: str, value: object) -> None:
    found: object = parse(text).settings
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    "text",
    [
        "listen: {port: 0}", "listen: {port: eight}", "listen: {port: 70000}", "listen: {port: true}", "listen: {host: 'a b'}",
        "listen: {host: 999.1.1.1}", "memory: {ceiling: lots}", "memory: {ceiling: -1}", "memory: {ceiling: 0}", "cpu: {threads: 0}",
        "cpu: {cpus: 3-1}", "cpu: {cpus: x}", "context: 1", "kernel: fast", "dtype: int8", "drain_s: -1", "drain_s: .nan",
        "model: ''", "model: [a]", "worker: {env: [a]}", "worker: {extra_args: {a: 1}}", "tls: {cert: a.pem}", "tune: {upgrade_loss_pct: 101}",
        "compile: maybe", "model: 2026-13-45", "context: !!float abc", "context: " + "9" * 5000, "memory: {ceiling: " + "9" * 400 + " G}",
        "drain_s: " + "9" * 400, "context: ٣", "worker: {env: {A: \"a\\0b\"}}", "worker: {extra_args: [\"a\\0b\"]}", "[" * 3000, "- a\n- b", "just text", "a: [", "max_queued: 1.5", "worker: {extra_args: \"'\"}",
    ],
)
def test_a_wrong_value_is_one_line_and_exit_78(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, origin="the file")
    assert caught.value.exit_code == 78
    assert "\n" not in caught.value.line
    assert caught.value.do


def test_aliases_that_nest_without_end_are_only_unknown_keys() -> None:
    assert parse("a: &a {b: *a}").warnings
    bomb = "a: &a0 {x: 1}\n" + "".join(f"b{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 40))
    assert len(parse(bomb).warnings) < 1000


def test_precedence_flag_environment_file() -> None:
    base = parse("context: 1000\nmax_running: 2\nlisten: {port: 1111}")
    both = overlay(base, env={"APPLIANCE_CONTEXT": "2000", "APPLIANCE_LISTEN_PORT": "2222"}, flags={"context": "3000"})
    assert (both.settings.context, both.settings.listen.port, both.settings.max_running) == (3000, 2222, 2)
    assert both.sources["context"] == "flag"
    assert both.sources["listen.port"] == "APPLIANCE_LISTEN_PORT"


def test_every_key_has_its_own_environment_variable() -> None:
    assert len({env_name(key) for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize(("text", "size"), [("1G", 1024**3), ("1.5GiB", 1610612736), ("10", 10), ("2 mb", 2 * 1024**2)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda c: st.lists(c, max_size=3) | st.dictionaries(
    st.sampled_from([*{k.split(".")[0] for k in KEYS}, *{k.split(".")[-1] for k in KEYS}, "x"]), c, max_size=4), max_leaves=8))
def test_any_yaml_tree_is_read_or_refused(tree: object) -> None:
    import yaml

    with contextlib.suppress(ConfigError):
        parse(yaml.safe_dump(tree))
