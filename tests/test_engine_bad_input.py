"""What clients send by mistake: that request alone fails, with a message to act on, and the client goes on working."""

from __future__ import annotations

import json
import math
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import tinker
import zstandard
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

import engine_routes
import request_queue
import wire_format
from engine_routes import build_app
from mock_tinker import LocalTinkerServer

KEY = "tml-local-test"
STEP = types.AdamParams(learning_rate=2e-3)
CONTEXT = 512
VOCABULARY = 4096


def datum(tokens: list[int], **inputs: Any) -> tinker.Datum:
    return tinker.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


GOOD = datum([300, 301, 302], target_tokens=[301, 302, 303], weights=[1.0, 1.0, 1.0])
PROMPT = types.ModelInput.from_ints([300, 301])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTinkerServer]:
    """A server of this module's own: what is sent here would disturb the others' tests."""
    with LocalTinkerServer(tmp_path_factory.mktemp("engine"), threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def service(server: LocalTinkerServer) -> Iterator[Any]:
    client = tinker.ServiceClient(base_url=server.base_url, api_key=KEY)
    yield client
    client.close("success").result(timeout=30)


def new_client(service: Any, model: str) -> Any:
    return service.create_lora_training_client(base_model=model, rank=4, seed=1).result(timeout=60)


def good_step(client: Any) -> float:
    gradients, update = client.forward_backward([GOOD], "cross_entropy"), client.optim_step(STEP)
    loss = gradients.result(timeout=60).metrics["loss:sum"]
    update.result(timeout=60)
    return loss


def weights_of(server: LocalTinkerServer, client: Any) -> bytes:
    path = client.save_state(f"now-{time.monotonic_ns()}").result(timeout=60).path
    return (server.engine.store.find(path).folder / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def two_steps(server: LocalTinkerServer, service: Any, base_model_name: str) -> bytes:
    """The weights after two good steps and nothing else."""
    client = new_client(service, base_model_name)
    for _ in range(2):
        good_step(client)
    return weights_of(server, client)


def fault(future: Any, message: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        future.result(timeout=60)
    assert str(caught.value.category) == "user", caught.value


PPO = {"target_tokens": [301, 302, 303], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}
IMAGE = types.ImageChunk(data=b"x", format="png", expected_tokens=3)
BATCHES: dict[str, tuple[Callable[[], list[tinker.Datum]], str]] = {
    "weights of another shape": (
        lambda: [datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[1.0, 1.0])],
        r"weights has shape \[2\], target_tokens \[3\]",
    ),
    "targets of another shape": (lambda: [datum([1, 2, 3], target_tokens=[2, 3])], r"shape \[2\] for 3 input tokens"),
    "targets in three dimensions": (
        lambda: [
            datum([1, 2], target_tokens=types.TensorData(data=list(range(8)), dtype="int64", shape=[2, 2, 2])),
        ],
        r"must be \[2\] or \[2, K\]",
    ),
    "targets of another type": (
        lambda: [datum([1, 2], target_tokens=types.TensorData(data=[1.5, 2.5], dtype="float32", shape=[2]))],
        "no token id",
    ),
    "a negative token": (lambda: [datum([1, -2], target_tokens=[2, 3])], "model_input holds token -2"),
    "a token out of range": (lambda: [datum([1, VOCABULARY], target_tokens=[2, 3])], f"0 to {VOCABULARY - 1}"),
    "a negative target": (lambda: [datum([1, 2], target_tokens=[2, -3])], "target_tokens holds token -3"),
    "a huge target": (lambda: [datum([1, 2], target_tokens=[2, 2**40])], "target_tokens holds token 1099511627776"),
    "an empty input": (lambda: [datum([], target_tokens=[])], "model_input is empty"),
    "no targets": (lambda: [datum([1, 2], weights=[1.0, 1.0])], "lacks target_tokens"),
    "NaN as a weight": (
        lambda: [datum([1, 2], target_tokens=[2, 3], weights=[1.0, math.nan])],
        "weights holds a value that is not finite",
    ),
    "infinity as a weight": (
        lambda: [datum([1, 2], target_tokens=[2, 3], weights=[1.0, math.inf])],
        "weights holds a value that is not finite",
    ),
    "an input the loss does not take": (
        lambda: [datum([1, 2], target_tokens=[2, 3], advantages=[1.0, 1.0])],
        "takes no input advantages",
    ),
    "a sequence over the context": (
        lambda: [GOOD, datum([5] * (CONTEXT + 1), target_tokens=[5] * (CONTEXT + 1))],
        f"datum 1: {CONTEXT + 1} tokens, the model's context holds {CONTEXT}",
    ),
    "a few bytes that stand for terabytes": (
        lambda: [datum([1, 2], target_tokens=types.TensorData([1], "int64", [2, 10**12], [0, 1, 1], [7]))],
        r"the shape \[2, 1000000000000\]",
    ),
    "a sparse tensor that contradicts itself": (
        lambda: [datum([1, 2], target_tokens=types.TensorData([1], "int64", [2, 4], [0, 1, 1], [9]))],
        "does not fit the shape",
    ),
    "an image": (
        lambda: [tinker.Datum(model_input=types.ModelInput(chunks=[IMAGE]), loss_fn_inputs=GOOD.loss_fn_inputs)],
        "serves text models only",
    ),
}
NO_PATH = "is not the path of a checkpoint"
REQUESTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an unknown loss": (lambda c: c.forward_backward([GOOD], "nonsense"), "'nonsense' is not supported; choose one of"),
    "an unknown setting": (lambda c: c.forward_backward([GOOD], "cross_entropy", {"x": 1.0}), "has no setting 'x'"),
    "NaN as a setting": (
        lambda c: c.forward_backward([datum([1, 2, 3], **PPO)], "ppo", {"clip_low_threshold": math.nan}),
        "clip_low_threshold is nan",
    ),
    "text as a setting": (
        lambda c: c.forward_backward([datum([1, 2, 3], **PPO)], "ppo", {"clip_low_threshold": "low"}),
        "clip_low_threshold is 'low'",
    ),
    "a loss without its inputs": (
        lambda c: c.forward_backward([GOOD], "ppo"),
        "takes no input weights|needs the input",
    ),
    "a custom loss nobody made": (
        lambda c: c.forward_backward([GOOD], "custom", {"loss_id": "none"}),
        "no custom loss 'none'",
    ),
    "NaN as a learning rate": (lambda c: c.optim_step(types.AdamParams(learning_rate=math.nan)), "must be a finite"),
    "infinity as eps": (lambda c: c.optim_step(types.AdamParams(learning_rate=1e-3, eps=math.inf)), "must be a finite"),
    "a negative learning rate": (lambda c: c.optim_step(types.AdamParams(learning_rate=-1.0)), "learning_rate is -1.0"),
    "beta of 1": (lambda c: c.optim_step(types.AdamParams(learning_rate=1e-3, beta1=1.0)), "beta1 is 1.0"),
    "no name": (lambda c: c.save_state(""), "cannot name a checkpoint"),
    "the name of a parent": (lambda c: c.save_state(".."), "cannot name a checkpoint"),
    "a name that climbs": (lambda c: c.save_state("../../x"), "cannot name a checkpoint"),
    "a name that climbs, for sampling": (lambda c: c.save_weights_for_sampler("..\\x"), "cannot name a checkpoint"),
    "an endless name": (lambda c: c.save_state("x" * 5000), "cannot name a checkpoint"),
    "a name longer than files have": (lambda c: c.save_state("\u20ac" * 150), "takes three or more"),
    "a name with a NUL": (lambda c: c.save_state("a\0b"), "cannot name a checkpoint"),
    "a life of 0 s": (lambda c: c.save_state("brief", ttl_seconds=0), "ttl_seconds is 0"),
    "a negative life": (lambda c: c.save_state("brief", ttl_seconds=-1), "ttl_seconds is -1"),
    "an endless life": (lambda c: c.save_weights_for_sampler("brief", ttl_seconds=10**15), "ttl_seconds is 10000"),
    "no path": (lambda c: c.load_state(""), "path must be a non-empty string"),
    "another scheme": (lambda c: c.load_state("http://a:train:0/weights/x"), NO_PATH),
    "a path that climbs": (lambda c: c.load_state("tinker://../../weights/.."), NO_PATH),
    "a path of parents": (lambda c: c.load_state("tinker://../weights/.."), "there is no checkpoint"),
    "a path to nothing": (lambda c: c.load_state("tinker://nobody:train:0/weights/x"), "there is no checkpoint"),
    "a path of another kind": (lambda c: c.load_state("tinker://nobody:train:0/other/x"), NO_PATH),
    "an endless path": (lambda c: c.load_state("tinker://" + "x" * 900 + "/weights/a"), "is no name or id"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_training_mistakes_fail_alone_and_leave_the_weights_as_they_were(
    server: LocalTinkerServer, service: Any, base_model_name: str, two_steps: bytes
) -> None:
    client = new_client(service, base_model_name)
    good_step(client)
    # All in flight at once, so that a request after each of them waits for its turn.
    asked = [(client.forward_backward(make(), "cross_entropy"), message) for make, message in BATCHES.values()]
    asked += [(request(client), message) for request, message in REQUESTS.values()]
    for future, message in asked:
        fault(future, message)
    with pytest.raises(ValueError, match="No data"):
        client.forward_backward([], "cross_entropy")
    assert good_step(client) > 0
    assert weights_of(server, client) == two_steps


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_checkpoint_in_the_wrong_place(server: LocalTinkerServer, service: Any, base_model_name: str) -> None:
    client, other = (
        new_client(service, base_model_name),
        service.create_lora_training_client(base_model=base_model_name, rank=8, seed=1).result(timeout=60),
    )
    path = client.save_state("taken").result(timeout=60).path
    sampled = client.save_weights_for_sampler("taken").result(timeout=60).path
    fault(client.save_state("taken"), "exists already; choose another name, or save with overwrite=True")
    assert client.save_state("taken", overwrite=True).result(timeout=60).path == path
    assert client.save_weights_for_sampler("taken").result(timeout=60).path == sampled
    fault(client.load_state(sampled), "sampling only")
    fault(other.load_state(path), "rank or trained layers differ")
    fault(service.create_training_client_from_state(sampled), "sampling only")
    for bad in (
        "tinker://x/weights/a",
        "nonsense",
        path + "x",
        path.replace("weights", "other"),
        "tinker://" + "x" * 900,
    ):
        fault(service.create_training_client_from_state_with_optimizer(bad), "checkpoint|no name or id")
        if bad.startswith("tinker://"):
            with pytest.raises((tinker.BadRequestError, tinker.NotFoundError), match=r"checkpoint|no name or id"):
                service.create_sampling_client(model_path=bad).result(timeout=60)
    assert good_step(client) > 0
    assert good_step(other) > 0


MODELS = ("", "x" * 300, "~nobody-of-this-name/model", "\0", "no/such-model", "../tests", "x" * 5000)


@pytest.mark.parametrize("name", MODELS)
def test_base_models_that_are_none(service: Any, base_model_name: str, name: str) -> None:
    fault(service.create_lora_training_client(base_model=name, rank=4), "base_model")
    with pytest.raises((tinker.BadRequestError, ValueError), match="base_model"):
        service.create_sampling_client(base_model=name).result(timeout=60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "LoRA rank is 0"),
        ({"rank": -3}, "LoRA rank is -3"),
        ({"rank": 10**9}, "between 1 and 192"),
        ({"train_attn": False, "train_mlp": False}, "nothing to train"),
    ],
)
def test_adapters_that_cannot_be(service: Any, base_model_name: str, options: dict[str, Any], message: str) -> None:
    fault(service.create_lora_training_client(base_model=base_model_name, **{"rank": 4, "seed": 1, **options}), message)


SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "negative max_tokens": ({"max_tokens": -1}, "max_tokens is -1"),
    "huge max_tokens": ({"max_tokens": 10**9}, "max_tokens is 1000000000"),
    "negative temperature": ({"temperature": -0.5}, "temperature is -0.5"),
    "top_p of 0": ({"top_p": 0.0}, "top_p is 0.0"),
    "top_p over 1": ({"top_p": 1.5}, "top_p is 1.5"),
    "top_k of 0": ({"top_k": 0}, "top_k is 0"),
    "an empty stop": ({"stop": ""}, "stop holds an empty string"),
    "an endless seed": ({"seed": 2**200}, "seed is a number of 201 bits"),
}
PROMPTS: dict[str, tuple[list[int], str]] = {
    "empty": ([], "the prompt is empty"),
    "negative": ([1, -1], "the prompt holds token -1"),
    "out of range": ([VOCABULARY], f"0 to {VOCABULARY - 1}"),
    "over the context": ([5] * (CONTEXT + 1), f"{CONTEXT + 1} tokens, the model's context holds {CONTEXT}"),
}


