"""The local engine over long use: what it lets go, many clients at once, sudden death, no network, other devices."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
import tinker
import torch
from no_network import LOG_VARIABLE
from tinker import types

import engine_sessions
import local_engine
import mock_tinker
import request_queue
import torch_device
from adapter_store import AdapterSpec, AdapterStore, CheckpointInfo
from benchmarks import engine_soak
from durable_files import StorageError
from error_handling import ConfigurationError
from mock_tinker import LocalTinkerServer
from request_queue import Reply, RequestQueue

KEY = "tml-local-test"
STEP = types.AdamParams(learning_rate=2e-3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalTinkerServer]:
    with LocalTinkerServer(tmp_path / "state", threads=1) as running:
        yield running


class Visitor:
    """A client without the SDK: it opens a session, works in it, and need not say good-bye."""

    def __init__(self, server: LocalTinkerServer, model: str) -> None:
        self.url = f"{server.base_url}/api/v1"
        self.http = requests.Session()
        self.http.trust_env = False
        self.model = model
        self.session_id = self.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})[
            "session_id"
        ]
        self.model_id = ""

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(f"{self.url}/{path}", json=body, timeout=60)
        assert answer.status_code in (200, 204), (path, answer.status_code, answer.text)
        return answer.json() if answer.content else {}

    def finished(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request_id = self.post(path, body)["request_id"]
        answer = self.http.post(f"{self.url}/retrieve_future", json={"request_id": request_id}, timeout=60)
        while answer.status_code == 408:
            answer = self.http.post(f"{self.url}/retrieve_future", json={"request_id": request_id}, timeout=60)
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "application/x-protobuf":
            return {}
        assert "error" not in answer.json(), answer.text
        return answer.json()

    def create_model(self, number: int = 0) -> None:
        body = {"session_id": self.session_id, "model_seq_id": number, "base_model": self.model}
        self.model_id = self.finished("create_model", {**body, "lora_config": {"rank": 4, "seed": 1}})["model_id"]

    def work(self) -> list[str]:
        """A model, a step, a named and a nameless sampler, both sampled from; the samplers' ids."""
        self.create_model()
        model = {"model_id": self.model_id}
        self.finished("optim_step", {**model, "seq_id": 1, "adam_params": {"learning_rate": 1e-3}})
        path = self.finished("save_weights_for_sampler", {**model, "seq_id": 2, "path": "named"})["path"]
        made = self.finished("save_weights_for_sampler", {**model, "seq_id": 3, "sampling_session_seq_id": 0})
        body = {"session_id": self.session_id, "sampling_session_seq_id": 1, "model_path": path}
        samplers = [made["sampling_session_id"], self.post("create_sampling_session", body)["sampling_session_id"]]
        for sampler in samplers:
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
            body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt}
            self.finished("asample", {**body, "sampling_params": {"max_tokens": 1}})
        return samplers


def held(server: LocalTinkerServer) -> dict[str, int]:
    """How much the engine holds of each kind."""
    engine = server.engine
    (model,) = engine.models.loaded.values()
    return {
        "sessions": len(engine.book.sessions),
        "runs": len(engine.runs),
        "samplers": len(engine.book.samplers),
        "streams": len(engine.queue._streams),
        "adapters": len(model._adapters),
        "sampled adapters": len(model._samplers),
        "nameless checkpoints": len(list((engine.store.root / "ephemeral").glob("*"))),
    }


