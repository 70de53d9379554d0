"""The connection: which service is chosen, what its failures say, and what is asked of it."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import tinker

import chat_sampler
import rendering
import service_waits
import tinker_backend
from error_handling import (
    AuthenticationError,
    CheckpointError,
    ConfigurationError,
    InterruptedRunError,
    ServiceError,
    ServiceUnavailableError,
)

MODEL = "Qwen/Qwen3-8B"
MOCK = {"TINKER_MOCK": "1"}


@contextmanager
def answering(status: int, body: bytes, content_type: str = "application/json") -> Iterator[str]:
    """A real HTTP server on loopback that gives every GET the same answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def backend() -> Iterator[tinker_backend.Backend]:
    with tinker_backend.connect(env=MOCK) as opened:
        yield opened


def datum(tokens: list[int], weights: list[float]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
            "weights": tinker.TensorData.from_numpy(np.array(weights[1:], dtype=np.float32)),
        },
    )


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False), ("no", False)])
def test_mock_switch_reads_the_usual_spellings(value, expected):
    assert tinker_backend.is_mock({"TINKER_MOCK": value}) is expected


def test_without_a_key_the_remedy_is_named():
    with (
        pytest.raises(ConfigurationError, match=r"TINKER_API_KEY is not set.*TINKER_MOCK=1") as caught,
        tinker_backend.connect(env={}),
    ):
        pass
    assert caught.value.exit_code == 2


def test_a_key_of_another_service_is_refused_without_repeating_it():
    with (
        pytest.raises(ConfigurationError, match="must start with 'tml-'") as caught,
        tinker_backend.connect(env={"TINKER_API_KEY": "sk-secret-value"}),
    ):
        pass
    assert "sk-secret-value" not in str(caught.value)


def test_mock_mode_ignores_a_key_in_the_environment():
    env = {"TINKER_MOCK": "1", "TINKER_API_KEY": "tml-real-key", "TINKER_BASE_URL": "http://127.0.0.1:9"}
    with tinker_backend.connect(env=env) as opened:
        assert opened.kind == "embedded"
        assert opened.api_key != "tml-real-key"
        assert MODEL in opened.models()


def test_a_proxy_in_the_environment_does_not_swallow_local_requests(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    with tinker_backend.connect(env=MOCK) as opened:
        assert MODEL in opened.models()
    assert "127.0.0.1" in os.environ["NO_PROXY"]


def test_nobody_listening_is_told_at_once():
    env = {"TINKER_API_KEY": "tml-key", "TINKER_BASE_URL": "http://127.0.0.1:9"}
    with (
        pytest.raises(ServiceUnavailableError, match=r"no answer from the Tinker service at http://127\.0\.0\.1:9"),
        tinker_backend.connect(env=env),
    ):
        pass


def test_a_refused_key_is_told_without_repeating_it():
    with (
        answering(401, b'{"detail": "bad key"}') as url,
        pytest.raises(AuthenticationError, match="refused the API key") as caught,
        tinker_backend.connect(env={"TINKER_API_KEY": "tml-marked-key", "TINKER_BASE_URL": url}),
    ):
        pass
    assert "tml-marked-key" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"<html>hello</html>"), (200, b'{"models": []}'), (404, b"{}"), (500, b"oops")]
)
def test_a_server_of_another_kind_is_told(status, body):
    with (
        answering(status, body) as url,
        pytest.raises(ServiceError, match="TINKER_BASE_URL"),
        tinker_backend.connect(env={"TINKER_API_KEY": "tml-key", "TINKER_BASE_URL": url}),
    ):
        pass


def test_the_key_is_not_in_the_connection_repr(backend):
    assert backend.api_key not in repr(backend)


def test_an_unknown_model_is_refused_with_near_names(backend):
    with pytest.raises(ConfigurationError, match="Qwen/Qwen3-8B"):
        backend.check_model("Qwen/Qwen3-8Bb")


def test_a_foreign_server_is_asked_for_its_models():
    served = json.dumps({"supported_models": [{"model_name": "acme/small", "max_context_length": 99}]}).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path.endswith("get_server_capabilities")
            body = served if known else b'{"detail":"Not Found"}'
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with tinker_backend.connect(env={"TINKER_API_KEY": "tml-key", "TINKER_BASE_URL": url}) as opened:
            assert opened.check_model("acme/small") == tinker_backend.ServedModel("acme/small", 99)
            with pytest.raises(ConfigurationError, match="acme/small"):
                opened.check_model("acme/smal")
    finally:
        server.shutdown()
        server.server_close()


def test_the_stand_in_is_named(backend):
    served = backend.check_model(MODEL)
    assert served.stand_in
    assert served.max_context >= 128


def test_the_tokenizer_is_the_served_model_s(backend):
    import base_models

    tokenizer = tinker_backend.get_tokenizer(MODEL, backend)
    own = base_models.load_tokenizer(base_models.resolve_base_model(MODEL).folder)
    text = "The printer is offline — again!\n"
    assert tokenizer.encode(text, add_special_tokens=False) == own.encode(text, add_special_tokens=False)


