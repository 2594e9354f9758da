"""Server addresses as people type them."""

from __future__ import annotations

from urllib.parse import urlsplit

from draftmill.builder.requests.api_key import VARIABLES
from draftmill.manifests.errors import ServerError


def split_url(url: str) -> tuple[str, str]:
    """(API base ending in /v1, server root) of what a person typed."""
    text = url if "://" in url else f"http://{url}"
    text = text.rstrip("/")
    try:
        parts = urlsplit(text)
        # whoever resolves the name would raise what nobody expects of an address
        named = bool(parts.hostname and parts.hostname.encode("idna") and " " not in text)
        valid = parts.scheme in ("http", "https") and named and parts.port != 0
    except ValueError:
        valid = False
    if valid and (parts.username or parts.password or parts.query):
        # Not quoted: the address is kept in the history of every request.
        raise ServerError(
            f"the URL of {parts.hostname} holds a key or a query. Give http://HOST:PORT/v1 alone, "
            f"and put the key into the environment as {VARIABLES[0]}."
        )
    if not valid:
        raise ServerError(f"{url!r} is not a server URL; expected http://HOST:PORT/v1")
    if not parts.path:
        text += "/v1"
    return text, text.removesuffix("/v1")