def soon(condition: Callable[[], bool]) -> bool:
    """Whether `condition` becomes true within a time that no working engine needs."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_sessions_that_come_and_go_leave_nothing_behind(server: LocalTinkerServer, base_model_name: str) -> None:
    resident = Visitor(server, base_model_name)
    resident.work()
    before = held(server)
    for _ in range(4):
        visitor = Visitor(server, base_model_name)
        visitor.work()
        visitor.post(f"sessions/{visitor.session_id}/finish", {})
    assert soon(lambda: held(server) == before), (held(server), before)


def test_a_session_whose_client_vanished_is_let_go(server: LocalTinkerServer, base_model_name: str) -> None:
    gone, alive = Visitor(server, base_model_name), Visitor(server, base_model_name)
    samplers = gone.work()
    alive.create_model()
    alive.post("optim_step", {"model_id": alive.model_id, "seq_id": 9, "adam_params": {}})
    sessions = server.engine.book.sessions
    for session in sessions.values():
        session.last_seen -= engine_sessions.SESSION_IDLE_S + 1
    # Its client sends no heartbeat, but it asks for something.
    alive.post("optim_step", {"model_id": alive.model_id, "seq_id": 8, "adam_params": {}})
    server.engine.tidy_now()
    assert list(sessions) == [alive.session_id]
    assert soon(lambda: held(server)["adapters"] == 1), held(server)
    assert held(server) == {
        "sessions": 1,
        "runs": 1,
        "samplers": 0,
        "streams": 1,
        "adapters": 1,
        "sampled adapters": 0,
        "nameless checkpoints": 0,
    }
    assert gone.model_id not in server.engine.runs
    answer = requests.get(f"{gone.url}/samplers/{samplers[0]}", timeout=30)
    assert answer.status_code == 404
    # Its checkpoints stay.
    assert [info.name for info in server.engine.store.list(gone.model_id)] == ["named"]


def test_the_engine_tidies_by_itself(tmp_path: Path, base_model_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_engine, "TIDY_S", 0.02)
    with LocalTinkerServer(tmp_path, threads=1) as server:
        visitor = Visitor(server, base_model_name)
        visitor.create_model()
        state = visitor.finished("save_weights", {"model_id": visitor.model_id, "seq_id": 1, "path": "brief"})["path"]
        folder = server.engine.store.find(state).folder
        server.engine.store.update(state, expires_at=time.time())
        server.engine.book.sessions[visitor.session_id].last_seen -= engine_sessions.SESSION_IDLE_S + 1
        assert soon(lambda: not folder.exists() and not server.engine.book.sessions and not server.engine.runs)


def test_a_session_goes_on_after_a_restart_of_the_server_unless_it_was_ended(
    tmp_path: Path, base_model_name: str
) -> None:
    with LocalTinkerServer(tmp_path, threads=1) as server:
        going, ended = Visitor(server, base_model_name), Visitor(server, base_model_name)
        ended.post(f"sessions/{ended.session_id}/finish", {"status": "success", "exit_code": 0, "type": "success"})
    with LocalTinkerServer(tmp_path, threads=1) as server:
        for visitor in (going, ended):
            visitor.url = f"{server.base_url}/api/v1"
        going.create_model(3)
        assert going.post("session_heartbeat", {"session_id": going.session_id})
        body = {"session_id": ended.session_id, "model_seq_id": 0, "base_model": base_model_name}
        answer = requests.post(f"{ended.url}/create_model", json=body, timeout=30)
        assert answer.status_code in (200, 400)
        if answer.status_code == 400:
            assert "has ended" in answer.json()["detail"]


async def test_large_replies_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "KEEP_RETRIEVED_BYTES", 10_000)
    queue = RequestQueue(lambda group, batch: None)
    queue.start()
    ids = [queue.submit("x", None, lambda: Reply(bytes(1000))) for _ in range(30)]
    for request_id in ids:
        assert await queue.wait(request_id, 10) is not None
    queue.sweep()
    assert sorted(queue._requests) == sorted(ids[-10:])
    # What nobody has retrieved yet stays.
    unasked = queue.submit("x", None, lambda: Reply(bytes(20_000)))
    asked = queue.submit("x", None, lambda: Reply(bytes(20_000)))
    assert await queue.wait(asked, 10) is not None
    queue.sweep()
    assert await queue.wait(unasked, 10) is not None
    queue.stop()


def batches(number: int) -> list[list[tinker.Datum]]:
    """Two batches of a client's own."""
    chance = random.Random(number)
    result = []
    for _ in range(2):
        batch = []
        for _ in range(3):
            tokens = [chance.randrange(100, 4000) for _ in range(chance.randint(4, 20))]
            inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
            batch.append(tinker.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        result.append(batch)
    return result


def test_four_clients_at_once_train_what_each_trains_alone(server: LocalTinkerServer, base_model_name: str) -> None:
    together = threading.Barrier(4)

    def train(number: int, *, alone: bool) -> bytes:
        service = tinker.ServiceClient(base_url=server.base_url, api_key=KEY)
        client = service.create_lora_training_client(base_model=base_model_name, rank=4 + number, seed=number).result()
        if not alone:
            together.wait(timeout=120)
        for batch in batches(number):
            futures: list[Any] = [client.forward_backward(batch, "cross_entropy"), client.optim_step(STEP)]
            for future in futures:
                future.result(timeout=120)
            # Sampling in between has the engine switch adapters.
            sampler = client.save_weights_and_get_sampling_client().result(timeout=120)
            sampler.compute_logprobs(types.ModelInput.from_ints([300, 301])).result(timeout=120)
        path = client.save_state("end").result(timeout=120).path
        weights = (server.engine.store.find(path).folder / "adapter_model.safetensors").read_bytes()
        service.close("success").result(timeout=60)
        return weights

    alone = [train(number, alone=True) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda number: train(number, alone=False), range(4)))
    assert at_once == alone
    assert len(set(alone)) == 4
    assert len(server.engine.models.loaded) == 1


