"""Server addresses as people type them."""

from __future__ import annotations

from urllib.parse import urlsplit

from draftmill.manifests.errors import ServerError


def split_url(url: str) -> tuple[str, str]:
    """(API base ending in /v1, server root) of what a person typed."""
    text = url if "://" in url else f"http://{url}"
    text = text.rstrip("/")
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ServerError(f"{url!r} is not a server URL; expected http://HOST:PORT/v1")
    if not parts.path:
        text += "/v1"
    return text, text.removesuffix("/v1")
