"""The fault plan: what it accepts, what it does to real HTTP calls, and that the SDK loses nothing under it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import tinker
from tinker import types

from adapter_store import KINDS
from error_handling import ConfigurationError
from fault_injection import PlanSource
from fault_plan import EVENTS_KEPT, QUEUED_CALLS, ExpireFault, FaultPlan, StatusFault, parse_plan, read_plan
from local_engine import SAVE_CALLS
from mock_tinker import LocalTinkerServer, main

KEY = "tml-local-test"
STEP = types.AdamParams(learning_rate=2e-3)
STEPS = 3
ENDPOINT = "/api/v1/faults"
Training = tuple[str, list[tinker.Datum]]
CALLS = ("optim_step", "forward_backward", "healthz", "save_weights", "client/config")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTinkerServer]:
    """A server whose faults can be changed while it runs."""
    with LocalTinkerServer(tmp_path_factory.mktemp("faulty"), threads=1, allow_faults=True) as server:
        yield server


@pytest.fixture(scope="module")
def faulty_client(faulty: LocalTinkerServer) -> Iterator[Any]:
    client = tinker.ServiceClient(base_url=faulty.base_url, api_key=KEY)
    yield client
    put(faulty)
    client.close("success").result(timeout=10)


@pytest.fixture(scope="module")
def training(base_model_name: str, small_tokenizer: Any) -> Training:
    """What is trained: the base model's name, and a batch."""
    texts = ["What is a cat? an animal", "What is red? a colour", "Where is the bread? on the table"]
    found = []
    for text in texts:
        tokens = small_tokenizer.encode(text)
        loss_inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        found.append(tinker.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=loss_inputs))
    return base_model_name, found


def put(server: LocalTinkerServer, *faults: dict[str, Any]) -> None:
    answer = requests.put(server.base_url + ENDPOINT, json={"faults": list(faults)}, timeout=30)
    assert answer.status_code == 200, answer.text


def report(server: LocalTinkerServer) -> dict[str, Any]:
    return requests.get(server.base_url + ENDPOINT, timeout=30).json()


def new_client(service_client: Any, model: str) -> Any:
    return service_client.create_lora_training_client(base_model=model, rank=8, seed=1).result(timeout=60)


def train(service_client: Any, model: str, data: list[tinker.Datum]) -> Any:
    client = new_client(service_client, model)
    futures = [(client.forward_backward(data, "cross_entropy"), client.optim_step(STEP)) for _ in range(STEPS)]
    for pair in futures:
        for future in pair:
            future.result(timeout=60)
    return client


def outcome(server: LocalTinkerServer, client: Any) -> tuple[bytes, int, int]:
    """What the client's adapter file holds once saved, the optimizer steps taken, and how many states were saved."""
    path = client.save_state("state").result(timeout=60).path
    adapter = server.engine.store.find(path).folder / "adapter_model.safetensors"
    info = requests.post(f"{server.base_url}/api/v1/get_info", json={"model_id": client.model_id}, timeout=30).json()
    return adapter.read_bytes(), info["step"], len(server.engine.store.list(client.model_id))


@pytest.fixture(scope="module")
def undisturbed(faulty: LocalTinkerServer, faulty_client: Any, training: Training) -> tuple[bytes, int, int]:
    put(faulty)
    found = outcome(faulty, train(faulty_client, *training))
    assert found[1:] == (STEPS, 1)
    return found


