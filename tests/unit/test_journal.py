"""The agent's words: whoever reads them, or does not, the speaker never waits and the log has every line."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

import pytest

from appliance.supervisor import journal
from appliance.supervisor.journal import Journal


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """`room`: how much it takes before somebody reads."""

    reader: IO[bytes]
    writer: TextIO
    room: int

    def line(self) -> str:
        assert select.select([self.reader], [], [], 5)[0], "nothing comes"
        return self.reader.readline().decode()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    room = 0
    try:
        while True:
            room += os.write(writer, b"x" * 1024)
    except BlockingIOError:
        os.read(reader, room)
    os.set_blocking(writer, True)
    made = Pipe(reader=open(reader, "rb", buffering=0), writer=open(writer, "w"), room=room)  # noqa: SIM115
    yield made
    made.reader.close()  # first: it sets free who still writes
    made.writer.close()


def made(folder: Path, output: TextIO | None) -> Journal:
    with contextlib.redirect_stdout(output):
        return Journal(folder / "agent.log", began=time.monotonic(), stamped=False)


def test_a_line_goes_to_both(tmp_path: Path, pipe: Pipe) -> None:
    one = made(tmp_path, pipe.writer)
    one.say("ready:\n  serving tiny")
    assert pipe.line() == "ready: serving tiny\n"
    assert (tmp_path / "agent.log").read_text().endswith(" ready: serving tiny\n")


def test_nobody_reads_then_somebody_does(tmp_path: Path, pipe: Pipe) -> None:
    one, said = made(tmp_path, pipe.writer), pipe.room // 80 + 3 * journal.LINES
    began = time.monotonic()
    for number in range(said):
        one.say(f"{number:079d}")
    assert time.monotonic() - began < 10
    one.close()  # gives up
    assert time.monotonic() - began < 10 + 2 * journal.LAST_S
    assert [int(line.split()[1]) for line in (tmp_path / "agent.log").read_text().splitlines()] == list(range(said))
    lines = []
    while "are left out here" not in (line := pipe.line()):
        lines.append(int(line))
    assert lines == list(range(len(lines))), "in order, without a hole"
    assert len(lines) + int(line.split()[0]) == said
    one.say("and on")
    assert pipe.line() == "and on\n"


def test_the_last_line_gets_out(tmp_path: Path, pipe: Pipe) -> None:
    one = made(tmp_path, pipe.writer)
    for number in range(500):
        one.say(str(number))
    one.close()
    assert os.read(pipe.reader.fileno(), 1 << 16).endswith(b"\n499\n")


def test_the_reader_has_gone(tmp_path: Path, pipe: Pipe) -> None:
    one = made(tmp_path, pipe.writer)
    pipe.reader.close()
    for _ in range(3):
        one.say("still here")
        one.close()
    assert len((tmp_path / "agent.log").read_text().splitlines()) == 3


def test_without_standard_output(tmp_path: Path) -> None:
    one, began = made(tmp_path, None), time.monotonic()
    one.say("hello")
    one.close()
    assert time.monotonic() - began < journal.LAST_S
    assert (tmp_path / "agent.log").read_text().endswith(" hello\n")


def test_the_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LOG_BYTES", 1000)
    one = made(tmp_path, None)
    for number in range(100):
        one.say(f"{number:050d}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.log", "agent.log.1"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2400
    assert (tmp_path / "agent.log").read_text().endswith("0099\n")