def test_sampling_mistakes_fail_alone(service: Any, base_model_name: str) -> None:
    sampler = service.create_sampling_client(base_model=base_model_name).result(timeout=60)
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    before = sampler.sample(PROMPT, 1, greedy).result(timeout=60).sequences[0]
    # Together with good ones, whose batch they might spoil.
    good = [sampler.sample(PROMPT, 1, greedy) for _ in range(4)]
    asked = [
        (sampler.sample(PROMPT, 1, types.SamplingParams(**{"max_tokens": 4, **params})), message)
        for params, message in SAMPLES.values()
    ]
    asked += [(sampler.sample(types.ModelInput.from_ints(p), 1, greedy), message) for p, message in PROMPTS.values()]
    asked += [(sampler.sample(PROMPT, n, greedy), f"num_samples is {n}") for n in (0, -1, 5000, 10**9)]
    asked += [
        (sampler.sample(PROMPT, 1, greedy, topk_prompt_logprobs=10**6), "topk_prompt_logprobs is 1000000"),
        (
            sampler.sample(PROMPT, 4096, types.SamplingParams(max_tokens=500), topk_sample_logprobs=1000),
            "more than the 33554432 logprobs",
        ),
        (sampler.compute_logprobs(types.ModelInput.from_ints([VOCABULARY, 1])), "the prompt holds token"),
    ]
    for future, message in asked:
        fault(future, message)
    good += [sampler.sample(PROMPT, 1, greedy)]
    for future in good:
        assert future.result(timeout=60).sequences[0].tokens == before.tokens
    # Legal, if unusual.
    nothing = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=0)).result(timeout=60).sequences[0]
    assert (nothing.tokens, nothing.stop_reason) == ([], "length")
    coldest = types.SamplingParams(max_tokens=4, temperature=5e-324, seed=-1)
    assert sampler.sample(PROMPT, 1, coldest).result(timeout=60).sequences[0].tokens == before.tokens