# The SDK waits as long as Retry-After says, half a second and more without it, a second before it repeats a save.
SOON = 0.02
DISTURBED: dict[str, list[dict[str, Any]]] = {
    "too_many_requests": [
        {"call": "optim_step", "kind": "status", "status": 429, "retry_after": SOON, "after": 1, "times": 3}
    ],
    "bursts": [
        {"call": "forward_backward", "kind": "status", "status": status, "retry_after": SOON, "times": 2}
        for status in (500, 503, 408)
    ]
    + [
        {"call": "retrieve_future", "kind": "status", "status": status, "after": 1, "times": 2}
        for status in (500, 503, 408)
    ],
    "dropped_before": [
        {"call": "optim_step", "kind": "drop"},
        {"call": "save_weights", "kind": "drop"},
        {"call": "retrieve_future", "kind": "status", "status": 429, "after": 1},
    ],
    "dropped_after": [
        {"call": "optim_step", "kind": "drop", "when": "after"},
        {"call": "forward_backward", "kind": "drop", "when": "after", "after": 1},
        {"call": "save_weights", "kind": "drop", "when": "after"},
        {"call": "retrieve_future", "kind": "drop", "when": "after", "after": 2},
    ],
    "delayed": [
        {"call": "forward_backward", "kind": "delay", "seconds": 0.05, "times": 2},
        {"call": "optim_step", "kind": "delay", "seconds": 0.05, "when": "after", "times": 2},
        {"call": "retrieve_future", "kind": "delay", "seconds": 0.05, "when": "after", "times": 2},
    ],
    "refused_though_carried_out": [
        {"call": call, "kind": "status", "status": 503, "retry_after": SOON, "when": "after", "times": 2}
        for call in ("create_model", "forward_backward", "optim_step")
    ],
}


@pytest.fixture
def disturbed(request: pytest.FixtureRequest, faulty: LocalTinkerServer, undisturbed: Any) -> list[dict[str, Any]]:
    """The faults of this name, in force once it is known what comes out without them."""
    put(faulty, *DISTURBED[request.param])
    return DISTURBED[request.param]


@pytest.mark.parametrize("disturbed", DISTURBED, indirect=True)
def test_no_step_is_lost_or_taken_twice(
    disturbed: Any, faulty: LocalTinkerServer, faulty_client: Any, training: Training, undisturbed: Any
) -> None:
    client = train(faulty_client, *training)
    assert outcome(faulty, client) == undisturbed
    told = report(faulty)
    assert [fault["triggered"] for fault in told["faults"]] == [fault.get("times", 1) for fault in disturbed]
    assert len(told["events"]) == sum(fault["triggered"] for fault in told["faults"])


