"""A client's own loss, run on the engine: the graph that `ServiceClient.create_custom_loss` traces and uploads.

    loss = build_custom_loss(body)                    # raises RequestError naming the node
    value, metrics = loss(logprobs, {"advantages": advantages})

A graph is plain data. Its nodes are carried out one by one, and only operations named here are: arithmetic on tensors
and numbers, nothing that reads, writes, imports or draws random numbers.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wire_format import RequestError

MAX_NODES = 4096
# Elements of a tensor that a loss may make, and the largest whole number it may name (a size, a repetition).
MAX_ELEMENTS = 1 << 25
METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ON_TENSORS = _names(
    """abs absolute add addcdiv addcmul atan2 bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min clip cos
    cosh div divide eq erf erfc exp exp2 expm1 floor floor_divide fmod ge greater greater_equal gt isfinite isinf isnan
    le lerp less less_equal log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor lt maximum
    minimum mul multiply nan_to_num ne neg negative not_equal pow reciprocal relu remainder round rsqrt sigmoid sign sin
    sinh sqrt square sub subtract tan tanh true_divide trunc where xlogy

    all amax amin any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum log_softmax logcumsumexp
    logsumexp max mean median min norm prod quantile softmax sort std sum topk var

    broadcast_to chunk clone detach diff dot flatten flip gather index_select inner masked_fill matmul movedim narrow
    outer permute reshape roll select split squeeze swapaxes take_along_dim transpose tril triu unbind unsqueeze"""
)
_TORCH = _ON_TENSORS | _names(
    "arange cat concat full full_like ones ones_like scalar_tensor stack tensor zeros zeros_like"
)
_METHODS = _ON_TENSORS | _names(
    """bool contiguous dim double expand expand_as float int long new_full new_ones new_zeros numel size to type_as
    view view_as"""
)
_FUNCTIONAL = _names(
    """binary_cross_entropy binary_cross_entropy_with_logits elu gelu hardsigmoid hardtanh huber_loss kl_div l1_loss
    leaky_relu log_softmax logsigmoid mse_loss relu selu sigmoid silu smooth_l1_loss softmax softplus softsign tanh
    threshold"""
)
_ATTRIBUTES = _names("T device dtype mT ndim shape")
_MATH = _names(
    """atan atan2 ceil copysign cos cosh erf erfc exp expm1 fabs floor fmod hypot isfinite isinf isnan log log10 log1p
    log2 pow sin sinh sqrt tan tanh"""
)
_OPERATORS = _names(
    """abs add and_ eq floordiv ge getitem gt iadd imul invert isub itruediv le lt matmul mod mul ne neg or_ pos pow sub
    truediv xor"""
)
_MODULES = (
    ("torch", _TORCH, torch),
    ("torch.nn.functional", _FUNCTIONAL, torch.nn.functional),
    # What the SDK calls functions such as softplus, which are built in.
    ("torch._C._nn", _FUNCTIONAL, torch.nn.functional),
    ("math", _MATH, math),
    ("operator", _OPERATORS, operator),
)
_CONSTANTS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


@dataclass(frozen=True)
class _Node:
    op: str
    name: str
    target: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class CustomLoss:
    """An uploaded loss. `input_ranks`: dimensions of each input in order, `logprobs` first (0, 1 [T] or 2 [T, K])."""

    name: str
    input_ranks: dict[str, int]
    nodes: tuple[_Node, ...]

    def __call__(
        self, logprobs: torch.Tensor, inputs: Mapping[str, np.ndarray]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of one datum, a scalar tensor, and its metrics. Raises `RequestError` naming the node."""
        given = {name: torch.from_numpy(np.array(values)).to(logprobs.device) for name, values in inputs.items()}
        given["logprobs"] = logprobs
        known: dict[str, Any] = {}
        for node in self.nodes:
            try:
                known[node.name] = given[node.target] if node.op == "placeholder" else _run(node, known)
            except RequestError:
                raise
            except Exception as error:
                raise RequestError(f"custom loss {self.name!r}: {node.name} ({node.target}) failed: {error}") from error
        loss, metrics = known[self.nodes[-1].name]
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise RequestError(f"custom loss {self.name!r} must return a scalar tensor as its loss, not {shape}")
        return loss, {
            name: float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            for name, value in metrics.items()
        }


