"""The local server, driven by the real SDK."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import requests
import tinker
import torch
import zstandard
from sdk_clients import KEY, STEP, greedy, make_datum, new_client, prompt_of, train
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

import base_models
from error_handling import ConfigurationError, RunLockedError, ServiceUnavailableError
from mock_tinker import LocalTinkerServer, is_loopback

PAIRS = [("What is a cat?", " an animal"), ("What is red?", " a colour"), ("What is iron?", " a metal")]


@pytest.fixture(scope="module")
def data(small_tokenizer: Any) -> list[tinker.Datum]:
    return [make_datum(small_tokenizer, *pair) for pair in PAIRS]


@pytest.fixture(scope="module")
def rest(engine: Any) -> Any:
    return tinker.RestClient(base_url=engine.base_url, api_key=KEY)


def adapter_folder(server: Any, path: str) -> Path:
    return server.engine.store.find(path).folder


def adapter_bytes(server: Any, client: Any) -> bytes:
    """What the client's adapter file holds now."""
    path = client.save_state(f"now-{time.monotonic_ns()}").result().path
    return (adapter_folder(server, path) / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def trained(service_client: Any, base_model_name: str, data: list[tinker.Datum]) -> Any:
    """A client trained until it knows the answers, its losses, its saved state and its sampler weights."""
    client = new_client(service_client, base_model_name)
    losses = train(client, data, 40)
    state = client.save_state("state").result().path
    weights = client.save_weights_for_sampler("weights").result().path
    return client, losses, state, weights


def test_training_lowers_the_loss_and_the_sampler_answers_as_trained(
    service_client: Any, base_model_name: str, trained: Any, small_tokenizer: Any
) -> None:
    _, losses, _, weights = trained
    assert losses[-1] < 0.1 * losses[0]
    tuned = service_client.create_sampling_client(model_path=weights).result()
    base = service_client.create_sampling_client(base_model=base_model_name).result()
    assert tuned.get_base_model() == base_model_name
    for question, answer in PAIRS:
        prompt = prompt_of(small_tokenizer, question)
        reply = tuned.sample(prompt, 1, greedy()).result().sequences[0]
        assert small_tokenizer.decode(reply.tokens[:-1]) == answer
        assert reply.stop_reason == "stop"
        assert base.sample(prompt, 1, greedy()).result().sequences[0].tokens != reply.tokens


def test_capabilities_and_info(rest: Any, trained: Any, base_model_name: str, small_tokenizer: Any) -> None:
    models = {model.model_name: model for model in rest.get_server_capabilities().result().supported_models}
    assert models[base_model_name].max_context_length == 512
    info = trained[0].get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (base_model_name, True, 8)
    assert trained[0].get_tokenizer().encode("a cat") == base_models.load_tokenizer(base_models.STAND_IN).encode(
        "a cat"
    )


def test_the_same_seed_gives_the_same_file_through_the_sdk(
    service_client: Any, engine: Any, base_model_name: str, data: list[tinker.Datum]
) -> None:
    files = []
    for seed in (5, 5, 6):
        client = new_client(service_client, base_model_name, seed=seed)
        train(client, data, 3)
        files.append(adapter_bytes(engine, client))
    assert files[0] == files[1]
    assert files[0] != files[2]


def test_forward_returns_logprobs_without_training(service_client: Any, base_model_name: str, data: Any) -> None:
    client = new_client(service_client, base_model_name)
    first = client.forward(data, "cross_entropy").result()
    again = client.forward(data, "cross_entropy").result()
    assert first.metrics == again.metrics
    total = 0.0
    for datum, output in zip(data, first.loss_fn_outputs, strict=True):
        logprobs = output["logprobs"].to_numpy()
        assert logprobs.shape == (datum.model_input.length,)
        total -= float((logprobs * datum.loss_fn_inputs["weights"].to_numpy()).sum())
    assert first.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_a_custom_loss_trains_through_forward_and_backward(
    service_client: Any, base_model_name: str, data: Any
) -> None:
    client = new_client(service_client, base_model_name)

    def loss(data: Any, logprobs: Any) -> Any:
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        total = -sum((w * lp).sum() for w, lp in zip(weights, logprobs, strict=True))
        return 0.5 * total, {"mine": 1.0}

    plain = new_client(service_client, base_model_name)
    expected = plain.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
    norm = plain.optim_step(STEP).result().metrics["unclipped_grad_l2_norm:mean"]
    output = client.forward_backward_custom(data, loss).result()
    assert output.metrics["loss:sum"] == pytest.approx(0.5 * expected, rel=1e-4)
    half = client.optim_step(STEP).result().metrics["unclipped_grad_l2_norm:mean"]
    assert half == pytest.approx(0.5 * norm, rel=1e-3)


def test_a_request_cut_in_chunks_is_one_batch(
    service_client: Any, base_model_name: str, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = new_client(service_client, base_model_name)
    cut = new_client(service_client, base_model_name)
    expected = whole.forward_backward(data * 4, "cross_entropy").result()
    config = cut.holder.get_client_config()
    monkeypatch.setattr(cut.holder, "_client_config", config.model_copy(update={"fwdbwd_max_chunk_len": 2}))
    found = cut.forward_backward(data * 4, "cross_entropy").result()
    assert len(found.loss_fn_outputs) == 12
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    norms = [client.optim_step(STEP).result().metrics["unclipped_grad_l2_norm:mean"] for client in (whole, cut)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_a_compressed_body_is_understood(service_client: Any, engine: Any, base_model_name: str, data: Any) -> None:
    client = new_client(service_client, base_model_name)
    request = types.ForwardBackwardRequest(
        model_id=client.model_id,
        seq_id=1,
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn="cross_entropy"),
    )
    body = zstandard.ZstdCompressor().compress(forward_backward_request_to_proto(request).SerializeToString())
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
    url = f"{engine.base_url}/api/v1/forward_backward"
    request_id = requests.post(url, data=body, headers=headers, timeout=30).json()["request_id"]
    url = f"{engine.base_url}/api/v1/retrieve_future"
    answer = requests.post(url, json={"request_id": request_id}, timeout=30)
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert len(deserialize_forward_backward_output(answer.content).loss_fn_outputs) == len(data)


def test_state_continues_in_a_new_client_bit_for_bit(
    service_client: Any, engine: Any, base_model_name: str, data: list[tinker.Datum]
) -> None:
    unbroken = new_client(service_client, base_model_name)
    train(unbroken, data, 3)
    path = unbroken.save_state("middle").result().path
    train(unbroken, data, 3)
    files = {"unbroken": adapter_bytes(engine, unbroken)}
    restored = service_client.create_training_client_from_state_with_optimizer(path).result()
    weights_only = service_client.create_training_client_from_state(path).result()
    loaded = new_client(service_client, base_model_name, seed=9)
    loaded.load_state_with_optimizer(path).result()
    for name, client in (("restored", restored), ("weights only", weights_only), ("loaded", loaded)):
        assert client.get_info().lora_rank == 8
        train(client, data, 3)
        files[name] = adapter_bytes(engine, client)
    assert files["restored"] == files["unbroken"]
    assert files["loaded"] == files["unbroken"]
    assert files["weights only"] != files["unbroken"]


def test_an_unnamed_sampler_is_a_snapshot(service_client: Any, base_model_name: str, data: Any, engine: Any) -> None:
    client = new_client(service_client, base_model_name)
    before = client.save_weights_and_get_sampling_client().result()
    prompt = data[0].model_input
    first = before.compute_logprobs(prompt).result()
    train(client, data, 3)
    after = client.save_weights_and_get_sampling_client().result()
    assert before.compute_logprobs(prompt).result() == first
    assert after.compute_logprobs(prompt).result() != first
    names = [info.name for info in engine.engine.store.list(client.model_id)]
    assert names == []


def test_scored_logprobs_equal_those_of_training(service_client: Any, trained: Any, data: list[tinker.Datum]) -> None:
    client, _, _, weights = trained
    tuned = service_client.create_sampling_client(model_path=weights).result()
    output = client.forward(data, "cross_entropy").result().loss_fn_outputs
    for datum, result in zip(data, output, strict=True):
        scored = tuned.compute_logprobs(datum.model_input).result()
        assert scored[0] is None
        assert scored[1:] == pytest.approx(result["logprobs"].to_numpy()[:-1].tolist(), abs=1e-4)


def test_plain_peft_reads_what_was_saved(trained: Any, engine: Any, data: list[tinker.Datum]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    client, _, state, weights = trained
    expected = client.forward(data[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    for path in (state, weights):
        base = AutoModelForCausalLM.from_pretrained(base_models.STAND_IN, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, adapter_folder(engine, path))
        tokens = torch.tensor([data[0].model_input.to_ints()])
        targets = torch.from_numpy(data[0].loss_fn_inputs["target_tokens"].to_numpy())
        with torch.no_grad():
            logprobs = model(input_ids=tokens).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        assert logprobs.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


async def test_concurrent_greedy_samples_equal_those_alone(
    service_client: Any, base_model_name: str, small_tokenizer: Any
) -> None:
    sampler = await service_client.create_sampling_client(base_model=base_model_name)
    words = ("cat", "dog", "tree", "house", "river", "bird", "fish", "car")
    prompts = [prompt_of(small_tokenizer, f"What is a {word}?") for word in words]
    together = await asyncio.gather(*(sampler.sample(prompt, 1, greedy(10)) for prompt in prompts * 2))
    assert [r.sequences[0].tokens for r in together[:8]] == [r.sequences[0].tokens for r in together[8:]]
    for prompt, result in zip(prompts, together, strict=False):
        alone = await sampler.sample(prompt, 1, greedy(10))
        assert alone.sequences[0].tokens == result.sequences[0].tokens
    assert len({result.sequences[0].sequence_id for result in together}) == 16


def test_requests_sent_together_are_decoded_as_one_batch(
    service_client: Any, base_model_name: str, small_tokenizer: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []
    run_samples = engine.engine.queue._run_batch
    monkeypatch.setattr(
        engine.engine.queue, "_run_batch", lambda group, batch: batches.append(batch) or run_samples(group, batch)
    )
    sampler = service_client.create_sampling_client(base_model=base_model_name).result()
    prompt = prompt_of(small_tokenizer, "What is a dog?")
    for future in [sampler.sample(prompt, 1, greedy(4)) for _ in range(40)]:
        future.result()
    assert 1 <= len(batches) <= 20


def test_stops_limits_and_seeds_through_the_sdk(
    service_client: Any, base_model_name: str, small_tokenizer: Any
) -> None:
    sampler = service_client.create_sampling_client(base_model=base_model_name).result()
    prompt = prompt_of(small_tokenizer, "a kind of bird that")

    def ask(**params: Any) -> Any:
        return sampler.sample(prompt, 1, types.SamplingParams(**params)).result().sequences[0]

    free = ask(max_tokens=12, temperature=0.0, stop=[])
    assert (len(free.tokens), free.stop_reason) == (12, "length")
    assert len(free.logprobs) == 12
    stopped = ask(max_tokens=12, temperature=0.0, stop=[free.tokens[5]])
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[5]) + 1]
    text = small_tokenizer.decode(free.tokens[:4])
    assert ask(max_tokens=12, temperature=0.0, stop=text[-3:]).stop_reason == "stop"
    drawn = [ask(max_tokens=12, temperature=1.0, seed=seed).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def failure(future: Any) -> tuple[str, str]:
    with pytest.raises(tinker.RequestFailedError) as caught:
        future.result(timeout=60)
    return str(caught.value), str(caught.value.category)


def test_a_clients_mistakes_fail_one_request_and_training_goes_on(
    service_client: Any, base_model_name: str, data: list[tinker.Datum], small_tokenizer: Any
) -> None:
    client = new_client(service_client, base_model_name)
    strange = tinker.Datum(model_input=types.ModelInput.from_ints([1, 99999]), loss_fn_inputs={"target_tokens": [1, 2]})
    long = make_datum(small_tokenizer, "word " * 600, " end")
    requested = [
        (client.forward_backward([strange], "cross_entropy"), "token 99999"),
        (client.forward_backward([long], "cross_entropy"), "context holds 512"),
        (client.forward_backward(data, "stable_reinforce"), "not published"),
        (client.optim_step(types.AdamParams(learning_rate=-1.0)), "learning_rate is -1"),
        (client.save_state("a/b"), "cannot name a checkpoint"),
        (client.load_state("tinker://nobody:train:0/weights/x"), "there is no checkpoint"),
    ]
    good = client.forward_backward(data, "cross_entropy")
    for future, message in requested:
        text, category = failure(future)
        assert message in text
        assert category == "user"
    assert good.result().metrics["loss:sum"] > 0
    client.optim_step(STEP).result()
    client.save_state("twice").result()
    assert "exists already" in failure(client.save_state("twice"))[0]
    client.save_state("twice", overwrite=True).result()


def test_wrong_models_and_samplers_are_refused_at_once(
    service_client: Any, base_model_name: str, trained: Any, small_tokenizer: Any
) -> None:
    unknown = service_client.create_lora_training_client(base_model="no/such-model", rank=4)
    assert "no/such-model" in failure(unknown)[0]
    assert (
        "LoRA rank is 0" in failure(service_client.create_lora_training_client(base_model=base_model_name, rank=0))[0]
    )
    assert "sampling only" in failure(service_client.create_training_client_from_state(trained[3]))[0]
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        service_client.create_sampling_client(model_path=trained[2] + "x").result(timeout=30)
    with pytest.raises(tinker.BadRequestError, match="no/such-model"):
        service_client.create_sampling_client(base_model="no/such-model").result(timeout=30)
    sampler = service_client.create_sampling_client(base_model=base_model_name).result()
    long = types.ModelInput.from_ints([5] * 513)
    text, category = failure(sampler.sample(long, 1, greedy()))
    assert "513 tokens" in text
    assert category == "user"
    short = sampler.sample(types.ModelInput.from_ints([5] * 510), 1, greedy(20, stop=[])).result().sequences[0]
    assert (len(short.tokens), short.stop_reason) == (2, "length")


def test_checkpoints_are_listed_published_given_a_life_and_deleted(
    service_client: Any, rest: Any, engine: Any, base_model_name: str, data: list[tinker.Datum]
) -> None:
    client = new_client(service_client, base_model_name, rank=4)
    train(client, data, 2)
    state = client.save_state("one", ttl_seconds=7200, user_metadata={"round": "1"}).result().path
    sampler = client.save_weights_for_sampler("one").result().path
    listed = {c.tinker_path: c for c in rest.list_checkpoints(client.model_id).result().checkpoints}
    assert set(listed) == {state, sampler}
    assert listed[state].checkpoint_type == "training"
    assert listed[state].user_metadata == {"round": "1"}
    assert listed[state].size_bytes > listed[sampler].size_bytes
    assert listed[state].expires_at is not None
    assert engine.engine.store.find(state).info.step == 2

    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.lora_rank, info.is_lora) == (base_model_name, 4, True)
    rest.publish_checkpoint_from_tinker_path(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    changed = {c.tinker_path: c for c in rest.list_user_checkpoints().result().checkpoints}[state]
    assert changed.public
    assert changed.expires_at is None
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    run = rest.get_training_run(client.model_id).result()
    assert (run.base_model, run.lora_rank) == (base_model_name, 4)
    assert run.last_checkpoint is not None
    assert not run.last_checkpoint.public
    assert client.model_id in [run.training_run_id for run in rest.list_training_runs(limit=100).result().training_runs]
    session_id = client.model_id.split(":")[0]
    assert session_id in rest.list_sessions().result().sessions
    assert client.model_id in rest.get_session(session_id).result().training_run_ids
    rest.delete_checkpoint_from_tinker_path(state).result()
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        rest.delete_checkpoint_from_tinker_path(state).result()


def test_a_restarted_server_serves_what_was_saved(
    tmp_path: Path, base_model_name: str, data: list[tinker.Datum], small_tokenizer: Any
) -> None:
    prompt = prompt_of(small_tokenizer, PAIRS[0][0])

    def start() -> tuple[LocalTinkerServer, Any]:
        server = LocalTinkerServer(tmp_path / "state", threads=1)
        return server, tinker.ServiceClient(base_url=server.start(), api_key=KEY)

    server, service = start()
    client = new_client(service, base_model_name)
    train(client, data, 2)
    state = client.save_state("s").result().path
    weights = client.save_weights_for_sampler("w").result().path
    sampled = service.create_sampling_client(model_path=weights).result().sample(prompt, 1, greedy()).result()
    first_id = client.model_id
    train(client, data, 2)
    unbroken = adapter_bytes(server, client)
    server.stop()

    server, service = start()
    again = service.create_sampling_client(model_path=weights).result().sample(prompt, 1, greedy()).result()
    assert again.sequences[0].tokens == sampled.sequences[0].tokens
    restored = service.create_training_client_from_state_with_optimizer(state).result()
    assert restored.model_id != first_id
    train(restored, data, 2)
    assert adapter_bytes(server, restored) == unbroken
    assert post(server, "get_info", {"model_id": restored.model_id})["step"] == 4
    server.stop()


def test_a_client_of_a_dead_servers_model_is_told(engine: Any, data: list[tinker.Datum], small_tokenizer: Any) -> None:
    answer = post(engine, "optim_step", {"model_id": "gone:train:0", "seq_id": 57, "adam_params": {}})
    reply = post(engine, "retrieve_future", {"request_id": answer["request_id"]})
    assert reply["category"] == "user"
    assert "the server was restarted" in reply["error"]


def post(server: Any, path: str, body: Any) -> Any:
    response = requests.post(f"{server.base_url}/api/v1/{path}", json=body, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


def test_requests_out_of_order_and_repeated_run_once_in_order(engine: Any, base_model_name: str) -> None:
    session = post(engine, "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": base_model_name, "lora_config": {"rank": 4}}
    created = post(engine, "create_model", body)
    assert post(engine, "create_model", body) == created
    model_id = created["model_id"]
    assert model_id == f"{session}:train:0"
    step = {"model_id": model_id, "adam_params": {"learning_rate": 1e-3}}
    second = post(engine, "optim_step", {**step, "seq_id": 2})
    save = post(engine, "save_weights", {"model_id": model_id, "seq_id": 3, "path": "x"})
    assert post(engine, "optim_step", {**step, "seq_id": 2}) == second
    first = post(engine, "optim_step", {**step, "seq_id": 1})
    path = post(engine, "retrieve_future", save)["path"]
    assert engine.engine.store.find(path).info.step == 2
    assert post(engine, "optim_step", {**step, "seq_id": 1}) == first
    assert post(engine, "get_info", {"model_id": model_id})["step"] == 2


def test_a_finished_session_lets_go_of_its_models(engine: Any, base_model_name: str) -> None:
    service = tinker.ServiceClient(base_url=engine.base_url, api_key=KEY)
    client = new_client(service, base_model_name)
    sampler = client.save_weights_and_get_sampling_client().result()
    assert client.model_id in engine.engine.runs
    model = engine.engine.runs[client.model_id].model
    before = len(model._adapters)
    sampler_id = sampler._sampling_session_id
    folder = engine.engine.book.samplers[sampler_id].checkpoint.folder
    service.close("success").result()
    deadline = time.monotonic() + 30
    while (client.model_id in engine.engine.runs or folder.exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.model_id not in engine.engine.runs
    assert sampler_id not in engine.engine.book.samplers
    assert len(model._adapters) < before
    assert not folder.exists(), "a sampler without a name ends with its session"


def test_unknown_sessions_and_requests_get_their_status(engine: Any) -> None:
    for path, body, status in (
        ("session_heartbeat", {"session_id": "nobody"}, 410),
        ("retrieve_future", {"request_id": "nothing"}, 410),
        ("create_model", {"session_id": "s"}, 400),
        ("get_info", {"model_id": "m"}, 400),
    ):
        response = requests.post(f"{engine.base_url}/api/v1/{path}", json=body, timeout=30)
        assert response.status_code == status, path
        assert response.json()["detail"]
    broken = requests.post(f"{engine.base_url}/api/v1/optim_step", data=b"{", timeout=30)
    assert broken.status_code == 400
    assert requests.get(f"{engine.base_url}/api/v1/samplers/none", timeout=30).status_code == 404


def test_tokenizer_files_rebuild_the_tokenizer_that_is_served(
    engine: Any, base_model_name: str, tmp_path: Path, small_tokenizer: Any
) -> None:
    answer = requests.get(f"{engine.base_url}/api/v1/tokenizer_files", {"model": base_model_name}, timeout=30).json()
    assert answer["stand_in"] is True
    assert answer["max_context"] == 512
    assert answer["served_by"] != base_model_name
    for name, text in answer["files"].items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    text = "<|im_start|>user\nWhat is a cat?<|im_end|>"
    assert base_models.load_tokenizer(tmp_path).encode(text) == small_tokenizer.encode(text)
    unknown = requests.get(f"{engine.base_url}/api/v1/tokenizer_files", {"model": "no/such"}, timeout=30)
    assert unknown.status_code == 422
    assert "no/such" in unknown.json()["detail"]


def test_off_loopback_a_key_is_demanded(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--api-key"):
        LocalTinkerServer(tmp_path, host="0.0.0.0")
    assert is_loopback("127.0.0.1")
    assert not is_loopback("192.168.1.5")
    with LocalTinkerServer(tmp_path, api_key="tml-secret") as server:
        url = f"{server.base_url}/api/v1"
        assert requests.get(f"{url}/healthz", timeout=30).status_code == 200
        assert requests.get(f"{url}/get_server_capabilities", timeout=30).status_code == 401
        wrong = requests.get(f"{url}/get_server_capabilities", headers={"X-API-Key": "tml-x"}, timeout=30)
        assert wrong.status_code == 401
        right = requests.get(f"{url}/get_server_capabilities", headers={"X-API-Key": "tml-secret"}, timeout=30)
        assert right.json()["supported_models"]
        with pytest.raises(tinker.AuthenticationError):
            tinker.RestClient(base_url=server.base_url, api_key="tml-x").get_server_capabilities().result()


def test_a_state_folder_or_port_in_use_is_refused(tmp_path: Path) -> None:
    with LocalTinkerServer(tmp_path / "a") as server:
        with pytest.raises(RunLockedError, match="in use by another process"):
            LocalTinkerServer(tmp_path / "a").start()
        port = int(server.base_url.rsplit(":", 1)[1])
        with pytest.raises(ServiceUnavailableError, match="cannot listen"):
            LocalTinkerServer(tmp_path / "b", port=port).start()
    LocalTinkerServer(tmp_path / "b").engine.store.open()


def test_stopping_does_not_wait_for_a_polling_client(tmp_path: Path, base_model_name: str) -> None:
    server = LocalTinkerServer(tmp_path, threads=1)
    server.start()
    session = post(server, "create_session", {})["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": base_model_name, "lora_config": {"rank": 4}}
    model_id = post(server, "create_model", body)["model_id"]
    held = post(server, "optim_step", {"model_id": model_id, "seq_id": 5, "adam_params": {}})["request_id"]
    code = (
        "import json, sys, requests; r = requests.post(sys.argv[1], json={'request_id': sys.argv[2]}, timeout=60); "
        "print(r.status_code)"
    )
    poll = subprocess.Popen(
        [sys.executable, "-c", code, f"{server.base_url}/api/v1/retrieve_future", held],
        stdout=subprocess.PIPE,
        text=True,
    )
    request = server.engine.queue._requests[held]
    while not request.waiters:
        time.sleep(0.01)
    server.stop()
    server.stop()
    output, _ = poll.communicate(timeout=30)
    assert output.strip() == "503"


def test_stand_alone_it_prints_its_address_and_ends_on_sigterm(tmp_path: Path) -> None:
    env = {**os.environ, "MOCK_TINKER_API_KEY": "tml-env"}
    command = [
        sys.executable,
        "mock_tinker.py",
        "--port",
        "0",
        "--state-dir",
        str(tmp_path),
        "--model",
        "Qwen/Qwen3-8B",
    ]
    root = Path(__file__).resolve().parent.parent
    process = subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("Tinker server ready at http://127.0.0.1:")
        url = line.split("ready at ")[1].split(",")[0]
        headers = {"X-API-Key": "tml-env"}
        assert requests.get(f"{url}/api/v1/get_server_capabilities", timeout=30).status_code == 401
        models = requests.get(f"{url}/api/v1/get_server_capabilities", headers=headers, timeout=30).json()
        assert [model["model_name"] for model in models["supported_models"]] == ["Qwen/Qwen3-8B"]
        other = requests.get(f"{url}/api/v1/tokenizer_files", {"model": "Qwen/Qwen3-32B"}, headers=headers, timeout=30)
        assert other.status_code == 422
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        process.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [(["--help"], 0, "--state-dir"), (["--host", "0.0.0.0"], 2, "give --api-key"), (["--nonsense"], 2, "--nonsense")],
)
def test_the_command_line_explains_itself(arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "MOCK_TINKER_API_KEY"}
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, root / "mock_tinker.py", *arguments],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert message in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