def test_reading_and_changing_checkpoints_while_they_are_saved(server: LocalTinkerServer, base_model_name: str) -> None:
    owner = Visitor(server, base_model_name)
    owner.create_model()
    run = f"training_runs/{owner.model_id}"
    saved = f"{run}/checkpoints/weights/again"
    stop = threading.Event()
    seen: list[int] = []

    def save(seq: int) -> None:
        body = {"model_id": owner.model_id, "seq_id": seq, "path": "again", "overwrite": True}
        owner.finished("save_weights", body)

    save(1)
    asked: list[tuple[str, str, Any, tuple[int, ...]]] = [
        ("GET", "checkpoints", None, (200,)),
        ("GET", f"{run}/checkpoints", None, (200,)),
        ("GET", "training_runs", None, (200,)),
        ("GET", run, None, (200,)),
        ("GET", "sessions", None, (200,)),
        ("POST", f"{saved}/publish", {}, (204,)),
        ("PUT", f"{saved}/ttl", {"ttl_seconds": 3600}, (204,)),
        ("POST", "weights_info", {"tinker_path": f"tinker://{owner.model_id}/weights/again"}, (200,)),
        ("POST", "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}, (200,)),
        ("POST", "get_info", {"model_id": owner.model_id}, (200,)),
        # What another client has just deleted is not there; nothing else may be wrong.
        ("DELETE", f"{run}/checkpoints/sampler_weights/brief", None, (204, 404)),
        ("GET", "get_server_capabilities", None, (200,)),
    ]

    def ask(first: int) -> None:
        with requests.Session() as http:
            http.trust_env = False
            number = first
            while not stop.is_set():
                method, path, body, allowed = asked[number % len(asked)]
                answer = http.request(method, f"{owner.url}/{path}", json=body, timeout=60)
                assert answer.status_code in allowed, (method, path, answer.status_code, answer.text)
                seen.append(answer.status_code)
                number += 5

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, first) for first in range(4)]
        try:
            for seq in range(2, 42, 2):
                save(seq)
                brief = {"model_id": owner.model_id, "seq_id": seq + 1, "path": "brief"}
                owner.finished("save_weights_for_sampler", brief)
                server.engine.tidy_now()
        finally:
            stop.set()
        for future in asking:
            future.result()
    assert len(seen) > 40
    assert soon(lambda: held(server)["adapters"] == 1)


def info_of(name: str, **changes: Any) -> CheckpointInfo:
    spec = AdapterSpec("Qwen/Qwen3-8B", rank=8, seed=1)
    info = CheckpointInfo("5f0c:train:0", "weights", name, spec, "f" * 32, 3, 3, created=time.time())
    return replace(info, **changes)


def write(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "x").write_text(text)


