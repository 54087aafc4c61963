"""One file and one listing over a bad line: what is tried again, what ends at once, and that nothing wrong gets a name."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ApplianceError
from appliance.hub.orders import Order
from appliance.hub.selection import Listing, RemoteFile
from appliance.hub.transfer import PART, Hub, Pace
from tests.hub.fake_hub import COMMIT, FakeHub, Repo

WEIGHTS = os.urandom(1_000_000)
NAME = "model.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    import huggingface_hub.constants
    from huggingface_hub.utils import close_session

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    close_session()
    with FakeHub({"org/name": Repo(files={"config.json": b"{}", NAME: WEIGHTS})}) as one:
        yield one
    close_session()


class Line:
    """A `Hub` whose pauses take no time, with what it said."""

    def __init__(self, fake: FakeHub, *, token: str | None = None, **fields: Any) -> None:
        self.pauses: list[tuple[float, str]] = []
        self.came = 0
        fields = {"tries": 4, "wait_s": 1.0, "silence_s": 5.0, "repo": "org/name", "revision": "main", **fields}
        order = Order(endpoint=fields.pop("endpoint", fake.endpoint), file=None, folder="", **fields)
        self.hub = Hub(order, token, on_wait=lambda pause, why: self.pauses.append((pause, why)), sleep=lambda _s: None)

    def bring(self, folder: Path, name: str = NAME) -> Path:
        data = {NAME: WEIGHTS, "config.json": b"{}"}[name]
        lfs = hashlib.sha256(data).hexdigest() if name == NAME else None
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        file = RemoteFile(name=name, bytes=len(data), sha256=lfs, git_sha1=git)
        listing = Listing(repo="org/name", commit=COMMIT, files=(file,))

        def came(count: int) -> None:
            self.came += count

        self.hub.download(listing, file, folder / name, came)
        return folder / name


@pytest.mark.parametrize(("faults", "tries"), [
    ([], 0),
    ([{"match": "resolve", "times": 2, "status": 503}], 2),
    ([{"match": "cdn", "times": 3, "status": 500}], 3),
    ([{"match": "resolve", "status": 429, "headers": {"Retry-After": "7"}}], 1),
    ([{"match": "cdn", "times": 3, "cut_after": 300_000}], 3),
    ([{"match": "cdn", "times": 2, "cut_after": 0}], 2),
    ([{"match": "cdn", "short": 400_000}], 1),
    ([{"match": "cdn", "cut_after": 500_000}, {"match": "cdn", "ignore_range": 1}], 1),
    ([{"match": "cdn", "cut_after": 500_000}, {"match": "cdn", "wrong_range": 1}], 2),
    ([{"match": "cdn", "cut_after": 500_000}, {"match": "cdn", "status": 416}], 2),
    ([{"match": "cdn", "longer": 10}], 1),
    ([{"match": "cdn", "packed": 1}], 1),
    ([{"match": "cdn", "flip": 1000}], 1),
    ([{"match": "resolve", "html": 1}], 1),
])
def test_a_file_arrives_whole_over_a_bad_line(hub: FakeHub, tmp_path: Path, faults: list[dict[str, Any]], tries: int) -> None:
    hub.faults += faults
    line = Line(hub)
    assert line.bring(tmp_path).read_bytes() == WEIGHTS
    assert line.came == len(WEIGHTS)
    assert len(line.pauses) == tries, line.pauses
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_the_hub_says_how_long_to_wait(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults += [{"match": "resolve", "status": 429, "headers": {"Retry-After": "7"}},
                   {"match": "resolve", "status": 429, "headers": {"Retry-After": "90000"}},
                   {"match": "resolve", "status": 429, "headers": {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}}]
    line = Line(hub)
    line.bring(tmp_path)
    assert [pause for pause, _ in line.pauses] == [7.0, 300.0, 4.0]


def test_progress_costs_no_try_and_no_byte_comes_twice(hub: FakeHub, tmp_path: Path) -> None:
    """A line that is cut every 150 kB brings a file of 1 MB with two tries to spare (ollama#941, #8105)."""
    hub.faults.append({"match": "cdn", "times": 6, "cut_after": 150_000})
    line = Line(hub, tries=2)
    line.bring(tmp_path)
    assert hub.sent_bytes < len(WEIGHTS) + 1000
    assert [one["range"] for one in hub.asked("cdn")][:3] == [None, "bytes=150000-", "bytes=300000-"]


def test_what_came_twice_is_no_progress(hub: FakeHub, tmp_path: Path) -> None:
    """A mirror without ranges that is cut now late, now early, is given up."""
    hub.faults += [{"match": "cdn", "ignore_range": 1, "cut_after": count} for _ in range(50) for count in (600_000, 300_000)]
    with pytest.raises(ApplianceError, match="does not come through"):
        Line(hub).bring(tmp_path)
    assert len(hub.asked("cdn")) == 4


def test_a_long_look_at_a_file_is_no_silence(hub: FakeHub, tmp_path: Path) -> None:
    """A checksum of tens of GB takes longer than a job may say nothing."""
    (tmp_path / (NAME + PART)).write_bytes(WEIGHTS)
    file = RemoteFile(name=NAME, bytes=len(WEIGHTS), sha256=hashlib.sha256(WEIGHTS).hexdigest(), git_sha1=None)
    heard: list[int] = []
    Line(hub).hub.download(Listing(repo="org/name", commit=COMMIT, files=(file,)), file, tmp_path / NAME, heard.append)
    assert heard == [0]


@pytest.mark.parametrize(("fault", "code", "says"), [
    ({"match": "resolve", "status": 401}, 78, "not open to this node"),
    ({"match": "resolve", "status": 403, "code": "GatedRepo"}, 78, "accept its terms"),
    ({"match": "cdn", "status": 403}, 78, "answers 403"),
    ({"match": "resolve", "status": 404, "code": "EntryNotFound"}, 65, "lost a file"),
    ({"match": "resolve", "status": 404, "code": "RevisionNotFound"}, 65, "has no revision"),
    ({"match": "resolve", "status": 410}, 69, "answers 410"),
    ({"match": "resolve", "times": 99, "loop": 1}, 69, "redirects in a circle"),
    ({"match": "resolve", "status": 302, "headers": {"Location": "ftp://127.0.0.1/x"}}, 69, "unknown kind"),
    ({"match": "cdn", "times": 99, "status": 502}, 75, "what has come is kept"),
    ({"match": "cdn", "times": 99, "cut_after": 0}, 75, "does not come through"),
    ({"match": "cdn", "times": 99, "flip": 5}, 75, "its checksum was wrong twice"),
    ({"match": "cdn", "times": 99, "longer": 5}, 75, "1000005 bytes are sent where"),
])
def test_what_does_not_help_ends_in_one_line(hub: FakeHub, tmp_path: Path, fault: dict[str, Any], code: int, says: str) -> None:
    hub.faults.append(fault)
    with pytest.raises(ApplianceError, match=says) as caught:
        Line(hub).bring(tmp_path)
    assert caught.value.exit_code == code
    assert not (tmp_path / NAME).exists(), "what is not right gets no name"


def test_an_interrupted_file_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / (NAME + PART)).write_bytes(WEIGHTS[:600_000])
    Line(hub).bring(tmp_path)
    assert (tmp_path / NAME).read_bytes() == WEIGHTS
    assert hub.sent_bytes == 400_000


