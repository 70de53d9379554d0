"""Tinker's losses against formulas written out anew, in torch, value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from token_losses import LOSSES, has_gradient

Tensors = dict[str, torch.Tensor]
LOW, HIGH, BETA = 0.7, 1.3, 0.2
SETTINGS = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH, "beta": BETA}


def make_inputs(shape: tuple[int, int]) -> tuple[torch.Tensor, Tensors]:
    generator = torch.Generator().manual_seed(5)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    logprobs = -normal(1.0).abs() - 0.05
    mask = (torch.arange(shape[0]) % 3 != 0).double()[:, None].expand(shape)
    inputs = {
        "weights": normal(1.0),
        "logprobs": logprobs + normal(0.4),
        "advantages": normal(1.0),
        "sequence_ratio_mask": mask,
    }
    return logprobs, inputs


def token_by_token(one: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor, Tensors], torch.Tensor]:
    """The sum over tokens of a loss that is written for one of them."""

    def total(logprobs: torch.Tensor, inputs: Tensors) -> torch.Tensor:
        terms = [
            one(logprobs[t, k], **{name: values[t, k] for name, values in inputs.items()})
            for t in range(logprobs.shape[0])
            for k in range(logprobs.shape[1])
        ]
        return torch.stack(terms).sum()

    return total


def clip(ratio: torch.Tensor) -> torch.Tensor:
    return torch.min(torch.max(ratio, torch.full_like(ratio, LOW)), torch.full_like(ratio, HIGH))


def cross_entropy(p: torch.Tensor, weights: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
    return -weights * p


def importance_sampling(
    p: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, **_: torch.Tensor
) -> torch.Tensor:
    return -torch.exp(p) / torch.exp(logprobs) * advantages


def ppo(p: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(p) / torch.exp(logprobs)
    return -torch.minimum(ratio * advantages, clip(ratio) * advantages)


def cispo(p: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factor = clip(torch.exp(p) / torch.exp(logprobs))
    return -factor * advantages * p


def dro(p: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
    return -(p * advantages) + BETA / 2 * (p - logprobs).square()


def gspo(logprobs: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    with torch.no_grad():
        ratios = torch.exp(logprobs) / torch.exp(inputs["logprobs"])
        marked = ratios[inputs["sequence_ratio_mask"] == 1]
        sequence_ratio = marked.prod() ** (1 / marked.numel())
    # The value of s for every token, with the gradient of the token's own probability.
    carried = sequence_ratio * torch.exp(logprobs) / torch.exp(logprobs).detach()
    return -torch.minimum(carried * inputs["advantages"], clip(carried) * inputs["advantages"]).sum()


FORMULAS = {
    "cross_entropy": token_by_token(cross_entropy),
    "importance_sampling": token_by_token(importance_sampling),
    "ppo": token_by_token(ppo),
    "cispo": token_by_token(cispo),
    "dro": token_by_token(dro),
    "gspo": gspo,
}


def test_every_loss_has_a_formula() -> None:
    assert set(FORMULAS) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(11, 1), (7, 3)])
def test_value_and_gradient_follow_the_formula(name: str, shape: tuple[int, int]) -> None:
    logprobs, inputs = make_inputs(shape)
    ours, theirs = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    found = LOSSES[name].function(ours, inputs, SETTINGS)
    assert found.shape == shape
    expected = FORMULAS[name](theirs, inputs)
    found.sum().backward()
    expected.backward()
    assert found.sum().item() == pytest.approx(expected.item(), abs=1e-9)
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_rows_said_to_have_no_gradient_have_none(name: str) -> None:
    logprobs, inputs = make_inputs((9, 2))
    for values in (inputs["weights"], inputs["advantages"]):
        values[[1, 4, 5]] = 0.0
    leaf = logprobs.clone().requires_grad_()
    LOSSES[name].function(leaf, inputs, SETTINGS).sum().backward()
    assert leaf.grad is not None
    left_out = ~has_gradient(LOSSES[name], inputs)
    assert left_out.sum() == (0 if name == "dro" else 3)
    assert (leaf.grad[left_out] == 0).all()


def test_a_sequence_without_marked_tokens_has_ratio_one() -> None:
    logprobs, inputs = make_inputs((5, 1))
    inputs["sequence_ratio_mask"] = torch.zeros(5, 1, dtype=torch.float64)
    found = LOSSES["gspo"].function(logprobs, inputs, SETTINGS)
    torch.testing.assert_close(found, -inputs["advantages"])
