"""One forward, or forward and backward, pass over a few sequences.

    for part in split_into_passes(model, batch):
        results = run_pass(model, [batch.data[index] for index in part], batch)

The output layer is the widest one, so it sees only the rows that are scored, a chunk at a time, and its backward pass
ends at the hidden states; the rest of the model then runs backward once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from prompt_scoring import split_by_tokens
from token_losses import LOSSES, TokenLoss, has_gradient
from wire_format import RequestError, TrainingBatch, TrainingDatum

# Sequences shorter than this are laid side by side in one row of at most so many tokens: padding would cost more than
# the wider attention does.
PACKED_TOKENS = 512
# Floats of logits that are held at once.
LOGITS_CHUNK = 32_000_000


class TrainableModel(Protocol):
    """What a pass needs of a model. Hidden states are (rows, tokens, width), logits (rows, vocabulary)."""

    device: torch.device
    vocabulary: int
    prefill_tokens: int
    packs_sequences: bool

    def hidden_states(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass
class DatumResult:
    """Target logprobs of one datum, float32 (T,) or (T, K) as its targets came, its summed loss and its metrics."""

    logprobs: np.ndarray
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


def split_into_passes(model: TrainableModel, batch: TrainingBatch) -> list[list[int]]:
    """Indices of `batch.data` in groups that one pass takes: of as many targets a position, packed into a row of
    `PACKED_TOKENS`, or padded where the model cannot pack."""
    parts: list[list[int]] = []
    for width in sorted({datum.targets.shape[1] for datum in batch.data}):
        indices = [index for index, datum in enumerate(batch.data) if datum.targets.shape[1] == width]
        lengths = [len(datum.tokens) for datum in batch.data]
        if not model.packs_sequences:
            parts.extend(split_by_tokens(indices, lengths.__getitem__, model.prefill_tokens))
            continue
        first = len(parts)
        for index in indices:
            if len(parts) > first and sum(lengths[other] for other in parts[-1]) + lengths[index] <= PACKED_TOKENS:
                parts[-1].append(index)
            else:
                parts.append([index])
    return parts


def pack(model: TrainableModel, sequences: Sequence[np.ndarray]) -> torch.Tensor:
    """Hidden states (all tokens, width) of sequences that share one row and do not see each other."""
    lengths = [len(tokens) for tokens in sequences]
    tokens = torch.from_numpy(np.concatenate(sequences)).to(model.device)[None]
    positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(model.device)[None]
    owner = torch.repeat_interleave(torch.tensor(lengths)).to(model.device)
    mask = ((owner[:, None] == owner[None]) & (positions[0][:, None] >= positions))[None, None]
    return model.hidden_states(tokens, position_ids=positions, attention_mask=mask)[0]


def run_pass(model: TrainableModel, data: Sequence[TrainingDatum], batch: TrainingBatch) -> list[DatumResult]:
    """Score `data` (of one number of targets a position); unless `batch.forward_only` gradients are added up."""
    if batch.custom is not None:
        return _run_whole_sequences(model, data, batch, _custom_losses(batch))
    loss = LOSSES[batch.loss_fn]
    if loss.is_sequence_loss:
        return _run_whole_sequences(model, data, batch, _sequence_losses(loss, batch.settings))
    return _run_tokens(model, data, batch, loss)


def _run_tokens(
    model: TrainableModel, data: Sequence[TrainingDatum], batch: TrainingBatch, loss: TokenLoss
) -> list[DatumResult]:
    row = _rows_of(model, data)
    target = torch.from_numpy(np.concatenate([datum.targets for datum in data])).to(model.device)
    tensors = {
        name: torch.from_numpy(np.concatenate([datum.inputs[name] for datum in data])).to(model.device)
        for name in data[0].inputs
    }
    needs_gradient = np.zeros(len(row), bool)
    if not batch.forward_only:
        needs_gradient = has_gradient(loss, tensors).cpu().numpy()
    with torch.set_grad_enabled(bool(needs_gradient.any())):
        hidden = _hidden_rows(model, data)
    leaf = hidden.detach().requires_grad_(hidden.requires_grad)
    logprobs = torch.zeros(target.shape, device=model.device)
    losses = torch.zeros(target.shape, device=model.device)
    for with_gradient in (True, False):
        for chosen in _chunks(np.flatnonzero(needs_gradient == with_gradient), model.vocabulary):
            where = torch.from_numpy(chosen).to(model.device)
            with torch.set_grad_enabled(with_gradient):
                picked = _picked(model, leaf, row[chosen], target[where])
                part = loss.function(picked, {name: values[where] for name, values in tensors.items()}, batch.settings)
                if with_gradient:
                    part.sum().backward()
            logprobs[where] = picked.detach()
            losses[where] = part.detach()
    if leaf.grad is not None:
        hidden.backward(leaf.grad)
    return _split_results(data, logprobs.cpu().numpy(), losses.cpu().numpy())


DatumLoss = Callable[[TrainingDatum, torch.Tensor], tuple[torch.Tensor, Mapping[str, float]]]


def _sequence_losses(loss: TokenLoss, settings: Mapping[str, float]) -> DatumLoss:
    def datum_loss(datum: TrainingDatum, logprobs: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, float]]:
        inputs = {name: torch.from_numpy(values).to(logprobs.device) for name, values in datum.inputs.items()}
        return loss.function(logprobs, inputs, settings).sum(), {}

    return datum_loss


def _custom_losses(batch: TrainingBatch) -> DatumLoss:
    custom = batch.custom

    def datum_loss(datum: TrainingDatum, logprobs: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, float]]:
        assert custom is not None, "guarded by the caller"
        # The client traced its loss on the CPU: tensors that the loss makes itself are there.
        values = logprobs.cpu()
        return custom(values[:, 0] if datum.is_flat else values, datum.inputs)

    return datum_loss


def _run_whole_sequences(
    model: TrainableModel, data: Sequence[TrainingDatum], batch: TrainingBatch, datum_loss: DatumLoss
) -> list[DatumResult]:
    """A loss over whole sequences: all logprobs first, then the loss and its gradient by them, then backward."""
    row = _rows_of(model, data)
    target = torch.from_numpy(np.concatenate([datum.targets for datum in data])).to(model.device)
    with torch.set_grad_enabled(not batch.forward_only):
        hidden = _hidden_rows(model, data)
    leaf = hidden.detach().requires_grad_(hidden.requires_grad)
    logprobs = torch.zeros(target.shape, device=model.device)
    with torch.no_grad():
        for chosen in _chunks(np.arange(len(row)), model.vocabulary):
            logprobs[torch.from_numpy(chosen).to(model.device)] = _picked(
                model, leaf, row[chosen], target[torch.from_numpy(chosen).to(model.device)]
            )
    logprobs.requires_grad_(not batch.forward_only)
    results = []
    start = 0
    for datum in data:
        part = logprobs[start : start + len(datum.tokens)]
        with torch.set_grad_enabled(not batch.forward_only):
            loss, metrics = datum_loss(datum, part)
        if loss.requires_grad:
            loss.backward()
        values = part.detach().cpu().numpy()
        results.append(DatumResult(values[:, 0] if datum.is_flat else values, float(loss.detach()), dict(metrics)))
        start += len(datum.tokens)
    if logprobs.grad is not None:
        slope = logprobs.grad
        for chosen in _chunks(np.flatnonzero((slope != 0).any(dim=1).cpu().numpy()), model.vocabulary):
            where = torch.from_numpy(chosen).to(model.device)
            picked = _picked(model, leaf, row[chosen], target[where])
            (picked * slope[where]).sum().backward()
    if leaf.grad is not None:
        hidden.backward(leaf.grad)
    return results


def _chunks(rows: np.ndarray, vocabulary: int) -> list[np.ndarray]:
    size = max(1, LOGITS_CHUNK // vocabulary)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _picked(model: TrainableModel, hidden: torch.Tensor, rows: np.ndarray, target: torch.Tensor) -> torch.Tensor:
    """Logprobs (N, K) of `target` (N, K) after the hidden states in `rows` (N,)."""
    logits = model.logits(hidden.index_select(0, torch.from_numpy(rows).to(hidden.device)))
    return logits.gather(1, target) - logits.logsumexp(-1, keepdim=True)


def _hidden_rows(model: TrainableModel, data: Sequence[TrainingDatum]) -> torch.Tensor:
    """Hidden states (rows, width) of the sequences' tokens; `_rows_of` says which row is which token's."""
    sequences = [np.asarray(datum.tokens, np.int64) for datum in data]
    if model.packs_sequences and len(data) > 1:
        return pack(model, sequences)
    # Padding stands to the right, where causal attention keeps it out of sight: no mask is needed.
    tokens = np.zeros((len(data), max(map(len, sequences))), np.int64)
    for index, sequence in enumerate(sequences):
        tokens[index, : len(sequence)] = sequence
    return model.hidden_states(torch.from_numpy(tokens).to(model.device)).flatten(0, 1)


def _rows_of(model: TrainableModel, data: Sequence[TrainingDatum]) -> np.ndarray:
    """The row of `_hidden_rows` that holds each token, the sequences' tokens one after the other."""
    lengths = [len(datum.tokens) for datum in data]
    if model.packs_sequences and len(data) > 1:
        return np.arange(sum(lengths))
    longest = max(lengths)
    return np.concatenate([index * longest + np.arange(length) for index, length in enumerate(lengths)])


def _split_results(data: Sequence[TrainingDatum], logprobs: np.ndarray, losses: np.ndarray) -> list[DatumResult]:
    results = []
    start = 0
    for datum in data:
        length = len(datum.tokens)
        own = logprobs[start : start + length]
        loss = float(losses[start : start + length].sum(dtype=np.float64))
        results.append(DatumResult(own[:, 0] if datum.is_flat else own, loss))
        start += length
    return results


def check_datum(datum: TrainingDatum, where: str, *, max_context: int, vocabulary: int) -> None:
    """Raise `RequestError` when a model of this context length and vocabulary cannot take `datum`."""
    if len(datum.tokens) > max_context:
        raise RequestError(f"{where}: {len(datum.tokens)} tokens, the model's context holds {max_context}: shorten it")
    for name, tokens in (("model_input", datum.tokens), ("target_tokens", datum.targets)):
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocabulary:
            raise RequestError(
                f"{where}: {name} holds token {low if low < 0 else high}; this model's tokens are 0 to "
                f"{vocabulary - 1} (was it made with another model's tokenizer?)"
            )
