"""The sampling requests of the queue as what a batch decodes: checked when they join, answered as soon as they end.

model.serve(checkpoint, QueuedSamples(batch, model.check_sample))
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from queued_request import Reply, failed
from running_batch import RunningBatch
from sample_format import SampleRequest, SampleResult, encode_sample
from wire_format import RequestError

Check = Callable[[SampleRequest], Reply | None]


class QueuedSamples:
    """A `SampleSource` over a `RunningBatch` whose items are pairs of a sampler and a `SampleRequest`.

    `check` looks at a request that is about to join: it raises `RequestError`, or returns the reply to fail it with.
    """

    def __init__(self, batch: RunningBatch, check: Check) -> None:
        self._batch = batch
        self._check = check
        self._requests: dict[Hashable, SampleRequest] = {}

    @property
    def is_gathering(self) -> bool:
        """Whether more requests are about to come."""
        return self._batch.is_gathering

    def take(self) -> Sequence[tuple[Hashable, SampleRequest]]:
        """The sound ones among the requests that join now; the others are answered."""
        joining = []
        for request_id, (_, request) in self._batch.take():
            try:
                refused = self._check(request)
            except RequestError as error:
                refused = failed(error)
            if refused is not None:
                self._batch.finish(request_id, refused)
                continue
            self._requests[request_id] = request
            joining.append((request_id, request))
        return joining

    def is_wanted(self, key: Hashable) -> bool:
        """False once the client has cancelled the request."""
        return self._batch.is_open(str(key))

    def finish(self, key: Hashable, result: SampleResult) -> None:
        """Answer with what was sampled."""
        self._batch.finish(str(key), Reply(encode_sample(self._requests.pop(key), result)))

    def fail(self, key: Hashable, error: Exception) -> None:
        """Answer with the error."""
        del self._requests[key]
        self._batch.finish(str(key), failed(error))
