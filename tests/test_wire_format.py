"""The wire format against the SDK's own encoder and decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
import zstandard
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from wire_format import (
    RequestError,
    TrainingBatch,
    decode_forward_backward,
    encode_forward_backward,
    parse_forward_backward,
)

HALF = types.TensorData(data=[0.5], dtype="float32")


def make_body(data: list[tinker.Datum], loss_fn: Any = "cross_entropy", config: Any = None) -> bytes:
    request = types.ForwardBackwardRequest(
        model_id="m",
        seq_id=3,
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config),
    )
    return forward_backward_request_to_proto(request).SerializeToString()


def make_datum(tokens: list[int], **inputs: Any) -> tinker.Datum:
    return tinker.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def decode(data: list[tinker.Datum], loss_fn: Any = "cross_entropy", config: Any = None) -> TrainingBatch:
    return decode_forward_backward(parse_forward_backward(make_body(data, loss_fn, config), None))


def test_a_request_survives_the_wire_plain_and_compressed() -> None:
    datum = make_datum([5, 6, 7], target_tokens=[6, 7, 8], weights=[0.0, 0.5, 1.0])
    body = make_body([datum])
    for sent, encoding in ((body, None), (zstandard.ZstdCompressor().compress(body), "zstd")):
        message = parse_forward_backward(sent, encoding)
        assert (message.model_id, message.seq_id) == ("m", 3)
        batch = decode_forward_backward(message)
        assert batch.data[0].tokens.tolist() == [5, 6, 7]
        assert batch.data[0].targets.tolist() == [[6], [7], [8]]
        assert batch.data[0].inputs["weights"].tolist() == [[0.0], [0.5], [1.0]]
        assert batch.data[0].is_flat


def test_weights_default_to_one_and_settings_to_tinkers() -> None:
    datum = make_datum([5, 6], target_tokens=[6, 7])
    assert decode([datum]).data[0].inputs["weights"].tolist() == [[1.0], [1.0]]
    policy = make_datum([5, 6], target_tokens=[6, 7], logprobs=[-1.0, -2.0], advantages=[1.0, 1.0])
    assert decode([policy], "ppo").settings == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert decode([policy], "ppo", {"clip_high_threshold": 1.5}).settings["clip_high_threshold"] == 1.5


def test_sparse_and_wide_targets() -> None:
    import torch

    wide = torch.tensor([[6, 9], [7, 0]])
    weights = torch.tensor([[0.3, 0.7], [1.0, 0.0]])
    datum = make_datum(
        [5, 6],
        target_tokens=types.TensorData.from_torch(wide),
        weights=types.TensorData.from_torch_sparse(weights),
    )
    found = decode([datum]).data[0]
    assert found.targets.tolist() == wide.tolist()
    np.testing.assert_allclose(found.inputs["weights"], weights.numpy())
    assert not found.is_flat


@pytest.mark.parametrize(
    ("data", "loss_fn", "message"),
    [
        ([make_datum([], target_tokens=[])], "cross_entropy", "model_input is empty"),
        ([make_datum([1, 2], target_tokens=[1])], "cross_entropy", r"shape \[1\] for 2 input tokens"),
        ([make_datum([1, 2], weights=[1.0, 1.0])], "cross_entropy", "lacks target_tokens"),
        ([make_datum([1], target_tokens=[1], advantages=[1.0])], "cross_entropy", "takes no input advantages"),
        ([make_datum([1], target_tokens=[1], weights=[1.0, 2.0])], "cross_entropy", "must be equal"),
        ([make_datum([1], target_tokens=[1], weights=[float("nan")])], "cross_entropy", "not finite"),
        ([make_datum([1], target_tokens=[1], logprobs=[-1.0])], "ppo", "needs the input advantages"),
        ([make_datum([1], target_tokens=[1])], "stable_reinforce", "not published"),
        ([make_datum([1], target_tokens=[1])], "custom", "'custom' is not supported"),
        ([make_datum([1], target_tokens=HALF)], "cross_entropy", "no token id"),
    ],
)
def test_mistakes_are_named(data: list[tinker.Datum], loss_fn: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        decode(data, loss_fn)


def test_no_data_unknown_settings_and_rubbish_are_refused() -> None:
    with pytest.raises(RequestError, match="at least one datum"):
        decode([])
    with pytest.raises(RequestError, match="no setting 'clip'"):
        decode([make_datum([1], target_tokens=[1])], "cross_entropy", {"clip": 1.0})
    with pytest.raises(RequestError, match="not a ForwardBackwardRequest"):
        parse_forward_backward(b"\xff\xff\xff", None)
    with pytest.raises(RequestError, match="not valid zstd"):
        parse_forward_backward(b"plain", "zstd")


def test_results_are_read_by_the_sdk() -> None:
    flat, wide = np.array([-1.0, -2.0], np.float32), np.array([[-1.0, -3.0]], np.float32)
    output = deserialize_forward_backward_output(encode_forward_backward([flat, flat, wide], {"loss:sum": 2.5}))
    assert output.metrics == {"loss:sum": 2.5}
    shapes = [result["logprobs"].shape for result in output.loss_fn_outputs]
    assert shapes == [[2], [2], [1, 2]]
    assert list(output.loss_fn_outputs[2]["logprobs"].data) == [-1.0, -3.0]
