"""The error tree of draftmill: one root, messages that say what, where and what to do.

DraftmillError
├── UsageError                 wrong arguments                                (exit code 2)
├── ConfigError                config.toml or a setting; names file, line, key
├── SettingsMismatch           a run disagrees with what is stored, field by field
├── DatasetError               not a dataset, wrong schema version
│   └── LockedError            another process writes this dataset; carries its pid
├── DamagedError               bytes on disk that fail their check; carries shard and offset
├── SourceFileError            a prompt source that cannot be read at all
├── BudgetError                the disk budget (or the disk itself) is full   (exit code 3)
├── RequestError               one request to a server went wrong
│   ├── TransientError         worth retrying; the only kind that is retried
│   │   ├── UnreachableError   nobody answered; costs no attempt
│   │   └── TimedOutError      the deadline passed; becomes the state timed_out
│   └── PermanentError         would fail again: the server's own words
├── RejectedError              one sample is unusable; carries reason, layer, position
└── ServerError                a server that draftmill started or uses is not what it must be
    └── WrongStatesError       its hidden states are not those of the target; the run stops
"""

from __future__ import annotations

# What data of somebody else's making can do to the code that reads it. For the few lines that take
# such data apart, never around code that does more.
NOT_UNDERSTOOD = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def why(error: Exception) -> str:
    """An error of reading or writing in words, without the path that stands before them already."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error) or type(error).__name__


class DraftmillError(Exception):
    """Root of all errors that draftmill raises on purpose. `exit_code` is what the CLI returns."""

    exit_code = 1


class UsageError(DraftmillError):
    """The arguments do not make sense together."""

    exit_code = 2


class ConfigError(DraftmillError):
    """A setting is unknown, of the wrong type or out of range."""


class SettingsMismatch(DraftmillError):
    """The settings of this run would mix two kinds of samples in one dataset."""


class DatasetError(DraftmillError):
    """The folder is not a dataset that this version can use."""


class LockedError(DatasetError):
    """Another process has the dataset open for writing."""

    def __init__(self, message: str, *, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class DamagedError(DraftmillError):
    """Stored bytes fail their checksum or contradict themselves."""

    def __init__(self, reason: str, *, shard: str | None = None, offset: int | None = None) -> None:
        where = "" if shard is None else f"{shard} at byte {offset}: "
        super().__init__(f"{where}{reason}")
        self.reason = reason
        self.shard = shard
        self.offset = offset


class SourceFileError(DraftmillError):
    """A prompt source cannot be opened, or its format is not known."""


class BudgetError(DraftmillError):
    """The disk budget, or the disk, has no room for the next sample."""

    exit_code = 3


class RequestError(DraftmillError):
    """One request to a server failed."""

    def __init__(
        self, message: str, *, http_status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.retry_after_s = retry_after_s


class TransientError(RequestError):
    """The same request may well succeed later."""


class UnreachableError(TransientError):
    """The connection was refused or cut before the server took the request."""


class TimedOutError(TransientError):
    """The request's deadline passed without an answer."""


class PermanentError(RequestError):
    """The server will refuse this request every time."""


class RejectedError(DraftmillError):
    """A sample that must not be stored; the rest of the run goes on."""

    def __init__(
        self, reason: str, *, layer: int | None = None, position: int | None = None
    ) -> None:
        where = "" if layer is None else f" (layer {layer}, position {position})"
        super().__init__(f"{reason}{where}")
        self.reason = reason
        self.layer = layer
        self.position = position


class ServerError(DraftmillError):
    """A server cannot be started, died, or serves something else than it should."""


class WrongStatesError(ServerError):
    """A server's hidden states are not the target's: nothing more may be stored from it."""