def test_chunks_of_one_batch_keep_their_order_when_some_are_lost(
    faulty: LocalTinkerServer,
    faulty_client: Any,
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = faulty_client.holder.get_client_config()
    monkeypatch.setattr(faulty_client.holder, "_client_config", config.model_copy(update={"fwdbwd_max_chunk_len": 1}))
    put(faulty)
    expected = outcome(faulty, train(faulty_client, *training))
    put(
        faulty,
        {"call": "forward_backward", "kind": "drop", "after": 1},
        {"call": "forward_backward", "kind": "drop", "when": "after", "after": 4},
    )
    assert outcome(faulty, train(faulty_client, *training)) == expected
    assert [fault["triggered"] for fault in report(faulty)["faults"]] == [1, 1]


def test_a_failed_step_is_told_and_can_be_taken_again(
    faulty: LocalTinkerServer, faulty_client: Any, training: Training, undisturbed: Any
) -> None:
    # Every optimizer step is sent twice and counts once.
    put(
        faulty,
        {"call": "optim_step", "kind": "status", "status": 503, "retry_after": SOON, "when": "after", "times": 2},
        {"call": "optim_step", "kind": "fail", "after": 1},
        {"call": "forward_backward", "kind": "fail", "after": 2, "category": "user", "message": "not today"},
    )
    model, data = training
    client = new_client(faulty_client, model)
    client.forward_backward(data, "cross_entropy").result(timeout=60)
    client.optim_step(STEP).result(timeout=60)
    client.forward_backward(data, "cross_entropy").result(timeout=60)
    with pytest.raises(tinker.RequestFailedError, match="the fault plan lets this optim_step fail") as failed:
        client.optim_step(STEP).result(timeout=60)
    assert failed.value.category == types.RequestErrorCategory.Server
    client.optim_step(STEP).result(timeout=60)
    with pytest.raises(tinker.RequestFailedError, match="not today") as failed:
        client.forward_backward(data, "cross_entropy").result(timeout=60)
    assert failed.value.category == types.RequestErrorCategory.User
    client.forward_backward(data, "cross_entropy").result(timeout=60)
    client.optim_step(STEP).result(timeout=60)
    assert outcome(faulty, client) == undisturbed
    assert [(fault["seen"], fault["triggered"]) for fault in report(faulty)["faults"][1:]] == [(4, 1), (4, 1)]


def test_saves_loads_and_samples_can_fail(
    faulty: LocalTinkerServer, faulty_client: Any, base_model_name: str, small_tokenizer: Any
) -> None:
    put(faulty, *({"call": call, "kind": "fail"} for call in ("save_weights", "load_weights", "asample")))
    client = new_client(faulty_client, base_model_name)
    with pytest.raises(tinker.RequestFailedError, match="save_weights fail"):
        client.save_state("first").result(timeout=60)
    assert faulty.engine.store.list(client.model_id) == []
    path = client.save_state("first").result(timeout=60).path
    with pytest.raises(tinker.RequestFailedError, match="load_weights fail"):
        faulty_client.create_training_client_from_state(path).result(timeout=60)
    sampler = faulty_client.create_sampling_client(base_model=base_model_name).result(timeout=60)
    prompt = types.ModelInput.from_ints(small_tokenizer.encode("What is"))
    greedy = types.SamplingParams(max_tokens=2, temperature=0.0)
    with pytest.raises(tinker.RequestFailedError, match="asample fail"):
        sampler.sample(prompt, 1, greedy).result(timeout=60)
    assert len(sampler.sample(prompt, 1, greedy).result(timeout=60).sequences) == 1


def test_the_lost_answer_of_a_sample_and_of_a_nameless_sampler_costs_nothing(
    faulty: LocalTinkerServer, faulty_client: Any, base_model_name: str, small_tokenizer: Any
) -> None:
    put(
        faulty,
        {"call": "save_weights_for_sampler", "kind": "drop", "when": "after"},
        {"call": "asample", "kind": "drop", "when": "after"},
    )
    before = len(list(faulty.engine.store.root.glob("ephemeral/*")))
    sampler = new_client(faulty_client, base_model_name).save_weights_and_get_sampling_client().result(timeout=60)
    prompt = types.ModelInput.from_ints(small_tokenizer.encode("What is"))
    answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2, temperature=0.0)).result(timeout=60)
    assert len(answer.sequences) == 1
    assert len(list(faulty.engine.store.root.glob("ephemeral/*"))) == before + 1
    assert [fault["triggered"] for fault in report(faulty)["faults"]] == [1, 1]


def test_an_expired_checkpoint_is_not_loaded_and_says_why(
    faulty: LocalTinkerServer, faulty_client: Any, base_model_name: str
) -> None:
    put(faulty)
    client = new_client(faulty_client, base_model_name)
    old, new = (client.save_state(name).result(timeout=60).path for name in ("old", "new"))
    sampled = client.save_weights_for_sampler("sampled").result(timeout=60).path
    put(
        faulty,
        {"call": "load_weights", "kind": "expire", "newest": "weights"},
        {"call": "create_sampling_session", "kind": "expire", "path": sampled},
        {"call": "create_sampling_session", "kind": "expire", "path": "tinker://nobody/weights/nothing"},
    )
    with pytest.raises(tinker.RequestFailedError, match=f"the checkpoint {new} has expired"):
        faulty_client.create_training_client_from_state_with_optimizer(new).result(timeout=60)
    again = faulty_client.create_training_client_from_state_with_optimizer(old).result(timeout=60)
    assert again.save_state("again").result(timeout=60).path.endswith("/weights/again")
    with pytest.raises(tinker.NotFoundError, match=f"the checkpoint {sampled} has expired"):
        faulty_client.create_sampling_client(model_path=sampled).result(timeout=60)
    events = report(faulty)["events"]
    assert f"expired {new}" in events
    assert f"expired {sampled}" in events
    assert any("no checkpoint expired: there is no checkpoint tinker://nobody" in event for event in events)


