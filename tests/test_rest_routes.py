"""What the engine answers without a model: sessions, runs, checkpoints, copies and downloads, asked by the real SDK."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pyrage
import pytest
import requests
import tinker
from tinker import types

import base_models
from access_tokens import USER_URN
from mock_tinker import LocalTinkerServer
from rest_routes import ACCOUNT_FUNCTIONS

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental"),
]
KEY = "tml-local-test"
TOKENS = list(range(20, 30))
DATUM = tinker.Datum(
    model_input=types.ModelInput.from_ints(TOKENS[:-1]),
    loss_fn_inputs={
        "target_tokens": types.TensorData(data=TOKENS[1:], dtype="int64"),
        "weights": types.TensorData(data=[1.0] * 9, dtype="float32"),
    },
)


@pytest.fixture(scope="module")
def rest(engine: Any) -> Any:
    return tinker.RestClient(base_url=engine.base_url, api_key=KEY)


@pytest.fixture(scope="module")
def service(engine: Any) -> Iterator[Any]:
    """A client of its own, under a project, so that what it makes can be told from the rest."""
    with tinker.ServiceClient(
        user_metadata={"purpose": "rest"},
        project_id="project-rest",
        display_name="Rest routes",
        base_url=engine.base_url,
        api_key=KEY,
    ) as client:
        yield client


@pytest.fixture(scope="module")
def client(service: Any, base_model_name: str) -> Any:
    """A training client after one step."""
    made = service.create_lora_training_client(base_model_name, rank=2, seed=1, user_metadata={"run": "a"}).result()
    made.forward_backward([DATUM], "cross_entropy").result()
    made.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return made


def failure(future: Any) -> tuple[str, str]:
    with pytest.raises(tinker.RequestFailedError) as caught:
        future.result(timeout=60)
    return str(caught.value), str(caught.value.category)


def get(server: Any, path: str, **parameters: Any) -> requests.Response:
    return requests.get(f"{server.base_url}/api/v1/{path}", parameters, timeout=30)


def test_exported_weights_are_fetched_by_url_and_read_by_plain_peft(
    client: Any, rest: Any, tmp_path: Path, base_model_name: str
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = client.save_weights_external("for peft", ttl_seconds=7200).result().path
    assert path == f"tinker://{client.model_id}/external_weights/for peft"
    answer = rest.get_external_weights_urls(path).result()
    assert set(answer.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    assert 3000 < answer.expires.timestamp() - time.time() <= 3600
    for name, url in answer.urls.items():
        response = requests.get(url, timeout=30)
        assert response.status_code == 200
        (tmp_path / name).write_bytes(response.content)

    base = AutoModelForCausalLM.from_pretrained(base_models.STAND_IN, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS[:-1]])).logits[0]
    found = logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    expected = client.forward([DATUM], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-4)

    listed = {item.tinker_path: item for item in rest.list_checkpoints(client.model_id).result().checkpoints}[path]
    assert (listed.checkpoint_type, listed.checkpoint_id) == ("external", "external_weights/for peft")
    assert listed.expires_at is not None
    rest.delete_checkpoint(client.model_id, listed.checkpoint_id).result()
    gone = requests.get(url, timeout=30)
    assert gone.status_code == 404
    assert "there is no checkpoint" in gone.json()["detail"]


def test_an_address_opens_only_what_it_was_made_for(client: Any, rest: Any) -> None:
    first = client.save_weights_external("signed").result().path
    url = rest.get_external_weights_urls(first).result().urls["adapter_config.json"]
    assert requests.get(url, timeout=30).json()["r"] == 2
    other = url.replace("adapter_config.json", "checkpoint.json")
    outside = url.replace("adapter_config.json", quote("../../../../../engine.lock", safe=""))
    later = url.replace("expires=1", "expires=2")
    unsigned = url.partition("?")[0]
    for wrong in (other, outside, later, unsigned, url[:-3] + "xxx", url + "x"):
        response = requests.get(wrong, timeout=30)
        # With slashes in it the address leads nowhere at all.
        assert response.status_code == (404 if wrong == outside else 403), wrong
        assert response.json()["detail"]
    client.save_weights_external("signed").result()
    assert requests.get(url, timeout=30).status_code == 404, "another checkpoint has the name now"


def test_files_for_download_are_neither_sampled_nor_trained_here(client: Any, service: Any, engine: Any) -> None:
    path = client.save_weights_external("plain").result().path
    with pytest.raises(tinker.BadRequestError, match="for download only"):
        service.create_sampling_client(model_path=path).result(timeout=30)
    message, category = failure(service.create_training_client_from_state(path))
    assert "needs a path with /weights/" in message
    assert category == "user"
    client.save_state("no-export").result()
    wrong = get(engine, f"training_runs/{client.model_id}/checkpoints/weights/no-export/external_weights_urls")
    assert wrong.status_code == 400
    assert "/external_weights/" in wrong.json()["detail"]


def test_exported_weights_are_encrypted_to_the_keys_that_are_named(client: Any, rest: Any) -> None:
    owners = [pyrage.x25519.Identity.generate() for _ in range(2)]
    keys = [str(owner.to_public()) for owner in owners]
    path = client.save_weights_external("secret", age_encryption_recipients=keys).result().path
    urls = rest.get_external_weights_urls(path).result().urls
    assert set(urls) == {"adapter_config.json.age", "adapter_model.safetensors.age"}
    sealed = requests.get(urls["adapter_config.json.age"], timeout=30).content
    assert sealed.startswith(b"age-encryption.org/v1")
    for owner in owners:
        assert json.loads(pyrage.decrypt(sealed, [owner]))["r"] == 2
    stranger = pyrage.x25519.Identity.generate()
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(sealed, [stranger])
    for wrong in (["age1nonsense"], ["ssh-ed25519 AAAA"], keys * 6):
        message, category = failure(client.save_weights_external("wrong", age_encryption_recipients=wrong))
        assert "age_encryption_recipients" in message
        assert category == "user"


@pytest.mark.parametrize("kind", ["external", "training"])
def test_the_cookbook_downloads_weights(
    kind: str, client: Any, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training weights it exports itself, encrypted to a key of its own, and deletes the export."""
    from tinker_cookbook import weights

    monkeypatch.setenv("TINKER_API_KEY", KEY)
    save = client.save_weights_external if kind == "external" else client.save_state
    path = save(f"cookbook-{kind}").result().path
    weights.download(tinker_path=path, output_dir=str(tmp_path), base_url=engine.base_url)
    assert {file.name for file in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    saved = engine.engine.store.find(path).folder / "adapter_model.safetensors"
    assert (tmp_path / saved.name).read_bytes() == saved.read_bytes()
    assert "download" not in [info.name for info in engine.engine.store.list()]


def test_a_copy_is_a_checkpoint_of_its_own(client: Any, service: Any, rest: Any, engine: Any) -> None:
    state = client.save_state("original", user_metadata={"a": "b"}).result().path
    rest.publish_checkpoint_from_tinker_path(state).result()
    copied = rest.copy_weights(state, "archive", ttl_seconds=7200, weights_access_token="tml-any").result()
    run_id = copied.removeprefix("tinker://").split("/")[0]
    assert copied.endswith("/weights/original")
    assert run_id != client.model_id
    folders = [engine.engine.store.find(path).folder for path in (state, copied)]
    files = [folder / "adapter_model.safetensors" for folder in folders]
    assert os.path.samefile(*files), "the copy takes no space"
    run = rest.get_training_run(run_id).result()
    assert run.last_checkpoint is not None
    assert (run.base_model, run.lora_rank) == (client.get_info().model_data.model_name, 2)
    assert (run.last_checkpoint.public, run.last_checkpoint.user_metadata) == (False, {"a": "b"})
    assert run.last_checkpoint.expires_at is not None
    assert [r.training_run_id for r in rest.list_training_runs(project_id="archive").result().training_runs] == [run_id]

    rest.delete_checkpoint_from_tinker_path(state).result()
    restored = service.create_training_client_from_state_with_optimizer(copied).result()
    assert restored.get_info().lora_rank == 2
    sampler = client.save_weights_for_sampler("s").result().path
    second = service.copy_weights(sampler).result()
    assert "/sampler_weights/s" in second
    inside = rest.list_training_runs(project_id="project-rest").result().training_runs
    assert second.removeprefix("tinker://").split("/")[0] in [run.training_run_id for run in inside]


def test_a_copy_that_is_asked_for_twice_is_made_once(client: Any, engine: Any, service: Any) -> None:
    source = client.save_weights_for_sampler("twice").result().path
    other = client.save_weights_for_sampler("other").result().path
    url = f"{engine.base_url}/api/v1/copy_weights"

    def ask(key: str, **body: Any) -> requests.Response:
        return requests.post(url, json=body, headers={"X-Idempotency-Key": key}, timeout=30)

    key = uuid.uuid4().hex
    first = ask(key, source_path=source, destination_project_id="p")
    assert first.status_code == 200
    assert ask(key, source_path=source, destination_project_id="p").json() == first.json()
    assert ask(key + "x", source_path=source, destination_project_id="p").json() != first.json()
    taken = ask(key, source_path=other, destination_project_id="p")
    assert taken.status_code == 400
    assert "holds something else" in taken.json()["detail"]

    session_id = client.model_id.split(":")[0]
    slot = {"session_id": session_id, "model_seq_id": 77}
    assert ask("k", source_path=source, **slot).json()["tinker_path"] == (
        f"tinker://{session_id}:train:77/sampler_weights/twice"
    )
    assert ask("k", source_path=source, session_id=session_id, model_seq_id=0).status_code == 400, "it is being trained"
    assert ask("k", source_path=source, session_id="nobody", model_seq_id=0).status_code == 404
    both = {**slot, "destination_project_id": "p"}
    for body in ({}, {"session_id": session_id}, {"destination_project_id": 3}, both):
        assert ask("k", source_path=source, **body).status_code == 400, body
    assert ask("k", source_path=source + "x", destination_project_id="p").status_code == 404
    assert ask("k", source_path=3, destination_project_id="p").status_code == 400


def test_sessions_are_found_by_how_they_stand(engine: Any, rest: Any) -> None:
    ended = tinker.ServiceClient(
        base_url=engine.base_url, api_key=KEY, display_name="Ended early", user_metadata={"n": "1"}
    )
    session_id = ended.holder.get_session_id()

    def found(**request: Any) -> list[Any]:
        return rest.search_sessions(types.SessionSearchRequest(session_id=session_id, **request)).result().sessions

    active = types.session_status_query.ActiveSessionStatusQuery()
    assert found(statuses=[active])[0].status.type == "active"
    ended.close("interrupted", detail="a person stopped it").result()
    assert found(statuses=[active]) == []
    by_reason = types.session_status_query.ClientFinishedSessionStatusQuery(reasons=["interrupted"])
    session = found(statuses=[by_reason])[0]
    assert session.status.reason.type == "interrupted"
    assert session.status.detail == "a person stopped it"
    assert (session.display_name, session.user_metadata) == ("Ended early", {"n": "1"})
    assert (session.owner, session.project_id) == (USER_URN, "local")
    answer = requests.post(
        f"{engine.base_url}/api/v1/sessions/{session_id}/finish", json={"reason": {"type": "success"}}, timeout=30
    )
    assert answer.status_code == 204
    assert found()[0].status.reason.type == "interrupted", "the first word stays"


def test_the_search_pages_by_cursor_and_counts_checkpoints(client: Any, engine: Any, rest: Any) -> None:
    sessions = [
        tinker.ServiceClient(base_url=engine.base_url, api_key=KEY, display_name=f"paged {number}") for number in "abc"
    ]
    opened = [session.holder.get_session_id() for session in sessions]
    request = types.SessionSearchRequest(display_name="paged", limit=1)
    seen = []
    while True:
        page = rest.search_sessions(request).result()
        seen += [session.session_id for session in page.sessions]
        if page.next_cursor is None:
            break
        request = request.model_copy(update={"cursor": page.next_cursor})
    assert seen == opened[::-1]
    for session in sessions:
        session.close("success").result()

    client.save_state("counted").result()
    request = types.SessionSearchRequest(display_name="rest routes", user_metadata={"purpose": "rest"})
    mine = rest.search_sessions(request).result().sessions[0]
    infos = engine.engine.store.list(client.model_id)
    assert mine.checkpoints_count >= len(infos) > 0
    assert mine.checkpoint_storage_bytes >= sum(info.size_bytes for info in infos)


def test_a_session_tells_its_samplers_after_its_end_as_well(engine: Any, rest: Any, base_model_name: str) -> None:
    service = tinker.ServiceClient(base_url=engine.base_url, api_key=KEY)
    sampler = service.create_sampling_client(base_model=base_model_name).result()
    session_id = service.holder.get_session_id()
    ids = rest.get_session(session_id).result().sampler_ids
    assert rest.get_sampler(ids[0]).result().base_model == base_model_name
    assert sampler.get_base_model() == base_model_name
    service.close("success").result()
    assert rest.get_session(session_id, access_scope="accessible").result().sampler_ids == ids
    with pytest.raises(tinker.NotFoundError, match="no sampling session"):
        rest.get_sampler(ids[0]).result()


@pytest.mark.parametrize("path", ["sessions", "training_runs", "checkpoints"])
def test_lists_are_cut_in_pages(path: str, engine: Any, client: Any) -> None:
    for name in ("page-1", "page-2"):
        client.save_state(name, overwrite=True).result()
    whole = get(engine, path, limit=1000).json()
    total = len(whole[path])
    assert total >= 2 or path == "training_runs"
    assert whole["cursor"] == {"offset": 0, "limit": 1000, "total_count": total}
    assert get(engine, path, limit=0).json()[path] == []
    assert get(engine, path, limit=10**25, offset=1).json()[path] == whole[path][1:]
    assert get(engine, path, limit=1, offset=total - 1).json()[path] == whole[path][-1:]
    assert get(engine, path, limit=5, offset=10**25).json()[path] == []
    for wrong in ({"limit": -1}, {"offset": -1}, {"limit": "many"}, {"limit": "1.5"}, {"offset": "9" * 5000}):
        response = get(engine, path, **wrong)
        assert response.status_code == 400, wrong
        assert next(iter(wrong)) in response.json()["detail"]


def test_scopes_and_projects_filter(engine: Any, client: Any, rest: Any) -> None:
    for scope in ("owned", "accessible"):
        assert rest.get_training_run(client.model_id, access_scope=scope).result().training_run_id == client.model_id
    response = get(engine, f"training_runs/{client.model_id}", access_scope="everyone")
    assert response.status_code == 400
    assert "access_scope" in response.json()["detail"]
    assert get(engine, "training_runs", project_id="nobody's").json()["training_runs"] == []
    run = rest.get_training_run_by_tinker_path(f"tinker://{client.model_id}/weights/x").result()
    assert (run.training_run_id, run.model_owner, run.user_metadata) == (client.model_id, USER_URN, {"run": "a"})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "training_runs/nobody:train:0"),
        ("GET", "training_runs/nobody:train:0/checkpoints"),
        ("GET", "training_runs/..%2F..%2Fetc"),
        ("GET", f"training_runs/{'x' * 300}"),
        ("DELETE", "training_runs/nobody:train:0/checkpoints/weights/x"),
        ("POST", "training_runs/nobody:train:0/checkpoints/weights/x/publish"),
        ("DELETE", "training_runs/nobody:train:0/checkpoints/weights/x/publish"),
        ("PUT", "training_runs/nobody:train:0/checkpoints/weights/x/ttl"),
        ("GET", "training_runs/nobody:train:0/checkpoints/external_weights/x/external_weights_urls"),
        ("GET", "sessions/nobody"),
        ("GET", "sessions/nobody/trace_export"),
        ("POST", "sessions/nobody/finish"),
        ("GET", "samplers/nobody:sample:0"),
        ("GET", "no/such/address"),
    ],
)
def test_what_is_not_there_is_said_so(method: str, path: str, engine: Any) -> None:
    response = requests.request(method, f"{engine.base_url}/api/v1/{path}", json={}, timeout=30)
    is_bad_name = len(path) > 300
    assert response.status_code == (400 if is_bad_name else 404)
    assert len(response.json()["detail"]) > 20


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("weights_info", {}),
        ("weights_info", {"tinker_path": 3}),
        ("weights_info", {"tinker_path": "tinker://a/b"}),
        ("weights_info", {"tinker_path": "tinker://\ud800/weights/x"}),
        ("weights_info", []),
        ("create_session", {"user_metadata": [1]}),
        ("create_session", {"display_name": {}}),
        ("sessions/search", {"limit": "all"}),
        ("sessions/x/finish", {"reason": {"type": "bored"}}),
        ("copy_weights", {"source_path": None}),
        ("training_runs/a/checkpoints/nonsense/x/publish", {}),
        ("save_weights_external", {"path": "x"}),
        ("save_weights_external", {"path": "x", "model_id": 7}),
    ],
)
def test_a_malformed_request_is_a_400_with_a_message(path: str, body: Any, engine: Any) -> None:
    response = requests.post(f"{engine.base_url}/api/v1/{path}", json=body, timeout=30)
    assert response.status_code == 400
    assert len(response.json()["detail"]) > 10