class RawClient:
    """A client that sends what the SDK never would: a session, a model in it, and the next number of its requests."""

    def __init__(self, server: LocalTinkerServer, model: str) -> None:
        self.url = f"{server.base_url}/api/v1"
        self.http = requests.Session()
        self.http.trust_env = False
        self.session_id = self.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}).json()[
            "session_id"
        ]
        body = {"session_id": self.session_id, "model_seq_id": 0, "base_model": model}
        created = self.post("create_model", {**body, "lora_config": {"rank": 4, "seed": 1}}).json()
        self.model_id = created["model_id"]
        self.result(created["request_id"])
        self.number = 0

    def post(self, path: str, body: Any = None, data: Any = None, **headers: str) -> requests.Response:
        content = data if body is None else json.dumps(body)
        return self.http.post(f"{self.url}/{path}", data=content, headers=headers, timeout=60)

    def result(self, request_id: str) -> requests.Response:
        while (answer := self.post("retrieve_future", {"request_id": request_id})).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        return answer

    def next(self, path: str, body: Any) -> Any:
        """The reply to the next request of the model."""
        self.number += 1
        sent = self.post(path, {"model_id": self.model_id, "seq_id": self.number, **body})
        assert sent.status_code == 200, sent.text
        return self.result(sent.json()["request_id"]).json()

    def gradients(self, **changes: Any) -> bytes:
        """The body of a good forward_backward with the next number."""
        self.number += 1
        request = types.ForwardBackwardRequest(
            model_id=self.model_id,
            seq_id=self.number,
            forward_backward_input=types.ForwardBackwardInput(data=[GOOD], loss_fn="cross_entropy"),
        )
        message = forward_backward_request_to_proto(request)
        for name, value in changes.items():
            setattr(message, name, value)
        return message.SerializeToString()

    def step(self) -> None:
        sent = self.post("forward_backward", data=self.gradients())
        answer = self.result(sent.json()["request_id"])
        assert answer.headers["content-type"] == "application/x-protobuf"
        assert "metrics" in self.next("optim_step", {"adam_params": {"learning_rate": 2e-3}})

    def weights(self, server: LocalTinkerServer) -> bytes:
        path = self.next("save_weights", {"path": f"now-{time.monotonic_ns()}"})["path"]
        return (server.engine.store.find(path).folder / "adapter_model.safetensors").read_bytes()


