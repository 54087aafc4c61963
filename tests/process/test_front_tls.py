"""The front door with TLS: versions, reload while connections are open, a broken pair, the last day."""

from __future__ import annotations

import datetime
import http.client
import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.errors import ConfigError
from appliance.front import certificate
from appliance.settings import Listen, Settings, Tls
from tests.process.house import COMPLETION, House, built


def pair(folder: Path, name: str, *, days: int = 400, curve: str = "prime256v1") -> Tls:
    """A certificate of its own that says `name`."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", f"ec_paramgen_curve:{curve}", "-nodes", "-keyout", str(key),
         "-out", str(cert), "-days", str(days), "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"],
        check=True, capture_output=True)
    return Tls(cert=str(cert), key=str(key))


@pytest.fixture
def house() -> Iterator[House]:
    with built() as made:
        yield made


def reload(house: House, settings: Settings) -> str | None:
    assert house.door is not None
    return house.door.reload(replace(settings, listen=Listen(port=house.port)))


def shown(house: House, trusted: Tls, *, name: str | None = None, version: ssl.TLSVersion | None = None) -> str:
    """The name in the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=trusted.cert)
    context.check_hostname = False
    if version:
        context.minimum_version = context.maximum_version = version
    with socket.create_connection(("127.0.0.1", house.port), timeout=10) as plain, \
            context.wrap_socket(plain, server_hostname=name) as secure:
        found = secure.getpeercert()
    assert found is not None
    return str(dict(entry[0] for entry in found["subject"])["commonName"])