@pytest.mark.parametrize("data", [b"{", b"[" * 200_000, b"\xff\xfe", b'"text"'])
def test_a_body_that_is_no_json_object_is_a_400(data: bytes, engine: Any) -> None:
    response = requests.post(f"{engine.base_url}/api/v1/weights_info", data=data, timeout=30)
    assert response.status_code == 400
    assert "JSON" in response.json()["detail"]


@pytest.mark.parametrize("ttl", [0, -1, 3599, "a day", 1.5, True, 10**12])
def test_a_life_out_of_range_is_refused(ttl: Any, engine: Any, client: Any) -> None:
    path = client.save_state("life", overwrite=True).result().path.removeprefix(f"tinker://{client.model_id}/")
    url = f"{engine.base_url}/api/v1/training_runs/{client.model_id}/checkpoints/{path}/ttl"
    response = requests.put(url, json={"ttl_seconds": ttl}, timeout=30)
    assert response.status_code == 400
    assert "3600" in response.json()["detail"]


@pytest.mark.parametrize("name", ["step 10: best", "a+b&c=d;e,f", "größe–空 😀", '<x*|>"y"', "@!$'()~", "x" * 150])
def test_a_checkpoint_with_an_odd_name_is_managed_like_any_other(name: str, client: Any, rest: Any) -> None:
    path = client.save_weights_external(name).result().path
    for url in rest.get_external_weights_urls(path).result().urls.values():
        assert requests.get(url, timeout=30).status_code == 200
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    listed = {item.tinker_path: item for item in rest.list_user_checkpoints().result().checkpoints}
    assert listed[path].public
    assert listed[path].expires_at is not None
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in {item.tinker_path for item in rest.list_checkpoints(client.model_id).result().checkpoints}


