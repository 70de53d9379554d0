"""What a client may ask of a sampler beside a continuation, through the real SDK."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from sdk_clients import KEY, STEP, greedy, make_datum, new_client, prompt_of, train
from tinker import types

ONE_TOKEN = types.SamplingParams(max_tokens=1, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def sampler(service_client: Any, base_model_name: str) -> Any:
    return service_client.create_sampling_client(base_model=base_model_name).result()


@pytest.fixture(scope="module")
def prompt(small_tokenizer: Any) -> types.ModelInput:
    return prompt_of(small_tokenizer, "What is a cat? It is a small animal that lives in the house.")


@pytest.fixture(scope="module")
def plain_logprobs(prompt: types.ModelInput) -> torch.Tensor:
    """Logprobs (L - 1, vocabulary) of the token after each of the prompt's, by plain transformers."""
    from transformers import AutoModelForCausalLM

    import base_models

    model = AutoModelForCausalLM.from_pretrained(base_models.STAND_IN, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=torch.tensor([prompt.to_ints()])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_named_ids_are_scored_where_they_were_asked(
    sampler: Any, prompt: types.ModelInput, plain_logprobs: torch.Tensor, is_sparse: bool
) -> None:
    rows = prompt.length - 1
    ids = torch.full((rows, 3), -1, dtype=torch.int64)
    ids[1, 0], ids[1, 2], ids[rows - 1, 1] = 17, 4000, 250
    tensor = types.TensorData.from_torch_sparse(ids, pad_value=-1) if is_sparse else types.TensorData.from_torch(ids)
    result = sampler.sample(prompt, 1, ONE_TOKEN, include_prompt_logprobs=True, target_prompt_logprobs=tensor).result()
    found = result.target_prompt_logprobs.to_torch()
    expected = torch.where(ids >= 0, plain_logprobs.gather(1, ids.clamp_min(0)), torch.zeros(()))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    own = plain_logprobs.gather(1, torch.tensor(prompt.to_ints()[1:])[:, None])[:, 0]
    assert result.prompt_logprobs[1:] == pytest.approx(own.tolist(), abs=1e-4)


def test_alternatives_are_drawn_with_the_models_probabilities(
    sampler: Any, prompt: types.ModelInput, plain_logprobs: torch.Tensor
) -> None:
    def draw(seed: int, temperature: float = 1.0, count: int = 400) -> Any:
        params = types.SamplingParams(max_tokens=1, temperature=temperature, seed=seed)
        return sampler.sample(prompt, 1, params, prompt_alt_tokens_k=count).result().prompt_alt_tokens

    drawn = draw(1)
    tokens, logprobs = drawn.tokens.to_torch(), drawn.logprobs.to_torch()
    assert tokens.shape == (prompt.length - 1, 400)
    torch.testing.assert_close(logprobs, plain_logprobs.gather(1, tokens), atol=1e-4, rtol=0)
    best = plain_logprobs.argmax(-1, keepdim=True)
    shares, expected = (tokens == best).float().mean(1), plain_logprobs.exp().gather(1, best)[:, 0]
    assert (shares - expected).abs().max() < 4 * 0.5 / 400**0.5
    assert torch.equal(draw(1).tokens.to_torch(), tokens)
    assert not torch.equal(draw(2).tokens.to_torch(), tokens)
    assert torch.equal(draw(1, temperature=0.0, count=2).tokens.to_torch(), best.expand(-1, 2))


def test_a_scored_suffix_leaves_the_rest_out_of_logprobs_and_top_k(
    sampler: Any, prompt: types.ModelInput, plain_logprobs: torch.Tensor
) -> None:
    ids = torch.full((prompt.length - 1, 1), -1, dtype=torch.int64)
    ids[0] = 99
    result = sampler.sample(
        prompt,
        1,
        ONE_TOKEN,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        prompt_logprobs_last_n=3,
        target_prompt_logprobs=types.TensorData.from_torch(ids),
        prompt_alt_tokens_k=1,
    ).result()
    assert [value is None for value in result.prompt_logprobs] == [True] * (prompt.length - 3) + [False] * 3
    assert [row is None for row in result.topk_prompt_logprobs] == [True] * (prompt.length - 3) + [False] * 3
    values, tokens = plain_logprobs[-1].topk(2)
    assert [token for token, _ in result.topk_prompt_logprobs[-1]] == tokens.tolist()
    assert [value for _, value in result.topk_prompt_logprobs[-1]] == pytest.approx(values.tolist(), abs=1e-4)
    assert result.target_prompt_logprobs.to_torch()[0, 0].item() == pytest.approx(
        plain_logprobs[0, 99].item(), abs=1e-4
    )
    assert result.prompt_alt_tokens.tokens.shape == [prompt.length - 1, 1]


def test_ids_that_the_model_does_not_have_are_refused(sampler: Any, prompt: types.ModelInput) -> None:
    ids = np.full((prompt.length - 1, 1), 10**6, np.int64)
    tensor = types.TensorData.from_numpy(ids)
    with pytest.raises(tinker.RequestFailedError, match="target_prompt_logprobs holds token 1000000") as caught:
        sampler.sample(prompt, 1, ONE_TOKEN, target_prompt_logprobs=tensor).result()
    assert str(caught.value.category) == "user"


def test_inflight_samplers_follow_the_newest_weights(
    service_client: Any, base_model_name: str, small_tokenizer: Any, engine: Any
) -> None:
    data = [make_datum(small_tokenizer, "What is a cat?", " an animal")]
    prompt = data[0].model_input
    client = new_client(service_client, base_model_name)
    snapshot = client.save_weights_and_get_sampling_client().result()
    fixed = snapshot.compute_logprobs(prompt).result()
    followers = [client.save_weights_and_get_sampling_client(kind="inflight").result()]
    for _ in range(3):
        train(client, data, 2)
        followers.append(client.save_weights_and_get_sampling_client(kind="inflight").result())
        newest = client.save_weights_and_get_sampling_client().result().compute_logprobs(prompt).result()
        assert newest != fixed
        for follower in followers:
            assert follower.compute_logprobs(prompt).result() == newest
    assert snapshot.compute_logprobs(prompt).result() == fixed
    run = engine.engine.runs[client.model_id]
    assert len(run.published) == 2, "weights that no request can name any more are let go"
    assert all(checkpoint.folder.is_dir() for checkpoint in run.published)


def sample_in_another_process(pickled: bytes, handle: str, tokens: list[int], answers: Any) -> None:
    """Sample greedily with a copy of a client, and with one made from its handle."""
    params = types.SamplingParams(max_tokens=6, temperature=0.0)
    for client in (pickle.loads(pickled), tinker.SamplingClient.from_sampler_handle(handle, api_key=KEY)):
        result = client.sample(types.ModelInput.from_ints(tokens), 1, params).result()
        answers.put((result.sequences[0].tokens, result.sequences[0].sequence_id))


def test_a_copy_of_a_client_samples_from_another_process(
    sampler: Any, prompt: types.ModelInput, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_BASE_URL", engine.base_url)
    own = sampler.sample(prompt, 1, greedy(6)).result().sequences[0]
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    arguments = (pickle.dumps(sampler), sampler.get_sampler_handle(), prompt.to_ints(), answers)
    process = context.Process(target=sample_in_another_process, args=arguments)
    process.start()
    found = [answers.get(timeout=120) for _ in range(2)]
    process.join(timeout=60)
    assert process.exitcode == 0
    assert [tokens for tokens, _ in found] == [own.tokens, own.tokens]
    assert len({own.sequence_id, *(sequence_id for _, sequence_id in found)}) == 3, "copies share no request number"


def test_a_step_of_learning_rate_zero_moves_nothing(
    service_client: Any, base_model_name: str, small_tokenizer: Any
) -> None:
    data = [make_datum(small_tokenizer, "What is red?", " a colour")]
    client = new_client(service_client, base_model_name)
    train(client, data, 2)
    before = client.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    after = client.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    assert (before == after).all()
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(STEP).result()
    moved = client.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    assert (before != moved).any()