def build_custom_loss(body: Mapping[str, Any]) -> CustomLoss:
    """The loss that a `create_custom_loss` request describes. Raises `RequestError`."""
    name = str(body.get("name"))
    ranks = _input_ranks(name, body.get("inputs"))
    graph = body.get("graph")
    listed = graph.get("nodes") if isinstance(graph, Mapping) and graph.get("format", 1) == 1 else None
    if not isinstance(listed, list) or not 2 <= len(listed) <= MAX_NODES:
        raise RequestError(f"custom loss {name!r}: graph must have format 1 and 2 to {MAX_NODES} nodes")
    nodes: list[_Node] = []
    for index, entry in enumerate(listed):
        nodes.append(_check_node(name, index, entry, {node.name for node in nodes}))
    placeholders = [node.target for node in nodes if node.op == "placeholder"]
    if placeholders != list(ranks):
        raise RequestError(
            f"custom loss {name!r}: the graph takes {', '.join(placeholders)}, its inputs are {', '.join(ranks)}"
        )
    if [node.op for node in nodes].index("output") != len(nodes) - 1:
        raise RequestError(f"custom loss {name!r}: the graph must end with its only output")
    _check_output(name, nodes[-1].args)
    return CustomLoss(name, ranks, tuple(nodes))


def _input_ranks(name: str, inputs: Any) -> dict[str, int]:
    try:
        ranks = {str(entry["name"]): entry["rank"] for entry in inputs}
    except (TypeError, KeyError) as error:
        raise RequestError(f"custom loss {name!r}: inputs must be a list of objects with name and rank") from error
    if next(iter(ranks), None) != "logprobs" or any(rank not in (0, 1, 2) for rank in ranks.values()):
        raise RequestError(f"custom loss {name!r}: inputs must begin with logprobs, each of rank 0, 1 or 2")
    return ranks


def _check_node(name: str, index: int, entry: Any, before: set[str]) -> _Node:
    where = f"custom loss {name!r}: node {index}"
    if not isinstance(entry, Mapping):
        raise RequestError(f"{where} must be an object")
    node = _Node(
        str(entry.get("op")),
        str(entry.get("name")),
        str(entry.get("target")),
        entry.get("args") or [],
        entry.get("kwargs") or {},
    )
    where = f"{where} ({node.target})"
    if node.name in before:
        raise RequestError(f"{where}: the name {node.name!r} is taken")
    if not isinstance(node.args, list) or not isinstance(node.kwargs, Mapping):
        raise RequestError(f"{where}: args must be a list and kwargs an object")
    if node.op not in ("placeholder", "output"):
        _find(node, where)
    for reference in _references([*node.args, *node.kwargs.values()]):
        if reference not in before:
            raise RequestError(f"{where} refers to {reference!r}, which no earlier node makes")
    return node


def _check_output(name: str, args: Sequence[Any]) -> None:
    returned = args[0] if args else None
    pair = returned.get("tuple") if isinstance(returned, Mapping) else returned
    metrics = (
        pair[1].get("dict") if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], Mapping) else None
    )
    if not isinstance(metrics, Mapping):
        raise RequestError(f"custom loss {name!r} must return (loss, metrics)")
    for metric in metrics:
        if not METRIC_NAME.fullmatch(str(metric)):
            raise RequestError(
                f"custom loss {name!r}: the metric {metric!r} must be named custom/<name>:sum or custom/<name>:mean"
            )


