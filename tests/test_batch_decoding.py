"""Batched sampling, checked against transformers' own generation and against sampling alone."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import base_models
import batch_decoding
from adapter_store import AdapterSpec
from batch_decoding import check_sample, generate, serve
from local_model import LocalModel
from prompt_scoring import split_by_tokens
from sample_format import SampleRequest, SampleResult
from wire_format import RequestError, TrainingBatch, TrainingDatum

TEXTS = [
    "a kind of bird that",
    "the act of making",
    "return the number of",
    "large tree of the tropics having",
    "What is a dog?",
    "in a manner that shows",
    "of or relating to the",
    "a person who",
    "any of several plants of the genus",
    "the quality of being",
    "open the file and",
    "small",
    "someone who writes books for a living and",
    "a unit of length equal to",
    "the state of",
    "belonging to a later time than the one that",
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel(base_models.STAND_IN, max_context=512)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    """A random model in which several query heads share a key head."""
    folder: Path = tmp_path_factory.mktemp("grouped")
    config = LlamaConfig(
        vocab_size=300, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)
    return LocalModel(folder, max_context=128)


@pytest.fixture(scope="module")
def prompts(model: LocalModel) -> list[tuple[int, ...]]:
    tokenizer = base_models.load_tokenizer(base_models.STAND_IN)
    return [tuple(tokenizer.encode(text)) for text in TEXTS]


def ask(prompt: tuple[int, ...], max_tokens: int | None = 12, **changes: Any) -> SampleRequest:
    fields: dict[str, Any] = {
        "prompt": prompt, "num_samples": 1, "max_tokens": max_tokens, "temperature": 0.0, "top_p": 1.0, "top_k": -1,
        "seed": 3, "stop_strings": (), "stop_tokens": frozenset(), "stops_at_eos": True, "prompt_logprobs": False,
        "scored_from": 1, "topk_prompt": 0, "topk_sample": 0,
    }  # fmt: skip
    return SampleRequest(**{**fields, **changes})


def demo_prompts() -> list[tuple[int, ...]]:
    """The demo's 20 questions, and as many tickets as make them 64 prompts."""
    data = Path(base_models.__file__).parent / "data"
    rows = [json.loads(line) for line in (data / "demo_data.jsonl").read_text("utf-8").splitlines()]
    texts = [row["question"] for row in rows]
    tickets = [json.loads(line) for line in (data / "tickets_eval.jsonl").read_text("utf-8").splitlines()]
    texts += ["\n".join(message["content"] for message in ticket["messages"][:2]) for ticket in tickets]
    tokenizer = base_models.load_tokenizer(base_models.STAND_IN)
    return [tuple(tokenizer.encode(text)) for text in texts[:64]]


def tokens_of(results: list[SampleResult]) -> list[list[int]]:
    return [sequence.tokens for result in results for sequence in result.sequences]


