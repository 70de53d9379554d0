"""What travels between a Tinker client and the local engine, as plain Python and back to bytes.

The SDK sends training data as protobuf and sampling requests as JSON; results of both go back as protobuf. Here the
bytes become dataclasses that are checked for everything that does not depend on a model::

    request = decode_forward_backward(body)          # raises RequestError with a message for the client
    payload = encode_forward_backward(outputs, metrics)

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from error_handling import EvalLoopError

# Inputs of each loss beside `target_tokens`, all of the targets' shape, with their default (None: required).
LOSS_INPUTS: dict[str, dict[str, float | None]] = {
    "cross_entropy": {"weights": 1.0},
    "importance_sampling": {"logprobs": None, "advantages": None},
    "ppo": {"logprobs": None, "advantages": None},
    "cispo": {"logprobs": None, "advantages": None},
    "dro": {"logprobs": None, "advantages": None},
}
LOSS_SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
}


class RequestError(EvalLoopError, ValueError):
    """A client's mistake: it fails that request alone, with this message and the category "user"."""


@dataclass(frozen=True)
class TrainingDatum:
    """One sequence to train or score.

    `tokens`: int64, shape (T,). `targets`: int64, shape (T, K). `inputs`: the loss's other inputs, float32, each of
    shape (T, K). `is_flat`: the client sent shape (T,), so logprobs go back in that shape.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: dict[str, np.ndarray]
    is_flat: bool


@dataclass(frozen=True)
class TrainingBatch:
    """A forward or forward_backward request, checked."""

    loss_fn: str
    settings: dict[str, float]
    forward_only: bool
    data: list[TrainingDatum]


@dataclass(frozen=True)
class SampleRequest:
    """A sampling request, checked. `seed` None asks for a random one; `max_tokens` None means up to the context."""

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


@dataclass
class TopK:
    """The k likeliest tokens at each of N positions: int32 ids and float32 logprobs, both of shape (N, k)."""

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
    """`prompt_logprobs`: float32, shape (len(prompt),), NaN where nothing was scored; None when not asked for."""

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt: TopK | None = None


def parse_forward_backward(body: bytes, encoding: str | None) -> Any:
    """The protobuf message in an HTTP body, unpacked when `encoding` is "zstd". Raises `RequestError`."""
    from google.protobuf.message import DecodeError
    from tinker.proto import tinker_public_pb2 as pb

    if encoding == "zstd":
        import zstandard

        try:
            body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
        except zstandard.ZstdError as err:
            raise RequestError(f"the body is not valid zstd: {err}") from err
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as err:
        raise RequestError(f"the body is not a ForwardBackwardRequest: {err}") from err
    return message


def decode_forward_backward(message: Any) -> TrainingBatch:
    """Check a parsed request and turn it into arrays. Raises `RequestError` naming the datum."""
    loss_fn = message.loss_fn
    if loss_fn not in LOSS_INPUTS:
        raise RequestError(f"loss_fn {loss_fn!r} is not supported; choose one of {', '.join(LOSS_INPUTS)}")
    settings = dict(LOSS_SETTINGS[loss_fn])
    sent = {key: value.number for key, value in message.loss_fn_config_v2.items()} or dict(message.loss_fn_config)
    for key, value in sent.items():
        if key not in settings:
            known = ", ".join(settings) or "none"
            raise RequestError(f"loss_fn_config: {loss_fn} has no setting {key!r} (known: {known})")
        settings[key] = float(value)
    if not message.data:
        raise RequestError("the request holds no data: send at least one datum")
    data = [_decode_datum(datum, loss_fn, f"datum {index}") for index, datum in enumerate(message.data)]
    return TrainingBatch(loss_fn, settings, bool(message.forward_only), data)


def _decode_datum(message: Any, loss_fn: str, where: str) -> TrainingDatum:
    parts = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise RequestError(f"{where}: model_input holds {kind}; this engine serves text models only")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if tokens.size == 0:
        raise RequestError(f"{where}: model_input is empty")
    expected = LOSS_INPUTS[loss_fn]
    unknown = sorted(set(message.loss_fn_inputs) - set(expected) - {"target_tokens"})
    if unknown:
        raise RequestError(
            f"{where}: {loss_fn} takes no input {', '.join(unknown)}; it takes target_tokens, {', '.join(expected)}"
        )
    if "target_tokens" not in message.loss_fn_inputs:
        raise RequestError(f"{where}: loss_fn_inputs lacks target_tokens")
    targets = _decode_tensor(message.loss_fn_inputs["target_tokens"], f"{where}: target_tokens")
    is_flat = targets.ndim == 1
    if targets.ndim not in (1, 2) or targets.shape[0] != tokens.size or targets.size == 0:
        raise RequestError(
            f"{where}: target_tokens has shape {list(targets.shape)} for {tokens.size} input tokens; "
            f"it must be [{tokens.size}] or [{tokens.size}, K]"
        )
    inputs = {}
    for name, default in expected.items():
        if name in message.loss_fn_inputs:
            values = _decode_tensor(message.loss_fn_inputs[name], f"{where}: {name}")
            if values.shape != targets.shape:
                raise RequestError(
                    f"{where}: {name} has shape {list(values.shape)}, target_tokens {list(targets.shape)}; "
                    "they must be equal"
                )
            if not np.isfinite(values).all():
                raise RequestError(f"{where}: {name} holds a value that is not finite")
        elif default is None:
            raise RequestError(f"{where}: {loss_fn} needs the input {name}")
        else:
            values = np.full(targets.shape, default)
        inputs[name] = values.astype(np.float32).reshape(tokens.size, -1)
    return TrainingDatum(tokens, targets.astype(np.int64).reshape(tokens.size, -1), inputs, is_flat)


def _decode_tensor(message: Any, where: str) -> np.ndarray:
    """A dense array of the tensor's shape (flat when none was sent); sparse cells that are not listed are 0."""
    from tinker.proto import tinker_public_pb2 as pb

    types = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
    if message.dtype not in types:
        raise RequestError(f"{where}: unknown dtype {message.dtype}")
    dtype = np.dtype(types[message.dtype])
    shape = tuple(message.shape)
    try:
        if not message.HasField("sparse_csr"):
            values = np.frombuffer(message.dense, dtype=dtype)
            return values.reshape(shape) if shape else values
        values = np.frombuffer(message.sparse_csr.values, dtype=dtype)
        row_ends = np.frombuffer(message.sparse_csr.crow_indices, dtype=np.int64)
        columns = np.frombuffer(message.sparse_csr.col_indices, dtype=np.int64)
        dense = np.zeros(shape, dtype=dtype)
        dense[np.repeat(np.arange(shape[0]), np.diff(row_ends)), columns] = values
    except (ValueError, IndexError) as err:
        raise RequestError(f"{where}: the data does not fit the shape {list(shape)} ({err})") from err
    return dense