def get(server: LocalTinkerServer, path: str) -> tuple[int, str | None, Any]:
    """Status, Retry-After and body of one GET over a connection of its own, with no client that would repeat it."""
    connection = http.client.HTTPConnection(server.base_url.removeprefix("http://"), timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Retry-After"], json.loads(answer.read())
    finally:
        connection.close()


def test_what_a_client_sees_of_each_kind(faulty: LocalTinkerServer) -> None:
    put(
        faulty,
        {"call": "healthz", "kind": "status", "status": 418, "message": "a teapot"},
        {"call": "healthz", "kind": "status", "status": 429, "retry_after": 7},
        {"call": "healthz", "kind": "drop"},
        {"call": "healthz", "kind": "delay", "seconds": 0.3, "after": 3},
    )
    assert get(faulty, "/api/v1/healthz") == (418, None, {"detail": "a teapot"})
    expected = {"detail": "the fault plan answers healthz with 429"}
    assert get(faulty, "/api/v1/healthz") == (429, "7", expected)
    with pytest.raises(http.client.RemoteDisconnected):
        get(faulty, "/api/v1/healthz")
    started = time.monotonic()
    assert get(faulty, "/api/v1/healthz")[0] == 200
    assert time.monotonic() - started >= 0.3
    assert get(faulty, "/api/v1/healthz")[0] == 200
    told = report(faulty)
    assert [(fault["seen"], fault["triggered"]) for fault in told["faults"]] == [(5, 1)] * 4
    assert told["events"] == [
        "fault 0: healthz number 1: answered 418",
        "fault 1: healthz number 2: answered 429",
        "fault 2: healthz number 3: connection dropped before it was carried out",
        "fault 3: healthz number 4: delayed by 0.3 s before it was carried out",
    ]


def test_a_fault_of_every_call_spares_the_endpoint_and_what_is_no_call(faulty: LocalTinkerServer) -> None:
    put(faulty, {"call": "*", "kind": "status", "status": 503, "times": None})
    assert get(faulty, "/api/v1/healthz")[0] == 503
    assert get(faulty, "/api/v1/training_runs/someone/checkpoints")[0] == 503
    assert get(faulty, "/api/v1/nothing")[0] == 404
    assert requests.delete(faulty.base_url + ENDPOINT, timeout=30).status_code == 204
    assert get(faulty, "/api/v1/healthz")[0] == 200
    assert report(faulty) == {"faults": [], "events": []}


def test_the_names_in_the_plan_s_rules_are_the_engine_s(faulty: LocalTinkerServer) -> None:
    assert faulty.faults is not None
    assert set(QUEUED_CALLS) < faulty.faults.calls
    assert set(SAVE_CALLS.values()) < set(QUEUED_CALLS)
    for kind in KINDS:
        (fault,) = parse_plan({"faults": [{"call": "*", "kind": "expire", "newest": kind}]}, CALLS)
        assert isinstance(fault, ExpireFault)


def test_a_wrong_plan_is_refused_and_the_one_in_force_stays(faulty: LocalTinkerServer) -> None:
    put(faulty, {"call": "get_info", "kind": "drop"})
    url = faulty.base_url + ENDPOINT
    for body, message in (
        ('{"faults": [{"call": "get_info", "kind": "crash"}]}', "faults[0].kind: must be one of status, drop"),
        ("[]", "must be an object"),
        ("{", "is not JSON"),
    ):
        answer = requests.put(url, data=body, timeout=30)
        assert answer.status_code == 400
        assert message in answer.json()["detail"]
    assert [fault["call"] for fault in report(faulty)["faults"]] == ["get_info"]


def test_a_server_that_was_not_asked_for_faults_has_none(engine: Any) -> None:
    assert engine.faults is None
    assert requests.get(engine.base_url + ENDPOINT, timeout=30).status_code == 404
    assert requests.put(engine.base_url + ENDPOINT, json={"faults": []}, timeout=30).status_code == 404


def test_a_plan_given_at_start_is_in_force_and_cannot_be_changed_unless_asked_for(tmp_path: Path) -> None:
    faults: PlanSource = [{"call": "healthz", "kind": "status", "status": 500}]
    with LocalTinkerServer(tmp_path / "state", api_key=KEY, fault_plan=faults) as server:
        assert get(server, "/api/v1/healthz")[0] == 500
        assert get(server, "/api/v1/healthz")[0] == 200
        headers = {"X-API-Key": KEY}
        assert requests.get(server.base_url + ENDPOINT, headers=headers, timeout=30).status_code == 404
        assert server.faults is not None
        assert server.faults.report()["faults"][0]["triggered"] == 1
    with LocalTinkerServer(tmp_path / "state", api_key=KEY, allow_faults=True) as server:
        assert requests.get(server.base_url + ENDPOINT, timeout=30).status_code == 401
        assert requests.get(server.base_url + ENDPOINT, headers=headers, timeout=30).json()["faults"] == []


def test_a_server_stops_though_a_call_is_delayed(tmp_path: Path) -> None:
    faults: PlanSource = [{"call": "healthz", "kind": "delay", "seconds": 600}]
    with LocalTinkerServer(tmp_path, fault_plan=faults) as server:
        statuses: list[int] = []
        waiting = threading.Thread(target=lambda: statuses.append(get(server, "/api/v1/healthz")[0]))
        waiting.start()
        while not server.faults.report()["events"]:  # type: ignore[union-attr]
            time.sleep(0.01)
        assert get(server, "/api/v1/healthz")[0] == 200
    waiting.join(timeout=60)
    assert statuses == [200]


def test_the_command_line_takes_a_plan_and_opens_the_endpoint(tmp_path: Path) -> None:
    plan = tmp_path / "faults.json"
    plan.write_text('{"faults": [{"call": "healthz", "kind": "drop"}]}', encoding="utf-8")
    command = [sys.executable, "mock_tinker.py", "--port", "0", "--state-dir", str(tmp_path / "state")]
    root = Path(__file__).resolve().parent.parent
    process = subprocess.Popen(
        [*command, "--fault-plan", str(plan), "--allow-faults"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split("ready at ")[1].split(",")[0]
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{url}/api/v1/healthz", timeout=30)
        assert requests.get(url + ENDPOINT, timeout=30).json()["faults"][0]["triggered"] == 1
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "fault 0: healthz number 1: connection dropped before it was carried out" in log


def test_the_command_line_refuses_a_wrong_plan_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "faults.json"
    plan.write_text('{"faults": [\n  {"call": "optim_stp", "kind": "drop"}\n]}', encoding="utf-8")
    assert main(["--port", "0", "--state-dir", str(tmp_path / "state"), "--fault-plan", str(plan)]) == 2
    told = capsys.readouterr().err
    assert f'{plan}:2: faults[0].call: there is no call "optim_stp"; did you mean optim_step?' in told
    assert not (tmp_path / "state").exists()


STATUS = {"call": "optim_step", "kind": "status", "status": 500}
WRONG = [
    (STATUS | {"tims": 2}, "faults[0].tims: unknown key; did you mean faults[0].times?"),
    (STATUS | {"times": 0}, "faults[0].times: must be at least 1, got 0"),
    (STATUS | {"after": -1}, "faults[0].after: must be at least 0, got -1"),
    (STATUS | {"after": 1.5}, "faults[0].after: must be a whole number"),
    (STATUS | {"status": 200}, "faults[0].status: must be at least 400, got 200"),
    (STATUS | {"retry_after": -1}, "faults[0].retry_after: must be at least 0"),
    (STATUS | {"when": "during"}, "faults[0].when: must be one of 'before' or 'after', got \"during\""),
    ({"call": "optim_step", "kind": "status"}, "faults[0].status: is required"),
    ({"call": "optim_step", "kind": "delay", "seconds": 0}, "faults[0].seconds: must be above 0"),
    ({"call": "optim_step", "kind": "delay", "seconds": float("nan")}, "faults[0].seconds: must be a finite number"),
    ({"kind": "drop"}, "faults[0].call: is required"),
    ({"call": "optim_step"}, "faults[0].kind: must be one of status, drop, delay, expire, fail, and is not given"),
    ({"call": "optim_step", "kind": ["drop"]}, "faults[0].kind: must be one of status, drop, delay, expire, fail"),
    ({"call": "zzz", "kind": "drop"}, 'there is no call "zzz"; known are *, client/config, forward_backward'),
    ({"call": "healthz", "kind": "fail"}, "healthz is answered at once, so no request of it fails later"),
    ({"call": "optim_step", "kind": "fail", "category": "weather"}, "faults[0].category: must be one of 'server'"),
    ({"call": "*", "kind": "expire"}, "faults[0]: give either path"),
    ({"call": "*", "kind": "expire", "path": "weights/1"}, "faults[0].path: must start with tinker://"),
    ("drop", "faults[0]: must be an object"),
]


@pytest.mark.parametrize(("fault", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_fault_is_named(fault: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_plan({"faults": [fault]}, CALLS)
    assert message in str(caught.value)


def test_all_that_is_wrong_in_a_file_is_told_at_once_with_its_lines(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(
        '{"faults": [\n'
        '  {"call": "optim_step", "kind": "drop", "kind": "drop"},\n'
        '  {"call": "optim_step",\n'
        '   "kind": "status", "status": 42}\n'
        '], "note": 1}',
        encoding="utf-8",
    )
    with pytest.raises(ConfigurationError) as caught:
        read_plan(plan, CALLS)
    assert str(caught.value).splitlines() == [
        f"{plan}:2: faults[0].kind: written twice, first on line 2; keep one",
        f"{plan}:5: note: unknown key; a plan has one: faults",
        f"{plan}:4: faults[1].status: must be at least 400, got 42",
    ]
    for text in ("{}", '{"faults": {}}'):
        plan.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigurationError, match="faults: must be a list of faults"):
            read_plan(plan, CALLS)


def answers(plan: FaultPlan, calls: int) -> list[Any]:
    found = []
    for _ in range(calls):
        due = plan.due("optim_step")
        fault = due.answer if due else None
        found.append(fault.status if isinstance(fault, StatusFault) else fault and "drop")
    return found


def test_faults_count_for_themselves_and_wait_for_their_turn() -> None:
    plan = FaultPlan(CALLS)
    faults = [STATUS | {"after": 2, "times": 2}, {"call": "*", "kind": "drop", "after": 1, "times": 2}]
    plan.put(parse_plan({"faults": faults}, CALLS))
    # The drop is due from the second call on; the third and fourth are taken by the fault listed first.
    assert answers(plan, 7) == [None, "drop", 500, 500, "drop", None, None]
    assert plan.due("healthz") is None
    plan.put(parse_plan({"faults": faults}, CALLS))
    assert answers(plan, 7) == [None, "drop", 500, 500, "drop", None, None]


def test_delays_add_up_beside_an_answer() -> None:
    plan = FaultPlan(CALLS)
    delays = [{"call": "optim_step", "kind": "delay", "seconds": seconds} for seconds in (1, 2.5)]
    plan.put(parse_plan({"faults": [*delays, STATUS, delays[0] | {"when": "after"}]}, CALLS))
    due = plan.due("optim_step")
    assert due is not None
    assert (due.wait_before, due.wait_after) == (3.5, 1.0)
    assert isinstance(due.answer, StatusFault)


def test_counts_are_exact_when_many_threads_call() -> None:
    plan = FaultPlan(CALLS)
    faults = [STATUS | {"after": 100, "times": 1000}, {"call": "optim_step", "kind": "fail", "times": 700}]
    plan.put(parse_plan({"faults": faults}, CALLS))
    refused, failed = [], []

    def call() -> None:
        for _ in range(500):
            refused.append(plan.due("optim_step") is not None)
            failed.append(plan.failure("optim_step") is not None)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sum(refused), sum(failed)) == (1000, 700)
    told = plan.report()
    assert [(fault["seen"], fault["triggered"]) for fault in told["faults"]] == [(4000, 1000), (4000, 700)]
    assert len(told["events"]) == EVENTS_KEPT
