"""Who may use the service: address, keys, certificate, modes of secret files. No secret is kept or shown.
"""

from __future__ import annotations

import os
import ssl
import stat
from datetime import UTC, datetime
from pathlib import Path

from appliance import keys
from appliance.checkup.patient import Patient
from appliance.errors import ApplianceError
from appliance.settings import is_loopback
from appliance.symptoms import AccessFacts, Problem

CREDENTIALS = ("/etc/credstore/appliance.api_key", "/run/credstore/appliance.api_key",
               "/etc/credstore.encrypted/appliance.api_key", "/run/credstore.encrypted/appliance.api_key")
"""Where the unit's LoadCredential= finds a key; only that there is one is looked at."""



def access(case: Patient, unseen: list[str]) -> AccessFacts:
    settings = case.settings
    if isinstance(case.parsed, Problem):
        return AccessFacts()
    count, problem = _keys(case, unseen)
    secrets = [settings.api_key_file, settings.tls.key, str(case.directories.state / keys.FILE)]
    days, tls_problem = _certificate(case)
    return AccessFacts(
        loopback=is_loopback(settings.listen.host), host=settings.listen.host, keys=count, keys_problem=problem,
        tls=settings.tls.cert is not None, tls_problem=tls_problem, tls_days=days,
        readable_secrets=tuple(path for path in secrets if path and _open_to_all(Path(path))),
    )


def _keys(case: Patient, unseen: list[str]) -> tuple[int | None, str | None]:
    """How many keys there are, and what is wrong with them. A service that runs has what it needs."""
    file = case.directories.state / keys.FILE
    if case.running is not None or any(_exists(Path(path)) for path in CREDENTIALS):
        return None, None
    try:
        extra = keys.configured_key(case.settings.api_key_file, case.env)
        return len(keys.KeyRing(file).list()) + (extra is not None), None
    except ApplianceError as error:
        if os.geteuid() and "ermission denied" in error.line:
            unseen.append("the API keys")
            return None, None
        return None, error.line


def _certificate(case: Patient) -> tuple[float | None, str | None]:
    """Days until the certificate ends, and what is wrong with the pair."""
    tls = case.settings.tls
    if tls.cert is None or tls.key is None:
        return None, None
    from appliance.front.certificate import not_after

    try:
        if os.access(tls.key, os.R_OK):
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key, password=lambda: b"")
        end = not_after(Path(tls.cert).read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        return None, getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return (end - datetime.fromtimestamp(case.now, UTC)).total_seconds() / 86400, None


def _open_to_all(path: Path) -> bool:
    """Whether everybody may read the file and pass all folders above it."""
    try:
        modes = [folder.stat().st_mode for folder in path.absolute().parents]
        return bool(path.stat().st_mode & stat.S_IROTH) and all(mode & stat.S_IXOTH for mode in modes)
    except OSError:
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
