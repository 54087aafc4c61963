"""`applianctl` in a fresh process: quick help, one-line errors, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.cli.application import Application
from appliance.cli.main import SECTIONS
from appliance.errors import ConfigError

FORBIDDEN = ("torch", "vllm", "numpy", "transformers", "pydantic", "asyncio", "importlib.metadata", "gguf", "yaml", "psutil")


def applianctl(*args: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "APPLIANCE_HOME": str(home), "HOME": str(home), **env}
    return subprocess.run([sys.executable, "-m", "appliance.cli.main", *args], env=environment, capture_output=True,
                          text=True, timeout=60, check=False)


def test_help_imports_nothing_heavy() -> None:
    code = ("import sys\nfrom appliance.cli.main import cli\n"
            "try:\n    cli.main(['--help'], prog_name='applianctl')\nexcept SystemExit:\n    pass\n"
            f"print('LOADED', [m for m in {FORBIDDEN!r} if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_help_reads_like_a_table_of_contents(tmp_path: Path) -> None:
    out = applianctl("--help", home=tmp_path).stdout
    for heading in ("Serve:", "Models:", "This machine:", "Settings:"):
        assert heading in out
    for command in ("serve", "status", "logs", "start", "stop", "drain", "chat", "model", "doctor", "support-bundle", "probe", "plan", "config"):
        assert f"\n  {command} " in out


@pytest.mark.parametrize("command", [name for _, commands in SECTIONS for name, _, _ in commands])
def test_every_command_has_help(command: str, tmp_path: Path) -> None:
    done = applianctl(command, "--help", home=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: applianctl {command}")


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("mdoel",), 2, "Did you mean `model`?"),
        (("status",), 69, "the service is not running"),
        (("chat", "hello"), 69, "the service is not running"),
        (("model", "add", "/nowhere/at/all"), 65, "/nowhere/at/all"),
        (("model", "show", "nothing"), 65, "nothing"),
        (("model", "use", "nothing"), 65, "nothing"),
        (("--config", "/nowhere.yaml", "config", "check"), 78, "/nowhere.yaml does not exist"),
        (("serve", "--port", "0"), 78, "--port"),
        (("plan", "--memory", "lots"), 78, "not a size"),
        (("probe", "--root", "/nowhere"), 2, "/nowhere"),
        (("serve", "--nonsense"), 2, "--nonsense"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, tuple) else None,
)
def test_bad_input_is_one_line_with_its_code(args: tuple[str, ...], code: int, says: str, tmp_path: Path) -> None:
    done = applianctl(*args, home=tmp_path)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_version(tmp_path: Path) -> None:
    from appliance import __version__

    assert applianctl("--version", home=tmp_path).stdout == f"applianctl {__version__}\n"


def test_an_unknown_key_warns_with_the_nearest_name_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("lisen:\n  port: 9000\ncontext: 4096\n")
    done = applianctl("--config", str(file), "config", "show", home=tmp_path)
    assert done.returncode == 0
    assert "unknown key `lisen.port` is ignored; did you mean `listen.port`?" in done.stderr
    assert "4096" in done.stdout


def test_flag_wins_over_environment_wins_over_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("listen: {port: 9001}\ncontext: 4096\nmax_running: 3\n")
    done = applianctl("--config", str(file), "config", "show", home=tmp_path, APPLIANCE_CONTEXT="2048")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["context"] == ["2048", "APPLIANCE_CONTEXT"]
    assert rows["max_running"] == ["3", str(file)]
    assert rows["listen.host"] == ["127.0.0.1", "default"]


def test_a_variable_that_is_empty_names_no_file(tmp_path: Path) -> None:
    assert Application(env={"APPLIANCE_CONFIG": "", "APPLIANCE_MODEL": ""}).read_settings() == Application(env={}).read_settings()


@pytest.mark.parametrize(("make", "why"), [
    (os.mkfifo, "it is no regular file; give a file of text"), (os.mkdir, "Is a directory; give a file of text"),
    (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"), (lambda path: path.write_bytes(b"\xff\xfe"), "not UTF-8 text; give"),
    (lambda path: path.write_bytes(b"#" * (300 << 10)), "it is larger than 256 KiB"), (lambda path: path.symlink_to("/dev/zero"), "it is no regular file"),
], ids=["pipe", "folder", "loop", "binary", "large", "endless"])
def test_what_is_no_settings_file_is_one_line(make: Callable[[Path], object], why: str, tmp_path: Path) -> None:
    make(tmp_path / "a.yaml")
    for args in (("--config", str(tmp_path / "a.yaml"), "config", "check"), ("apply", "--dry-run", str(tmp_path / "a.yaml"))):
        done = applianctl(*args, home=tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (78, 1), done.stderr
        assert why in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another account")
@pytest.mark.parametrize(("mode_of_folder", "mode_of_file", "closed"), [(0o755, 0o644, False), (0o755, 0o600, True), (0o700, 0o644, True)],
                         ids=["open", "file", "folder"])
def test_settings_that_are_closed_to_an_account(mode_of_folder: int, mode_of_file: int, closed: bool) -> None:
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "appliance.yaml"
        file.write_text("context: 512\n")
        file.chmod(mode_of_file)
        Path(made).chmod(mode_of_folder)
        assert not Application(env={}, config_file=str(file)).settings_closed
        app = Application(env={}, config_file=str(file))
        os.seteuid(54321)
        try:
            assert app.settings_closed is closed
            if closed:
                with pytest.raises(ConfigError, match=r"appliance\.yaml cannot be read: Permission denied; .* or run the command with sudo"):
                    app.read_settings()
        finally:
            os.seteuid(0)
