"""The fault plan: which calls of the local engine go wrong, how, from which one on, and how often.

A plan is a JSON object; every fault in it names a call of the API and what happens to it::

    {"faults": [
      {"call": "optim_step", "kind": "status", "status": 429, "retry_after": 1, "after": 2, "times": 3},
      {"call": "save_weights", "kind": "drop", "when": "after"},
      {"call": "forward_backward", "kind": "fail", "after": 9}
    ]}

    plan = FaultPlan(calls)                         # the names of the calls that the server answers
    plan.put(read_plan("faults.json", calls))       # raises ConfigurationError with everything that is wrong
    plan.due("optim_step")                          # what happens to this call; counted and logged

Every fault counts for itself the calls that match it, lets the first `after` of them pass, and then acts `times`
times. A call is refused or dropped by the first fault whose turn it is; the others stay due for the next call. Nothing
is left to chance, so the same calls meet the same faults. `fault_injection` brings a plan to the server.
"""

from __future__ import annotations

import difflib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from config_faults import Fault, explain
from config_file import KeyPath, dotted, in_json, read_json_object, unusable_values
from config_groups import Count, NotNegative, Positive, StrictModel, Text
from error_handling import ConfigurationError
from queued_request import Reply

logger = logging.getLogger("mock_tinker")

ANY_CALL = "*"
# The calls that are answered with the id of a request, whose result the client then fetches.
QUEUED_CALLS = (
    "asample",
    "create_model",
    "forward_backward",
    "load_weights",
    "optim_step",
    "save_weights",
    "save_weights_external",
    "save_weights_for_sampler",
)
EVENTS_KEPT = 1000

When = Literal["before", "after"]


class PlannedFault(StrictModel):
    """What every fault says: `call`, a name of the API or `*` for each; `after`, how many matching calls pass first
    (0 or more); `times`, how often it acts (1 or more; null: from then on always)."""

    call: Text
    after: int = Field(default=0, ge=0)
    times: Count | None = 1


class StatusFault(PlannedFault):
    """The call is answered with HTTP `status` (400..599) in place of its answer, with `retry_after` (seconds, 0 or
    more) as Retry-After header. `when` says whether the request was carried out first.

    With `queue_state` the answer is that of a service which keeps the request in its queue, with `message` as its
    reason; the SDK takes it from `retrieve_future` with status 408.

    After 408, 409, 429 and 5xx the SDK sends a request again. After others it does not: one that belongs to a model's
    order then leaves a hole there, and the model's later requests wait a while for it.
    """

    kind: Literal["status"] = "status"
    status: int = Field(ge=400, le=599)
    retry_after: NotNegative | None = None
    message: Text | None = None
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] | None = None
    when: When = "before"


class DropFault(PlannedFault):
    """The connection is closed without an answer, before the request was carried out or after."""

    kind: Literal["drop"] = "drop"
    when: When = "before"


class DelayFault(PlannedFault):
    """The call takes `seconds` (above 0, at most an hour) longer: they pass before the request is carried out, or
    between that and the answer."""

    kind: Literal["delay"] = "delay"
    seconds: Positive = Field(le=3600)
    when: When = "before"


class ExpireFault(PlannedFault):
    """The life of a checkpoint ends as the call comes in: of the one at `path`, or of the `newest` of a kind.

    It can then be neither loaded nor opened for sampling. Samplers opened before are not looked for.
    """

    kind: Literal["expire"] = "expire"
    path: Annotated[str, Field(pattern=r"^tinker://.")] | None = None
    newest: Literal["weights", "sampler_weights", "external_weights"] | None = None


class FailFault(PlannedFault):
    """The request is accepted and fails when its turn comes, with `category` and `message`; it changes nothing.

    Here requests are counted, each once however often it is sent. Gradients that wait for a failed optimizer step
    keep waiting: the next one applies them.
    """

    kind: Literal["fail"] = "fail"
    category: Literal["server", "user", "unknown"] = "server"
    message: Text | None = None


KINDS: dict[str, type[PlannedFault]] = {
    "status": StatusFault,
    "drop": DropFault,
    "delay": DelayFault,
    "expire": ExpireFault,
    "fail": FailFault,
}


