"""The base models that a server offers: which one a name stands for, each loaded once.

models = ServedModels(offered=(), threads=2, device="cpu", should_stop=lambda: False)
base = models.resolve_now("Qwen/Qwen3-8B")     # any thread; touches no tensor
model = models.load("Qwen/Qwen3-8B")           # the engine's thread
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from request_fields import text_of
from wire_format import RequestError

if TYPE_CHECKING:
    from base_models import BaseModel
    from local_model import LocalModel

logger = logging.getLogger("mock_tinker")


class ServedModels:
    """Base models by name. `offered` limits the names (none: every name known). `loaded` holds models by folder."""

    def __init__(self, offered: Sequence[str], *, threads: int, device: str, should_stop: Callable[[], bool]) -> None:
        self.loaded: dict[str, LocalModel] = {}
        self._offered = list(offered)
        self.threads = threads
        self._device = device
        self._should_stop = should_stop
        self._resolving = threading.Lock()
        self._bases: dict[str, BaseModel] = {}
        self._announced: set[str] = set()

    def resolve_now(self, name: str) -> BaseModel:
        """The base model behind `name`. Raises `ConfigurationError` (a `ValueError`) listing the choices."""
        import base_models

        name = text_of({"base_model": name}, "base_model")
        if self._offered and name not in self._offered:
            raise RequestError(f"this server offers {', '.join(self._offered)}; not {name!r}")
        # One at a time: resolving may convert the model first.
        with self._resolving:
            if name not in self._bases:
                base = base_models.resolve_base_model(name)
                config = json.loads((base.folder / "config.json").read_text(encoding="utf-8"))
                self._bases[name] = replace(base, max_context=_context_length(base.max_context, config))
            return self._bases[name]

    def capabilities_now(self) -> list[dict[str, Any]]:
        """Models offered, with their context length where finding it out costs nothing."""
        import base_models

        models = []
        for name in self._offered or base_models.available_models():
            # Resolving the model from the wheel may convert it first, which takes many seconds.
            known = name in self._bases or name != base_models.SMOLLM2_NAME
            context = self.resolve_now(name).max_context if known else None
            models.append({"model_name": name, "max_context_length": context, "trainable": True, "sampleable": True})
        return models

    def load(self, name: str) -> LocalModel:
        """The model behind `name`, loaded on first use. Raises `ConfigurationError`, `RequestError`."""
        base = self.resolve_now(name)
        key = str(base.folder)
        if key not in self.loaded:
            import torch

            from local_model import LocalModel

            # The order in which sums are formed depends on the number of threads, so it is fixed.
            torch.set_num_threads(self.threads)
            started = time.monotonic()
            model = LocalModel(base.folder, max_context=base.max_context, device=self._device)
            model.should_stop = self._should_stop
            self.loaded[key] = model
            logger.info("loaded %s from %s in %.1f s", name, base.folder, time.monotonic() - started)
        if base.stand_in and name not in self._announced:
            self._announced.add(name)
            logger.info("%s is served by the small stand-in model in %s", name, base.folder)
        return self.loaded[key]


def _context_length(limit: int, config: Mapping[str, Any]) -> int:
    """Tokens that a model can be served with; at most its sliding window, as the masks here know none."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return min(limit, window) if window else limit