def by_transformers(folder: Path, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = plain.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()


def test_greedy_is_that_of_transformers(model: LocalModel, prompts: list[tuple[int, ...]]) -> None:
    for prompt in prompts[:4]:
        assert tokens_of(generate(model, [ask(prompt)])) == [by_transformers(model.folder, prompt, 12)]


def test_greedy_with_grouped_heads_is_that_of_transformers(grouped: LocalModel) -> None:
    rng = np.random.default_rng(0)
    questions = [tuple(int(t) for t in rng.integers(0, 300, length)) for length in (5, 17, 9)]
    expected = [by_transformers(grouped.folder, prompt, 20) for prompt in questions]
    assert tokens_of(generate(grouped, [ask(prompt, 20) for prompt in questions])) == expected
    assert len({tuple(tokens) for tokens in expected}) == 3


def test_a_batch_gives_what_each_request_gives_alone(model: LocalModel, prompts: list[tuple[int, ...]]) -> None:
    requests = [ask(prompt, 6 + index) for index, prompt in enumerate(prompts)]
    together = generate(model, requests)
    for request, result in zip(requests, together, strict=True):
        alone = generate(model, [request])[0].sequences[0]
        assert alone.tokens == result.sequences[0].tokens
        assert alone.stop_reason == result.sequences[0].stop_reason
        np.testing.assert_allclose(alone.logprobs, result.sequences[0].logprobs, atol=1e-4)


def test_greedy_answers_do_not_depend_on_how_many_share_the_batch(model: LocalModel) -> None:
    questions = demo_prompts()
    alone = [generate(model, [ask(prompt, 8)])[0].sequences[0] for prompt in questions]
    for size in (16, 64):
        for start in range(0, len(questions), size):
            part = questions[start : start + size]
            for one, result in zip(alone[start:], generate(model, [ask(prompt, 8) for prompt in part]), strict=False):
                shared = result.sequences[0]
                assert (shared.tokens, shared.stop_reason) == (one.tokens, one.stop_reason)
                np.testing.assert_allclose(shared.logprobs, one.logprobs, rtol=0, atol=1e-4)
    assert len({tuple(sequence.tokens) for sequence in alone}) > 10


class Arrivals:
    """A source whose requests come at given steps, and which notes at which step each was answered."""

    is_gathering = False

    def __init__(self, by_step: dict[int, list[tuple[str, SampleRequest]]], unwanted: dict[str, int]) -> None:
        self.by_step = by_step
        self.unwanted = unwanted
        self.step = -1
        self.results: dict[Hashable, SampleResult] = {}
        self.answered: dict[Hashable, int] = {}
        self.errors: dict[Hashable, Exception] = {}

    def take(self) -> Sequence[tuple[Hashable, SampleRequest]]:
        self.step += 1
        return self.by_step.get(self.step, [])

    def is_wanted(self, key: Hashable) -> bool:
        return self.step < self.unwanted.get(str(key), 10**6)

    def finish(self, key: Hashable, result: SampleResult) -> None:
        self.results[key] = result
        self.answered[key] = self.step

    def fail(self, key: Hashable, error: Exception) -> None:
        self.errors[key] = error


def test_requests_that_join_a_running_batch_get_what_they_get_alone(model: LocalModel, prompts: list[Any]) -> None:
    beginning = prompts[8] + prompts[15]
    requests = {
        "first": ask(beginning + prompts[0], 30, stops_at_eos=False),
        "same beginning": ask(beginning + prompts[3], 12, topk_sample=2),
        "hot": ask(prompts[5], 9, temperature=1.0, num_samples=3, seed=11),
        "short": ask(prompts[2], 2),
        "scored": ask(prompts[9], 1, prompt_logprobs=True),
        "much longer": ask(beginning * 6, 25, stops_at_eos=False),
        "last": ask(prompts[7], 5, stops_at_eos=False),
    }
    joins_at = {"same beginning": 3, "hot": 3, "short": 4, "scored": 6, "much longer": 9, "last": 20}
    by_step: dict[int, list[tuple[str, SampleRequest]]] = {}
    for name, request in requests.items():
        by_step.setdefault(joins_at.get(name, 0), []).append((name, request))
    source = Arrivals(by_step, {})
    serve(model, source)
    assert source.errors == {}
    for name, request in requests.items():
        alone = generate(model, [request])[0]
        for one, joined in zip(alone.sequences, source.results[name].sequences, strict=True):
            assert (joined.tokens, joined.stop_reason) == (one.tokens, one.stop_reason)
            np.testing.assert_allclose(joined.logprobs, one.logprobs, rtol=0, atol=1e-4)
    assert source.answered["short"] == 4
    assert source.answered["scored"] == 6
    assert source.answered["last"] == 23
    assert source.answered["first"] == 28
    assert source.answered["much longer"] == 32


def test_a_request_that_nobody_wants_any_more_leaves_the_others_alone(model: LocalModel, prompts: list[Any]) -> None:
    wanted = {str(index): ask(prompts[index], 15, stops_at_eos=False) for index in range(4)}
    gone = ask(prompts[9], 400, num_samples=2, stops_at_eos=False)
    source = Arrivals({0: [("0", wanted["0"]), ("gone", gone)], 2: list(wanted.items())[1:]}, {"gone": 5})
    serve(model, source)
    assert source.results.keys() == wanted.keys()
    assert source.step < 20
    for name, request in wanted.items():
        assert tokens_of([source.results[name]]) == tokens_of(generate(model, [request]))


def test_what_goes_wrong_for_those_that_join_leaves_the_others_alone(
    model: LocalModel, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ask(prompts[0], 10, stops_at_eos=False)
    expected = tokens_of(generate(model, [request]))
    score_prompts = batch_decoding.score_prompts

    def broken(model: LocalModel, requests: Sequence[SampleRequest]) -> Any:
        if any(asked.prompt_logprobs for asked in requests):
            raise ZeroDivisionError
        return score_prompts(model, requests)

    monkeypatch.setattr(batch_decoding, "score_prompts", broken)
    source = Arrivals({0: [("sound", request)], 4: [("broken", ask(prompts[1], prompt_logprobs=True))]}, {})
    serve(model, source)
    assert tokens_of([source.results["sound"]]) == expected
    assert isinstance(source.errors["broken"], ZeroDivisionError)
    assert source.results.keys() == {"sound"}


def test_sampled_tokens_depend_on_the_seed_not_on_the_batch(model: LocalModel, prompts: list[tuple[int, ...]]) -> None:
    hot = [ask(prompt, temperature=1.0, seed=index) for index, prompt in enumerate(prompts)]
    filtered = [ask(prompt, temperature=0.9, top_p=0.8, top_k=40) for prompt in prompts]
    together = tokens_of(generate(model, [*hot, *filtered]))
    assert together[2] == tokens_of(generate(model, [hot[2]]))[0]
    assert together[18] == tokens_of(generate(model, [filtered[2]]))[0]
    other = tokens_of(generate(model, [ask(prompts[2], temperature=1.0, seed=99)]))[0]
    assert other != together[2]


def test_samples_of_one_request_differ_and_repeat(model: LocalModel, prompts: list[tuple[int, ...]]) -> None:
    request = ask(prompts[0], num_samples=4, temperature=1.0)
    first = tokens_of(generate(model, [request]))
    assert len({tuple(tokens) for tokens in first}) == 4
    assert tokens_of(generate(model, [request])) == first
    unseeded = ask(prompts[0], num_samples=4, temperature=1.0, seed=None)
    assert tokens_of(generate(model, [unseeded])) != tokens_of(generate(model, [unseeded]))


def test_first_tokens_are_drawn_with_the_models_probabilities(model: LocalModel, prompts: list[Any]) -> None:
    count = 600
    drawn = [
        tokens[0] for tokens in tokens_of(generate(model, [ask(prompts[3], 1, num_samples=count, temperature=0.7)]))
    ]
    with torch.inference_mode():
        model._activate(None)
        logits = model.logits(model.hidden_states(torch.tensor([prompts[3]]))[0, -1])
    probabilities = (logits / 0.7).softmax(-1)
    for token in probabilities.topk(3).indices.tolist():
        expected = probabilities[token].item()
        spread = 4 * (expected * (1 - expected) / count) ** 0.5
        assert abs(drawn.count(token) / count - expected) < spread


def test_top_k_and_top_p_leave_only_the_likeliest(model: LocalModel, prompts: list[Any]) -> None:
    greedy = tokens_of(generate(model, [ask(prompts[1])]))
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        assert tokens_of(generate(model, [ask(prompts[1], temperature=1.0, **narrow)])) == greedy
    with torch.inference_mode():
        best = model.logits(model.hidden_states(torch.tensor([prompts[1]]))[0, -1]).topk(5).indices.tolist()
    drawn = tokens_of(generate(model, [ask(prompts[1], 1, temperature=3.0, top_k=5, num_samples=100)]))
    assert {tokens[0] for tokens in drawn} == set(best)


def test_what_ends_a_sequence(model: LocalModel, prompts: list[Any]) -> None:
    free = generate(model, [ask(prompts[0], 20, stops_at_eos=False)])[0].sequences[0]
    assert (len(free.tokens), free.stop_reason) == (20, "length")
    by_token = generate(model, [ask(prompts[0], 20, stop_tokens=frozenset({free.tokens[4]}))])[0].sequences[0]
    cut = free.tokens.index(free.tokens[4])
    assert (by_token.tokens, by_token.stop_reason) == (free.tokens[: cut + 1], "stop")
    text = model.text(free.tokens)
    stop = text[6:12]
    by_text = generate(model, [ask(prompts[0], 20, stop_strings=("never said", stop))])[0].sequences[0]
    assert by_text.stop_reason == "stop"
    assert stop in model.text(by_text.tokens)
    assert stop not in model.text(by_text.tokens[:-1])
    assert by_text.tokens == free.tokens[: len(by_text.tokens)]


def test_end_of_sequence_ends_unless_stops_are_switched_off(
    model: LocalModel, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(generate(model, [ask(prompts[4], 8, stops_at_eos=False)]))[0]
    monkeypatch.setattr(model, "eos_tokens", frozenset({tokens[2]}))
    cut = tokens.index(tokens[2]) + 1
    assert tokens_of(generate(model, [ask(prompts[4], 8)]))[0] == tokens[:cut]
    assert tokens_of(generate(model, [ask(prompts[4], 8, stops_at_eos=False)]))[0] == tokens


def test_the_context_ends_a_sequence(grouped: LocalModel) -> None:
    results = generate(grouped, [ask((1, 2, 3) * 41, None), ask((5,) * 128, 10), ask((7,), 2)])
    assert [len(result.sequences[0].tokens) for result in results] == [128 - 123, 0, 2]
    assert {result.sequences[0].stop_reason for result in results} == {"length"}
    with pytest.raises(RequestError, match="129 tokens"):
        check_sample(grouped, ask((5,) * 129))
    with pytest.raises(RequestError, match="token 300"):
        check_sample(grouped, ask((5, 300)))


def test_little_memory_changes_the_batches_not_the_results(
    model: LocalModel, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [ask(prompt, 40, stops_at_eos=False) for prompt in prompts[:6]]
    expected = tokens_of(generate(model, requests))
    monkeypatch.setattr(model, "cache_budget_bytes", model.cache_bytes_per_token * 90)
    monkeypatch.setattr(model, "prefill_tokens", 16)
    monkeypatch.setattr(batch_decoding, "RESERVED_TOKENS", 10)
    assert tokens_of(generate(model, requests)) == expected


def test_a_shared_beginning_changes_nothing(model: LocalModel, prompts: list[Any]) -> None:
    beginning = prompts[8] + prompts[15]
    assert len(beginning) > batch_decoding.MIN_SHARED_PREFIX
    requests = [ask(beginning + prompt) for prompt in prompts[:5]]
    together = generate(model, requests)
    for request, result in zip(requests, together, strict=True):
        alone = generate(model, [request])[0].sequences[0]
        assert result.sequences[0].tokens == alone.tokens
        np.testing.assert_allclose(result.sequences[0].logprobs, alone.logprobs, atol=1e-4)


def test_sampling_scoring_and_training_agree_on_logprobs(model: LocalModel, prompts: list[Any]) -> None:
    sampled = generate(model, [ask(prompts[5], 15, temperature=1.0)])[0].sequences[0]
    whole = (*prompts[5], *sampled.tokens)
    scored = generate(model, [ask(whole, 1, prompt_logprobs=True)])[0]
    assert scored.prompt_logprobs is not None
    assert np.isnan(scored.prompt_logprobs[0])
    np.testing.assert_allclose(scored.prompt_logprobs[len(prompts[5]) :], sampled.logprobs, atol=1e-4)
    datum = TrainingDatum(
        np.array(whole[:-1]), np.array(whole[1:])[:, None], {"weights": np.ones((len(whole) - 1, 1), np.float32)}, True
    )
    adapter = model.create_adapter(AdapterSpec("m", 4, 1))
    trained, _ = model.forward_backward(adapter, TrainingBatch("cross_entropy", {}, True, [datum]))
    np.testing.assert_allclose(trained[0], scored.prompt_logprobs[1:], atol=1e-4)


def test_top_logprobs_of_prompt_and_sample(model: LocalModel, prompts: list[Any]) -> None:
    request = ask(prompts[9], 6, prompt_logprobs=True, topk_prompt=3, topk_sample=2, scored_from=2)
    result = generate(model, [request, ask(prompts[1])])[0]
    assert result.topk_prompt is not None
    assert result.prompt_logprobs is not None
    assert result.topk_prompt.token_ids.shape == (len(prompts[9]), 3)
    assert np.isnan(result.prompt_logprobs[:2]).all()
    assert (result.topk_prompt.logprobs[:2] == -99999.0).all()
    assert (result.topk_prompt.logprobs[2:, 0] >= result.prompt_logprobs[2:] - 1e-5).all()
    sequence = result.sequences[0]
    assert sequence.topk is not None
    assert sequence.topk.token_ids[:, 0].tolist() == sequence.tokens
    np.testing.assert_allclose(sequence.topk.logprobs[:, 0], sequence.logprobs, atol=1e-5)


def test_a_stopping_engine_ends_the_batch(model: LocalModel, prompts: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="stopping"):
        generate(model, [ask(prompts[0], 100, stops_at_eos=False)], should_stop=lambda: True)


def test_groups_stay_within_the_budget_and_lose_nothing() -> None:
    lengths = {0: 5, 1: 90, 2: 30, 3: 31, 4: 5, 5: 5}
    groups = split_by_tokens(list(lengths), lengths.__getitem__, budget=62)
    assert sorted(item for group in groups for item in group) == list(lengths)
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[item] for item in group) <= 62
    assert groups[0] == [1]