@pytest.fixture
def raw(server: LocalTinkerServer, base_model_name: str) -> RawClient:
    return RawClient(server, base_model_name)


NUMBERED: list[tuple[str, dict[str, Any], str]] = [
    ("optim_step", {}, "adam_params is missing"),
    ("optim_step", {"adam_params": None}, "adam_params"),
    ("optim_step", {"adam_params": []}, "adam_params"),
    ("optim_step", {"adam_params": "fast"}, "adam_params"),
    ("optim_step", {"adam_params": {"learning_rate": "1e-3"}}, "learning_rate is '1e-3'"),
    ("optim_step", {"adam_params": {"learning_rate": True}}, "learning_rate is True"),
    ("optim_step", {"adam_params": {"learning_rate": math.nan}}, "learning_rate is nan"),
    ("optim_step", {"adam_params": {"learning_rate": 10**400}}, "learning_rate"),
    ("optim_step", {"adam_params": {"type": "muon"}}, "'muon' is not supported"),
    ("optim_step", {"adam_params": {"type": ["adamw"]}}, "not supported"),
    ("save_weights", {"path": 5}, "cannot name a checkpoint"),
    ("save_weights", {"path": ["x"]}, "cannot name a checkpoint"),
    ("save_weights", {"path": "x", "ttl_seconds": "long"}, "ttl_seconds is 'long'"),
    ("save_weights", {"path": "x", "ttl_seconds": True}, "ttl_seconds is True"),
    ("save_weights", {"path": "x", "ttl_seconds": math.inf}, "ttl_seconds is inf"),
    ("save_weights", {"path": "x", "user_metadata": ["a"]}, "user_metadata must"),
    ("save_weights", {"path": "x", "user_metadata": {"a": math.nan}}, "user_metadata must"),
    ("save_weights_for_sampler", {"sampling_session_seq_id": "first"}, "sampling_session_seq_id is 'first'"),
    ("save_weights_for_sampler", {"path": {}}, "cannot name a checkpoint"),
    ("load_weights", {}, "path must be a non-empty string"),
    ("load_weights", {"path": 7}, "path must be a non-empty string"),
    ("load_weights", {"path": "tinker://a/weights/b" * 100}, "path"),
]