async def test_waiting_has_a_limit_and_names_what_it_waits_for():
    with pytest.raises(ServiceUnavailableError, match="gave up after 0 s waiting for the moon"):
        await tinker_backend.wait_for(asyncio.sleep(30), "the moon", limit_s=0.05)


async def test_a_long_wait_says_so(monkeypatch):
    monkeypatch.setattr(service_waits, "WAIT_NOTE_S", 0.01)
    notes: list[str] = []
    watch = service_waits.Watch(note=notes.append)
    assert await tinker_backend.wait_for(asyncio.sleep(0.1, "done"), "a step", watch=watch) == "done"
    assert notes
    assert notes[0].startswith("still waiting for a step")


async def test_a_service_that_is_gone_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(service_waits, "WAIT_NOTE_S", 0.01)
    answers = iter([False, True, False, False, False])
    watch = service_waits.Watch(is_alive=lambda: next(answers))
    with pytest.raises(ServiceUnavailableError, match="stopped answering while the run waited for a step"):
        await tinker_backend.wait_for(asyncio.sleep(30), "a step", watch=watch)
    assert next(answers, "all asked") == "all asked"


async def test_a_run_that_shall_stop_waits_no_longer_than_its_grace(monkeypatch):
    monkeypatch.setattr(service_waits, "STOP_GRACE_S", 0.05)
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(InterruptedRunError, match="while waiting for a step"):
        await tinker_backend.wait_for(asyncio.sleep(30), "a step", watch=service_waits.Watch(stop=stop))


def test_a_closed_server_is_not_alive_and_an_open_one_is():
    with answering(200, b'{"supported_models": []}') as url:
        opened = tinker_backend.Backend("server", url, "tml-key")
        assert opened.is_alive()
    assert opened.is_alive(), "asked again only after some seconds"
    assert not tinker_backend.Backend("server", url, "tml-key").is_alive()


@pytest.mark.parametrize("url", ["notaurl", "ftp://127.0.0.1:1", "http://127.0.0.1:99999", "http://"])
def test_an_address_that_cannot_be_one_is_a_usage_error(url):
    env = {"TINKER_API_KEY": "tml-key", "TINKER_BASE_URL": url}
    with pytest.raises(ConfigurationError, match="TINKER_BASE_URL is"), tinker_backend.connect(env=env):
        pass


async def test_errors_of_the_service_become_ours(backend):
    client = await backend.create_training_client(MODEL, rank=4, seed=1)
    with pytest.raises(ServiceError, match="waiting for an impossible step"):
        await tinker_backend.wait_for(
            client.forward_backward([datum([5, 10**6], [0, 1])], "cross_entropy"), "an impossible step"
        )


def test_errors_of_ours_go_through_translation_unchanged():
    error = ConfigurationError("as it was")
    assert tinker_backend.translate_error(error, "anything") is error


async def test_sampler_weights_are_refused_for_training(backend):
    with pytest.raises(CheckpointError, match="weights for sampling only"):
        await backend.restore_training_client("tinker://run:train:0/sampler_weights/last")


async def test_a_state_that_is_gone_cannot_be_restored_and_that_is_told(backend):
    with pytest.raises(CheckpointError, match="cannot be restored"):
        await backend.restore_training_client("tinker://no-such-session:train:0/weights/none")


def test_a_missing_state_is_told(backend):
    with pytest.raises(CheckpointError, match="was not found"):
        backend.state_info("tinker://no-such-session:train:0/weights/none")


async def sampler(backend, **settings) -> chat_sampler.ChatSampler:
    chat_format = rendering.get_chat_format(MODEL, backend.get_tokenizer(MODEL))
    client = await backend.create_sampling_client(base_model=MODEL)
    return chat_sampler.ChatSampler(client, chat_format, **settings)


async def test_a_cut_reply_says_so_and_counts_its_tokens(backend):
    asked = [{"role": "user", "content": "Name a colour."}]
    reply = await (await sampler(backend, max_tokens=2)).reply(asked)
    assert reply.stop_reason == "max_tokens"
    assert reply.tokens_out == len(reply.tokens) == 2
    assert reply.tokens_in > 4


async def test_sampled_replies_repeat_by_seed_and_differ_by_epoch(backend):
    asked = [{"role": "user", "content": "Tell me a story."}]
    first = await sampler(backend, max_tokens=12, temperature=1.0, seed=7)
    again = await sampler(backend, max_tokens=12, temperature=1.0, seed=7)
    one = await first.reply(asked)
    assert (await again.reply(asked)).tokens == one.tokens
    others = [(await first.reply(asked, epoch=epoch)).tokens for epoch in range(2, 6)]
    assert any(tokens != one.tokens for tokens in others)
