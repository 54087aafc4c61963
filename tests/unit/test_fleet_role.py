"""What the role `appliance` decides: which variables cannot be meant, and by which way a change is put into force."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_fleet_filters import PLUGINS, load

wishes, course, node_module = load("filter/wishes.py"), load("filter/course.py"), load("modules/node.py")

ROLE = PLUGINS.parent / "roles/appliance"
ARMOUR = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nx\n-----END PGP PUBLIC KEY BLOCK-----\n"
CERT, CERT_KEY = "-----BEGIN CERTIFICATE-----\nx\n", "-----BEGIN PRIVATE KEY-----\nx\n"
GOOD: dict[str, Any] = {
    "state": "present", "version": "", "source": "repository", "repository_uri": "", "repository_suite": "bookworm", "repository_key": "",
    "key_text": "", "packages_dir": "", "config": {}, "model": "", "model_name": "", "model_kind": "default", "stored_as": "smollm2", "api_key": "",
    "tls_cert": "", "tls_key": "", "verify_prompt": "Hello", "wait_s": 900, "min_memory_mb": 0, "min_disk_mb": 0,
}
REPOSITORY = {"repository_uri": "https://apt.example.org", "repository_key": "appliance.asc", "key_text": ARMOUR}


def hub(model: str) -> dict[str, Any]:
    return {"model": model, "model_kind": "hub", "stored_as": "m"}


@pytest.mark.parametrize(("changes", "said"), [
    ({}, ""),
    (REPOSITORY, ""),
    ({**REPOSITORY, "repository_uri": "file:/srv/repository"}, ""),
    ({**REPOSITORY, "repository_suite": ""}, ""),
    ({**REPOSITORY, "repository_key": ARMOUR}, ""),
    ({**REPOSITORY, "repository_uri": "https://a b"}, "appliance_repository_uri 'https://a b' is no address"),
    ({**REPOSITORY, "repository_uri": "https://a\nTrusted: yes"}, "appliance_repository_uri 'https://a\\nTrusted: yes' is no address"),
    ({**REPOSITORY, "repository_uri": "https://a\n"}, "is no address"),
    ({**REPOSITORY, "repository_uri": "apt.example.org"}, "is no address"),
    ({**REPOSITORY, "repository_suite": "bookworm\nTrusted: yes"}, "is no name of a suite"),
    ({**REPOSITORY, "repository_suite": "bookworm trixie"}, "is no name of a suite"),
    ({**REPOSITORY, "key_text": ""}, "appliance_repository_key 'appliance.asc' cannot be read on the controller"),
    ({**REPOSITORY, "key_text": "hello"}, "appliance_repository_key 'appliance.asc' holds no armoured public key"),
    ({**REPOSITORY, "repository_key": "a\nb", "key_text": "a\nb"}, "appliance_repository_key is a text and no public key"),
    ({**REPOSITORY, "key_text": ARMOUR + "-----BEGIN PGP PRIVATE KEY BLOCK-----"}, "is a private key, which no node may get"),
    ({"repository_uri": "https://a"}, "nodes need both"),
    ({"repository_key": "x", "key_text": ARMOUR}, "nodes need both"),
    ({"version": "0.1.0~deb12"}, ""),
    ({"version": "1 2"}, "appliance_version '1 2' is no version"),
    ({"version": "newest"}, "is no version"),
    ({"source": "packages"}, "appliance_packages_dir is empty"),
    ({"source": "packages", "packages_dir": "debs", "repository_uri": "left over"}, ""),
    ({"config": '{"listen": 1}'}, "appliance_config is a text and no mapping"),
    ({"config": {5: 1}}, "appliance_config has a key that is no text: 5"),
    ({"wait_s": 0}, "appliance_wait_s is 0; it is 1 or more"),
    ({"wait_s": "900"}, ""),
    ({"min_memory_mb": -1}, "appliance_min_memory_mb is -1"),
    ({"verify_prompt": " \n"}, "appliance_verify_prompt is blank"),
    ({"model": "a", "config": {"model": "b"}}, "the model is set twice"),
    ({"model": "a", "model_kind": "stored", "stored_as": "a", "config": {"model": None}}, ""),
    (hub("hf:org/name"), ""),
    (hub("hf:org/name@refs/pr/1:model-Q4_K_M.gguf"), ""),
    (hub("hf:org"), "is no model of the Hub"),
    (hub("hf:org/name\n"), "is no model of the Hub"),
    ({"model": "/a\nb.gguf", "model_kind": "file", "stored_as": "b"}, "is no path on one line"),
    ({"model": "A b", "model_kind": "stored", "stored_as": "A b"}, "'A b' is no name for a model"),
    ({"model": "a\n", "model_kind": "stored", "stored_as": "a\n"}, "is no name for a model"),
    ({"model": "/x.gguf", "model_kind": "file", "model_name": "B", "stored_as": "B"}, "set appliance_model_name"),
    ({"model_name": "b"}, "appliance_model_name is set and appliance_model adds no model"),
    ({"api_key": "abc"}, ""),
    ({"api_key": "abc\n"}, ""),
    ({"api_key": "  \n"}, "cannot be sent in a header"),
    ({"api_key": "abc\ndef"}, "cannot be sent in a header"),
    ({"api_key": "schl\u00fcssel"}, "cannot be sent in a header"),
    ({"api_key": "abc", "config": {"api_key_file": "/x"}}, "the API key is set twice"),
    ({"tls_cert": CERT}, "TLS needs both"),
    ({"tls_key": CERT_KEY}, "TLS needs both"),
    ({"tls_cert": CERT, "tls_key": CERT_KEY}, ""),
    ({"tls_cert": CERT, "tls_key": CERT_KEY, "config": {"tls": None}}, "TLS is set twice"),
    ({"tls_cert": "server.crt", "tls_key": CERT_KEY}, "appliance_tls_cert is no certificate"),
    ({"tls_cert": CERT, "tls_key": "server.key"}, "appliance_tls_key is no key"),
    ({"state": "purged", "version": "1 2"}, ""),  # what is wrong with what is not wanted any more stops no removal
])
def test_variables_that_cannot_be_meant(changes: dict[str, Any], said: str) -> None:
    found = wishes.wishes_refusal({**GOOD, **changes})
    assert said in found
    assert bool(found) == bool(said)
    assert "\n" not in found


def test_a_secret_is_in_no_sentence() -> None:
    for changes in ({"api_key": "my secret"}, {"tls_cert": CERT, "tls_key": "secret"}, {**REPOSITORY, "repository_key": "-----x\nsecret", "key_text": "-----x\nsecret"}):
        assert "secret" not in wishes.wishes_refusal({**GOOD, **changes})


def test_every_wish_is_judged_and_every_variable_is_a_wish() -> None:
    options = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    given = yaml.safe_load((ROLE / "vars/main.yml").read_text())["_appliance_wishes"]
    assert given.keys() == GOOD.keys()
    judged_elsewhere = {"strict", "verify_expect", "cpu_flags"}
    assert {name.removeprefix("appliance_") for name in options} == (given.keys() - {"key_text", "model_kind", "stored_as"}) | judged_elsewhere


@pytest.mark.parametrize(("config", "host", "port"), [
    ({}, "127.0.0.1", 8000),
    ({"listen": {"host": "0.0.0.0", "port": "8100"}}, "0.0.0.0", 8100),
    ({"listen": {"host": None, "port": None}}, "127.0.0.1", 8000),
    ({"listen": [1]}, "127.0.0.1", 8000),
    ({"listen": {"host": ["::"], "port": "1'; reboot"}}, "127.0.0.1", -1),
    ({"listen": {"port": 0}}, "127.0.0.1", -1),
    ("a text", "127.0.0.1", 8000),
])
def test_where_settings_listen(config: object, host: str, port: int) -> None:
    assert wishes.listening(config) == {"host": host, "port": port}


@pytest.mark.parametrize(("tags", "state", "said"), [
    (["all"], "present", ""),
    (["all"], "purged", ""),
    (["configure", "verify"], "present", ""),
    (["remove"], "absent", ""),
    (["other"], "absent", ""),
    (["remove"], "present", "--tags remove does nothing while appliance_state is present"),
    (["install", "other"], "absent", "--tags install does nothing while appliance_state is absent"),
])
def test_tags_that_would_do_nothing(tags: list[str], state: str, said: str) -> None:
    found = wishes.tags_refusal(tags, state)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_a_variable_with_a_typing_error_is_shown() -> None:
    options = ["appliance_state", "appliance_model", "appliance_model_name", "appliance_api_key"]
    assert wishes.unknown_variables(["appliance_modle", "appliance_hosts", "appliance_model", "appliance_region"], options) == [
        "appliance_modle is no variable of this role; did you mean appliance_model?"]


# ---- settings and the way they take

MARK = "# Written by the role"


def test_settings_are_written_as_plain_yaml() -> None:
    class Text(str):
        """As Ansible's tagged texts are."""

    class Vaulted:
        """As a value of a vault that nobody has asked for yet."""

        def __str__(self) -> str:
            return "s3cret: x"

    tree = {"memory": {"ceiling": Text("6G")}, "worker": {"env": {"HF_TOKEN": Vaulted()}}, "cpu": {"cpus": (0, 1)}, "compile": False, "context": None, "trial_s": 1.5}
    text = course.settings_text(tree, MARK)
    assert text.startswith(f"{MARK}\n#")
    assert yaml.safe_load(text) == {"memory": {"ceiling": "6G"}, "worker": {"env": {"HF_TOKEN": "s3cret: x"}}, "cpu": {"cpus": [0, 1]}, "compile": False,
                                    "context": None, "trial_s": 1.5}
    assert list(yaml.safe_load(text)) == list(tree)
    assert yaml.safe_load(course.settings_text({}, MARK)) is None


