"""Shared by tests that drive the local engine through the SDK: data, clients, a few steps of training."""

from __future__ import annotations

from typing import Any

import tinker
from tinker import types

KEY = "tml-local-test"
STEP = types.AdamParams(learning_rate=2e-3)


def make_datum(tokenizer: Any, question: str, answer: str) -> tinker.Datum:
    prompt = tokenizer.encode(question)
    reply = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    tokens = prompt + reply
    weights = [0.0] * len(prompt) + [1.0] * len(reply)
    return tinker.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def new_client(service_client: Any, model: str, **options: Any) -> Any:
    return service_client.create_lora_training_client(base_model=model, **{"rank": 8, "seed": 1, **options}).result()


def train(client: Any, data: list[tinker.Datum], steps: int) -> list[float]:
    """`steps` steps with two requests in flight; the summed loss of each."""
    futures = [(client.forward_backward(data, "cross_entropy"), client.optim_step(STEP)) for _ in range(steps)]
    losses = []
    for forward, step in futures:
        losses.append(forward.result(timeout=60).metrics["loss:sum"])
        step.result(timeout=60)
    return losses


def prompt_of(tokenizer: Any, text: str) -> types.ModelInput:
    return types.ModelInput.from_ints(tokenizer.encode(text))


def greedy(tokens: int = 8, **options: Any) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=tokens, temperature=0.0, **options)
