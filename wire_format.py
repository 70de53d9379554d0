"""What travels between a Tinker client and the local engine, as plain Python and back to bytes.

The SDK sends training data as protobuf and sampling requests as JSON; results of both go back as protobuf. Here the
bytes become dataclasses that are checked for everything that does not depend on a model::

    request = decode_forward_backward(body)          # raises RequestError with a message for the client
    payload = encode_forward_backward(outputs, metrics)

Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from error_handling import EvalLoopError

if TYPE_CHECKING:
    from custom_losses import CustomLoss

# Inputs of each loss beside `target_tokens`, all of the targets' shape, with their default (None: required).
LOSS_INPUTS: dict[str, dict[str, float | None]] = {
    "cross_entropy": {"weights": 1.0},
    "importance_sampling": {"logprobs": None, "advantages": None},
    "ppo": {"logprobs": None, "advantages": None},
    "cispo": {"logprobs": None, "advantages": None},
    "dro": {"logprobs": None, "advantages": None},
    "gspo": {"logprobs": None, "advantages": None, "sequence_ratio_mask": None},
}
LOSS_SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}
# Target tokens of a request, and values of one tensor: a sparse tensor of a few bytes can stand for any number.
MAX_CELLS = 1 << 25
# Bytes that a compressed body may unpack to, and how many of it are unpacked at a time.
MAX_UNPACKED = 256_000_000
PACKED_PIECE = 1024
# Losses of the API that this engine does not have, and why.
UNSUPPORTED_LOSSES = {"stable_reinforce": "its formula, and what it takes from sampling, are not published"}


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
    """A forward or forward_backward request, checked. `custom` is the client's own loss when `loss_fn` is "custom"."""

    loss_fn: str
    settings: dict[str, float]
    forward_only: bool
    data: list[TrainingDatum]
    custom: CustomLoss | None = None


def parse_forward_backward(body: bytes, encoding: str | None) -> Any:
    """The protobuf message in an HTTP body, unpacked when `encoding` is "zstd". Raises `RequestError`."""
    from google.protobuf.message import DecodeError
    from tinker.proto import tinker_public_pb2 as pb

    if encoding == "zstd":
        body = _unpack(body)
    elif encoding not in (None, "", "identity"):
        raise RequestError(f"the content encoding {encoding!r} is not supported; send zstd, or the plain body")
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as err:
        raise RequestError(f"the body is not a ForwardBackwardRequest: {err}") from err
    return message


def _unpack(body: bytes) -> bytes:
    import zstandard

    unpacker = zstandard.ZstdDecompressor().decompressobj()
    parts, size = [], 0
    try:
        # In small pieces: a few bytes can unpack to gigabytes.
        for start in range(0, len(body), PACKED_PIECE):
            if unpacker.eof:
                raise RequestError("the body holds more than one zstd frame")
            parts.append(unpacker.decompress(body[start : start + PACKED_PIECE]))
            size += len(parts[-1])
            if size > MAX_UNPACKED:
                raise RequestError(f"the body unpacks to more than {MAX_UNPACKED} bytes: send fewer data at once")
    except zstandard.ZstdError as err:
        raise RequestError(f"the body is not valid zstd: {err}") from err
    if not unpacker.eof or unpacker.unused_data:
        raise RequestError("the body is not one whole zstd frame: its end is missing, or something follows it")
    return b"".join(parts)


def decode_forward_backward(message: Any, find_custom: Callable[[str], CustomLoss] | None = None) -> TrainingBatch:
    """Check a parsed request and turn it into arrays; `find_custom` gives the uploaded loss of an id.

    Raises `RequestError` naming the datum.
    """
    loss_fn = message.loss_fn
    custom, settings = None, {}
    if loss_fn == "custom" and find_custom is not None:
        custom = find_custom(message.loss_fn_config_v2["loss_id"].text)
    else:
        settings = _decode_settings(message)
    if not message.data:
        raise RequestError("the request holds no data: send at least one datum")
    data, cells = [], 0
    for index, datum in enumerate(message.data):
        tokens, targets = _decode_tokens(datum, f"datum {index}")
        if custom is not None:
            inputs = _decode_custom_inputs(datum, custom, targets, f"datum {index}")
        else:
            inputs = _decode_inputs(datum, loss_fn, targets, f"datum {index}")
        data.append(TrainingDatum(tokens, targets.reshape(tokens.size, -1), inputs, targets.ndim == 1))
        cells += targets.size
        if cells > MAX_CELLS:
            raise RequestError(f"the request holds more than {MAX_CELLS} target tokens: send fewer data at once")
    return TrainingBatch(loss_fn, settings, bool(message.forward_only), data, custom)