@pytest.mark.parametrize("name", ["best?", "best#2", "100%41", "a\\b", "a\nb", "空" * 40])
def test_a_name_that_cannot_stand_in_a_url_is_refused_when_it_is_given(name: str, client: Any, rest: Any) -> None:
    message, category = failure(client.save_state(name))
    assert category == "user"
    assert "cannot name a checkpoint" in message or "is no name" in message


def test_an_id_may_be_percent_encoded(engine: Any, client: Any) -> None:
    encoded = quote(client.model_id, safe="")
    assert "%3A" in encoded
    assert get(engine, f"training_runs/{encoded}").json()["training_run_id"] == client.model_id
    assert get(engine, f"training_runs/{encoded}/checkpoints").status_code == 200


def test_the_size_of_what_is_kept_is_told_by_project(engine: Any, client: Any, rest: Any) -> None:
    client.save_state("sized", overwrite=True).result()
    usage = rest.get_current_checkpoint_storage_usage().result().data
    assert sum(item.size_bytes for item in usage) == sum(info.size_bytes for info in engine.engine.store.list())
    mine = rest.get_current_checkpoint_storage_usage("project-rest").result().data
    assert [item.project_id for item in mine] == ["project-rest"]
    assert mine[0].checkpoint_count >= 1
    assert mine[0].size_gigabytes == mine[0].size_bytes / 1e9
    assert mine[0].estimated_monthly_cost_usd is None