@pytest.mark.parametrize("left", [WEIGHTS + b"more", b"x" * 700_000, b"x" * len(WEIGHTS), b""])
def test_a_wrong_beginning_is_not_built_upon(hub: FakeHub, tmp_path: Path, left: bytes) -> None:
    (tmp_path / (NAME + PART)).write_bytes(left)
    line = Line(hub)
    line.bring(tmp_path)
    assert (tmp_path / NAME).read_bytes() == WEIGHTS


def test_a_small_file_is_checked_by_its_git_checksum(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append({"match": "config.json", "flip": 0})
    line = Line(hub)
    assert line.bring(tmp_path, "config.json").read_bytes() == b"{}"
    assert "arrived damaged" in line.pauses[0][1]


def test_a_token_goes_to_the_endpoint_and_not_on(hub: FakeHub, tmp_path: Path) -> None:
    Line(hub, token="hf_secret").bring(tmp_path)
    assert [one["authorization"] for one in hub.asked("resolve")] == ["Bearer hf_secret"]
    assert [one["authorization"] for one in hub.asked("cdn")] == [None]
    assert not any(one["authorization"] for one in hub.requests if one["host"].startswith("localhost"))


def test_without_a_token_none_is_looked_for(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    Line(hub).bring(tmp_path)
    Line(hub).hub.listing()
    assert not any(one["authorization"] for one in hub.requests)


@pytest.mark.parametrize(("fields", "fault", "code", "says"), [
    ({"repo": "org/other"}, None, 65, "was not found"),
    ({"revision": "v9"}, None, 65, "has no revision 'v9'"),
    ({}, {"match": "api", "html": 1}, 69, "does not speak the Hub's protocol"),
    ({}, {"match": "api", "times": 99, "status": 503}, 75, "answers 503"),
    ({}, {"match": "api", "times": 99, "loop": 1}, 69, "in a circle"),
    ({"endpoint": "http://127.0.0.1:9"}, None, 69, "cannot be reached"),
    ({"endpoint": "http://no-such-host.invalid"}, None, 69, "cannot be reached"),
])
def test_a_listing_that_cannot_be_had(hub: FakeHub, fields: dict[str, Any], fault: dict[str, Any] | None, code: int, says: str) -> None:
    hub.faults += [fault] if fault else []
    with pytest.raises(ApplianceError, match=says) as caught:
        Line(hub, **fields).hub.listing()
    assert caught.value.exit_code == code


def test_a_gated_model_needs_its_token(hub: FakeHub) -> None:
    hub.repos["org/name"] = Repo(files={"config.json": b"{}"}, token="hf_right", gated=True)
    assert Line(hub, token="hf_right").hub.listing().commit == COMMIT
    for token in (None, "hf_wrong"):
        with pytest.raises(ApplianceError, match=r"accept its terms .* hub.token_file") as caught:
            Line(hub, token=token).hub.listing()
        assert "hf_" not in caught.value.line


@pytest.mark.parametrize("said", [
    {"sha": None}, {"sha": "main"}, {"sha": 7}, {"siblings": None}, {"siblings": [{"rfilename": "config.json"}]},
    {"siblings": [{"rfilename": "config.json", "size": -1, "blobId": "0" * 40}]},
    {"siblings": [{"rfilename": "config.json", "size": 5, "blobId": "xyz"}]},
    {"siblings": [{"rfilename": "tokenizer.json", "size": 1 << 40, "blobId": "0" * 40}]},
    {"siblings": 7}, {"siblings": [7]},
])
def test_a_listing_is_not_believed_blindly(hub: FakeHub, said: dict[str, Any]) -> None:
    hub.repos["org/name"].said = said
    try:
        assert Line(hub).hub.listing().files == ()
    except ApplianceError as error:
        assert error.exit_code in (65, 69)  # noqa: PT017


def test_the_rate_is_kept(hub: FakeHub, tmp_path: Path) -> None:
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(1000, sleep=sleep, clock=lambda: now[0])
    for _ in range(10):
        pace.took(500)
    assert 3.9 <= sum(slept) <= 5.0
    now[0] += 3600  # a pause is not caught up later
    pace.took(5000)
    assert 3.9 <= slept[-1] <= 5.0


def test_a_stalled_connection_is_given_up(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append({"match": "cdn", "stall_s": 3.0})
    line, began = Line(hub, silence_s=0.3), time.monotonic()
    line.bring(tmp_path)
    assert time.monotonic() - began < 3.0
    assert "ReadTimeout" in line.pauses[0][1]


def test_a_proxy_is_used(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import close_session

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    close_session()
    with pytest.raises(ApplianceError, match="cannot be reached"):
        Line(hub, endpoint="http://hub.example").hub.listing()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    close_session()
    Line(hub).bring(tmp_path)
