"""Tinker's losses over the logprobs of target tokens.

    loss = LOSSES["ppo"](logprobs, {"logprobs": old, "advantages": advantages}, settings).sum()

Each takes the trained model's logprobs (N, K), the request's other inputs in the same shape, and its settings, and
returns a loss per token (N, K). The loss of a request is the sum, never a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

LossFunction = Callable[[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, float]], torch.Tensor]


def _cross_entropy(
    logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], settings: Mapping[str, float]
) -> torch.Tensor:
    return -logprobs * inputs["weights"]


def _importance_sampling(
    logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], settings: Mapping[str, float]
) -> torch.Tensor:
    return -(logprobs - inputs["logprobs"]).exp() * inputs["advantages"]


def _ppo(logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], settings: Mapping[str, float]) -> torch.Tensor:
    ratio = (logprobs - inputs["logprobs"]).exp()
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


def _cispo(logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], settings: Mapping[str, float]) -> torch.Tensor:
    ratio = (logprobs - inputs["logprobs"]).exp().detach()
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -clipped * logprobs * inputs["advantages"]


def _dro(logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], settings: Mapping[str, float]) -> torch.Tensor:
    difference = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * difference**2)


# Per-token losses, (N, K) each; the request's loss is their sum.
LOSSES: dict[str, LossFunction] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
}


def has_gradient(loss_fn: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Which rows can have a gradient, bool (N,): a token of weight or advantage 0 has none (but DRO's always has)."""
    factor = {"cross_entropy": "weights", "dro": None}.get(loss_fn, "advantages")
    if factor is None:
        return torch.ones(next(iter(inputs.values())).shape[0], dtype=torch.bool)
    return (inputs[factor] != 0).any(dim=1)
