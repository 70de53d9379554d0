"""Shared by all tests: the environment that keeps them on this machine, and one running engine on the small model."""

from __future__ import annotations

import os

# Before torch is imported: its waiting threads would otherwise spin on the cores that other work needs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TINKER_TELEMETRY"] = "0"
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"

from collections.abc import Iterator
from typing import Any

import pytest

# A hosted name, served by the small stand-in model.
BASE_MODEL = "Qwen/Qwen3-8B"
API_KEY = "tml-local-test"


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running `LocalTinkerServer` on the small model; `engine.base_url` is its address."""
    from mock_tinker import LocalTinkerServer

    with LocalTinkerServer(tmp_path_factory.mktemp("engine"), threads=1) as server:
        yield server


@pytest.fixture(scope="session")
def service_client(engine: Any) -> Iterator[Any]:
    """A `tinker.ServiceClient` of the running engine."""
    import tinker

    client = tinker.ServiceClient(base_url=engine.base_url, api_key=API_KEY)
    yield client
    client.close("success").result(timeout=10)


@pytest.fixture(scope="session")
def base_model_name() -> str:
    """The name under which tests ask for the small model."""
    return BASE_MODEL


@pytest.fixture(scope="session")
def small_tokenizer() -> Any:
    """The small model's tokenizer."""
    import base_models

    return base_models.load_tokenizer(base_models.resolve_base_model(BASE_MODEL).folder)
