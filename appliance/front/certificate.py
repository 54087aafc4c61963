"""TLS from certificate files: the context, its reload, and how long the certificate is still good.

TLS 1.2 and newer. After a reload new connections get the new pair while the open ones keep the old; a pair that cannot
be loaded changes nothing. Does not: make certificates, watch files, or ask clients for theirs.
"""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

from appliance.errors import ConfigError
from appliance.settings import Tls

WARN_DAYS = 14
UTC_TIME, GENERALIZED_TIME, SEQUENCE, EXPLICIT_0 = 0x17, 0x18, 0x30, 0xA0


class Certificates:
    """`context`: what the listening socket is given, once; each handshake is switched to the pair loaded last.

    A context in use is never changed: a pair that turns out not to fit would leave half of each in it.
    """

    def __init__(self, tls: Tls) -> None:
        self._current = _context(tls)
        self.context = _context(tls)
        self.context.sni_callback = self._choose

    def load(self, tls: Tls) -> None:
        """New connections get this pair. Raises ConfigError, and nothing has changed."""
        self._current = _context(tls)

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        # Called for each handshake, also without a name in it.
        connection.context = self._current


def _context(tls: Tls) -> ssl.SSLContext:
    assert tls.cert is not None
    assert tls.key is not None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    try:
        # A password prompt would wait for ever on a service's standard input.
        made.load_cert_chain(tls.cert, tls.key, password=lambda: b"")
    except ssl.SSLError as error:
        why = (error.reason or str(error)).replace("_", " ").lower()
        raise ConfigError(f"the certificate {tls.cert} and the key {tls.key} cannot be used", why=why,
                          do="correct tls.cert and tls.key") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the certificate {tls.cert} or the key {tls.key} cannot be read", why=why,
                          do="check tls.cert and tls.key, their owner and mode") from None
    return made


def warning(tls: Tls, *, now: datetime.datetime) -> str | None:
    """What is to be said about the certificate's last day, if anything. `now`: with a time zone."""
    if tls.cert is None:
        return None
    try:
        end = not_after(Path(tls.cert).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return f"the certificate {tls.cert} cannot be read any more"
    days = (end - now) / datetime.timedelta(days=1)
    if days < 0:
        return f"the certificate {tls.cert} ended on {end:%Y-%m-%d}"
    return f"the certificate {tls.cert} ends in {days:.0f} days, on {end:%Y-%m-%d}" if days < WARN_DAYS else None


def not_after(pem: str) -> datetime.datetime:
    """The last moment of the first certificate in a PEM text (RFC 5280). Raises ValueError."""
    begin, end = ssl.PEM_HEADER, ssl.PEM_FOOTER
    if begin not in pem or end not in pem:
        raise ValueError("there is no certificate in it")
    der = ssl.PEM_cert_to_DER_cert(pem[pem.index(begin):pem.index(end) + len(end)])
    _, certificate, _ = _element(der)
    _, signed, _ = _element(certificate)
    tag, _, rest = _element(signed)
    if tag == EXPLICIT_0:  # the version; absent in version 1
        _, _, rest = _element(rest)
    for _ in range(2):  # signature algorithm, issuer
        _, _, rest = _element(rest)
    _, validity, _ = _element(rest)
    _, _, last = _element(validity)
    tag, text, _ = _element(last)
    if tag not in (UTC_TIME, GENERALIZED_TIME):
        raise ValueError("its validity is not a time")
    digits = text.decode("ascii")
    if tag == UTC_TIME:
        digits = ("19" if int(digits[:2]) >= 50 else "20") + digits
    return datetime.datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC)


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """The first DER element: its tag, its contents, and what follows."""
    if len(der) < 2:
        raise ValueError("it ends too early")
    length, start = der[1], 2
    if length & 0x80:
        start = 2 + (length & 0x7F)
        length = int.from_bytes(der[2:start])
    return der[0], der[start:start + length], der[start + length:]