def _references(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        if set(value) == {"ref"}:
            return [str(value["ref"])]
        return [name for part in value.values() for name in _references(part)]
    if isinstance(value, list):
        return [name for part in value for name in _references(part)]
    return []


def _find(node: _Node, where: str) -> Callable[..., Any]:
    """The operation that `node` names. Raises `RequestError` when it is none of those allowed."""
    module, _, name = node.target.rpartition(".")
    if node.op == "call_method" and node.target in _METHODS:
        return getattr(torch.Tensor, node.target)
    if node.op == "call_function":
        if node.target in ("getattr", "builtins.getattr"):
            return _attribute
        for prefix, names, source in _MODULES:
            if module == prefix and name in names:
                return getattr(source, name)
    raise RequestError(
        f"{where}: a custom loss on this engine may use arithmetic of torch, torch.nn.functional, math and Python's "
        f"operators; {node.op} of {node.target!r} is not among it. Give forward_backward_custom the function itself, "
        "and the client runs it"
    )


def _attribute(value: Any, name: str) -> Any:
    if not isinstance(value, torch.Tensor) or name not in _ATTRIBUTES:
        raise RequestError(f"a custom loss may not read the attribute {name!r}")
    return getattr(value, name)


def _run(node: _Node, known: Mapping[str, Any]) -> Any:
    args = [_decode(value, known) for value in node.args]
    kwargs = {key: _decode(value, known) for key, value in node.kwargs.items()}
    if node.op == "output":
        return args[0]
    function = _find(node, node.name)
    _check_sizes(node, [*args, *kwargs.values()])
    if node.op == "call_method" and not isinstance(args[0], torch.Tensor):
        raise RequestError(f"{node.name}: {node.target} is called on a {type(args[0]).__name__}, not on a tensor")
    result = function(*args, **kwargs)
    if isinstance(result, torch.Tensor) and result.numel() > MAX_ELEMENTS:
        raise RequestError(f"{node.name} ({node.target}) makes {result.numel()} elements; at most {MAX_ELEMENTS}")
    return result


def _check_sizes(node: _Node, values: Sequence[Any]) -> None:
    """Refuse what would take the engine's memory or time: numbers and shapes out of all proportion."""
    numbers = [number for value in values for number in (value if isinstance(value, list | tuple) else [value])]
    whole = [number for number in numbers if type(number) is int]
    if any(abs(number) > MAX_ELEMENTS for number in whole):
        raise RequestError(f"{node.name} ({node.target}): a whole number beyond {MAX_ELEMENTS}")
    name = node.target.rpartition(".")[2]
    if name in ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full") and math.prod(whole) > MAX_ELEMENTS:
        raise RequestError(f"{node.name} ({node.target}): more than {MAX_ELEMENTS} elements")
    if node.target.startswith("operator.") and name != "getitem":
        if not all(isinstance(value, torch.Tensor | int | float) for value in values):
            raise RequestError(f"{node.name} ({node.target}) takes tensors and numbers only")
        if name == "pow" and len(whole) == 2 and whole[1] > 64:
            raise RequestError(f"{node.name} ({node.target}): the exponent {whole[1]} is too large")


def _decode(value: Any, known: Mapping[str, Any]) -> Any:
    """A JSON value of the graph as Python: see `tinker.types.CustomLossNode`."""
    if isinstance(value, list):
        return [_decode(part, known) for part in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        kind, content = next(iter(value.items()))
        if kind == "ref":
            return known[content]
        if kind == "tuple":
            return tuple(_decode(part, known) for part in content)
        if kind == "dict":
            return {key: _decode(part, known) for key, part in content.items()}
        if kind == "slice":
            return slice(*(_decode(part, known) for part in content))
        if kind == "ellipsis":
            return ...
        if kind == "float":
            return float(content)
        if kind == "device":
            return torch.device(content)
        if kind in _CONSTANTS and isinstance(getattr(torch, str(content), None), _CONSTANTS[kind]):
            return getattr(torch, content)
    raise RequestError(f"a custom loss holds an argument of unknown form: {sorted(map(str, value))}")
