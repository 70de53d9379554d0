"""Sampling requests and their results: the JSON that a client sends, and the protobuf that goes back.

    request = decode_sample(body)          # raises RequestError with a message for the client
    payload = encode_sample(request, result)

Checked here is everything that does not depend on a model. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from wire_format import RequestError, from_csr

# Ids that may be scored at one prompt position.
MAX_TARGETS = 1000
# Bits of a whole number; a seed may be of any usual size.
LONGEST_INTEGER = 128


@dataclass(frozen=True)
class SampleRequest:
    """A sampling request, checked. `seed` None asks for a random one; `max_tokens` None means up to the context.

    `target_prompt`: int64 (len(prompt) - 1, K) of ids to score, -1 where a cell names none; `target_csr` holds its row
    ends and columns when the client sent it sparse. `alternatives_k`: draws asked for at each prompt position.
    """

    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop_strings: tuple[str, ...]
    stop_tokens: frozenset[int]
    stops_at_eos: bool
    prompt_logprobs: bool
    scored_from: int
    topk_prompt: int
    topk_sample: int
    target_prompt: np.ndarray | None = None
    target_csr: tuple[np.ndarray, np.ndarray] | None = None
    alternatives_k: int = 0


@dataclass
class TopK:
    """k tokens at each of N positions, the likeliest or draws: integer ids and float32 logprobs, both (N, k)."""

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass
class SampledSequence:
    """One sampled continuation; the stop token or string that ended it is part of `tokens`."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None


@dataclass
class SampleResult:
    """`prompt_logprobs`: float32, shape (len(prompt),), NaN where nothing was scored; None when not asked for.
    `target_logprobs`: float32 of the request's `target_prompt`'s shape; `alternatives`: (len(prompt) - 1, k)."""

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt: TopK | None = None
    target_logprobs: np.ndarray | None = None
    alternatives: TopK | None = None


def decode_sample(body: Mapping[str, Any]) -> SampleRequest:
    """Check a sampling request's JSON. Raises `RequestError`."""
    params = _get(body, "sampling_params", dict, {})
    prompt = _decode_prompt(body.get("prompt"))
    if body.get("record_stability_info"):
        raise RequestError(
            "record_stability_info is not supported by this engine: what the loss stable_reinforce takes from it is "
            "not published. Sample without it, and train with importance_sampling, ppo, cispo, dro or gspo"
        )
    target_prompt, target_csr = _decode_targets(body.get("target_prompt_logprobs"), len(prompt))
    stop = params.get("stop")
    strings: tuple[str, ...] = ()
    tokens: frozenset[int] = frozenset()
    if isinstance(stop, str):
        strings = (stop,)
    elif isinstance(stop, list) and all(isinstance(item, str) for item in stop):
        strings = tuple(stop)
    elif isinstance(stop, list) and all(type(item) is int for item in stop):
        tokens = frozenset(stop)
    elif stop is not None:
        raise RequestError("sampling_params.stop must be a string, a list of strings or a list of token ids")
    if any(not item for item in strings):
        raise RequestError("sampling_params.stop holds an empty string")
    wants_prompt = bool(body.get("prompt_logprobs")) or _get(body, "topk_prompt_logprobs", int, 0) > 0
    last_n = _get(body, "prompt_logprobs_last_n", int, None)
    if last_n is not None and not 1 <= last_n <= max(1, len(prompt) - 1):
        raise RequestError(f"prompt_logprobs_last_n is {last_n}; it must be between 1 and {len(prompt) - 1}")
    request = SampleRequest(
        prompt=prompt,
        num_samples=_get(body, "num_samples", int, 1),
        max_tokens=_get(params, "max_tokens", int, None),
        temperature=float(_get(params, "temperature", (int, float), 1.0)),
        top_p=float(_get(params, "top_p", (int, float), 1.0)),
        top_k=_get(params, "top_k", int, -1),
        seed=_get(params, "seed", int, None),
        stop_strings=strings,
        stop_tokens=tokens,
        stops_at_eos=stop is None or bool(stop),
        prompt_logprobs=wants_prompt,
        scored_from=max(1, len(prompt) - last_n) if last_n else 1,
        topk_prompt=_get(body, "topk_prompt_logprobs", int, 0),
        topk_sample=_get(body, "topk_sample_logprobs", int, 0),
        target_prompt=target_prompt,
        target_csr=target_csr,
        alternatives_k=_get(body, "prompt_alt_tokens_k", int, 0),
    )
    limits = {
        "num_samples": (request.num_samples, 1, 4096),
        "max_tokens": (request.max_tokens or 0, 0, 10**7),
        "temperature": (request.temperature, 0.0, 1e6),
        "top_p": (request.top_p, 1e-9, 1.0),
        "topk_prompt_logprobs": (request.topk_prompt, 0, 1000),
        "topk_sample_logprobs": (request.topk_sample, 0, 1000),
        "prompt_alt_tokens_k": (request.alternatives_k, 0, 1000),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise RequestError(f"{name} is {value}; it must be between {low:g} and {high:g}")
    if request.alternatives_k and len(prompt) < 2:
        raise RequestError("prompt_alt_tokens_k needs a prompt of at least two tokens")
    if request.top_k < -1 or request.top_k == 0:
        raise RequestError(f"top_k is {request.top_k}; it must be -1 (no limit) or at least 1")
    return request


def _decode_prompt(prompt: Any) -> tuple[int, ...]:
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise RequestError("prompt must be an object with a list of chunks")
    tokens: list[int] = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else type(chunk).__name__
        if kind != "encoded_text":
            raise RequestError(f"prompt holds {kind}; this engine serves text models only")
        part = chunk.get("tokens")
        if not isinstance(part, list) or not all(type(token) is int for token in part):
            raise RequestError("prompt: tokens must be a list of integers")
        tokens.extend(part)
    if not tokens:
        raise RequestError("the prompt is empty")
    return tuple(tokens)


def _decode_targets(tensor: Any, prompt_length: int) -> tuple[np.ndarray | None, tuple[np.ndarray, np.ndarray] | None]:
    """The ids to score as a dense array (-1: none), and the sparse layout when one was sent."""
    if tensor is None:
        return None, None
    name = "target_prompt_logprobs"
    shape = tensor.get("shape") if isinstance(tensor, dict) else None
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int for size in shape):
        raise RequestError(f"{name} must be an int64 tensor of shape [len(prompt) - 1, K]")
    rows, columns = shape
    if rows != prompt_length - 1 or not 1 <= columns <= MAX_TARGETS:
        raise RequestError(
            f"{name} has shape {shape} for a prompt of {prompt_length} tokens; it must be [{prompt_length - 1}, K] "
            f"with K from 1 to {MAX_TARGETS}"
        )
    try:
        values = np.asarray(tensor.get("data"), dtype=np.int64)
        if tensor.get("sparse_crow_indices") is None:
            ids, csr = values.reshape(rows, columns), None
        else:
            row_ends, cells = (np.asarray(tensor[f"sparse_{part}_indices"], dtype=np.int64) for part in ("crow", "col"))
            ids, csr = from_csr(values, row_ends, cells, (rows, columns), fill=-1), (row_ends, cells)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as err:
        raise RequestError(f"{name}: the data does not fit the shape {shape} ({err})") from err
    if not (ids >= 0).any() or (ids < -1).any():
        raise RequestError(f"{name} must name at least one token id; cells that name none hold -1")
    return ids, csr