def test_a_sessions_timeline_is_exported(client: Any, rest: Any, service: Any) -> None:
    session_id = client.model_id.split(":")[0]
    url = rest.export_session_trace(session_id).result()
    timeline = requests.get(url, timeout=30).json()["traceEvents"]
    ran = [row for row in timeline if row["ph"] == "X" and row["args"]["request_id"].startswith(client.model_id)]
    assert [row["name"] for row in ran[:3]] == ["create_model", "forward_backward", "optim_step"]
    assert all(first["ts"] + first["dur"] <= second["ts"] for first, second in itertools.pairwise(ran))
    assert requests.get(url.replace("expires=1", "expires=2"), timeout=30).status_code == 403
    idle = tinker.ServiceClient(base_url=urlsplit(url)._replace(path="", query="").geturl(), api_key=KEY)
    with pytest.raises(RuntimeError, match="it made none"):
        rest.export_session_trace(idle.holder.get_session_id()).result()
    idle.close("success").result()


@pytest.mark.parametrize(("route", "reason"), sorted(ACCOUNT_FUNCTIONS.items()))
def test_what_only_an_account_has_is_refused_with_its_reason(route: Any, reason: str, engine: Any) -> None:
    method, path = route
    url = f"{engine.base_url}{path.replace('{session_id}', 'x')}"
    response = requests.request(method, url, json={"project_id": "p"}, timeout=30)
    assert response.status_code == 404
    assert response.json()["detail"] == reason
    assert "the local engine" in reason


