"""The connection to a Tinker service, and everything the project asks of one.

Which service is decided here and nowhere else: `TINKER_MOCK=1` starts the local engine inside this process and points
the SDK at it, else `TINKER_API_KEY` is required and `TINKER_BASE_URL` may name another server. After that nothing in
the product knows which one it talks to::

    with connect(engine_dir=run_dir / "engine") as backend:
        client = await backend.create_training_client("Qwen/Qwen3-8B", rank=16, seed=42)
        step = await forward_backward_async(client, data)
        update = await optim_step_async(client, learning_rate=1e-4)
        output = await wait_for(step, "the first training step")

Every wait has a limit and says what it waits for; every error of the SDK becomes one of `error_handling`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import server_differences
from error_handling import (
    AuthenticationError,
    CheckpointError,
    ConfigurationError,
    ServiceError,
    ServiceUnavailableError,
    is_transient_status,
    retry_after_seconds,
)
from logger import redact
from service_waits import WAIT_NOTE_S, Watch, in_thread, listen_to_queue, read_body, translate_error, wait_for

if TYPE_CHECKING:
    import tinker


T = TypeVar("T")

HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
# The SDK refuses keys without this prefix; the embedded engine asks for none, so this is no secret.
EMBEDDED_KEY = "tml-local-engine"
# With Python's start and the reading of the configuration, a service that is not there is told within 10 seconds.
CONNECT_LIMIT_S = 6.0
# Our own engine may have to convert a base model before it can name its tokenizer.
ENGINE_INFO_LIMIT_S = 300.0
# Making a client opens a session, for which the SDK tries again for five minutes.
SESSION_LIMIT_S = 330.0
STATE_INFO_LIMIT_S = 30.0
RETRY_S = 0.5
NOT_IMPLEMENTED = 501
LONGEST_QUOTE = 2000
LONGEST_ANSWER = 256 * 2**20


def is_mock(env: Mapping[str, str] = os.environ) -> bool:
    """True when `TINKER_MOCK` asks for the local engine; any value but empty, 0, false and no does."""
    return env.get("TINKER_MOCK", "").strip().lower() not in ("", "0", "false", "no")


@dataclass(frozen=True)
class ServedModel:
    """What a service says of a base model. `stand_in` names the small model that is served in its place, if any;
    `unchecked` says why no service was asked."""

    name: str
    max_context: int | None = None
    stand_in: str | None = None
    unchecked: str | None = None


@dataclass
class Backend:
    """An open connection. `kind` is "embedded", "server" (`TINKER_BASE_URL`) or "hosted"; `watch` is what its own waits
    tell."""

    kind: str
    base_url: str
    api_key: str = field(repr=False)
    watch: Watch = field(default_factory=Watch, repr=False)
    _server: Any = field(default=None, repr=False)
    _temp_dir: Any = field(default=None, repr=False)
    _service: Any = field(default=None, repr=False)
    _capabilities: dict[str, int | None] | None = field(default=None, repr=False)
    _alive: tuple[float, bool] = field(default=(float("-inf"), True), repr=False)
    _alive_lock: Any = field(default_factory=threading.Lock, repr=False)

    async def service(self) -> tinker.ServiceClient:
        """The SDK's client, with its session open on the service; made on first use."""
        if self._service is None:
            import tinker

            server_differences.accept_samples_without_ids()
            listen_to_queue()
            service = tinker.ServiceClient(base_url=self.base_url, api_key=self.api_key)
            # The SDK opens the session when it is first needed, and blocks meanwhile.
            opened = asyncio.wrap_future(in_thread(lambda: service.holder))
            await wait_for(opened, f"a session on the {self.describe()}", limit_s=SESSION_LIMIT_S, watch=self.watch)
            self._service = service
        return self._service

    def describe(self) -> str:
        """One phrase for the terminal."""
        place = {"embedded": "local engine inside this process", "server": "server at", "hosted": "hosted service at"}
        return place[self.kind] if self.kind == "embedded" else f"{place[self.kind]} {self.base_url}"

    def _get(self, path: str, limit_s: float = CONNECT_LIMIT_S, *, again: bool = True, **params: str) -> Any:
        """`_fetch`, with a refusal of the key raised as `AuthenticationError`."""
        response = self._fetch(path, limit_s, again=again, **params)
        if response.status_code in (401, 403):
            raise self._key_refused(response)
        return response

    def check_key(self) -> None:
        """Raise `AuthenticationError` for a key that the service does not know, however much it tells to anybody.

        Asks for what every server that has it gives to its own clients alone. A key may be good and have no right to
        it, so only 401 counts.
        """
        response = self._fetch("training_runs", limit="1")
        if response.status_code == 401:
            raise self._key_refused(response)

    def _key_refused(self, response: Any) -> AuthenticationError:
        return AuthenticationError(
            f"the Tinker service at {self.base_url} refused the API key (HTTP {response.status_code}). "
            "Check TINKER_API_KEY."
        )

    def _fetch(self, path: str, limit_s: float = CONNECT_LIMIT_S, *, again: bool = True, **params: str) -> Any:
        """GET `path` within `limit_s` seconds; raises as `wait_for` does. Returns the `requests.Response`, fully read.

        With `again`, what can pass (no connection, 408, 425, 429, 5xx) is tried anew while there is time.
        """
        deadline = time.monotonic() + limit_s
        asked = in_thread(lambda: self._ask(path, params, deadline, again))
        while True:
            try:
                response = asked.result(timeout=max(0.0, min(WAIT_NOTE_S, deadline - time.monotonic())))
                break
            except TimeoutError as err:
                if time.monotonic() >= deadline or asked.done():
                    raise self._unreachable(f"{limit_s:g} s passed") from err
                self.watch.say(f"still waiting for {path} of the {self.describe()}")
        return response

    def _ask(self, path: str, params: Mapping[str, str], deadline: float, again: bool) -> Any:
        import requests

        url, headers = f"{self.base_url}/api/v1/{path}", {"X-API-Key": self.api_key}
        while True:
            left = max(0.1, deadline - time.monotonic())
            wait_s = RETRY_S
            try:
                # A redirect would take the key to wherever it leads.
                response = requests.get(
                    url, params=params, headers=headers, timeout=left, stream=True, allow_redirects=False
                )
                read_body(response, deadline, LONGEST_ANSWER)
                if not is_transient_status(response.status_code):
                    return response
                wait_s = retry_after_seconds(response.headers.get("Retry-After")) or RETRY_S
            except requests.RequestException as err:
                if not again or time.monotonic() + wait_s >= deadline or not _may_pass(err):
                    raise self._unreachable(type(err).__name__) from err
            else:
                if not again or time.monotonic() + wait_s >= deadline:
                    return response
            time.sleep(wait_s)

    def _unreachable(self, reason: str) -> ServiceUnavailableError:
        return ServiceUnavailableError(
            f"no answer from the Tinker service at {self.base_url} ({reason}). "
            "Check the network and TINKER_BASE_URL, or set TINKER_MOCK=1 to use the local engine."
        )

    def is_alive(self) -> bool:
        """Whether the service answers at all; asked at most every 10 seconds, however many wait for it."""
        with self._alive_lock:
            asked_at, alive = self._alive
            if time.monotonic() - asked_at > 10:
                try:
                    self._get("get_server_capabilities", again=False)
                    alive = True
                except ServiceUnavailableError:
                    alive = False
                self._alive = (time.monotonic(), alive)
            return alive

    def models(self) -> dict[str, int | None]:
        """Base models the service offers, with their context length in tokens where it tells."""
        if self._capabilities is None:
            response = self._get("get_server_capabilities")
            if response.status_code != 200:
                raise ServiceError(
                    f"the Tinker service at {self.base_url} answered HTTP {response.status_code} when asked for its "
                    "models. Is TINKER_BASE_URL the address of a Tinker server?"
                )
            try:
                offered = response.json()["supported_models"]
                self._capabilities = {m["model_name"]: m.get("max_context_length") for m in offered}
            except (ValueError, KeyError, TypeError) as err:
                raise ServiceError(
                    f"{self.base_url} answered, but not as a Tinker server does. Check TINKER_BASE_URL."
                ) from err
        return self._capabilities

    def check_model(self, name: str) -> ServedModel:
        """Ask the service about `name`; raises `ConfigurationError` with near names when it does not serve it."""
        info = self._engine_info(name)
        if info is not None:
            stand_in = info.get("served_by") if info.get("stand_in") else None
            return ServedModel(name, info.get("max_context"), stand_in)
        offered = self.models()
        if name in offered:
            return ServedModel(name, offered[name] or server_differences.context_of_folder(name))
        near = difflib.get_close_matches(name, offered, n=3, cutoff=0.4) or sorted(offered)[:8]
        raise ConfigurationError(
            f"base_model: the {self.describe()} does not serve {name!r}. It serves, among others: {', '.join(near)}"
        )

    def _engine_info(self, model: str) -> dict[str, Any] | None:
        """What our own engine says of `model`, with its tokenizer's files; None when the server is another one."""
        response = self._get("tokenizer_files", ENGINE_INFO_LIMIT_S, model=model)
        if response.status_code in (400, 422):
            raise ConfigurationError(f"base_model: {_detail(response)}")
        if is_transient_status(response.status_code) and response.status_code != NOT_IMPLEMENTED:
            # Taken for a server that has no such call, it would have its tokens made by another tokenizer.
            raise ServiceUnavailableError(
                f"the Tinker service at {self.base_url} answered HTTP {response.status_code} when asked for the "
                f"tokenizer of {model}: {_detail(response)}"
            )
        if response.status_code != 200:
            return None
        try:
            info = response.json()
        except ValueError:
            return None
        return info if isinstance(info, dict) and "files" in info else None

    def get_tokenizer(self, model: str) -> Any:
        """The tokenizer of `model`: see `get_tokenizer`."""
        # Never through the cookbook, which runs programs that lie in a folder.
        if (Path(model) / "tokenizer_config.json").is_file() or (Path(model) / "tokenizer.json").is_file():
            return _load_tokenizer(Path(model))
        info = self._engine_info(model)
        if info is not None:
            return _load_tokenizer(_unpack_tokenizer(info["files"]))
        try:
            from tinker_cookbook import tokenizer_utils
        except ImportError:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        try:
            return tokenizer_utils.get_tokenizer(model)
        except Exception as err:
            raise ConfigurationError(
                f"base_model: the tokenizer of {model!r} could not be loaded ({type(err).__name__}: {err}). "
                "It is fetched from the model hub once; check the network, or put the model's folder on this machine."
            ) from err

    async def create_training_client(self, base_model: str, *, rank: int, seed: int) -> tinker.TrainingClient:
        """A new LoRA adapter on `base_model`, its weights fixed by `seed` where the service honours it."""
        service = await self.service()
        return await self._wait(
            service.create_lora_training_client(base_model=base_model, rank=rank, seed=seed),
            f"a new LoRA adapter on {base_model}",
        )

    async def restore_training_client(self, state_path: str, *, optimizer: bool = True) -> tinker.TrainingClient:
        """A training client holding the saved state at `state_path`, with its optimizer's moments unless refused."""
        if "/sampler_weights/" in state_path:
            raise CheckpointError(
                f"{state_path} holds weights for sampling only, without optimizer state; training needs a path with "
                "/weights/ in it (the state_path of a row in checkpoints.jsonl)"
            )
        service = await self.service()
        create = (
            service.create_training_client_from_state_with_optimizer
            if optimizer
            else service.create_training_client_from_state
        )
        what = f"the saved state {state_path}"
        try:
            try:
                return await self._wait(create(state_path), what)
            except ServiceError as err:
                if not server_differences.lacks_create_from_state(err):
                    raise
            saved = await asyncio.to_thread(self.state_info, state_path)
            load = server_differences.load_into_new_client(service, saved, state_path, optimizer=optimizer)
            return await self._wait(load, what)
        except ServiceUnavailableError:
            raise
        except ServiceError as err:
            raise CheckpointError(
                f"{state_path} cannot be restored: {err}. If the run was trained on the local engine, its folder "
                "engine/ must be as the run left it; from a state that is deleted a run goes back to the one before."
            ) from err

    async def create_sampling_client(
        self, *, model_path: str | None = None, base_model: str | None = None, state_path: str | None = None
    ) -> tinker.SamplingClient:
        """A client that samples from saved weights, or from the untouched base model.

        With `state_path`, the saved state of the same weights, these are sampled from there when the server can no
        longer do so from `model_path`, because the weights there are gone or because of
        `server_differences.has_let_go`.
        """
        what = f"a sampler of {model_path or base_model}"
        service = await self.service()
        try:
            opening = service.create_sampling_client(model_path=model_path, base_model=base_model)
            client = await self._wait(opening, what)
            if state_path is None or not await self._wait(server_differences.has_let_go(client), what):
                return client
        except ServiceUnavailableError:
            raise
        except ServiceError as err:
            if state_path is None or not server_differences.is_missing(err):
                raise
        holder = await self.restore_training_client(state_path, optimizer=False)
        saved = await self._wait(holder.save_weights_for_sampler("restored"), what)
        return await self.create_sampling_client(model_path=saved.path)

    async def _wait(self, future: Any, what: str) -> Any:
        return await wait_for(future, what, watch=self.watch)

    def state_info(self, state_path: str) -> Any:
        """Base model and rank of the saved state at `state_path`; raises `CheckpointError` when it is not there."""

        def ask() -> Any:
            return self._rest().get_weights_info_by_tinker_path(state_path).result(timeout=STATE_INFO_LIMIT_S)

        try:
            return in_thread(ask).result(timeout=STATE_INFO_LIMIT_S)
        except Exception as err:
            mended = translate_error(err, f"looking up {state_path}")
            if isinstance(mended, AuthenticationError | ServiceUnavailableError):
                raise mended from err
            raise CheckpointError(f"{state_path} was not found on the {self.describe()}: {err}") from err

    def has_checkpoint(self, path: str) -> bool:
        """False when the service says that there is no checkpoint at `path`: it expired, was deleted or never was.

        Raises `AuthenticationError` and `ServiceUnavailableError`; any other answer leaves it to whoever uses it.
        """
        try:
            self.state_info(path)
        except CheckpointError as err:
            return not server_differences.is_missing(err)
        return True

    async def delete_checkpoint(self, path: str) -> None:
        """Delete the checkpoint at `path`; one that is not there is no error. Raises `ServiceError`s."""

        def delete() -> None:
            self._rest().delete_checkpoint_from_tinker_path(path).result(timeout=STATE_INFO_LIMIT_S)

        try:
            await self._wait(asyncio.wrap_future(in_thread(delete)), f"the deletion of {path}")
        except ServiceError as err:
            if not server_differences.is_missing(err):
                raise

    def _rest(self) -> tinker.RestClient:
        import tinker

        return tinker.RestClient(base_url=self.base_url, api_key=self.api_key)

    def close(self, status: str = "success") -> None:
        """End the session and stop the embedded engine. Safe to call twice."""
        if self._service is not None:
            # A server that is already gone cannot be told that the session ends, and nothing depends on it.
            holder = self._service.holder
            with contextlib.suppress(Exception):
                self._service.close(status).result(timeout=5)
            # Else the SDK goes on telling the server that the session lives, and complains after two minutes.
            holder.close()
            self._service = None
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._temp_dir is not None:
            self._temp_dir.cleanup()
            self._temp_dir = None


