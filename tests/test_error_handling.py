import email.utils
import inspect
import pickle
import time

import pytest

import error_handling
from error_handling import (
    AuthenticationError,
    CheckpointError,
    ConfigurationError,
    DataError,
    DependencyError,
    EvalLoopError,
    EvalOpsError,
    EvaluationError,
    InterruptedRunError,
    RunLockedError,
    RunNotFoundError,
    ServiceError,
    ServiceUnavailableError,
    TrainingError,
    TransientError,
    is_transient_status,
    retry_after_seconds,
    retry_transient,
)

ALL = [cls for _, cls in inspect.getmembers(error_handling, inspect.isclass) if issubclass(cls, EvalLoopError)]


@pytest.mark.parametrize(
    ("error", "standard", "code"),
    [
        (ConfigurationError, ValueError, 2),
        (DataError, ValueError, 2),
        (DependencyError, ImportError, 2),
        (RunLockedError, RuntimeError, 2),
        (RunNotFoundError, FileNotFoundError, 2),
        (CheckpointError, RuntimeError, 1),
        (ServiceError, RuntimeError, 1),
        (ServiceUnavailableError, ConnectionError, 1),
        (AuthenticationError, PermissionError, 1),
        (TrainingError, ArithmeticError, 1),
        (EvaluationError, RuntimeError, 1),
        (EvalOpsError, RuntimeError, 1),
        (InterruptedRunError, Exception, 130),
    ],
)
def test_an_error_is_also_a_standard_one_and_has_its_exit_code(error, standard, code):
    with pytest.raises(standard) as caught:
        raise error("what, where, remedy")
    assert isinstance(caught.value, EvalLoopError)
    assert caught.value.exit_code == code


@pytest.mark.parametrize("error", ALL, ids=lambda cls: cls.__name__)
def test_the_message_is_shown_as_written_and_survives_pickling(error):
    assert str(error("data.jsonl:3: no rows")) == "data.jsonl:3: no rows"
    assert str(pickle.loads(pickle.dumps(error("x")))) == "x"


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_statuses_that_can_pass(status):
    assert is_transient_status(status)


@pytest.mark.parametrize("status", [200, 301, 400, 401, 402, 403, 404, 409, 422, 600])
def test_statuses_that_a_retry_would_not_mend(status):
    assert not is_transient_status(status)


def test_retry_after_as_seconds_or_as_a_date():
    assert retry_after_seconds("2.5") == 2.5
    assert retry_after_seconds("-3") == 0.0
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT", now=1445412470.0) == 10.0
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 -0000", now=1445412470.0) == 10.0
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    in_a_minute = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert retry_after_seconds(in_a_minute) == pytest.approx(60, abs=30)


@pytest.mark.parametrize("header", [None, "", "soon", "nan", "inf", "1e999", "Wed, 99 Oct"])
def test_an_unreadable_retry_after_counts_as_absent(header):
    assert retry_after_seconds(header) is None


class Flaky:
    """Fails with the given errors one after another, then answers "done"."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_what_can_pass_is_tried_again_after_growing_waits():
    call = Flaky(*[TransientError("busy")] * 4)
    waits: list[float] = []
    assert retry_transient(call, first_wait_s=1.0, max_wait_s=3.0, sleep=waits.append) == "done"
    assert call.calls == 5
    assert len(waits) == 4
    assert all(0 <= wait <= limit for wait, limit in zip(waits, [1.0, 2.0, 3.0, 3.0], strict=True))


def test_the_servers_wait_is_kept_but_capped():
    call = Flaky(TransientError("busy", retry_after=7.0), TransientError("busy", retry_after=1e6))
    waits: list[float] = []
    retry_transient(call, max_wait_s=30.0, sleep=waits.append)
    assert waits == [7.0, 30.0]


def test_the_last_error_is_raised_when_tries_run_out():
    call = Flaky(TransientError("first"), TransientError("second"), TransientError("third"))
    with pytest.raises(TransientError, match="second"):
        retry_transient(call, attempts=2, sleep=lambda _: None)
    assert call.calls == 2


@pytest.mark.parametrize("error", [AuthenticationError("wrong key"), ValueError("bad"), ServiceError("400")])
def test_any_other_error_goes_through_at_once(error):
    call = Flaky(error)
    with pytest.raises(type(error)):
        retry_transient(call, sleep=lambda _: pytest.fail("waited"))
    assert call.calls == 1
