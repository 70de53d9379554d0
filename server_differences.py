"""Where other servers of the Tinker API differ from what the SDK expects of one, and how each difference is met.

    server_differences.accept_samples_without_ids()
    if server_differences.lacks_create_from_state(error):
        client = await server_differences.load_into_new_client(service, saved, path, optimizer=True)

`tinker_backend` and `step_pipeline` ask here. A difference is noticed by what a server does, never by its name, so
that a server which stops differing is treated like any other. All were found on SkyRL 0.4.0. Two more are met where the
figures are made: `tinker_backend.trained_nll` takes losses from the returned logprobs, because a server may send no
metrics; and `compute_logprobs`, which SkyRL answers one value short, is not used at all.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import base_models
from error_handling import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    import tinker

DEPRECATION_LOGGER = "tinker.lib.public_interfaces.training_client"


def accept_samples_without_ids() -> None:
    """Let the SDK return samples of a server that numbers none; a server that does is treated as before.

    The SDK asserts that every promise of a sample carries `sample_sequence_ids`, and stamps them on the sequences. The
    ids only serve requests that refer back to a sequence, which this project never sends. Safe to call again.
    """
    from tinker.lib.public_interfaces import sampling_client

    attach = sampling_client._attach_sequence_ids
    if attach.__module__ == __name__:
        return

    def attach_if_sent(response: Any, ids: list[str] | None) -> Any:
        return response if ids is None else attach(response, ids)

    sampling_client._attach_sequence_ids = attach_if_sent  # type: ignore[assignment]


def lacks_create_from_state(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is a server's way to say that it makes no model from a saved state.

    It refuses the request for the field that only loading into an existing model has. Every other refusal, such as
    that of a state which is not there, is a real failure.
    """
    import tinker

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, tinker.UnprocessableEntityError):
            detail = cause.body.get("detail") if isinstance(cause.body, dict) else None
            faults = detail if isinstance(detail, list) else []
            return any(isinstance(fault, dict) and "model_id" in fault.get("loc", ()) for fault in faults)
        cause = cause.__cause__
    return False


def is_missing(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is the service's 404 or 410: what was asked for is not there any more."""
    import tinker

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, tinker.APIStatusError) and cause.status_code in (404, 410):
            return True
        cause = cause.__cause__
    return False


async def load_into_new_client(
    service: tinker.ServiceClient, saved: tinker.types.WeightsInfoResponse, path: str, *, optimizer: bool
) -> tinker.TrainingClient:
    """A training client holding the state at `path`, on a server that makes no model from a saved state.

    A new adapter like the `saved` one, whose very first request is the load: servers refuse a later one. Raises
    `CheckpointError` when the server does not tell the rank, and the SDK's errors.
    """
    if saved.lora_rank is None:
        raise CheckpointError(f"{path} cannot be restored: the server does not tell its LoRA rank")
    client = await service.create_lora_training_client(base_model=saved.base_model, rank=saved.lora_rank)
    with _without_deprecation_notice():
        loading = client.load_state_with_optimizer(path) if optimizer else client.load_state(path)
    await loading
    return client


async def has_let_go(sampling_client: tinker.SamplingClient) -> bool:
    """Whether the server cannot sample saved weights because it has let go of the training run that saved them.

    SkyRL's JAX backend samples a checkpoint through the adapter that was trained, which it unloads five minutes after
    the last sign of life, and when it restarts; the files are still there. Only a sample tells. Raises the SDK's
    errors for every other failure.
    """
    import tinker

    probe = tinker.ModelInput.from_ints([1])
    try:
        await sampling_client.sample(probe, 1, tinker.SamplingParams(max_tokens=1, temperature=0.0))
    except (tinker.TinkerError, ValueError) as err:
        if "not loaded" in str(err):
            return True
        raise
    return False


def runs_in_order(client: tinker.TrainingClient) -> bool:
    """Whether the server can be trusted to run the client's requests in the order in which they were sent.

    SkyRL looks for passes first and for optimizer steps after them. When both arrive between the two looks, the step
    overtakes the gradients sent just before it and is taken without them, and nobody is told; so to such a server a
    step is sent only once its gradients are there. Whether a server has this race cannot be asked. What tells is the
    model's id: one that goes by the protocol's numbers derives it from them (`<session>:train:<number>`).
    """
    return ":train:" in client.model_id


def context_of_folder(model: str) -> int | None:
    """Context length in tokens that the folder `model` states, for a server that tells none; None for other models."""
    if not Path(model).is_dir() or model in base_models.table_names():
        return None
    # A folder with only the tokenizer is enough for a client, and then the length stays unknown.
    with contextlib.suppress(ConfigurationError):
        return base_models.resolve_base_model(model).max_context
    return None


@contextlib.contextmanager
def _without_deprecation_notice() -> Iterator[None]:
    """Keep the SDK's advice to create clients from states to itself: there is nobody who could follow it."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("DEPRECATED")

    logger = logging.getLogger(DEPRECATION_LOGGER)
    logger.addFilter(is_other)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.removeFilter(is_other)