def test_a_checkpoint_that_could_not_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AdapterStore(tmp_path)
    store.open()
    store.save(info_of("one"), write("old"), overwrite=False)
    rename = os.replace

    def replace_nothing_new(source: Path, target: Path) -> None:
        if Path(source).name.startswith(".tmp-"):
            raise OSError("the disk is gone")
        rename(source, target)

    monkeypatch.setattr("adapter_store.os.replace", replace_nothing_new)
    with pytest.raises(StorageError, match="the disk is gone"):
        store.save(info_of("one"), write("new"), overwrite=True)
    monkeypatch.undo()
    assert (store.find(info_of("one").path).folder / "x").read_text() == "old"
    assert [info.name for info in store.list()] == ["one"]
    store.close()


def test_a_checkpoint_saved_in_the_place_of_one_whose_life_is_over_stays(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    store.open()
    store.save(info_of("one", expires_at=time.time() - 1), lambda folder: None, overwrite=False)
    stop = threading.Event()

    def list_always() -> None:
        while not stop.is_set():
            store.list()

    with ThreadPoolExecutor(1) as pool:
        listing = pool.submit(list_always)
        try:
            for _ in range(40):
                store.save(info_of("one", expires_at=time.time() - 1), lambda folder: None, overwrite=True)
                saved = store.save(info_of("one"), lambda folder: None, overwrite=True)
                assert store.find(saved.info.path).info == saved.info
        finally:
            stop.set()
        listing.result()
    assert [info.name for info in store.list()] == ["one"]
    store.close()


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Processes that have imported everything, from which no connection leaves the machine."""
    os.environ[LOG_VARIABLE] = str(tmp_path_factory.mktemp("network") / "tried.txt")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["no_network", *engine_soak.PRELOADED])
    return context


def offline(state: Path, pipe: Any) -> None:
    """Serve, train and sample in this process; then try what must not work."""
    with LocalTinkerServer(state, threads=1) as server:
        losses, tokens = engine_soak.train_and_sample(server.base_url)
    log = Path(os.environ[LOG_VARIABLE])
    tried = log.read_text(encoding="utf-8") if log.exists() else ""
    guarded = "no_network" in sys.modules and "HF_HUB_OFFLINE" not in os.environ
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    except OSError as error:
        pipe.send((guarded, losses, tokens, tried, str(error)))


def test_nothing_is_asked_of_the_network(forked: Any, tmp_path: Path) -> None:
    ours, theirs = forked.Pipe(duplex=False)
    process = forked.Process(target=offline, args=(tmp_path / "state", theirs), daemon=True)
    process.start()
    theirs.close()
    guarded, losses, tokens, tried, refusal = engine_soak.receive(ours)
    process.join(timeout=60)
    assert guarded
    assert losses[-1] < losses[0]
    assert len(tokens) >= 1
    assert tried == ""
    assert "no connection leaves this machine" in refusal


def test_killed_while_it_saves_every_listed_checkpoint_loads(forked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_soak.check_kills(3, seed=1)
    assert "3 kills" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused_before_serving(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    assert mock_tinker.main(["--device", device, "--port", "0", "--state-dir", str(state)]) == 2
    told = capsys.readouterr()
    assert f"the device {device!r} cannot be used" in told.err
    assert "auto, cpu" in told.err
    assert told.out == ""
    assert not state.exists()


def test_the_device_can_be_left_to_torch_or_to_the_environment(
    tmp_path: Path, base_model_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalTinkerServer(tmp_path, threads=1, device="auto") as server:
        Visitor(server, base_model_name).work()
        (model,) = server.engine.models.loaded.values()
        assert model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setenv(torch_device.DEVICE_VARIABLE, "nonsense")
    with pytest.raises(ConfigurationError, match="'nonsense' cannot be used"):
        LocalTinkerServer(tmp_path)
    assert torch_device.choose_device("cpu") == "cpu"


def test_the_engine_computes_on_the_cores_that_its_process_may_use(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    assert local_engine.LocalEngine(tmp_path).models.threads == len(cores)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(cores)})
        try:
            assert local_engine.LocalEngine(tmp_path).models.threads == 1
        finally:
            os.sched_setaffinity(0, cores)