def test_a_malformed_request_fails_in_its_turn(server: LocalTinkerServer, raw: RawClient, two_steps: bytes) -> None:
    raw.step()
    for path, body, message in NUMBERED:
        reply = raw.next(path, body)
        assert reply.get("category") == "user", (path, body, reply)
        assert message in reply["error"]
    raw.step()
    assert raw.weights(server) == two_steps


def test_damaged_training_data_is_the_clients_mistake(raw: RawClient) -> None:
    """Bits of a good request turned over at random: read as something else, or refused as a mistake."""
    chance = random.Random(3)
    body = raw.gradients()
    refused = 0
    for _ in range(1500):
        damaged = bytearray(body)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        del damaged[chance.choice([len(damaged), chance.randrange(len(damaged))]) :]
        try:
            batch = wire_format.decode_forward_backward(wire_format.parse_forward_backward(bytes(damaged), None))
            assert all(len(datum.tokens) == len(datum.targets) for datum in batch.data)
        except wire_format.RequestError as error:
            refused += bool(str(error))
    assert 500 < refused < 1500


def bomb(size: int) -> bytes:
    """A few kilobytes of zstd that unpack to `size` bytes."""
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    block = bytes(1 << 24)
    return b"".join([*(packer.compress(block) for _ in range(size >> 24)), packer.flush()])


