"""Fields of a client's JSON, checked: each function returns the value or raises `RequestError` that names the field."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from wire_format import RequestError

LONGEST_TEXT = 1000
TTL_RANGE_S = (3600, 10 * 366 * 86400)


def expiry(ttl_seconds: Any) -> float | None:
    """When a checkpoint of this life ends, in Unix seconds; None for one without end. Raises `RequestError`."""
    if ttl_seconds is None:
        return None
    low, high = TTL_RANGE_S
    if type(ttl_seconds) is not int or not low <= ttl_seconds <= high:
        raise RequestError(f"ttl_seconds is {ttl_seconds!r}; it must be a whole number from {low} to {high}")
    return time.time() + ttl_seconds


def metadata_of(body: Mapping[str, Any]) -> dict[str, str] | None:
    value = body.get("user_metadata")
    if value is not None and not (isinstance(value, dict) and all(isinstance(text, str) for text in value.values())):
        raise RequestError("user_metadata must map names to strings")
    return value


def check_optimizer(body: Mapping[str, Any]) -> None:
    kind = object_of(body, "optimizer_config").get("type", "adamw")
    if kind != "adamw":
        raise RequestError(f"the optimizer {kind!r} is not supported; this engine has adamw")


def text_of(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} must be a non-empty string")
    if len(value) > LONGEST_TEXT:
        raise RequestError(f"{name} has {len(value)} characters; it must be at most {LONGEST_TEXT}")
    return value


def number_of(body: Mapping[str, Any], name: str, least: int | None = None) -> int | None:
    """The whole number `name`, None when it was not sent."""
    value = body.get(name)
    if value is not None and (type(value) is not int or (least is not None and value < least)):
        limit = "" if least is None else f" from {least} on"
        raise RequestError(f"{name} is {value!r}; it must be a whole number{limit}")
    return value


def object_of(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise RequestError(f"{name} must be an object")
    return value or {}
