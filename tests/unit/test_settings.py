"""Reading the configuration: right values, wrong values, precedence."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigError
from appliance.readers import parse_size
from appliance.settings import KEYS, SECTIONS, Settings, env_name, overlay, parse

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
        "drain_s: " + "9" * 400, "context: ٣", "worker: {env: {A: \"a\\0b\"}}", "worker: {extra_args: [\"a\\0b\"]}", "[" * 3000, "- a\n- b", "just text", "a: [", "max_queued: 1.5", "worker: {extra_args: \"a\\0b\"}", "cpu: {cpus: []}", "memory: {ceiling: ٣G}", "x: \0",
        *(f"{key.replace('.', ': {')}: 0x{'f' * 5000}{'}' if '.' in key else ''}" for key in KEYS), f"0x{'f' * 5000}: 1", f"x: [{'1,' * 10_001}]", "#" * (1 << 19), "worker: {extra_args: \"'\"}",
    ],
)
def test_a_wrong_value_is_one_line_and_exit_78(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, origin="the file")
    assert caught.value.exit_code == 78
    assert "\n" not in caught.value.line
    assert caught.value.do


SHAPES = ["5", "text", "''", "true", "[1]", "[]", "2026-01-02", "1.5", "!!set {a}", "[{host: x}]", "\n- host: x\n- port: 1"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_of_another_shape_is_an_error_with_an_example(section: str, shape: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"{section}: {shape}\n", origin="the file")
    line = caught.value.line
    assert line.startswith(f"the file: {section} has a wrong value: ")
    example = line.split("`")[1]
    assert [key.split(".")[0] for key in parse(example).sources][:1] == [section]


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("nothing", ["", "null", "~", "{}", "\n  # port: 8000"])
def test_a_section_without_keys_is_no_mistake(section: str, nothing: str) -> None:
    assert parse(f"{section}: {nothing}\n") == parse("")


def test_every_section_is_known() -> None:
    assert set(SECTIONS) == {key.split(".")[0] for key in KEYS if "." in key}


@pytest.mark.parametrize("key", KEYS)
def test_no_value_of_a_wrong_type_is_taken_for_the_default(key: str) -> None:
    """A mapping, a list of lists: whatever a key wants, it is not that."""
    for value in ("[[1]]", "{a: {b: 1}}", "[{a: 1}]"):
        text = f"{key.replace('.', ': {')}: {value}" + ("}" if "." in key else "")
        with pytest.raises(ConfigError) as caught:
            parse(text, origin="the file")
        assert caught.value.line.startswith(f"the file: {key} ")


@pytest.mark.parametrize("text", ["worker: {env: [HF_TOKEN=hunter2]}", "worker: {env: {A: [hunter2]}}", "worker: {extra_args: {a: hunter2}}",
                                  "worker: {env: hunter2}", "worker: hunter2", "worker: {extra_args: \"'hunter2\"}", "worker: {extra_args: [[hunter2]]}"])
def test_a_refusal_does_not_show_what_may_be_a_secret(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert "hunter2" not in caught.value.line


@pytest.mark.parametrize(("text", "said"), [
    ("memory: {ceiling: 6G}\nmemory: {reserve: 1G}", ["`memory` stands there twice (line 2): only the last one counts"]),
    ("listen:\n  port: 1\n  host: ::1\n  port: 2", ["`listen.port` stands there twice (line 4): only the last one counts"]),
    ("context: 100\ncontext: 200\ncontext: 300", ["`context` stands there twice (line 2): only the last one counts", "`context` stands there twice (line 3): only the last one counts"]),
    ("worker:\n  env: {A: 1, B: 2, A: 3}\n  env: {A: 1}", [
        "`worker.env.A` stands there twice (line 2): only the last one counts", "`worker.env` stands there twice (line 3): only the last one counts"]),
    ("x: 1\nx: 2", ["unknown key `x` is ignored; see docs/configuration.md", "`x` stands there twice (line 2): only the last one counts"]),
    ("listen:\n  <<: {port: 1}\n  <<: {host: a}", []),
    ("x: &x {a: 1}\ncontext: 100\nworker: {env: {A: 1}, python: p}", ["unknown key `x.a` is ignored; see docs/configuration.md"]),
])
def test_a_key_that_stands_there_twice_is_said(text: str, said: list[str]) -> None:
    assert [warning.removeprefix("f: ") for warning in parse(text, origin="f").warnings] == said


@pytest.mark.parametrize(("first", "next_one"), [("{x: 1}", "{{p: *a{n}, q: *a{n}}}"), ("[1]", "[*a{n}, *a{n}]"), ("{x: 1}", "{{<<: [*a{n}, *a{n}]}}")],
                         ids=["mappings", "lists", "merges"])
@pytest.mark.parametrize("key", ["x", *KEYS])
def test_aliases_that_unfold_without_end_are_refused(key: str, first: str, next_one: str) -> None:
    bomb = f"a: &a0 {first}\n" + "".join(f"b{n}: &a{n + 1} {next_one.format(n=n)}\n" for n in range(40))
    with pytest.raises(ConfigError, match=r"line 1\d: more than 10000 values"):
        parse(f"{bomb}{key.replace('.', ': {')}: *a40{'}' if '.' in key else ''}\n")


@pytest.mark.parametrize("text", ["a: &a {b: *a}", "&a\nmodel: *a", "cpu: {cpus: &a [*a, *a]}", "x: &x [&y [*x, *x], *y]\ncontext: *y"])
def test_a_value_that_holds_itself_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a value that holds itself"):
        parse(text)


def test_a_long_key_does_not_make_a_long_warning() -> None:
    assert len(parse(f"? {'k' * 100_000}\n: 1\n").warnings[0]) < 200


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