def _decode_settings(message: Any) -> dict[str, float]:
    loss_fn = message.loss_fn
    if loss_fn in UNSUPPORTED_LOSSES:
        raise RequestError(f"loss_fn {loss_fn!r} is not supported by this engine: {UNSUPPORTED_LOSSES[loss_fn]}")
    if loss_fn not in LOSS_INPUTS:
        raise RequestError(f"loss_fn {loss_fn!r} is not supported; choose one of {', '.join(LOSS_INPUTS)}")
    settings = dict(LOSS_SETTINGS[loss_fn])
    sent: dict[str, Any] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        sent[key] = value.text if value.WhichOneof("value") == "text" else value.number
    for key, value in sent.items():
        if key not in settings:
            known = ", ".join(settings) or "none"
            raise RequestError(f"loss_fn_config: {loss_fn} has no setting {key!r} (known: {known})")
        if isinstance(value, str) or not math.isfinite(value):
            raise RequestError(f"loss_fn_config: {key} is {value!r}; it must be a finite number")
        settings[key] = float(value)
    return settings


def _decode_tokens(message: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Input tokens, int64 (T,), and targets, int64 (T,) or (T, K)."""
    parts = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise RequestError(f"{where}: model_input holds {kind}; this engine serves text models only")
        if len(chunk.encoded_text.tokens) % 4:
            raise RequestError(f"{where}: model_input's tokens are not whole 32-bit integers")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if tokens.size == 0:
        raise RequestError(f"{where}: model_input is empty")
    if "target_tokens" not in message.loss_fn_inputs:
        raise RequestError(f"{where}: loss_fn_inputs lacks target_tokens")
    targets = _decode_tensor(message.loss_fn_inputs["target_tokens"], f"{where}: target_tokens")
    if targets.ndim not in (1, 2) or targets.shape[0] != tokens.size or targets.size == 0:
        raise RequestError(
            f"{where}: target_tokens has shape {list(targets.shape)} for {tokens.size} input tokens; "
            f"it must be [{tokens.size}] or [{tokens.size}, K]"
        )
    if not np.isfinite(targets).all() or (targets != np.floor(targets)).any():
        raise RequestError(f"{where}: target_tokens holds a value that is no token id")
    return tokens, targets.astype(np.int64)


def _decode_inputs(message: Any, loss_fn: str, targets: np.ndarray, where: str) -> dict[str, np.ndarray]:
    """The inputs of a loss of the API's own, float32 (T, K) each."""
    expected = LOSS_INPUTS[loss_fn]
    unknown = sorted(set(message.loss_fn_inputs) - set(expected) - {"target_tokens"})
    if unknown:
        raise RequestError(
            f"{where}: {loss_fn} takes no input {', '.join(unknown)}; it takes target_tokens, {', '.join(expected)}"
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
        inputs[name] = values.astype(np.float32).reshape(targets.shape[0], -1)
    return inputs


def _decode_custom_inputs(message: Any, custom: CustomLoss, targets: np.ndarray, where: str) -> dict[str, np.ndarray]:
    """The inputs that a custom loss declares, in the types and shapes that were sent."""
    inputs = {}
    for name, rank in custom.input_ranks.items():
        if name == "logprobs":
            values = targets
        elif name in message.loss_fn_inputs:
            values = _decode_tensor(message.loss_fn_inputs[name], f"{where}: {name}")
            inputs[name] = values
        else:
            raise RequestError(f"{where}: the custom loss {custom.name!r} needs the input {name}")
        if values.ndim != rank:
            raise RequestError(
                f"{where}: {name} has {values.ndim} dimensions; the custom loss {custom.name!r} declared {rank}"
            )
    return inputs


def _decode_tensor(message: Any, where: str) -> np.ndarray:
    """A dense array of the tensor's shape (flat when none was sent); sparse cells that are not listed are 0."""
    from tinker.proto import tinker_public_pb2 as pb

    types = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
    if message.dtype not in types:
        raise RequestError(f"{where}: unknown dtype {message.dtype}")
    dtype = np.dtype(types[message.dtype])
    shape = tuple(message.shape)
    if min(shape, default=0) < 0 or math.prod(shape) > MAX_CELLS:
        raise RequestError(f"{where}: the shape {list(shape)} is not one of at most {MAX_CELLS} values")
    try:
        if not message.HasField("sparse_csr"):
            values = np.frombuffer(message.dense, dtype=dtype)
            return values.reshape(shape) if shape else values
        values = np.frombuffer(message.sparse_csr.values, dtype=dtype)
        row_ends = np.frombuffer(message.sparse_csr.crow_indices, dtype=np.int64)
        columns = np.frombuffer(message.sparse_csr.col_indices, dtype=np.int64)
        dense = from_csr(values, row_ends, columns, shape)
    except (ValueError, IndexError) as err:
        raise RequestError(f"{where}: the data does not fit the shape {list(shape)} ({err})") from err
    return dense


def from_csr(
    values: np.ndarray, row_ends: np.ndarray, columns: np.ndarray, shape: tuple[int, ...], fill: int = 0
) -> np.ndarray:
    """A dense array of a sparse one; cells that are not listed hold `fill`. Raises `ValueError`, `IndexError`."""
    if len(shape) != 2 or len(columns) != len(values):
        raise ValueError("a sparse array has two dimensions, and a column for each value")
    if len(row_ends) != shape[0] + 1 or row_ends[0] != 0 or row_ends[-1] != len(values) or (columns < 0).any():
        raise ValueError("its sparse indices are inconsistent")
    dense = np.full(shape, fill, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(row_ends)), columns] = values
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