def test_a_token_stands_for_the_key_and_is_renewed_after_a_restart(tmp_path: Path) -> None:
    secret = "tml-kept"
    with LocalTinkerServer(tmp_path, api_key=secret) as server:
        rest = tinker.RestClient(base_url=server.base_url, api_key=secret)
        who = rest.whoami().result()
        assert (who.user_urn, who.org_urn, who.email) == (USER_URN, "tml:organization:local", None)
        assert rest.list_user_checkpoints().result().checkpoints == []
        port = int(server.base_url.rsplit(":", 1)[1])
        for headers in ({}, {"X-API-Key": "eyJhbGciOiJIUzI1NiJ9.e30.x"}, {"Host": "x/api/v1/healthz?"}):
            response = requests.get(f"{server.base_url}/api/v1/checkpoints", headers=headers, timeout=30)
            assert response.status_code == 401, headers
        assert get(server, "signed/traces/x").status_code == 403
    with LocalTinkerServer(tmp_path, api_key=secret, port=port):
        assert rest.list_user_checkpoints().result(timeout=30).checkpoints == []


def test_lists_hold_while_checkpoints_come_and_go(client: Any, engine: Any) -> None:
    store, statuses, done = engine.engine.store, set(), threading.Event()

    def read() -> None:
        while not done.is_set():
            statuses.add(get(engine, "checkpoints").status_code)
            statuses.add(get(engine, f"training_runs/{client.model_id}/checkpoints").status_code)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(12):
        path = client.save_state(f"fleeting-{number % 2}", overwrite=True).result().path
        if number % 3 == 2:
            store.delete(path)
    done.set()
    for reader in readers:
        reader.join()
    assert statuses == {200}