def read_plan(path: Path | str, calls: Collection[str]) -> list[PlannedFault]:
    """The faults in a JSON file. Raises `ConfigurationError` naming the file, line and item of all that is wrong."""
    written = read_json_object(path)
    faults, wrong = _check_plan(written.data, calls)
    messages = [*written.faults]
    for key, message in wrong:
        known = [key[:length] for length in range(len(key), 0, -1) if key[:length] in written.lines]
        line = f":{written.lines[known[0]]}" if known else ""
        messages.append(f"{written.path}{line}: {dotted(key)}: {message}")
    if messages:
        raise ConfigurationError("\n".join(messages))
    return faults


def parse_plan(data: Any, calls: Collection[str]) -> list[PlannedFault]:
    """The faults of a plan that is no file (`{"faults": [...]}`). Raises `ConfigurationError`."""
    if not isinstance(data, dict):
        raise ConfigurationError(f'fault plan: must be an object {{"faults": [...]}}, got {in_json(data)}')
    faults, wrong = _check_plan(data, calls)
    if wrong:
        raise ConfigurationError("\n".join(f"fault plan: {dotted(key)}: {message}" for key, message in wrong))
    return faults


@dataclass(frozen=True)
class Due:
    """What happens to one call: checkpoints that expire, seconds to wait before it is carried out and before it is
    answered, and what takes the place of its answer."""

    expiries: tuple[ExpireFault, ...]
    wait_before: float
    wait_after: float
    answer: StatusFault | DropFault | None


@dataclass
class _Count:
    fault: PlannedFault
    seen: int = 0
    triggered: int = 0

    def see(self) -> bool:
        """Count a matching call; True when the fault's turn has come."""
        self.seen += 1
        return self.seen > self.fault.after and (self.fault.times is None or self.triggered < self.fault.times)


class FaultPlan:
    """The faults in force, and what they did so far. Safe to use from any thread.

    `calls` are the names of the calls that the server answers.
    """

    def __init__(self, calls: Collection[str]) -> None:
        self.calls = frozenset(calls)
        self._lock = threading.Lock()
        self._counts: list[_Count] = []
        self._events: deque[str] = deque(maxlen=EVENTS_KEPT)

    def put(self, faults: Sequence[PlannedFault]) -> None:
        """Set these faults in force in place of all others; every count starts again at 0."""
        with self._lock:
            self._counts = [_Count(fault) for fault in faults]
            self._events.clear()
        logger.warning("fault plan: faults in force: %d", len(faults))

    def due(self, call: str) -> Due | None:
        """What happens to this call on its way in and out; None when nothing does. Counts it."""
        expiries: list[ExpireFault] = []
        waits = {"before": 0.0, "after": 0.0}
        answer: StatusFault | DropFault | None = None
        with self._lock:
            for count in self._matching(call):
                fault = count.fault
                if isinstance(fault, FailFault) or not count.see():
                    continue
                if isinstance(fault, StatusFault | DropFault):
                    if answer is not None:
                        continue
                    answer = fault
                elif isinstance(fault, DelayFault):
                    waits[fault.when] += fault.seconds
                elif isinstance(fault, ExpireFault):
                    expiries.append(fault)
                self._trigger(count, call)
        if not expiries and answer is None and not any(waits.values()):
            return None
        return Due(tuple(expiries), waits["before"], waits["after"], answer)

    def failure(self, call: str) -> Reply | None:
        """The reply that fails the request now being carried out; None when it is to be carried out. Counts it."""
        failing: FailFault | None = None
        with self._lock:
            for count in self._matching(call):
                if isinstance(count.fault, FailFault) and count.see() and failing is None:
                    failing = count.fault
                    self._trigger(count, call)
        if failing is None:
            return None
        message = failing.message or f"the fault plan lets this {call} fail; nothing was changed"
        return Reply({"error": message, "category": failing.category})

    def guard(self, call: str, job: Callable[[], Reply]) -> Callable[[], Reply]:
        """`job`, which when its turn comes fails instead if the plan says so."""

        def guarded() -> Reply:
            reply = self.failure(call)
            return job() if reply is None else reply

        return guarded

    def note(self, event: str) -> None:
        """Log an event and keep it for the report."""
        with self._lock:
            self._note(event)

    def report(self) -> dict[str, Any]:
        """The faults, each with the calls it has `seen` and how often it `triggered`; the newest events in words."""
        with self._lock:
            faults = [
                count.fault.model_dump(exclude_none=True)
                | {"times": count.fault.times, "seen": count.seen, "triggered": count.triggered}
                for count in self._counts
            ]
            return {"faults": faults, "events": list(self._events)}

    def _matching(self, call: str) -> list[_Count]:
        return [count for count in self._counts if count.fault.call in (call, ANY_CALL)]

    def _trigger(self, count: _Count, call: str) -> None:
        count.triggered += 1
        index = next(index for index, other in enumerate(self._counts) if other is count)
        self._note(f"fault {index}: {call} number {count.seen}: {_describe(count.fault)}")

    def _note(self, event: str) -> None:
        self._events.append(event)
        logger.warning("fault plan: %s", event)


