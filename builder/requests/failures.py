"""The kinds of failure that retry policy and history tell apart, and which HTTP status is which."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from draftmill.builder.requests.api_key import redacted
from draftmill.manifests.errors import PermanentError, ServerError, TransientError

LONGEST_S = 3600.0  # that a server can have us wait
TRANSIENT_STATUS = {408, 409, 425}
PERMANENT_SERVER_STATUS = {501, 505}
# The server as a whole is wrong, not this request: no row may pay for it.
WRONG_SERVER_STATUS = {401, 403, 404}


class OverloadedError(TransientError):
    """The server asks for patience (429, 503); `retry_after_s` says how long, if it said so."""


class ServerFailedError(TransientError):
    """The server failed at this request (5xx, an answer it broke off)."""


class ConnectionCutError(TransientError):
    """The connection ended in the middle of a request."""


class NoTokenizerError(ServerError):
    """The server has no /tokenize and something needs one."""


class GarbledReplyError(TransientError):
    """A reply that is not what the protocol says."""


def status_error(url: str, status: int, words: str, retry_after_s: float | None) -> Exception:
    """The error of an HTTP status, with the server's own words."""
    text = f"HTTP {status}: {words}"
    if status in (429, 503):
        return OverloadedError(text, http_status=status, retry_after_s=retry_after_s)
    if status in WRONG_SERVER_STATUS:
        hint = " Set DRAFTMILL_API_KEY." if status in (401, 403) else ""
        return ServerError(f"{url} answers {text}{hint}")
    if status in TRANSIENT_STATUS or (status >= 500 and status not in PERMANENT_SERVER_STATUS):
        return ServerFailedError(text, http_status=status, retry_after_s=retry_after_s)
    return PermanentError(text, http_status=status)


def one_line(text: str) -> str:
    """What somebody said, on one line, without keys and as Unicode: it goes into the history."""
    return " ".join(redacted(text).split()).encode(errors="replace").decode()


def words(error: BaseException) -> str:
    """An exception's text on one line; its class where it has none."""
    return one_line(str(error))[:300] or type(error).__name__


def retry_after_s(header: str) -> float | None:
    """Seconds of a Retry-After header, which has seconds or a date: an hour at most.

    None for nonsense.
    """
    try:
        wait_s = float(header)
    except ValueError:
        try:
            until = parsedate_to_datetime(header)
        except (ValueError, OverflowError):
            return None
        if until.tzinfo is None:  # "-0000": a time in UTC, from nowhere in particular
            until = until.replace(tzinfo=UTC)
        wait_s = (until - datetime.now(UTC)).total_seconds()
    return None if math.isnan(wait_s) else min(LONGEST_S, max(0.0, wait_s))
