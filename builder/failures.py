"""The kinds of transient failure that the retry policy and the history tell apart."""

from __future__ import annotations

from draftmill.manifests.errors import TransientError


class OverloadedError(TransientError):
    """The server asks for patience (429, 503); `retry_after_s` says how long, if it said so."""


class ServerFailedError(TransientError):
    """The server failed at this request (5xx, an answer it broke off)."""


class ConnectionCutError(TransientError):
    """The connection ended in the middle of a request."""


class GarbledReplyError(TransientError):
    """A reply that is not what the protocol says."""
