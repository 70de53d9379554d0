"""A client's own loss on the engine: the SDK's trace of it, run node by node, against the same function in torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from custom_losses import MAX_ELEMENTS, CustomLoss, build_custom_loss
from wire_format import RequestError

STEP = types.AdamParams(learning_rate=1e-3)


def weighted(logprobs: Any, weights: Any) -> Any:
    return -(logprobs * weights).sum(), {"custom/tokens:sum": (weights != 0).sum()}


def halved(logprobs: Any, weights: Any) -> Any:
    return -(logprobs * weights).sum() / 2, {}


def everything(logprobs: Any, old: Any, advantages: Any, scale: Any) -> Any:
    """Uses each form that an argument of a graph can take."""
    ratio = torch.exp(logprobs - old).clamp(min=0.8, max=1.2)
    shifted = torch.cat([ratio[1:], ratio[:1]]) + torch.nn.functional.softplus(logprobs)[..., None].squeeze(-1)
    positions = torch.arange(logprobs.shape[0], dtype=torch.float32) / 10
    masked = torch.where(advantages > 0, shifted, torch.full_like(shifted, -math.inf)).nan_to_num(neginf=0.0)
    total = (masked * advantages * scale - positions * logprobs.detach()).sum() + torch.stack((ratio, shifted)).mean()
    total = total + logprobs.to(torch.float64).float().mean() ** 2 / math.sqrt(2.0)
    return total, {"custom/ratio:mean": ratio.mean(), "custom/n:sum": (ratio > 0).sum()}


def upload(function: Any, ranks: dict[str, int]) -> dict[str, Any]:
    """The request that the SDK makes of `function`."""
    handle = trace_loss(function, ranks, "s")
    inputs = [entry.model_dump() for entry in handle.inputs]
    return {"session_id": "s", "name": handle.name, "inputs": inputs, "graph": encode_graph(handle).model_dump()}


def build(function: Any, ranks: dict[str, int]) -> CustomLoss:
    return build_custom_loss(upload(function, ranks))


@pytest.mark.parametrize(
    ("function", "ranks"),
    [(weighted, {"logprobs": 1, "weights": 1}), (everything, {"logprobs": 1, "old": 1, "advantages": 1, "scale": 0})],
)
def test_the_graph_computes_what_the_function_does(function: Any, ranks: dict[str, int]) -> None:
    generator = np.random.default_rng(0)
    inputs = {
        name: generator.normal(size=9 if rank else ()).astype(np.float32)
        for name, rank in ranks.items()
        if name != "logprobs"
    }
    start = torch.from_numpy(-generator.random(9).astype(np.float32))
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    found, metrics = build(function, ranks)(ours, inputs)
    expected, their_metrics = function(theirs, *(torch.from_numpy(np.array(values)) for values in inputs.values()))
    torch.testing.assert_close(found, expected)
    assert metrics == {name: pytest.approx(float(value)) for name, value in their_metrics.items()}
    found.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def graph_of(*nodes: dict[str, Any]) -> dict[str, Any]:
    """A request whose graph has `nodes` between its placeholder and an output of node "x"."""
    returned = {"tuple": [{"ref": "x"}, {"dict": {}}]}
    listed = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        *nodes,
        {"op": "output", "name": "output", "target": "output", "args": [returned]},
    ]
    return {"name": "f", "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"format": 1, "nodes": listed}}


def call(target: str, *args: Any, op: str = "call_function", name: str = "x", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


LOGPROBS = {"ref": "logprobs"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (graph_of(call("torch.load", "/etc/passwd")), "torch.load.*not among it"),
        (graph_of(call("os.system", "true")), "os.system"),
        (graph_of(call("builtins.eval", "1")), "builtins.eval"),
        (graph_of(call("torch.manual_seed", 1)), "torch.manual_seed"),
        (graph_of(call("torch.rand_like", LOGPROBS)), "rand_like"),
        (graph_of(call("__class__", LOGPROBS, op="call_method")), "__class__"),
        (graph_of(call("tofile", LOGPROBS, "f", op="call_method")), "tofile"),
        (graph_of(call("weight", op="get_attr")), "get_attr"),
        (graph_of(call("torch.exp", {"ref": "later"})), "no earlier node"),
        (graph_of(call("torch.exp", LOGPROBS, name="logprobs")), "is taken"),
        (graph_of(), "no earlier node makes"),
        ({**graph_of(call("torch.exp", LOGPROBS)), "inputs": [{"name": "weights", "rank": 1}]}, "begin with logprobs"),
        ({**graph_of(call("torch.exp", LOGPROBS)), "inputs": "logprobs"}, "list of objects"),
        ({"name": "f", "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"nodes": []}}, "2 to"),
        ({"name": "f", "inputs": [{"name": "logprobs", "rank": 3}], "graph": {"nodes": []}}, "rank 0, 1 or 2"),
        ({}, "list of objects"),
    ],
)
def test_a_graph_that_is_not_arithmetic_is_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build_custom_loss(body)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (call("getattr", LOGPROBS, "grad_fn"), "attribute 'grad_fn'"),
        (call("torch.zeros", 10000, 10000), "more than"),
        (call("torch.arange", MAX_ELEMENTS * 2), "beyond"),
        (call("operator.pow", 9, 10**6), "too large"),
        (call("operator.mul", "x", 1000), "tensors and numbers only"),
        (call("torch.exp", "x"), "failed"),
        (call("torch.exp", LOGPROBS), "must return a scalar tensor"),
        (call("math.exp", 1000.0), "failed"),
        (call("sum", 3.0, op="call_method"), "not on a tensor"),
        (call("torch.exp", {"what": 1}), "unknown form"),
        (call("torch.sum", LOGPROBS, dtype={"dtype": "load"}), "unknown form"),
    ],
)
def test_a_node_that_fails_is_named(node: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build_custom_loss(graph_of(node))(torch.zeros(4, requires_grad=True), {})


@pytest.fixture(scope="module")
def data() -> list[tinker.Datum]:
    def datum(seed: int) -> tinker.Datum:
        tokens = np.random.default_rng(seed).integers(100, 4000, 12 + seed).tolist()
        weights = [float(index > 4) for index in range(len(tokens) - 1)]
        return tinker.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
        )

    return [datum(seed) for seed in range(3)]


def new_client(service_client: Any, name: str) -> Any:
    return service_client.create_lora_training_client(base_model=name, rank=4, seed=1).result()


def test_through_the_sdk_it_trains_as_the_built_in_loss_does(
    service_client: Any, base_model_name: str, data: list[tinker.Datum]
) -> None:
    loss = service_client.create_custom_loss(weighted, {"logprobs": 1, "weights": 1}).result()
    assert loss.loss_id is not None, "the engine runs it, not the client"
    custom, plain = new_client(service_client, base_model_name), new_client(service_client, base_model_name)
    for _ in range(3):
        found = custom.forward_backward_custom(data, loss).result()
        expected = plain.forward_backward(data, "cross_entropy").result()
        assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
        assert found.metrics["custom/tokens:sum"] == sum(sum(d.loss_fn_inputs["weights"].data) for d in data)
        for left, right in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(left["logprobs"].to_numpy(), right["logprobs"].to_numpy(), atol=1e-4)
        norms = [client.optim_step(STEP).result().metrics["unclipped_grad_l2_norm:mean"] for client in (custom, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_loss_that_fails_half_way_leaves_the_gradient_as_it_was(
    service_client: Any, base_model_name: str, data: list[tinker.Datum], monkeypatch: pytest.MonkeyPatch
) -> None:
    def picky(logprobs: Any, weights: Any) -> Any:
        return (logprobs * weights)[12].sum(), {"custom/n:sum": weights.sum()}

    monkeypatch.setattr("training_pass.PACKED_TOKENS", 1)
    loss = service_client.create_custom_loss(picky, {"logprobs": 1, "weights": 1}).result()
    clients = [new_client(service_client, base_model_name) for _ in range(2)]
    for client in clients:
        client.forward_backward(data, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match=r"getitem.*failed") as caught:
        clients[0].forward_backward_custom(list(reversed(data)), loss).result()
    assert str(caught.value.category) == "user"
    norms = [client.optim_step(STEP).result().metrics["unclipped_grad_l2_norm:mean"] for client in clients]
    assert norms[0] == norms[1]


def test_a_loss_belongs_to_its_session(
    engine: Any, service_client: Any, base_model_name: str, data: list[tinker.Datum]
) -> None:
    client = new_client(service_client, base_model_name)
    with pytest.raises(tinker.RequestFailedError, match="no custom loss"):
        client.forward_backward(data, "custom", {"loss_id": "another:loss:0"}).result()
    with pytest.raises(tinker.RequestFailedError, match="no custom loss ''"):
        client.forward_backward(data, "custom").result()
    loss = service_client.create_custom_loss(halved, {"logprobs": 1, "weights": 1}).result()
    lacking = [
        tinker.Datum(model_input=d.model_input, loss_fn_inputs={"target_tokens": d.loss_fn_inputs["target_tokens"]})
        for d in data
    ]
    with pytest.raises(tinker.RequestFailedError, match="needs the input weights"):
        client.forward_backward(lacking, "custom", {"loss_id": loss.loss_id}).result()
    assert client.forward_backward(data, "custom", {"loss_id": loss.loss_id}).result().metrics["loss:sum"] > 0
