"""A configuration's faults in words: validation errors, nearest known names, keys that must not be there.

Pure; what the keys are is handed in by `config_schema`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection
from typing import Any

from config_file import KeyPath, dotted, in_json

Fault = tuple[KeyPath, str]
"""Where, and what is wrong there."""

UNAVAILABLE = frozenset({"trackers", "notify"})
UNAVAILABLE_IN_HELDOUT = ("family", "metric", "bar", "guardrails", "criteria")
"""Keys that are part of the design and that no program serves yet: refused rather than ignored."""

# An unknown key that looks like a credential is answered with the environment variable that takes it.
_SECRET = re.compile(
    r"(^|_)(api_?key|secret(_key)?|password|passwd|credentials?|(auth|access|api|hf|bearer|wandb)_(token|key))$"
    r"|^(token|key|bearer|authorization|cookie)$"
)


def not_available(key: str) -> str:
    """The message about a key that no program serves yet."""
    return f"not available in this version; remove {key} or leave it at its default"


def secret_advice(key: str) -> str | None:
    """What to do instead of writing a credential under `key`; None when the key does not look like one."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_").replace(".", "_")
    if not _SECRET.search(name):
        return None
    variable = "EVALOPS_API_KEY" if "evalops" in name else "HF_TOKEN" if name.startswith("hf") else "TINKER_API_KEY"
    return f"a secret is never part of a configuration; set the environment variable {variable} and remove the key"


def secrets(value: Any, known: Collection[KeyPath], path: KeyPath = ()) -> list[Fault]:
    """A fault for every key of raw data, at any depth, that looks like a credential; its value is never shown."""
    if isinstance(value, list):
        return [fault for index, item in enumerate(value) for fault in secrets(item, known, (*path, index))]
    faults: list[Fault] = []
    for key, item in value.items() if isinstance(value, dict) else ():
        advice = None if (*path, key) in known else secret_advice(key)
        faults += [((*path, key), advice)] if advice else secrets(item, known, (*path, key))
    return faults


def explain(error: Any, known_beside: Callable[[KeyPath], list[str]], leaves: Collection[KeyPath]) -> Fault:
    """A pydantic error as (where, what is wanted, what was written).

    `known_beside(path)` lists the keys valid where `path` stands; `leaves` are all keys that hold a value.
    """
    path: KeyPath = tuple(error["loc"])
    kind, wanted, got = error["type"], error.get("ctx", {}), in_json(error.get("input"))
    if UNAVAILABLE.intersection(path[:2]):
        return path, not_available(str(path[0]))
    if path[0] == "heldout" and len(path) > 1 and path[1] in UNAVAILABLE_IN_HELDOUT:
        return path, not_available(str(path[1]))
    if kind == "extra_forbidden":
        return path, f"unknown key{_nearest(path, known_beside(path), leaves)}"
    if kind == "missing":
        return path, "is required and not given"
    bounds = {"greater_than": ("gt", "above"), "greater_than_equal": ("ge", "at least")}
    bounds |= {"less_than": ("lt", "below"), "less_than_equal": ("le", "at most")}
    if kind in bounds:
        name, words = bounds[kind]
        return path, f"must be {words} {wanted[name]}, got {got}"
    phrases = {
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "string_too_short": "must not be empty (null where nothing is meant)",
        "string_pattern_mismatch": "must start with tinker://",
        "tuple_type": "must be a list",
        "dict_type": "must be an object",
        "model_type": "must be an object",
        "literal_error": f"must be one of {wanted.get('expected', '')}",
    }
    return path, f"{phrases.get(kind, error['msg'])}, got {got}"


def _nearest(path: KeyPath, known: list[str], leaves: Collection[KeyPath]) -> str:
    """`; did you mean ...?` with the nearest known key, or the valid ones of a small object."""
    key = str(path[-1])
    # The right name in the wrong place comes before a similar name in the right one.
    elsewhere = [leaf for leaf in leaves if leaf[-1] == key]
    if elsewhere:
        return f"; did you mean {dotted(elsewhere[0])}?"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if near:
        return f"; did you mean {dotted((*path[:-1], near[0]))}?"
    by_name = {str(leaf[-1]): leaf for leaf in leaves} | {dotted(leaf): leaf for leaf in leaves}
    near = difflib.get_close_matches(key, list(by_name), n=1, cutoff=0.7)
    if near:
        return f"; did you mean {dotted(by_name[near[0]])}?"
    return f"; known here: {', '.join(known)}" if len(path) > 1 else "; the README lists the known keys"
