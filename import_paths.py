"""Functions of the user's own that a configuration names: `package.module:function`, or `file.py:function`.

    path = anchored("mine:choose", [config_folder, os.getcwd()])      # "/home/me/mine.py:choose"
    choose = load_function(path, key="selection.strategy", n_arguments=1)

Where the module is a file in one of the folders the path is made absolute, so that a run that is resumed from elsewhere
finds the same function; any other module is imported as Python finds it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from error_handling import ConfigurationError

_NAME = r"[A-Za-z_]\w*"
_DOTTED = re.compile(rf"({_NAME}(?:\.{_NAME})*):({_NAME})")
_FILE = re.compile(rf"(.+\.py):({_NAME})")


def is_import_path(text: str) -> bool:
    """Whether `text` has the form of an import path; whether there is such a function `load_function` says."""
    return bool(_DOTTED.fullmatch(text) or _FILE.fullmatch(text))


def anchored(text: str, folders: Sequence[str]) -> str:
    """`text` with the module's file, absolute, where that lies in one of `folders`; else `text` as it is."""
    dotted, file = _DOTTED.fullmatch(text), _FILE.fullmatch(text)
    names: tuple[str, ...]
    if dotted:
        stem = dotted[1].replace(".", os.sep)
        names, function = (f"{stem}.py", os.path.join(stem, "__init__.py")), dotted[2]
    elif file:
        names, function = (os.path.expanduser(file[1]),), file[2]
    else:
        return text
    for folder in folders:
        for name in names:
            path = os.path.abspath(os.path.join(folder, name))
            if os.path.isfile(path):
                return f"{path}:{function}"
    return text


def load_function(text: str, *, key: str, n_arguments: int) -> Callable[..., Any]:
    """The function that `text` names, which must take `n_arguments` positional arguments.

    Raises `ConfigurationError`, naming the configuration's `key`, when there is none, importing it fails, or its
    signature is another one.
    """
    dotted, file = _DOTTED.fullmatch(text), _FILE.fullmatch(text)
    if file:
        module, name = _import_file(Path(file[1]), f"{key}: {text}"), file[2]
    elif dotted:
        module, name = _import(dotted[1], f"{key}: {text}"), dotted[2]
    else:
        raise ConfigurationError(f"{key}: {text} is no import path; write package.module:function")
    function = getattr(module, name, None)
    if function is None:
        others = [other for other, value in vars(module).items() if inspect.isfunction(value)]
        known = f"; functions there: {', '.join(others[:10])}" if others else ""
        raise ConfigurationError(f"{key}: {text}: the module has no {name}{known}")
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine function" if callable(function) else f"of type {type(function).__name__}"
        raise ConfigurationError(f"{key}: {text}: {name} is {kind}, expected a plain function")
    try:
        inspect.signature(function).bind(*[None] * n_arguments)
    except (TypeError, ValueError) as err:
        count = "1 argument" if n_arguments == 1 else f"{n_arguments} arguments"
        raise ConfigurationError(f"{key}: {text}: {name} must take {count} by position ({err})") from err
    return function


def _import_file(path: Path, place: str) -> Any:
    if not path.is_file():
        raise ConfigurationError(f"{place}: there is no file {path}")
    root, name = path.parent, path.stem
    if name == "__init__":
        root, name = root.parent, root.name
    # A module of a package is imported as such, so that it can import its neighbours.
    while (root / "__init__.py").is_file():
        root, name = root.parent, f"{root.name}.{name}"
    if str(root) not in sys.path:
        sys.path.append(str(root))  # at the end: a file of the user's must not take the place of a module of ours
    module = _import(name, place)
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path.resolve():
        raise ConfigurationError(f"{place}: another module is called {name} ({found}); rename the file")
    return module


def _import(name: str, place: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as err:
        raise ConfigurationError(f"{place}: importing {name} failed: {type(err).__name__}: {err}") from err