def encode_forward_backward(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Protobuf result: per datum its target logprobs, shape (T,) or (T, K) as the targets had, and summed metrics."""
    from tinker.proto import tinker_public_pb2 as pb

    message = pb.ForwardBackwardOutput(loss_fn_output_type="TorchLossReturn", metrics=dict(metrics))
    start = 0
    while start < len(logprobs):
        # A record holds arrays of one trailing shape, so a change of width opens the next record.
        width = logprobs[start].shape[1:]
        end = start
        while end < len(logprobs) and logprobs[end].shape[1:] == width:
            end += 1
        part = [np.ascontiguousarray(values, dtype=np.float32) for values in logprobs[start:end]]
        offsets = np.concatenate([[0], np.cumsum([values.nbytes for values in part])]).astype(np.int64)
        record = message.loss_fn_outputs.add(type_tag="TorchLossReturn", num_datums=len(part))
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(values.tobytes() for values in part)
        tensor.offsets = offsets.tobytes()
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.trailing_shape.extend(width)
        start = end
    return message.SerializeToString()


def decode_sample(body: Mapping[str, Any]) -> SampleRequest:
    """Check a sampling request's JSON. Raises `RequestError`."""
    params = _get(body, "sampling_params", dict, {})
    prompt = _decode_prompt(body.get("prompt"))
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if body.get(name):
            raise RequestError(f"{name} is not supported by this engine")
    stop = params.get("stop")
    strings: tuple[str, ...] = ()
    tokens: frozenset[int] = frozenset()
    if isinstance(stop, str):
        strings = (stop,)
    elif isinstance(stop, list) and all(isinstance(item, str) for item in stop):
        strings = tuple(stop)
    elif isinstance(stop, list) and all(isinstance(item, int) for item in stop):
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
    )
    limits = {
        "num_samples": (request.num_samples, 1, 4096),
        "max_tokens": (request.max_tokens or 0, 0, 10**7),
        "temperature": (request.temperature, 0.0, 1e6),
        "top_p": (request.top_p, 1e-9, 1.0),
        "topk_prompt_logprobs": (request.topk_prompt, 0, 1000),
        "topk_sample_logprobs": (request.topk_sample, 0, 1000),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise RequestError(f"{name} is {value}; it must be between {low:g} and {high:g}")
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
        if not isinstance(part, list) or not all(isinstance(token, int) for token in part):
            raise RequestError("prompt: tokens must be a list of integers")
        tokens.extend(part)
    if not tokens:
        raise RequestError("the prompt is empty")
    return tuple(tokens)


def _get(body: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(f"{name} has the wrong type: {type(value).__name__}")
    return value


def encode_sample(result: SampleResult) -> bytes:
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
    return message.SerializeToString()


def _fill_topk(message: Any, topk: TopK) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = np.ascontiguousarray(topk.token_ids, dtype=np.int32).tobytes()
    message.logprobs = np.ascontiguousarray(topk.logprobs, dtype=np.float32).tobytes()
