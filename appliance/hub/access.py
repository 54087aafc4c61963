"""How this node reaches the Hub: the endpoint, the token, proxies, the rate; from settings and the environment.

Does: choose, and read the token. Does not: talk to anybody. Rules: a token is read from `hub.token_file`, else from
systemd's credential `hub_token`, else from HF_TOKEN, and goes to the child through a pipe: never into arguments, an
environment, a log or a file; it is sent to the endpoint alone and not to where that redirects; a node that is set
offline never tries.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from appliance.errors import ConfigError
from appliance.settings import Settings, is_loopback

ENDPOINT = "https://huggingface.co"
CREDENTIAL = "hub_token"
MAX_TOKEN_BYTES = 4096
NETWORK_VARIABLES = (
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR",
)
"""What an operator says of the way out; passed to the child that fetches, and to no other."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """`token` None: as a guest. `rate_bytes_s` None: as fast as it comes."""

    endpoint: str
    token: str | None
    rate_bytes_s: int | None
    network: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Access(endpoint={self.endpoint!r})"


def read_access(settings: Settings, env: Mapping[str, str]) -> Access:
    """Everything a fetch needs. Raises ConfigError when the node is offline or a value cannot be used."""
    if settings.hub.offline or _true(env.get("HF_HUB_OFFLINE")):
        said = "hub.offline" if settings.hub.offline else "HF_HUB_OFFLINE"
        raise ConfigError("this node does not fetch models", why=f"{said} is set",
                          do="bring the model as a folder, a GGUF file or a bundle")
    endpoint = (settings.hub.endpoint or env.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    token = read_token(settings, env)
    if reason := endpoint_refusal(endpoint, with_token=token is not None):
        raise ConfigError("the Hub's address cannot be used", why=reason, do="correct hub.endpoint or HF_ENDPOINT")
    network = {name: env[name] for name in NETWORK_VARIABLES if env.get(name)}
    return Access(endpoint=endpoint, token=token, rate_bytes_s=settings.hub.limit_rate, network=network)


def endpoint_refusal(endpoint: str, *, with_token: bool = False) -> str | None:
    """Why this is not the address of a Hub or mirror, or None."""
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or not endpoint.isprintable() or " " in endpoint:
        return f"{endpoint!r} is not an http or https address"
    if parts.username or parts.password or parts.query or parts.fragment:
        return "an address with a user, a password or a query is not used; give a token instead"
    if with_token and parts.scheme == "http" and not is_loopback(host):
        return f"a token is not sent unencrypted to {host}; use https"
    return None


def read_token(settings: Settings, env: Mapping[str, str]) -> str | None:
    """The token of `hub.token_file`, the credential or HF_TOKEN, or None. Raises ConfigError when it cannot be used."""
    path = settings.hub.token_file
    if path is None and env.get("CREDENTIALS_DIRECTORY"):
        credential = Path(env["CREDENTIALS_DIRECTORY"]) / CREDENTIAL
        path = str(credential) if credential.exists() else None
    if path is None:
        token, origin = env.get("HF_TOKEN", "").strip(), "HF_TOKEN"
        if not token:
            return None
    else:
        origin = path
        try:
            with open(path, encoding="utf-8") as file:
                token = file.readline(MAX_TOKEN_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise ConfigError(f"the Hub's token in {path} cannot be read", why=why,
                              do="correct hub.token_file") from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"the Hub's token in {origin} cannot be used", why="it is empty, or no header can carry it",
                          do="write the token, beginning with hf_, on the first line")
    return token


def token_pipe(token: str | None) -> int:
    """A descriptor from which one child reads the token; the caller closes it."""
    reader, writer = os.pipe()
    try:
        os.write(writer, (token or "").encode())  # far less than a pipe holds
    finally:
        os.close(writer)
    return reader


def _true(text: str | None) -> bool:
    return (text or "").strip().lower() in ("1", "true", "yes", "on")
