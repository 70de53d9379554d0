"""How likely a model finds the evaluation's targets, and whether an adapter changes that at all.

    likelihoods = await target_likelihoods(client, data)
    mean_nll(likelihoods)                                   # nats per weighted token
    if without_effect(base, likelihoods): ...               # not one logprob differs: there is no adapter

An adapter that is not applied, or that was never trained, gives a plausible score: the base model's. Scores and
replies cannot tell it from a weak one, the logprobs of the same tokens can.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from error_handling import NoEffectError, ServiceError
from evaluation import SampleResult
from service_waits import Watch, wait_for

if TYPE_CHECKING:
    import tinker

    from tinker_backend import Backend

# Enough to move every logprob of any model by more than rounding hides.
_CANARY_RATE = 1e-3
# What is asked of both samplers when their replies are the same.
_ASKED_OF_SAMPLERS = 8


@dataclass(frozen=True)
class TargetLikelihood:
    """One evaluated target under some weights.

    `example` and `logprobs` are digests of its tokens and of the logprobs of all of them, equal for equal bits. `nll`
    is the summed negative log-likelihood of its weighted tokens in nats, `weight` their summed weight.
    """

    example: str
    logprobs: str
    nll: float
    weight: float

    def to_row(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> TargetLikelihood:
        return cls(row["example"], row["logprobs"], row["nll"], row["weight"])


async def target_likelihoods(
    client: tinker.TrainingClient, data: Sequence[tinker.Datum], *, chunk: int = 64, watch: Watch | None = None
) -> list[TargetLikelihood]:
    """The likelihood of each datum under the client's weights, without training; `chunk` go into one forward pass."""
    found = []
    for start in range(0, len(data), chunk):
        part = list(data[start : start + chunk])
        forward = client.forward(part, "cross_entropy")
        output = await wait_for(forward, "the likelihood of the evaluation targets", watch=watch)
        for datum, result in zip(part, output.loss_fn_outputs, strict=True):
            weights = datum.loss_fn_inputs["weights"].to_numpy()
            logprobs = result["logprobs"].to_numpy()
            found.append(
                TargetLikelihood(
                    example=_digest(
                        repr(datum.model_input.to_ints()).encode(),
                        datum.loss_fn_inputs["target_tokens"].to_numpy().tobytes(),
                    ),
                    logprobs=_digest(logprobs.tobytes()),
                    nll=-float((weights * logprobs).sum()),
                    weight=float(weights.sum()),
                )
            )
    return found


def mean_nll(likelihoods: Sequence[TargetLikelihood]) -> float:
    """Negative log-likelihood per weighted token, in nats. Raises `ValueError` when nothing carries weight."""
    weight = sum(one.weight for one in likelihoods)
    if weight <= 0:
        raise ValueError("no token of the data carries weight, so its likelihood per token is undefined")
    return sum(one.nll for one in likelihoods) / weight


def without_effect(base: Sequence[TargetLikelihood], adapter: Sequence[TargetLikelihood]) -> bool:
    """Whether every logprob of the targets that both have is bit for bit the same; False when they share none."""
    before = {one.example: one.logprobs for one in base}
    shared = [one for one in adapter if one.example in before]
    return bool(shared) and all(before[one.example] == one.logprobs for one in shared)


def refuse_without_effect(
    round: int, base: Sequence[TargetLikelihood], adapter: Sequence[TargetLikelihood], *, learning_rate: float
) -> None:
    """Raise `NoEffectError` when the round's adapter leaves every logprob of the targets as it was."""
    if without_effect(base, adapter):
        raise NoEffectError(
            f"round {round}: the adapter has no effect. All {len(adapter)} evaluation targets have, bit for bit, the "
            "logprobs they had before training, so this round's score would be that of the untouched model. Likely "
            f"causes: a learning rate that moves no weight (it is {learning_rate:.3g}); a service that trained or "
            "loaded another adapter than it was asked to; training rows of which no token carries loss. Look at the "
            "losses in metrics.jsonl: unchanged ones mean that nothing was trained."
        )


def same_replies(before: Sequence[SampleResult], after: Sequence[SampleResult]) -> int:
    """How many samples got a reply from both, if all of these replies are equal; else 0."""
    replies = {sample.key: sample.output for sample in before if not sample.error}
    pairs = [(replies[s.key], s.output) for s in after if not s.error and s.key in replies]
    return len(pairs) if all(old == new for old, new in pairs) else 0


def tokens_asked_of_samplers(data: Sequence[tinker.Datum]) -> int:
    """Prompt tokens that `refuse_unused_adapter` sends for these data."""
    return 2 * sum(datum.model_input.length for datum in data[:_ASKED_OF_SAMPLERS])


async def refuse_unused_adapter(
    round: int,
    base: tinker.SamplingClient,
    adapter: tinker.SamplingClient,
    data: Sequence[tinker.Datum],
    *,
    watch: Watch | None = None,
) -> None:
    """Raise `NoEffectError` when two samplers give the same tokens bit-equal logprobs.

    For when all replies are equal: the weights may be trained, and the server sample without them.
    """
    asked = [datum.model_input for datum in data[:_ASKED_OF_SAMPLERS]]
    answers = []
    for client in (base, adapter):
        futures = [client.compute_logprobs(prompt) for prompt in asked]
        answers.append(
            [await wait_for(future, "logprobs of the evaluation targets", watch=watch) for future in futures]
        )
    if asked and answers[0] == answers[1]:
        raise NoEffectError(
            f"round {round}: the adapter has no effect. The sampler of its checkpoint gives every reply of the "
            f"untouched model, and bit for bit its logprobs over {len(asked)} evaluation targets, although training "
            "changed the weights: the server samples without the adapter, or from another one."
        )


async def canary(
    backend: Backend, base_model: str, datum: tinker.Datum, *, rank: int, seed: int, watch: Watch | None = None
) -> None:
    """One optimizer step that must do nothing and one that must do something, on an adapter made for that.

    Learning rate 0 may move no logprob of `datum`, a positive one must move some; raises `ServiceError` otherwise. The
    adapter lives in a session of its own, which ends here, so nothing of the run depends on it.
    """
    import tinker

    with _own_session(backend) as service:
        client = await wait_for(
            service.create_lora_training_client(base_model=base_model, rank=rank, seed=seed), "a trial adapter"
        )
        seen = [await target_likelihoods(client, [datum], watch=watch)]
        for rate in (0.0, _CANARY_RATE):
            gradients = client.forward_backward([datum], "cross_entropy")
            update = client.optim_step(tinker.AdamParams(learning_rate=rate))
            await wait_for(gradients, "a trial step", watch=watch)
            await wait_for(update, "a trial update", watch=watch)
            seen.append(await target_likelihoods(client, [datum], watch=watch))
    untouched, still, moved = seen
    if not without_effect(untouched, still):
        raise ServiceError(
            f"the {backend.describe()} is not to be trusted: an optimizer step with learning rate 0 changed logprobs"
        )
    if without_effect(untouched, moved):
        raise ServiceError(
            f"the {backend.describe()} is not to be trusted: an optimizer step with learning rate {_CANARY_RATE:g} "
            "changed no logprob, so training would have no effect"
        )


@contextlib.contextmanager
def _own_session(backend: Backend) -> Iterator[tinker.ServiceClient]:
    import tinker

    service = tinker.ServiceClient(base_url=backend.base_url, api_key=backend.api_key)
    try:
        yield service
    finally:
        # The adapter goes when its session ends; a server that is gone by then has nothing to let go of.
        with contextlib.suppress(Exception):
            service.close("success").result(timeout=5)


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]
