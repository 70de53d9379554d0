"""Sampling requests and results against the SDK's own decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_sample_response

from sample_format import SampledSequence, SampleResult, TopK, decode_sample, encode_sample
from wire_format import RequestError


def test_results_are_read_by_the_sdk() -> None:
    topk = TopK(np.array([[1, 2], [3, 4]], np.int32), np.array([[-0.1, -2.0], [-0.2, -3.0]], np.float32))
    result = SampleResult(
        [SampledSequence([1, 3], [-0.1, -0.2], "stop", topk), SampledSequence([], [], "length")],
        prompt_logprobs=np.array([np.nan, -1.0], np.float32),
    )
    sample = deserialize_sample_response(encode_sample(decode_sample(make_sample()), result))
    assert sample.prompt_logprobs == [None, -1.0]
    assert [list(sequence.tokens) for sequence in sample.sequences] == [[1, 3], []]
    assert [sequence.stop_reason for sequence in sample.sequences] == ["stop", "length"]
    top = sample.sequences[0].topk_logprobs
    assert top is not None
    assert top[1] == [(3, pytest.approx(-0.2)), (4, pytest.approx(-3.0))]


def make_sample(**changes: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    params = changes.pop("params", {})
    return {"prompt": prompt, "sampling_params": {"max_tokens": 4, **params}, **changes}


def test_stops_of_every_form() -> None:
    assert decode_sample(make_sample()).stops_at_eos
    assert decode_sample(make_sample(params={"stop": "x"})).stop_strings == ("x",)
    assert decode_sample(make_sample(params={"stop": ["x", "y"]})).stop_strings == ("x", "y")
    assert decode_sample(make_sample(params={"stop": [7, 8]})).stop_tokens == {7, 8}
    assert not decode_sample(make_sample(params={"stop": []})).stops_at_eos


def test_a_scored_suffix() -> None:
    assert decode_sample(make_sample(prompt_logprobs=True)).scored_from == 1
    assert decode_sample(make_sample(prompt_logprobs=True, prompt_logprobs_last_n=1)).scored_from == 2
    with pytest.raises(RequestError, match="between 1 and 2"):
        decode_sample(make_sample(prompt_logprobs=True, prompt_logprobs_last_n=3))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": None}, "prompt must be an object"),
        ({"prompt": {"chunks": []}}, "the prompt is empty"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "text models only"),
        ({"params": {"temperature": -1}}, "temperature is -1"),
        ({"params": {"top_p": 0}}, "top_p is 0"),
        ({"params": {"top_k": 0}}, "top_k is 0"),
        ({"params": {"max_tokens": "5"}}, "max_tokens has the wrong type"),
        ({"params": {"stop": [""]}}, "empty string"),
        ({"params": {"stop": [1, "x"]}}, "stop must be"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"record_stability_info": True}, "not published"),
        ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k is -1"),
        ({"target_prompt_logprobs": [1]}, "int64 tensor of shape"),
        ({"target_prompt_logprobs": {"data": [1, 2], "shape": [1, 2]}}, r"it must be \[2, K\]"),
        ({"target_prompt_logprobs": {"data": [1, 2, 3], "shape": [2, 1]}}, "does not fit the shape"),
        ({"target_prompt_logprobs": {"data": [-1, -1], "shape": [2, 1]}}, "at least one token id"),
        ({"target_prompt_logprobs": {"data": [-2, 3], "shape": [2, 1]}}, "at least one token id"),
        (
            {
                "target_prompt_logprobs": {
                    "data": [5],
                    "shape": [2, 1],
                    "sparse_crow_indices": [0, 2, 1],
                    "sparse_col_indices": [0],
                }
            },
            "does not fit the shape",
        ),
    ],
)
def test_sampling_mistakes_are_named(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        decode_sample(make_sample(**body))
