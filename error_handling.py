"""Exception classes, exit codes and the retry policy.

Every error the project raises on purpose inherits from `EvalLoopError` and from the standard class that fits, so
`except ValueError` written by someone who imports us keeps working. The exit code of a program is the code of the
error that ended it::

    try:
        config = load_and_validate_config(path)
    except EvalLoopError as err:
        print(err, file=sys.stderr)
        sys.exit(err.exit_code)
"""

from __future__ import annotations

import datetime
import email.utils
import math
import time
from collections.abc import Callable
from typing import Any

EXIT_TARGET_MET = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TARGET_MISSED = 3
EXIT_TEST_SET_SPENT = 4
EXIT_INTERRUPTED = 130

# Answers of an HTTP server after which the same request may succeed: request timeout, too early, rate limit.
# Every 5xx is added by `is_transient_status`.
_TRANSIENT_CLIENT_STATUS = frozenset({408, 425, 429})


class EvalLoopError(Exception):
    """Base class. `exit_code` is what a program returns when this error ends it."""

    exit_code: int = EXIT_FAILED


class ConfigurationError(EvalLoopError, ValueError):
    """The configuration or the command line is wrong; nothing was trained, sampled or saved."""

    exit_code = EXIT_USAGE


class DataError(EvalLoopError, ValueError):
    """A data file is missing, unreadable, or holds rows that cannot be used; the message names file:line."""

    exit_code = EXIT_USAGE


class DamagedFileError(DataError):
    """A file that the project wrote holds something else in its middle; the message names file:line. What was trained
    and sampled before is kept, so this is a failure and no bad usage."""

    exit_code = EXIT_FAILED


class DependencyError(EvalLoopError, ImportError):
    """A package that the configuration asks for is not installed."""

    exit_code = EXIT_USAGE


class RunLockedError(EvalLoopError, RuntimeError):
    """Another living process holds the run folder."""

    exit_code = EXIT_USAGE


class RunNotFoundError(EvalLoopError, FileNotFoundError):
    """There is no run to resume, or the named one does not exist."""

    exit_code = EXIT_USAGE

    def __str__(self) -> str:  # OSError would print only its errno form
        return str(self.args[0]) if self.args else ""


class CheckpointError(EvalLoopError, RuntimeError):
    """A checkpoint could not be saved, found or loaded."""


class ServiceError(EvalLoopError, RuntimeError):
    """The training service answered with an error that a retry would not mend, or retries ran out."""


class ServiceUnavailableError(ServiceError, ConnectionError):
    """The training service did not answer."""


class AuthenticationError(ServiceError, PermissionError):
    """The service refused the API key."""


class TrainingError(EvalLoopError, ArithmeticError):
    """Training cannot go on: a loss that is not finite, a round without steps."""


class SelectionError(EvalLoopError, RuntimeError):
    """The rows of a round cannot be chosen: none is left, or a function of the user's failed or returned what cannot be
    used."""


class EvaluationError(EvalLoopError, RuntimeError):
    """An evaluation could not be completed; no score exists."""


class NoEffectError(EvaluationError):
    """A trained adapter changes nothing, so its score would be that of the model it started from."""


class EvalOpsError(EvalLoopError, RuntimeError):
    """The EvalOps API refused a submission or did not answer."""


class InterruptedRunError(EvalLoopError):
    """The user or the system asked the run to stop; it can be resumed."""

    exit_code = EXIT_INTERRUPTED


def is_transient_status(status: int) -> bool:
    """True for an HTTP status after which the same request may succeed later (408, 425, 429, every 5xx)."""
    return status in _TRANSIENT_CLIENT_STATUS or 500 <= status <= 599


def retry_after_seconds(header: str | None, now: float | None = None) -> float | None:
    """Seconds asked for by a Retry-After header (RFC 9110, 10.2.3: a number of seconds or an HTTP date).

    None when the header is absent or unreadable; never negative.
    """
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = None
    if seconds is not None:
        return max(0.0, seconds) if math.isfinite(seconds) else None
    try:
        when = email.utils.parsedate_to_datetime(header)
    except (TypeError, ValueError):
        return None
    # An HTTP date is in GMT; one written with the zone "-0000" parses without a zone and would be taken as local.
    when = when if when.tzinfo else when.replace(tzinfo=datetime.UTC)
    return max(0.0, when.timestamp() - (time.time() if now is None else now))


class TransientError(EvalLoopError):
    """Raised inside a retried call to ask for another try; `retry_after` (seconds) overrides the backoff."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def retry_transient(
    call: Callable[[], Any],
    *,
    attempts: int = 5,
    first_wait_s: float = 0.5,
    max_wait_s: float = 30.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Run `call`, trying again only on `TransientError`; any other exception goes through at once.

    The wait before try k is exponential with full jitter, at most `max_wait_s`, or what the server's Retry-After asked
    for (also capped, so that a hostile header cannot stall a run). After `attempts` tries the last `TransientError`
    is raised. `call` must be safe to repeat: an optimizer step is not, and never goes through here.
    """
    import tenacity  # imported here so that `--help` does not pay for it

    backoff = tenacity.wait_random_exponential(multiplier=first_wait_s, max=max_wait_s)

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = getattr(error, "retry_after", None)
        return min(asked, max_wait_s) if asked is not None else backoff(state)

    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=wait,
        retry=tenacity.retry_if_exception_type(TransientError),
        sleep=sleep,
        reraise=True,
    )
    return retrying(call)