def _get(body: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(f"{name} has the wrong type: {type(value).__name__}")
    if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:
        raise RequestError(f"{name} is a number of {value.bit_length()} bits; it must fit into {LONGEST_INTEGER}")
    return value


def encode_sample(request: SampleRequest, result: SampleResult) -> bytes:
    """Protobuf result of a sampling request."""
    from tinker.proto import tinker_public_pb2 as pb

    message = pb.SampleResponse()
    reasons = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}
    for sequence in result.sequences:
        added = message.sequences.add(
            stop_reason=reasons[sequence.stop_reason],
            tokens=np.asarray(sequence.tokens, dtype=np.int32).tobytes(),
            logprobs=np.asarray(sequence.logprobs, dtype=np.float32).tobytes(),
        )
        if sequence.topk is not None:
            _fill_topk(added.topk_sampled_logprobs, sequence.topk)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype(np.float32).tobytes()
    if result.topk_prompt is not None:
        _fill_topk(message.topk_prompt_logprobs, result.topk_prompt)
    if result.target_logprobs is not None:
        _fill_tensor(message.target_prompt_logprobs, result.target_logprobs, request.target_csr)
    if result.alternatives is not None:
        _fill_tensor(message.prompt_alt_tokens.tokens, result.alternatives.token_ids.astype(np.int64))
        _fill_tensor(message.prompt_alt_tokens.logprobs, result.alternatives.logprobs)
    return message.SerializeToString()


def _fill_tensor(message: Any, values: np.ndarray, csr: tuple[np.ndarray, np.ndarray] | None = None) -> None:
    """Write an int64 or float32 array, in the sparse layout `csr` (row ends, columns) where one is given."""
    from tinker.proto import tinker_public_pb2 as pb

    message.dtype = pb.DTYPE_INT64 if values.dtype == np.int64 else pb.DTYPE_FLOAT32
    message.shape.extend(values.shape)
    if csr is None:
        message.dense = np.ascontiguousarray(values).tobytes()
        return
    row_ends, columns = csr
    rows = np.repeat(np.arange(len(row_ends) - 1), np.diff(row_ends))
    message.sparse_csr.values = values[rows, columns].tobytes()
    message.sparse_csr.crow_indices = row_ends.tobytes()
    message.sparse_csr.col_indices = columns.tobytes()


def _fill_topk(message: Any, topk: TopK) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = np.ascontiguousarray(topk.token_ids, dtype=np.int32).tobytes()
    message.logprobs = np.ascontiguousarray(topk.logprobs, dtype=np.float32).tobytes()