def test_a_body_that_cannot_be_read_is_refused_at_once(
    server: LocalTinkerServer, raw: RawClient, two_steps: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_format, "MAX_UNPACKED", 1 << 24)
    raw.step()
    good = raw.gradients()
    packed = zstandard.ZstdCompressor().compress(good)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("forward_backward", {"data": b"\xff" * 50}, "not a ForwardBackwardRequest"),
        ("forward_backward", {"data": good[:-3]}, "not a ForwardBackwardRequest"),
        ("forward_backward", {"data": b""}, "model_id must be"),
        ("forward_backward", {"data": b'{"model_id": "x"}'}, "not a ForwardBackwardRequest"),
        ("forward_backward", {"data": raw.gradients(seq_id=-4)}, "seq_id is -4"),
        ("forward_backward", {"data": b"no zstd", "encoding": "zstd"}, "not valid zstd"),
        ("forward_backward", {"data": packed[:-2], "encoding": "zstd"}, "end is missing"),
        ("forward_backward", {"data": packed * 2, "encoding": "zstd"}, "one whole zstd frame"),
        ("forward_backward", {"data": bomb(1 << 30), "encoding": "zstd"}, "unpacks to more than"),
        ("forward_backward", {"data": good, "encoding": "br"}, "'br' is not supported"),
        ("optim_step", {"data": b"[1, 2]"}, "must be a JSON object"),
        ("optim_step", {"data": b'{"model_id": "\xff"}'}, "not JSON"),
        ("optim_step", {"data": b'{"model_id": '}, "not JSON"),
        ("optim_step", {"data": b"[" * 100_000}, "not JSON"),
        ("optim_step", {"data": good}, "not JSON"),
        ("optim_step", {"data": b"9" * 5000}, "not JSON"),
        ("save_weights", {"body": {"model_id": raw.model_id, "path": "a\ud800"}}, "half of a surrogate pair"),
        ("optim_step", {"body": {"adam_params": {}}}, "model_id must be a non-empty string"),
        ("optim_step", {"body": {"model_id": "x" * 5000}}, "model_id has 5000 characters"),
        *(
            ("optim_step", {"body": {"model_id": raw.model_id, "seq_id": seq, "adam_params": {}}}, "seq_id is")
            for seq in ("3", 0, -1, 2.0, True, [3])
        ),
    ]
    for path, content, message in refused:
        headers = {"Content-Encoding": content.pop("encoding")} if "encoding" in content else {}
        answer = raw.post(path, **content, **headers)
        assert answer.status_code == 400, (path, message, answer.text)
        assert message in answer.json()["detail"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000, "kilobytes: the bomb went off"
    # A number whose request was refused is free: the client sends it again.
    raw.number -= 2
    raw.step()
    assert raw.weights(server) == two_steps


def test_a_body_over_the_limit_is_refused(
    tmp_path: Path, base_model_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_routes, "MAX_BODY", 100_000)
    with LocalTinkerServer(tmp_path, threads=1) as small:
        client = RawClient(small, base_model_name)
        for path in ("optim_step", "forward_backward", "asample", "create_session"):
            assert client.post(path, data=b" " * 100_001).status_code == 413, path
        assert client.post("optim_step", data=(b" " * 1000 for _ in range(101))).status_code == 413
        client.step()


def test_asking_with_the_wrong_types(server: LocalTinkerServer, raw: RawClient, base_model_name: str) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    body = {"base_model": base_model_name, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    stops: list[Any] = [5, {}, [1, "a"], [""], [None], [True]]
    wrong: list[dict[str, Any]] = [
        {"num_samples": "two"},
        {"num_samples": True},
        {"num_samples": 10**12},
        {"prompt": None},
        {"prompt": [1, 2]},
        {"prompt": {"chunks": [{"tokens": [True]}]}},
        {"prompt": {"chunks": [{"tokens": ["1"]}]}},
        {"prompt": {"chunks": ["text"]}},
        {"sampling_params": []},
        {"base_model": None},
        {"base_model": ["a"]},
        {"model_path": {}, "base_model": None},
        {"model_path": "tinker://a/weights/b"},
        {"sampling_session_id": ["x"]},
        {"sampling_session_id": "nobody:sample:0", "seq_id": 1},
        {"sampling_session_id": "nobody:sample:0", "seq_id": "1"},
        {"target_prompt_logprobs": {"shape": [10**9, 2]}},
        {"topk_prompt_logprobs": 1.5},
        {"prompt_logprobs_last_n": 5},
        *({"sampling_params": {"max_tokens": 1, "stop": stop}} for stop in stops),
        *({"sampling_params": {"max_tokens": 1, "temperature": t}} for t in (math.nan, math.inf, "hot", 10**400)),
        {"sampling_params": {"max_tokens": math.nan}},
        {"sampling_params": {"max_tokens": 1, "top_p": math.nan}},
    ]
    for changes in wrong:
        sent = raw.post("asample", {**body, **changes})
        assert sent.status_code == 200, (changes, sent.text)
        reply = raw.result(sent.json()["request_id"]).json()
        assert reply.get("category") == "user", (changes, reply)
        assert reply["error"]
    sent = raw.post("asample", body).json()
    assert raw.result(sent["request_id"]).headers["content-type"] == "application/x-protobuf"
    assert len(sent["sample_sequence_ids"]) == 1


def test_sessions_that_are_not_there(server: LocalTinkerServer, raw: RawClient, base_model_name: str) -> None:
    for path, body in (
        ("create_model", {"model_seq_id": 0, "base_model": base_model_name}),
        ("load_weights", {"model_seq_id": 0, "path": "tinker://a/weights/b"}),
        ("create_sampling_session", {"sampling_session_seq_id": 0, "base_model": base_model_name}),
    ):
        for session_id, status in (("nobody", 404), ("../x", 404), ("x" * 400, 400), (None, 400), (5, 400), ("", 400)):
            answer = raw.post(path, {"session_id": session_id, **body})
            assert answer.status_code == status, (path, session_id, answer.text)
            assert "session" in answer.json()["detail"] or "no name" in answer.json()["detail"]
        for number in (None, "0", -1, 1.0, True):
            name = "sampling_session_seq_id" if path == "create_sampling_session" else "model_seq_id"
            if (path, number) == ("create_sampling_session", None):
                continue
            answer = raw.post(path, {"session_id": raw.session_id, **body, name: number})
            assert answer.status_code == 400, (path, number, answer.text)
            assert name in answer.json()["detail"]
    for kind, value in (("rank", "4"), ("rank", True), ("seed", 1.5), ("train_mlp", "yes"), ("rank", [4])):
        body = {"session_id": raw.session_id, "model_seq_id": 7, "base_model": base_model_name}
        sent = raw.post("create_model", {**body, "lora_config": {kind: value}, "model_seq_id": time.monotonic_ns()})
        reply = raw.result(sent.json()["request_id"]).json()
        assert reply["category"] == "user"
        assert kind in reply["error"]


def test_what_belonged_to_a_session_that_ended(server: LocalTinkerServer, raw: RawClient, base_model_name: str) -> None:
    sampler = raw.post(
        "create_sampling_session",
        {"session_id": raw.session_id, "sampling_session_seq_id": 0, "base_model": base_model_name},
    ).json()["sampling_session_id"]
    other = RawClient(server, base_model_name)
    # The key tells users apart, not the session: a model may be used from another one while its own lasts.
    assert other.post("get_info", {"model_id": raw.model_id}).status_code == 200
    assert raw.post(f"sessions/{raw.session_id}/finish", {"status": "success"}).status_code == 204
    assert raw.post("session_heartbeat", {"session_id": raw.session_id}).status_code == 410
    sent = raw.post("asample", {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}})
    reply = raw.result(sent.json()["request_id"]).json()
    assert reply["category"] == "user"
    assert "it ended" in reply["error"]
    for client in (raw, other):
        client.number += 1
        body = {"model_id": raw.model_id, "seq_id": client.number, "adam_params": {"learning_rate": 1e-3}}
        reply = client.result(client.post("optim_step", body).json()["request_id"]).json()
        assert reply["category"] == "user"
        assert "its session ended" in reply["error"]
    other.number = 0
    other.step()


def test_a_number_that_never_comes_is_passed_over(
    server: LocalTinkerServer, service: Any, base_model_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "HOLE_S", 0.2)
    client = new_client(service, base_model_name)
    # The SDK numbers this request and then finds that it cannot be sent: the server never hears of it.
    with pytest.raises(OverflowError):
        client.forward_backward([datum([1, 2**40], target_tokens=[2, 3])], "cross_entropy").result(timeout=60)
    with pytest.raises(UnicodeEncodeError):
        client.save_state("half a pair \ud800").result(timeout=60)
    good_step(client)
    late = {"model_id": client.model_id, "seq_id": 2, "adam_params": {"learning_rate": 1.0}}
    raw = RawClient(server, base_model_name)
    reply = raw.result(raw.post("optim_step", late).json()["request_id"]).json()
    assert reply["category"] == "user"
    assert "came more than" in reply["error"]
    good_step(client)


BITS: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 10**400, 0.0, 1.5, -1e308, math.nan, math.inf, "", "x", "0",
    "..", "a/b", "\0", "\u2028", "tinker://a/weights/b", "tinker://", "x" * 3000, [], [[]], [None], [1, "a"], {},
    {"a": {"b": [1]}}, {"type": "x"}, [{}] * 3,
]  # fmt: skip