class Unconnected(Backend):
    """What a dry run has in place of a connection that cannot be had: nothing is asked, and that is said."""

    def __init__(self, reason: str) -> None:
        super().__init__("none", "", "")
        self._reason = reason

    def describe(self) -> str:
        return "not connected"

    def check_model(self, name: str) -> ServedModel:
        return ServedModel(name, unchecked=self._reason)

    def _engine_info(self, model: str) -> dict[str, Any] | None:
        return None


@contextlib.contextmanager
def connect_if_possible(*, adopt: str | None = None, adopt_from: Path | str | None = None) -> Iterator[Backend]:
    """`connect` for a dry run: without a key, or with a service that does not answer, an `Unconnected`."""
    with contextlib.ExitStack() as stack:
        try:
            backend = stack.enter_context(connect(adopt=adopt, adopt_from=adopt_from))
        except (ConfigurationError, ServiceError) as err:
            backend = Unconnected(str(err))
        yield backend


@contextlib.contextmanager
def connect(
    engine_dir: Path | None = None,
    env: Mapping[str, str] = os.environ,
    *,
    adopt: str | None = None,
    adopt_from: Path | str | None = None,
) -> Iterator[Backend]:
    """Connect to the service that the environment names, and close on leaving.

    `engine_dir` holds the embedded engine's state (None: a temporary folder, for checks that keep nothing). Each run
    has its own; `adopt` names a `tinker://` checkpoint that is looked for in the engines of the run folders in
    `adopt_from` and copied here, as a hosted service would find it without copying. Raises
    `ConfigurationError` without a usable key, `ServiceUnavailableError` or `AuthenticationError` within
    `CONNECT_LIMIT_S` seconds when the service does not answer or refuses.
    """
    # A usage report that the SDK cannot deliver is told with a traceback, which would bury what matters; a request that
    # failed is raised anyway, and without what the service may have quoted of it.
    for name in ("tinker.lib.telemetry", "tinker.lib.retry_handler"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    backend = _open(engine_dir, env, adopt, adopt_from)
    status = "errored"
    try:
        backend.models()
        if backend.kind != "embedded":
            backend.check_key()
        yield backend
        status = "success"
    except (KeyboardInterrupt, asyncio.CancelledError):
        status = "interrupted"
        raise
    finally:
        backend.close(status)


def _open(engine_dir: Path | None, env: Mapping[str, str], adopt: str | None, adopt_from: Path | str | None) -> Backend:
    if is_mock(env):
        from mock_tinker import LocalTinkerServer

        _keep_local_requests_local()
        os.environ["TINKER_TELEMETRY"] = "0"
        temp_dir = tempfile.TemporaryDirectory(prefix="tinker-engine-") if engine_dir is None else None
        state_dir = Path(temp_dir.name) if temp_dir else engine_dir
        assert state_dir is not None
        if adopt is not None and adopt_from is not None:
            _adopt(adopt, Path(adopt_from), state_dir)
        server = LocalTinkerServer(state_dir)
        return Backend("embedded", server.start(), EMBEDDED_KEY, _server=server, _temp_dir=temp_dir)
    key = env.get("TINKER_API_KEY", "").strip()
    if not key:
        raise ConfigurationError(
            "TINKER_API_KEY is not set. Set it to use the hosted service, or set TINKER_MOCK=1 to train on the local "
            "engine without a key."
        )
    if not key.startswith(("tml-", "eyJ")):
        raise ConfigurationError("TINKER_API_KEY does not look like a Tinker key: it must start with 'tml-'.")
    url = env.get("TINKER_BASE_URL", "").strip().rstrip("/")
    if url:
        _check_address(url)
    return Backend("server" if url else "hosted", url or HOSTED_URL, key)


def _check_address(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        complete = False
    if not complete:
        raise ConfigurationError(f"TINKER_BASE_URL is {url!r}; expected an address such as http://127.0.0.1:8000")
    if parts.hostname in ("127.0.0.1", "localhost", "::1"):
        _keep_local_requests_local()


def _keep_local_requests_local() -> None:
    # A proxy set for the outside world would swallow requests to this machine without a message.
    for name in ("NO_PROXY", "no_proxy"):
        listed = os.environ.get(name, "")
        if "127.0.0.1" not in listed:
            os.environ[name] = ",".join(filter(None, [listed, "127.0.0.1", "localhost"]))


def _adopt(path: str, runs_dir: Path, state_dir: Path) -> None:
    """Copy the checkpoint at `path` from whichever run's engine has it; when none has, the engine will say so."""
    from adapter_store import AdapterStore

    for engine in sorted(runs_dir.glob("*/engine")):
        if engine.resolve() == state_dir.resolve():
            continue
        with contextlib.suppress(CheckpointError):
            AdapterStore(state_dir).adopt(AdapterStore(engine).find(path))
            return


def get_tokenizer(model: str, backend: Backend) -> Any:
    """The only source of tokenizers, for training, dry runs and prediction alike.

    In this order: a local folder; the connected engine's own files, so that a stand-in is never fed another model's
    tokens; the tokenizer cache or hub. Returns a `transformers` tokenizer; raises `ConfigurationError`.
    """
    return backend.get_tokenizer(model)


def _unpack_tokenizer(files: Mapping[str, str]) -> Path:
    """Write tokenizer files (name to text) into the cache folder, once per content, and return their folder."""
    digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:24]
    import base_models

    folder = base_models.cache_dir() / "tokenizers" / digest
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temp:
            unpacked = Path(temp) / "files"
            unpacked.mkdir()
            for name, text in files.items():
                (unpacked / Path(name).name).write_text(text, encoding="utf-8")
            # Another process may have put the same content there meanwhile; then ours is not needed.
            with contextlib.suppress(OSError):
                unpacked.rename(folder)
    return folder


def _load_tokenizer(folder: Path) -> Any:
    import base_models

    return base_models.load_tokenizer(folder)


def _may_pass(err: Exception) -> bool:
    """Whether a request that failed like this may succeed a moment later."""
    import requests

    return isinstance(err, requests.ConnectionError | requests.Timeout | requests.exceptions.ChunkedEncodingError)


def _detail(response: Any) -> str:
    try:
        said = str(response.json().get("detail", response.text))
    except (ValueError, AttributeError):
        said = response.text
    return redact(said)[:LONGEST_QUOTE]


async def forward_backward_async(
    client: tinker.TrainingClient, data: Sequence[tinker.Datum], loss_fn: Any = "cross_entropy"
) -> Awaitable[tinker.ForwardBackwardOutput]:
    """Submit a gradient computation over `data`; await the returned future (through `wait_for`) for its output."""
    return client.forward_backward(list(data), loss_fn)


async def optim_step_async(
    client: tinker.TrainingClient, learning_rate: float, **adam: float
) -> Awaitable[tinker.OptimStepResponse]:
    """Submit one Adam step with the gradients accumulated so far; never repeated by us, whatever happens to it."""
    import tinker

    return client.optim_step(tinker.AdamParams(learning_rate=learning_rate, **adam))


def trained_nll(data: Sequence[tinker.Datum], outputs: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(summed negative log-likelihood in nats, summed weights) of a forward pass's weighted tokens.

    `outputs` are its `loss_fn_outputs`, one per datum. Taken from the returned logprobs and the weights sent, not from
    the service's metrics, which some servers leave empty.
    """
    total = weight_sum = 0.0
    for datum, result in zip(data, outputs, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        logprobs = result["logprobs"].to_numpy()
        total -= float((weights * logprobs).sum())
        weight_sum += float(weights.sum())
    return total, weight_sum


async def group_losses(
    client: tinker.TrainingClient,
    groups: Mapping[str, Sequence[tinker.Datum]],
    *,
    chunk: int = 64,
    watch: Watch | None = None,
) -> dict[str, float]:
    """Negative log-likelihood per weighted token (nats) of each group of `groups` under the client's weights.

    `chunk` groups go into one forward pass. Every group needs a weighted token.
    """
    losses: dict[str, float] = {}
    names = list(groups)
    for start in range(0, len(names), chunk):
        part = names[start : start + chunk]
        data = [datum for name in part for datum in groups[name]]
        output = await wait_for(client.forward(data, "cross_entropy"), "the losses of the chosen rows", watch=watch)
        outputs = iter(output.loss_fn_outputs)
        for name in part:
            nll, weight = trained_nll(groups[name], [next(outputs) for _ in groups[name]])
            losses[name] = nll / weight
    return losses