def running(settings: dict[str, Any] | None, *, status: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A node whose agent has started at 100 with these settings, written by the role at 50."""
    there = {"text": "# by hand\n" if settings is None else course.settings_text(settings, MARK), "right": True, "mode": "644", "warnings": [], "changed_at": 50.0,
             "now": 1000.0, "key_unread": False, "pair_unread": False, "tls_files": [], "tls_noted": False}
    known = {key: value for key, value in changes.items() if key in there}
    return {"unit": {"ActiveState": "active"}, "models": {"smollm2": "d1", "x": "d2"}, "in_use": "smollm2",
            "status": {"live": True, "model": "smollm2", "digest": "d1", "started_at": 100.0, "reloaded_at": None, **(status or {})},
            "settings": {**there, **known}, **{key: value for key, value in changes.items() if key not in there}}


def wish(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"settings": settings, "text": course.settings_text(settings, MARK), "mark": MARK, "model": "smollm2", "api_key": False, "tls": False,
            "tls_dir": "/etc/appliance/tls", **changes}


PORT, CONTEXT, WITH_TLS = {"listen": {"port": 8100}}, {"context": 256}, {"tls": {"cert": "/etc/appliance/tls/server.crt", "key": "/etc/appliance/tls/server.key"}}
STOPPED: dict[str, Any] = {"unit": {"ActiveState": "inactive"}, "status": {"live": False, "started_at": None}}


@pytest.mark.parametrize(("node", "asked", "expected"), [
    (running(CONTEXT), wish(CONTEXT), {"differs": False, "way": "apply", "restart": False, "reload": False, "model": []}),
    (running({}), wish(CONTEXT), {"differs": True, "way": "apply", "restart": False, "planned": True}),
    (running(CONTEXT), wish({}), {"differs": True, "way": "apply"}),  # a file of the role's is its own, also without a setting
    (running(None), wish({}), {"managed": False, "differs": False, "way": "apply", "restart": False}),
    (running(None), wish(CONTEXT), {"managed": True, "differs": True, "way": "apply"}),
    # what counts at a start only
    (running({}), wish(PORT), {"way": "restart", "differs": True}),
    (running({}), wish({"listen": {"host": "127.0.0.1", "port": "8000"}}), {"way": "apply"}),  # the same in other words
    (running({}), wish({"store": "/srv/models"}), {"way": "restart"}),
    (running(WITH_TLS), wish({}), {"way": "restart"}),
    (running({}), wish(WITH_TLS, tls=True), {"way": "restart"}),
    (running({"listen": [1]}), wish({}), {"way": "apply"}),
    # a run before has ended in between
    (running(CONTEXT, changed_at=200.0), wish(CONTEXT), {"differs": False, "way": "restart", "restart": True}),
    (running(CONTEXT, changed_at=200.0, status={"reloaded_at": 300.0}), wish(CONTEXT), {"way": "apply", "restart": False}),
    (running(CONTEXT, status={"warned": ["reload"]}), wish(CONTEXT), {"differs": False, "way": "restart", "restart": True}),  # a refused reload
    (running(CONTEXT, status={"warned": ["reload"]}), wish(PORT | CONTEXT), {"differs": True, "way": "restart", "restart": False}),
    (running(CONTEXT, changed_at=2000.0), wish(CONTEXT), {"way": "apply", "restart": False}),  # a clock that was ahead is no reason for ever
    (running(None, changed_at=200.0), wish({}), {"way": "apply", "restart": False}),
    (running({}, key_unread=True), wish({}, api_key=True), {"way": "restart", "restart": True}),
    (running({}, key_unread=True), wish({}), {"way": "apply", "restart": False}),  # the key is somebody else's
    (running(WITH_TLS, pair_unread=True), wish(WITH_TLS, tls=True), {"way": "apply", "restart": False, "reload": True}),
    (running(WITH_TLS, pair_unread=True), wish(WITH_TLS), {"reload": False}),
    # a service that does not run, or cannot
    (running(CONTEXT, **STOPPED), wish(PORT), {"way": "write", "restart": False, "reload": False, "planned": False}),
    (running(CONTEXT, right=False, text="listen: [this is\n"), wish(CONTEXT), {"way": "restart", "differs": True, "planned": False}),
    (running(CONTEXT, status={"live": False, "started_at": None}), wish(CONTEXT), {"way": "restart", "restart": True}),
])
def test_the_mildest_way(node: dict[str, Any], asked: dict[str, Any], expected: dict[str, Any]) -> None:
    found = course.course(node, asked)
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(("node", "name", "named"), [
    (running({}), "smollm2", False),
    (running({}), "x", True),
    (running({}), "", False),  # the settings decide
    (running({}), "never-stored", False),
    (running({}, models={}, in_use=""), "smollm2", False),
    (running({}, in_use="x"), "smollm2", True),
    (running({"model": "x"}, in_use="x"), "x", True),  # in use because of the settings before only: else the default is tried first
    (running({"model": "x"}, in_use="x"), "smollm2", True),
    (running({"model": None}, in_use="x"), "x", False),
    (running({}, models={"smollm2": "d9"}), "smollm2", True),  # the name has got another model
    (running({}, models={"smollm2": "d9"}, status={"live": False}), "smollm2", False),
])
def test_a_model_is_named_beside_the_settings(node: dict[str, Any], name: str, named: bool) -> None:
    assert course.course(node, wish({}, model=name))["model"] == (["--model", name] if named else [])


@pytest.mark.parametrize(("settings", "before", "mode", "closed", "hidden"), [
    ({}, {}, "644", False, False),
    ({}, {}, "640", True, False),  # closed by hand
    ({}, {}, "", False, False),
    ({"worker": {"env": {"HF_TOKEN": "x"}}}, {}, "644", True, True),
    ({}, {"worker": {"env": {"HF_TOKEN": "x"}}}, "640", True, True),
])
def test_settings_that_may_hold_a_secret_are_closed_and_not_shown(settings: dict[str, Any], before: dict[str, Any], mode: str, closed: bool, hidden: bool) -> None:
    found = course.course(running(before, mode=mode), wish(settings))
    assert (found["closed"], found["hidden"]) == (closed, hidden)


PAIR = ["server.crt", "server.key"]


@pytest.mark.parametrize(("node", "asked", "left"), [
    (running({}, tls_files=PAIR), wish({}), ["/etc/appliance/tls"]),
    (running({}, tls_files=["ca.crt", *PAIR]), wish({}), ["/etc/appliance/tls/server.crt", "/etc/appliance/tls/server.key"]),
    (running({}, tls_files=["mine.key"]), wish({}), []),
    (running({}), wish({}), []),
    (running({}, tls_files=PAIR), wish({}, tls=True), []),
    (running({}, tls_files=PAIR, tls_noted=True), wish({}), []),  # a rollback comes back to it
    (running({}, tls_files=PAIR), wish(WITH_TLS), []),  # settings of their own name the files
    (running(None, tls_files=PAIR), wish({}), []),  # the file is somebody else's
])
def test_what_a_certificate_leaves_behind(node: dict[str, Any], asked: dict[str, Any], left: list[str]) -> None:
    assert course.course(node, asked)["left_over"] == left


# ---- what the module reads


@pytest.mark.parametrize("text", ["a: !!int x", "a: !!bool x", "[" * 3000, "a: 2026-02-30", "a: !!timestamp x", "a: \0", "? [a]\n: b", "a: [", "text", "- a"],
                         ids=lambda text: repr(text[:12]))
def test_a_file_that_is_no_configuration_has_no_settings(text: str) -> None:
    assert course.tree_of(text) == {}


def test_what_a_node_says_wrong_is_nothing() -> None:
    for text in ("", "{", "[" * 100_000, "\0"):
        assert node_module._parsed(text) is None
    for address in ("", "https://[::1", "https://h:99999", "https://" + "a" * 70 + ".b"):
        assert node_module.served_certificate(address) is None


def test_what_dpkg_and_systemd_know(tmp_path: Path) -> None:
    said = {"dpkg-query": "installed appliance\nconfig-files appliance-worker\nunknown appliance-x\n", "systemctl": "LoadState=loaded\nActiveState=active\nMainPID=7\n",
            "dpkg": "", "applianctl": '{"settings": {"model": "y"}, "sources": {"model": "/etc/appliance/appliance.yaml"}}'}
    (tmp_path / "m.json").write_text('{"source": "s", "digest": "d"}')
    (tmp_path / "broken.json").write_text("{")
    config = tmp_path / "appliance.yaml"
    config.write_text("model: y\n")

    def found() -> dict[str, Any]:
        return dict(node_module.installation(lambda words: (0, said[words[0]], ""), notes=tmp_path, config=config, hold=tmp_path / "hold"))

    assert found() == {"known": ["appliance", "appliance-worker"], "interrupted": False, "held": False, "own_model": "y",
                       "unit": {"LoadState": "loaded", "ActiveState": "active", "MainPID": "7"}, "notes": {"broken": {}, "m": {"source": "s", "digest": "d"}}}
    mark = yaml.safe_load((ROLE / "vars/main.yml").read_text())["_appliance_settings_mark"]
    config.write_text(f"{mark}\nmodel: y\n")
    said["dpkg"] = "the package is half configured"
    (tmp_path / "hold").touch()
    assert {key: found()[key] for key in ("own_model", "interrupted", "held")} == {"own_model": "", "interrupted": True, "held": True}
    said["applianctl"] = '{"settings": {"model": "smollm2"}, "sources": {}}'
    config.write_text("")
    assert found()["own_model"] == ""


def test_what_a_machine_has(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2\nflags\t\t: other\n")
    (tmp_path / "key").touch()
    asked: list[list[str]] = []

    def run(words: list[str]) -> tuple[int, str, str]:
        asked.append(words)
        return 0, "amd64\n" if words[0] == "dpkg" else 'LISTEN 0 users:(("sshd",pid=1,fd=3))\n', ""

    found = node_module.machine(run, 22, cpuinfo=tmp_path / "cpuinfo", folders=(str(tmp_path), "/nowhere"), keys=(tmp_path / "no", tmp_path / "key"))
    assert (found["userland"], found["flags"], found["key"], len(found["free_mb"])) == ("amd64", ["fpu", "avx2"], True, 1)
    assert found["holders"] == ['LISTEN 0 users:(("sshd",pid=1,fd=3))']
    assert ["ss", "-ltnpH", "sport = :22"] in asked
    assert node_module.machine(run, -1, cpuinfo=tmp_path / "cpuinfo", folders=(), keys=())["holders"] == []


@pytest.mark.parametrize(("key", "given", "unread"), [(None, None, False), ("a", "a", False), ("a", "b", True), ("a", None, True)])
def test_whether_the_agent_has_the_key(tmp_path: Path, key: str | None, given: str | None, unread: bool) -> None:
    for name, text in (("key", key), ("given", given)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert read(tmp_path)["key_unread"] == unread


def test_whether_the_agent_has_the_certificate(tmp_path: Path) -> None:
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a", "-keyout", tmp_path / "server.key", "-out", tmp_path / "server.crt"],
                   check=True, capture_output=True)
    text = (tmp_path / "server.crt").read_text()
    served = ssl.PEM_cert_to_DER_cert(text)
    (tmp_path / "server.crt").write_text("a comment\n" + text + text)  # with its chain
    assert read(tmp_path, served, "https://127.0.0.1:8000")["pair_unread"] is False
    assert read(tmp_path, b"another", "https://127.0.0.1:8000")["pair_unread"] is True
    assert read(tmp_path, None, "https://127.0.0.1:8000")["pair_unread"] is True
    assert read(tmp_path, None, "http://127.0.0.1:8000")["pair_unread"] is False
    assert read(tmp_path)["tls_files"] == ["server.crt", "server.key"]


def test_what_the_agent_says_of_the_settings(tmp_path: Path) -> None:
    assert read(tmp_path)["text"] == ""
    (tmp_path / "appliance.yaml").write_bytes(b"modle: x\n\xff")
    (tmp_path / "appliance.yaml").chmod(0o640)
    (tmp_path / "before.yaml").write_text(f"tls: {{cert: {tmp_path}/server.crt}}\n")
    found = read(tmp_path)
    assert found["text"].startswith("modle: x\n")
    assert (found["right"], found["mode"], found["warnings"], found["tls_noted"]) == (True, "640", ["/etc: unknown key `modle` is ignored"], True)


def read(folder: Path, served: bytes | None = None, address: str = "") -> dict[str, Any]:
    return dict(node_module.settings(lambda words: (0, "", "applianctl: warning: /etc: unknown key `modle` is ignored\n"), lambda _: served, address,
                                     config=folder / "appliance.yaml", key=folder / "key", given=folder / "given", tls=folder, folder=folder))
