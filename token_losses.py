"""Tinker's losses over the logprobs of target tokens.

    loss = LOSSES["ppo"].function(logprobs, {"logprobs": old, "advantages": advantages}, settings).sum()

Each takes the trained model's logprobs (N, K), the request's other inputs in the same shape, and its settings, and
returns a loss per token (N, K). The loss of a request is the sum, never a mean. Formulas: Tinker's documentation of
its losses; importance ratios are those of the trained model to the one that sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Inputs = Mapping[str, torch.Tensor]
LossFunction = Callable[[torch.Tensor, Inputs, Mapping[str, float]], torch.Tensor]


@dataclass(frozen=True)
class TokenLoss:
    """A loss and what the engine must know of it.

    `factor`: the input whose zero takes a token out of the gradient, if there is one. `is_sequence_loss`: a token's
    loss needs the logprobs of its whole sequence, so `function` is called with one datum at a time.
    """

    function: LossFunction
    factor: str | None = "advantages"
    is_sequence_loss: bool = False


def _cross_entropy(logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]) -> torch.Tensor:
    return -logprobs * inputs["weights"]


def _importance_sampling(logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]) -> torch.Tensor:
    return -(logprobs - inputs["logprobs"]).exp() * inputs["advantages"]


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, settings: Mapping[str, float]) -> torch.Tensor:
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _ppo(logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]) -> torch.Tensor:
    return _clipped((logprobs - inputs["logprobs"]).exp(), inputs["advantages"], settings)


def _gspo(logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]) -> torch.Tensor:
    # GSPO-token (Zheng et al., 2025): each token has the value of the sequence's ratio, the geometric mean of its
    # tokens' ratios, and the gradient of its own logprob.
    marked = inputs["sequence_ratio_mask"] != 0
    fixed = logprobs.detach()
    mean = (fixed - inputs["logprobs"])[marked].mean() if marked.any() else fixed.new_zeros(())
    return _clipped((mean + logprobs - fixed).exp(), inputs["advantages"], settings)


def _cispo(logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]) -> torch.Tensor:
    ratio = (logprobs - inputs["logprobs"]).exp().detach()
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -clipped * logprobs * inputs["advantages"]


def _dro(logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]) -> torch.Tensor:
    difference = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * difference**2)


LOSSES: dict[str, TokenLoss] = {
    "cross_entropy": TokenLoss(_cross_entropy, factor="weights"),
    "importance_sampling": TokenLoss(_importance_sampling),
    "ppo": TokenLoss(_ppo),
    "cispo": TokenLoss(_cispo),
    "dro": TokenLoss(_dro, factor=None),
    "gspo": TokenLoss(_gspo, is_sequence_loss=True),
}


def has_gradient(loss: TokenLoss, inputs: Inputs) -> torch.Tensor:
    """Which rows can have a gradient, bool (N,): a token of weight or advantage 0 has none (but DRO's always has)."""
    if loss.factor is None:
        return torch.ones(next(iter(inputs.values())).shape[0], dtype=torch.bool)
    return (inputs[loss.factor] != 0).any(dim=1)