def _describe(fault: PlannedFault) -> str:
    if isinstance(fault, StatusFault):
        return f"answered {fault.status}" + (", though carried out" if fault.when == "after" else "")
    if isinstance(fault, DropFault):
        return f"connection dropped {fault.when} it was carried out"
    if isinstance(fault, DelayFault):
        return f"delayed by {fault.seconds:g} s {fault.when} it was carried out"
    if isinstance(fault, FailFault):
        return f"failed with category {fault.category}"
    return "a checkpoint expires"


def _check_plan(data: Mapping[str, Any], calls: Collection[str]) -> tuple[list[PlannedFault], list[Fault]]:
    """The faults that are sound, and what is wrong with the others."""
    wrong: list[Fault] = [((key,), "unknown key; a plan has one: faults") for key in data if key != "faults"]
    items = data.get("faults")
    if not isinstance(items, list):
        given = f"got {in_json(items)}" if "faults" in data else "and is not given"
        return [], [*wrong, (("faults",), f"must be a list of faults, {given}")]
    faults = []
    for index, item in enumerate(items):
        fault, its_own = _check_fault(item, calls, ("faults", index))
        wrong += its_own
        if fault is not None:
            faults.append(fault)
    return faults, wrong


def _check_fault(item: Any, calls: Collection[str], path: KeyPath) -> tuple[PlannedFault | None, list[Fault]]:
    if not isinstance(item, dict):
        return None, [(path, f"must be an object, got {in_json(item)}")]
    unusable = list(unusable_values(item, path))
    if unusable:
        return None, unusable
    kind = item.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        given = f"got {in_json(kind)}" if "kind" in item else "and is not given"
        return None, [((*path, "kind"), f"must be one of {', '.join(KINDS)}, {given}")]
    model = KINDS[kind]
    wrong: list[Fault] = []
    fault = None
    try:
        fault = model.model_validate(item)
    except ValidationError as err:
        known = list(model.model_fields)
        for error in err.errors(include_url=False):
            located: dict[str, Any] = {**error, "loc": (*path, *error["loc"])}
            wrong.append(explain(located, lambda _: known, ()))
    call = item.get("call")
    if isinstance(call, str) and call:
        message = _wrong_call(call, kind, calls)
        wrong += [((*path, "call"), message)] if message else []
    if isinstance(fault, ExpireFault) and (fault.path is None) == (fault.newest is None):
        wrong.append((path, "give either path (tinker://...) or newest (the kind of checkpoint)"))
    return (None if wrong else fault), wrong


def _wrong_call(call: str, kind: str, calls: Collection[str]) -> str | None:
    if call == ANY_CALL or call in (QUEUED_CALLS if kind == "fail" else calls):
        return None
    if call in calls:
        queued = ", ".join(QUEUED_CALLS)
        return f"{call} is answered at once, so no request of it fails later; choose {queued}, or the kind status"
    near = difflib.get_close_matches(call, calls, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known are {ANY_CALL}, {', '.join(sorted(calls))}"
    return f"there is no call {json.dumps(call)}; {hint}"
