"""Training computations, checked against plain transformers, peft and torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import base_models
import wire_format
from adapter_files import CONFIG_FILE, WEIGHTS_FILE, Adapter
from adapter_store import AdapterSpec, AdapterStore, Checkpoint, CheckpointInfo
from error_handling import CheckpointError
from local_model import LORA_ALPHA, SAMPLERS_KEPT, LocalModel
from sample_format import SampleRequest
from token_losses import LOSSES
from training_pass import pack
from wire_format import RequestError, TrainingBatch, TrainingDatum

SPEC = AdapterSpec("Qwen/Qwen3-8B", rank=8, seed=7)
STEP = {"learning_rate": 2e-3}


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
def plain_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(base_models.STAND_IN, dtype=torch.float32)


@pytest.fixture
def save(tmp_path: Path, model: LocalModel) -> Callable[..., Checkpoint]:
    store = AdapterStore(tmp_path / "state")
    store.open()

    def save_adapter(
        adapter: Adapter, name: str = "one", kind: str = "weights", owner: LocalModel = model
    ) -> Checkpoint:
        steps = adapter.optimizer_steps if kind == "weights" else 0
        info = CheckpointInfo("m", kind, name, adapter.spec, owner.fingerprint, adapter.step, steps, created=1.0)
        return store.save(
            info, lambda folder: owner.save_adapter(adapter, folder, optimizer=kind == "weights"), overwrite=False
        )

    return save_adapter


def make_datum(length: int, seed: int, **inputs: Any) -> TrainingDatum:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(100, 4000, length + 1)
    if not inputs:
        weights = np.zeros(length, np.float32)
        weights[length // 2 :] = 1.0
        inputs = {"weights": weights}
    shaped = {name: np.asarray(values, np.float32).reshape(length, -1) for name, values in inputs.items()}
    return TrainingDatum(tokens[:-1], tokens[1:].reshape(length, 1), shaped, is_flat=True)


def make_batch(*lengths: int, forward_only: bool = False, seed: int = 0) -> TrainingBatch:
    return TrainingBatch("cross_entropy", {}, forward_only, [make_datum(n, seed + i) for i, n in enumerate(lengths)])


def train(model: LocalModel, adapter: Adapter, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        losses.append(model.forward_backward(adapter, make_batch(20, 31, 12, seed=step))[1]["loss:sum"])
        model.optim_step(adapter, STEP)
    return losses


def weights_of(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {key: parameter.detach().clone() for key, parameter in adapter.parameters.items()}


def gradients_of(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {key: p.grad.clone() for key, p in adapter.parameters.items() if p.grad is not None}


def plain_logprobs(logits: torch.Tensor, datum: TrainingDatum) -> torch.Tensor:
    return logits.log_softmax(-1)[torch.arange(len(datum.tokens)), torch.from_numpy(datum.targets[:, 0])]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_loss_and_logprobs_are_those_of_the_plain_model(model: LocalModel, plain_model: Any) -> None:
    batch = make_batch(9, 40, 23, forward_only=True)
    logprobs, metrics = model.forward_backward(model.create_adapter(SPEC), batch)
    expected = 0.0
    for datum, ours in zip(batch.data, logprobs, strict=True):
        with torch.no_grad():
            theirs = plain_logprobs(plain_model(torch.from_numpy(datum.tokens)[None]).logits[0], datum)
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
        expected -= float((theirs.numpy() * datum.inputs["weights"][:, 0]).sum())
    assert metrics["loss:sum"] == pytest.approx(expected, abs=1e-3)


def test_forward_only_leaves_no_gradient(model: LocalModel) -> None:
    adapter = model.create_adapter(SPEC)
    model.forward_backward(adapter, make_batch(12, forward_only=True))
    assert gradients_of(adapter) == {}


def test_saved_adapter_in_plain_peft_has_the_same_logprobs_and_gradients(model: LocalModel, save: Any) -> None:
    adapter = model.create_adapter(SPEC)
    train(model, adapter, 4)
    folder = save(adapter).folder
    batch = make_batch(17, 33, seed=50)
    logprobs, _ = model.forward_backward(adapter, batch)

    base = AutoModelForCausalLM.from_pretrained(base_models.STAND_IN, dtype=torch.float32)
    peft_model = PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
    for datum, ours in zip(batch.data, logprobs, strict=True):
        theirs = plain_logprobs(peft_model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0], datum)
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-4)
        (-theirs * torch.from_numpy(datum.inputs["weights"][:, 0])).sum().backward()
    gradients = gradients_of(adapter)
    found = {key.replace(".default.", "."): p.grad for key, p in peft_model.named_parameters() if p.requires_grad}
    assert found.keys() == gradients.keys()
    for key, theirs in found.items():
        torch.testing.assert_close(gradients[key], theirs, atol=1e-3, rtol=1e-3)


def test_adam_step_is_that_of_torch_with_decay_and_clipping(model: LocalModel) -> None:
    adapter = model.create_adapter(SPEC)
    copies = {key: torch.nn.Parameter(p.detach().clone()) for key, p in adapter.parameters.items()}
    theirs = torch.optim.AdamW(copies.values(), lr=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    params = {
        "learning_rate": 3e-3,
        "beta1": 0.8,
        "beta2": 0.9,
        "eps": 1e-6,
        "weight_decay": 0.1,
        "grad_clip_norm": 1.0,
    }
    for step in range(3):
        model.forward_backward(adapter, make_batch(15, 22, seed=step))
        for key, gradient in gradients_of(adapter).items():
            copies[key].grad = gradient
        norm = float(torch.nn.utils.clip_grad_norm_(copies.values(), 1.0))
        theirs.step()
        metrics = model.optim_step(adapter, params)
        assert metrics["unclipped_grad_l2_norm:mean"] == pytest.approx(norm, rel=1e-4)
        assert norm > 1.0
    for key, ours in weights_of(adapter).items():
        torch.testing.assert_close(ours, copies[key].detach(), atol=1e-6, rtol=1e-5)
    assert adapter.step == 3
    assert gradients_of(adapter) == {}


def test_gradients_add_up_over_requests(model: LocalModel) -> None:
    whole, parts = model.create_adapter(SPEC), model.create_adapter(SPEC)
    batch = make_batch(15, 22, 31)
    _, metrics = model.forward_backward(whole, batch)
    total = 0.0
    for datum in batch.data:
        total += model.forward_backward(parts, TrainingBatch("cross_entropy", {}, False, [datum]))[1]["loss:sum"]
    assert total == pytest.approx(metrics["loss:sum"], rel=1e-5)
    for key, gradient in gradients_of(whole).items():
        torch.testing.assert_close(gradients_of(parts)[key], gradient, atol=1e-3, rtol=1e-3)


def test_a_batch_split_for_memory_gives_the_same_result(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(40, 12, 33, 25)
    whole, split = model.create_adapter(SPEC), model.create_adapter(SPEC)
    expected, metrics = model.forward_backward(whole, batch)
    monkeypatch.setattr(model, "prefill_tokens", 50)
    monkeypatch.setattr("training_pass.LOGITS_CHUNK", 7 * model.vocabulary)
    found, split_metrics = model.forward_backward(split, batch)
    assert split_metrics["loss:sum"] == pytest.approx(metrics["loss:sum"], rel=1e-5)
    for left, right in zip(expected, found, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-4)
    for key, gradient in gradients_of(whole).items():
        torch.testing.assert_close(gradients_of(split)[key], gradient, atol=1e-3, rtol=1e-3)


def test_training_lowers_the_loss_and_the_seed_fixes_every_bit(model: LocalModel) -> None:
    first, again = model.create_adapter(SPEC), model.create_adapter(SPEC)
    other = model.create_adapter(AdapterSpec(SPEC.base_model, rank=8, seed=8))
    assert not same(weights_of(first), weights_of(other))
    losses = []
    for adapter in (first, again):
        for _ in range(12):
            losses.append(model.forward_backward(adapter, make_batch(20, 31, 12))[1]["loss:sum"])
            model.optim_step(adapter, STEP)
    assert losses[:12] == losses[12:]
    assert losses[11] < 0.7 * losses[0]
    assert same(weights_of(first), weights_of(again))


def test_adapters_trained_in_turn_do_not_touch_each_other(model: LocalModel) -> None:
    alone, mixed, other = (model.create_adapter(AdapterSpec("m", 8, seed)) for seed in (1, 1, 2))
    train(model, alone, 3)
    for step in range(3):
        model.forward_backward(mixed, make_batch(20, 31, 12, seed=step))
        model.forward_backward(other, make_batch(25, seed=90 + step))
        model.optim_step(mixed, STEP)
        model.optim_step(other, STEP)
    assert same(weights_of(alone), weights_of(mixed))


def test_state_with_optimizer_continues_bit_for_bit(model: LocalModel, save: Any) -> None:
    unbroken = model.create_adapter(SPEC)
    train(model, unbroken, 3)
    checkpoint = save(unbroken)
    train(model, unbroken, 3, first=3)
    for optimizer in (True, False):
        resumed = model.create_adapter(AdapterSpec("m", 8, seed=99))
        model.load_adapter(resumed, checkpoint, optimizer=optimizer)
        assert resumed.step == 3
        train(model, resumed, 3, first=3)
        assert same(weights_of(resumed), weights_of(unbroken)) is optimizer


def test_checkpoint_of_another_rank_is_refused_and_changes_nothing(model: LocalModel, save: Any) -> None:
    checkpoint = save(model.create_adapter(AdapterSpec("m", rank=4, seed=1)))
    adapter = model.create_adapter(SPEC)
    before = weights_of(adapter)
    with pytest.raises(CheckpointError, match="rank or trained layers differ"):
        model.load_adapter(adapter, checkpoint, optimizer=False)
    assert same(before, weights_of(adapter))


def test_checkpoint_over_other_base_weights_is_refused(model: LocalModel, save: Any, untied: LocalModel) -> None:
    checkpoint = save(model.create_adapter(SPEC))
    with pytest.raises(CheckpointError, match="other base weights"):
        untied.load_adapter(untied.create_adapter(SPEC), checkpoint, optimizer=False)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    """A random model with grouped queries and an output layer of its own."""
    folder = tmp_path_factory.mktemp("untied")
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return LocalModel(folder, max_context=128)


def test_the_layers_trained_are_those_asked_for(model: LocalModel, untied: LocalModel) -> None:
    def layers(owner: LocalModel, **flags: bool) -> set[str]:
        adapter = owner.create_adapter(AdapterSpec("m", 4, 1, **flags))
        return {key.split(".lora_")[0].rsplit(".", 1)[-1] for key in adapter.parameters}

    attn, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert layers(model) == attn | mlp
    assert layers(untied) == attn | mlp | {"lm_head"}
    assert layers(untied, train_mlp=False, train_unembed=False) == attn
    assert layers(untied, train_attn=False, train_unembed=False) == mlp
    assert layers(untied, train_attn=False, train_mlp=False) == {"lm_head"}
    with pytest.raises(RequestError, match="nothing to train"):
        layers(model, train_attn=False, train_mlp=False)


def test_a_trained_output_layer_loads_in_plain_peft(untied: LocalModel, save: Any) -> None:
    adapter = untied.create_adapter(AdapterSpec("m", 4, 1))
    rng = np.random.default_rng(0)
    datum = TrainingDatum(
        rng.integers(0, 300, 20), rng.integers(0, 300, (20, 1)), {"weights": np.ones((20, 1), np.float32)}, True
    )
    batch = TrainingBatch("cross_entropy", {}, False, [datum])
    for _ in range(3):
        untied.forward_backward(adapter, batch)
        untied.optim_step(adapter, {"learning_rate": 1e-2})
    logprobs, _ = untied.forward_backward(adapter, batch)
    base = AutoModelForCausalLM.from_pretrained(untied.folder, dtype=torch.float32)
    peft_model = PeftModel.from_pretrained(base, save(adapter, owner=untied).folder).eval()
    with torch.no_grad():
        theirs = plain_logprobs(peft_model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0], datum)
    np.testing.assert_allclose(logprobs[0], theirs.numpy(), atol=1e-4)


def test_adapter_files_hold_no_pickle_and_name_alpha(model: LocalModel, save: Any) -> None:
    adapter = model.create_adapter(SPEC)
    train(model, adapter, 1)
    folder = save(adapter).folder
    names = {path.name for path in folder.iterdir()}
    assert names == {CONFIG_FILE, WEIGHTS_FILE, "optimizer.safetensors", "checkpoint.json"}
    assert f'"lora_alpha": {LORA_ALPHA}' in (folder / CONFIG_FILE).read_text()


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_policy_losses_have_the_value_and_gradient_of_plain_peft(model: LocalModel, save: Any, loss_fn: str) -> None:
    adapter = model.create_adapter(SPEC)
    train(model, adapter, 2)
    lengths = (24, 9, 17)
    data = [make_datum(length, seed) for seed, length in enumerate(lengths, 5)]
    logprobs, _ = model.forward_backward(adapter, TrainingBatch("cross_entropy", {}, True, data))
    rng = np.random.default_rng(3)
    inputs = [
        {
            "logprobs": own + rng.normal(0, 0.4, own.shape),
            "advantages": rng.normal(0, 1, own.shape),
            "sequence_ratio_mask": np.arange(len(own)) > 3,
        }
        for own in logprobs
    ]
    settings = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3, "beta": 0.2}
    taken = wire_format.LOSS_INPUTS[loss_fn]
    batch = [
        make_datum(length, seed, **{name: values for name, values in given.items() if name in taken})
        for (seed, length), given in zip(enumerate(lengths, 5), inputs, strict=True)
    ]
    found, metrics = model.forward_backward(adapter, TrainingBatch(loss_fn, settings, False, batch))
    gradients = gradients_of(adapter)

    base = AutoModelForCausalLM.from_pretrained(base_models.STAND_IN, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, save(adapter).folder, is_trainable=True)
    total = torch.zeros(())
    for datum, ours in zip(batch, found, strict=True):
        theirs = plain_logprobs(plain(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0], datum)
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)
        tensors = {name: torch.from_numpy(values) for name, values in datum.inputs.items()}
        total = total + LOSSES[loss_fn].function(theirs[:, None], tensors, settings).sum()
    total.backward()
    assert metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5, abs=1e-5)
    expected = {key.replace(".default.", "."): p.grad for key, p in plain.named_parameters() if p.requires_grad}
    assert expected.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], atol=1e-5 * largest, rtol=1e-3)


def test_several_targets_per_position(model: LocalModel) -> None:
    adapter = model.create_adapter(SPEC)
    rng = np.random.default_rng(2)
    tokens, targets = rng.integers(0, 4000, 10), rng.integers(0, 4000, (10, 3))
    weights = rng.random((10, 3)).astype(np.float32)
    wide = TrainingDatum(tokens, targets, {"weights": weights}, is_flat=False)
    found, metrics = model.forward_backward(
        adapter, TrainingBatch("cross_entropy", {}, False, [wide, make_datum(6, 1)])
    )
    assert [part.shape for part in found] == [(10, 3), (6,)]
    singles = [TrainingDatum(tokens, targets[:, k : k + 1], {"weights": weights[:, k : k + 1]}, True) for k in range(3)]
    expected, parts = model.forward_backward(
        adapter, TrainingBatch("cross_entropy", {}, True, [*singles, make_datum(6, 1)])
    )
    np.testing.assert_allclose(found[0], np.stack(expected[:3], axis=1), atol=1e-4)
    assert metrics["loss:sum"] == pytest.approx(parts["loss:sum"], rel=1e-4)


def test_a_gradient_that_is_not_finite_is_dropped_not_applied(model: LocalModel) -> None:
    adapter = model.create_adapter(SPEC)
    before = weights_of(adapter)
    huge = make_datum(10, 1, weights=np.full(10, 3e38))
    model.forward_backward(adapter, TrainingBatch("cross_entropy", {}, False, [huge]))
    with pytest.raises(RequestError, match="not finite"):
        model.optim_step(adapter, STEP)
    assert same(before, weights_of(adapter))
    model.forward_backward(adapter, make_batch(10))
    model.optim_step(adapter, STEP)
    assert adapter.step == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"beta1": 1.0}, "below 1"),
        ({"type": "dimuon", "learning_rate": 0.1}, "dimuon"),
    ],
)
def test_wrong_optimizer_parameters_are_refused(model: LocalModel, params: dict[str, Any], message: str) -> None:
    adapter = model.create_adapter(SPEC)
    with pytest.raises(RequestError, match=message):
        model.optim_step(adapter, params)
    assert adapter.step == 0


def test_too_long_and_unknown_tokens_are_refused_without_a_trace(model: LocalModel) -> None:
    adapter = model.create_adapter(SPEC)
    with pytest.raises(RequestError, match="datum 1: 513 tokens"):
        model.forward_backward(adapter, make_batch(10, 513))
    strange = TrainingDatum(np.array([1, 5000]), np.array([[1], [2]]), {"weights": np.ones((2, 1))}, True)
    with pytest.raises(RequestError, match="token 5000"):
        model.forward_backward(adapter, TrainingBatch("cross_entropy", {}, False, [make_datum(5, 1), strange]))
    assert gradients_of(adapter) == {}


def test_samplers_in_memory_are_bounded(save: Any) -> None:
    model = LocalModel(base_models.STAND_IN, max_context=512)
    request = SampleRequest((1, 2, 3), 1, 2, 0.0, 1.0, -1, None, (), frozenset(), True, False, 1, 0, 0)
    adapter = model.create_adapter(SPEC)
    outputs = []
    for number in range(SAMPLERS_KEPT + 3):
        train(model, adapter, 1, first=number)
        outputs.append(save(adapter, name=f"s{number}", owner=model))
    first = model.sample(outputs[0], [request])[0].sequences[0]
    for checkpoint in outputs[1:]:
        model.sample(checkpoint, [request])
    assert len(model._samplers) == SAMPLERS_KEPT
    again = model.sample(outputs[0], [request])[0].sequences[0]
    assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)


def test_sequences_side_by_side_do_not_see_each_other(model: LocalModel) -> None:
    assert model.packs_sequences
    generator = np.random.default_rng(5)
    sequences = [generator.integers(0, model.vocabulary, length) for length in (3, 17, 8, 30)]
    with torch.no_grad():
        packed = pack(model, sequences)
        alone = torch.cat([model.hidden_states(torch.from_numpy(tokens)[None])[0] for tokens in sequences])
        as_one = model.hidden_states(torch.from_numpy(np.concatenate(sequences))[None])[0]
    assert torch.allclose(packed, alone, atol=1e-4)
    assert not torch.allclose(packed, as_one, atol=1e-2)


def test_a_model_that_cannot_pack_pads_and_gives_the_same(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {}
    for packs in (True, False):
        monkeypatch.setattr(model, "packs_sequences", packs)
        adapter = model.create_adapter(SPEC)
        logprobs, metrics = model.forward_backward(adapter, make_batch(4, 40, 12, 200, 190, 180))
        results[packs] = (np.concatenate(logprobs), metrics["loss:sum"], gradients_of(adapter))
        model.drop_adapter(adapter)
    np.testing.assert_allclose(results[True][0], results[False][0], atol=1e-4)
    assert results[True][1] == pytest.approx(results[False][1], rel=1e-5)
    for key, gradient in results[True][2].items():
        torch.testing.assert_close(gradient, results[False][2][key], atol=1e-3, rtol=1e-3)