@pytest.mark.parametrize("name", [None, "one"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_reload_is_for_new_connections_and_drops_no_open_one(house: House, name: str | None, version: ssl.TLSVersion) -> None:
    one, two = pair(house.home, "one"), pair(house.home, "two")
    house.work()
    house.open(Settings(tls=one))
    assert shown(house, one, name=name, version=version) == "one"
    context = ssl.create_default_context(cafile=one.cert)
    kept = http.client.HTTPSConnection("127.0.0.1", house.port, context=context, timeout=10)
    kept.request("POST", "/v1/completions", json.dumps(COMPLETION))
    assert json.loads(kept.getresponse().read())["usage"]["completion_tokens"] == 4
    open_socket = kept.sock
    assert reload(house, Settings(tls=two)) is None
    assert shown(house, two, name=name, version=version) == "two"
    kept.request("GET", "/v1/models")
    assert kept.getresponse().status == 200
    assert kept.sock is open_socket
    kept.close()


def test_a_broken_pair_is_refused_and_the_old_one_stays(house: House) -> None:
    one, two = pair(house.home, "one"), pair(house.home, "two")
    house.open(Settings(tls=one))
    garbage = house.home / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for broken in (Tls(cert=one.cert, key=two.key), Tls(cert=str(garbage), key=two.key), Tls(cert="/nowhere.pem", key=two.key)):
        reason = reload(house, Settings(tls=broken))
        assert reason is not None
        assert "certificate" in reason
        assert len(reason.splitlines()) == 1
        assert shown(house, one) == "one"
    # the same files with new contents: what certificate renewal does
    assert one.cert is not None
    assert one.key is not None
    assert two.cert is not None
    assert two.key is not None
    Path(one.cert).write_text(Path(two.cert).read_text())
    Path(one.key).write_text(Path(two.key).read_text())
    assert reload(house, Settings(tls=one)) is None
    assert shown(house, one) == "two"


def test_old_versions_and_plain_text_are_refused(house: House) -> None:
    one = pair(house.home, "one")
    house.open(Settings(tls=one))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", house.port), timeout=10) as plain, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(plain)
    with socket.create_connection(("127.0.0.1", house.port), timeout=10) as plain:
        plain.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" not in plain.recv(65536)


def test_a_key_that_cannot_be_read_changes_nothing(house: House) -> None:
    one, two = pair(house.home, "one"), pair(house.home, "two")
    door = house.open(Settings(tls=one))
    reason = reload(house, Settings(tls=two, api_key_file="/nowhere", max_queued=3))
    assert reason is not None
    assert "/nowhere" in reason
    assert shown(house, one) == "one"
    assert door.max_queued == 16


def test_switching_tls_off_waits_for_the_next_start_and_the_rest_is_taken(house: House) -> None:
    one = pair(house.home, "one")
    door = house.open(Settings(tls=one))
    assert one.key is not None
    Path(one.key).unlink()  # not needed any more, the operator thinks
    assert reload(house, Settings(max_queued=3)) == \
        "TLS on or off changed: counts at the next start of the agent (systemctl restart appliance, or a new `serve`)"
    assert shown(house, one) == "one"
    assert (door.max_queued, door.address) == (3, f"https://127.0.0.1:{house.port}")
    two = pair(house.home, "two")
    assert reload(house, Settings(tls=two)) is None
    assert shown(house, two) == "two"


def test_after_another_address_a_reload_takes_the_rest(house: House) -> None:
    """Again and again: what counts at the next start only must not keep a new key or limit out until then."""
    house.work()
    door = house.open()
    key = house.home / "key"
    for text, limit in (("first", 100_000), ("second", 10)):
        key.write_text(text + "\n")
        reason = door.reload(Settings(listen=Listen(host="0.0.0.0", port=1), tls=Tls(cert="/later.pem", key="/later.key"),
                                      max_body=limit, max_queued=5, api_key_file=str(key)))
        assert reason is not None
        assert reason.startswith("listen and TLS on or off changed: counts at the next start")
        assert house.complete().status == 401
        answer = house.ask("POST", "/v1/completions", COMPLETION, Authorization=f"Bearer {text}")
        assert answer.status == (413 if limit == 10 else 200)
    assert house.ask("GET", "/v1/models", Authorization="Bearer first").status == 401
    assert (door.max_queued, door.address) == (5, f"http://127.0.0.1:{house.port}")


def test_a_reload_changes_limits_and_the_configured_key(house: House) -> None:
    house.work()
    house.open()
    key = house.home / "key"
    key.write_text("of-the-file\n")
    assert reload(house, Settings(max_body=10, api_key_file=str(key))) is None
    assert house.complete().status == 401
    assert house.ask("POST", "/v1/completions", COMPLETION, Authorization="Bearer of-the-file").status == 413


@pytest.mark.parametrize(("tls", "says"), [
    (Tls(cert="/nowhere.pem", key="/nowhere.key"), "No such file"), (Tls(cert=__file__, key=__file__), "cannot be used"),
])
def test_a_pair_that_cannot_be_used_at_the_start(house: House, tls: Tls, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        house.open(Settings(tls=tls))


@pytest.mark.parametrize(("days", "says"), [(400, None), (20, None), (13, "ends in 13 days"), (1, "ends in 1 days")])
def test_the_last_day_of_the_certificate(house: House, days: int, says: str | None) -> None:
    one = pair(house.home, "one", days=days)
    assert one.cert is not None
    end = certificate.not_after(Path(one.cert).read_text())
    told = subprocess.run(["openssl", "x509", "-enddate", "-noout", "-in", one.cert], capture_output=True, text=True, check=True)
    assert end == datetime.datetime.strptime(told.stdout.strip(), "notAfter=%b %d %H:%M:%S %Y GMT").replace(tzinfo=datetime.UTC)
    house.open(Settings(tls=one))
    house.until(lambda: house.board.traffic.at > 0)
    warnings = house.board.traffic.warnings
    assert (says in warnings[0]) if says else not warnings


def test_a_certificate_that_has_ended_and_one_far_away(house: House) -> None:
    far = pair(house.home, "far", days=20_000)  # after 2049: another kind of time
    assert far.cert is not None
    assert certificate.not_after(Path(far.cert).read_text()).year > 2050
    later = datetime.datetime(2200, 1, 1, tzinfo=datetime.UTC)
    assert "ended on 20" in str(certificate.warning(far, now=later))
    assert "cannot be read" in str(certificate.warning(Tls(cert="/nowhere", key="x"), now=later))


@pytest.mark.parametrize("text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n",
                                  "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        certificate.not_after(text)