def test_whatever_is_sent_nothing_breaks(
    server: LocalTinkerServer, base_model_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies made at random from bad values, to every route that takes one: never a 5xx, never a bug's message."""
    monkeypatch.setattr(request_queue, "HOLE_S", 0.05)
    monkeypatch.setattr(engine_routes, "LONG_POLL_S", 5.0)
    chance = random.Random(5)
    client = RawClient(server, base_model_name)
    served: list[Any] = build_app(server.engine).routes
    paths = [
        (method, route.path)
        for route in served
        for method in sorted(route.methods)
        if method in ("POST", "PUT", "DELETE")
    ]
    assert len(paths) > 25
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    whole = {
        "session_id": client.session_id, "model_id": client.model_id, "model_seq_id": 1, "seq_id": 1, "path": "name",
        "base_model": base_model_name, "lora_config": {"rank": 4}, "adam_params": {"learning_rate": 1e-3},
        "prompt": prompt, "sampling_params": {"max_tokens": 1, "temperature": 0.5, "stop": "x"}, "num_samples": 1,
        "tags": [], "user_metadata": {"a": "b"}, "sdk_version": "0", "display_name": "n", "ttl_seconds": 3600,
        "request_id": "x", "tinker_path": "tinker://a/weights/b", "source_path": "x", "overwrite": True,
        "sampling_session_seq_id": 0, "sampling_session_id": "x", "optimizer": True, "limit": 2, "query": "x",
        "custom_loss_seq_id": 0, "name": "loss", "graph": {}, "status": "success",
        "optimizer_config": {"type": "adamw"},
    }  # fmt: skip
    seen: dict[str, int] = {}
    for count in range(7 * len(paths)):
        method, path = paths[count % len(paths)]
        body: Any = dict(whole)
        for _ in range(chance.choice([0, 1, 1, 2, 6])):
            name = chance.choice(list(whole))
            if isinstance(body.get(name), dict) and chance.random() < 0.5 and body[name]:
                body[name] = {**body[name], chance.choice(list(body[name])): chance.choice(BITS)}
            elif chance.random() < 0.2:
                body.pop(name, None)
            else:
                body[name] = chance.choice(BITS)
        if chance.random() < 0.05:
            body = chance.choice(BITS)
        if isinstance(body, dict) and type(body.get("seq_id")) is int:
            body["seq_id"] = chance.choice([count + 1, body["seq_id"]])
        for part in ("session_id", "model_id", "name", "kind"):
            path = path.replace(
                "{" + part + "}", chance.choice(["x", "..", "%00", "a%3Ab", "x" * 300, "weights", "%ff"])
            )
        started = time.monotonic()
        answer = client.http.request(method, f"{server.base_url}{path}", data=json.dumps(body), timeout=60)
        assert answer.status_code < 500, (method, path, body, answer.text)
        if answer.status_code >= 400 and answer.status_code != 408:
            assert answer.json()["detail"], (method, path)
        if (
            answer.status_code == 200
            and "request_id" in (content := answer.json())
            and path != "/api/v1/retrieve_future"
        ):
            reply = client.result(content["request_id"])
            if reply.headers["content-type"] == "application/json":
                assert reply.json().get("category") != "server", (method, path, body, reply.json())
            seen[path] = seen.get(path, 0) + 1
        assert time.monotonic() - started < 30, (method, path, body)
    assert len(seen) >= 7
    RawClient(server, base_model_name).step()


def test_queries_that_make_no_sense(server: LocalTinkerServer) -> None:
    url = f"{server.base_url}/api/v1"
    for path in ("training_runs", "checkpoints", "sessions"):
        for query in ("limit=-1", "offset=-1", "limit=many", "limit=99999999999999999999", "offset=1e3", "limit="):
            answer = requests.get(f"{url}/{path}?{query}", timeout=30)
            assert answer.status_code < 500, (path, query, answer.text)
    for path in (
        "training_runs/..%2f..",
        "sessions/%00",
        "samplers/" + "x" * 5000,
        "tokenizer_files?model=%00",
        "nothing",
    ):
        answer = requests.get(f"{url}/{path}", timeout=30)
        assert 400 <= answer.status_code < 500, (path, answer.text)
    assert requests.get(f"{url}/healthz", timeout=30).json()["status"] == "ok"
