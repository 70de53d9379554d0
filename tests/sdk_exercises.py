"""The installed SDK's clients, each method called with each of its keywords, for `test_sdk_surface`.

`EXERCISES` holds a function per method that calls it against the running engine and looks at what came back; what it
passes is recorded. What the engine refuses stands in `ACCOUNT` and `UNSUPPORTED`, with the reason.
"""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any, get_args

import pyrage
import pytest
import requests
import tinker
import torch
from tinker import types
from tinker.lib.api_future_impl import QueueState
from tinker.lib.retry_handler import RetryConfig

import base_models
from rest_routes import ACCOUNT_FUNCTIONS

KEY = "tml-local-test"
BILLING, AUDIT, PROJECTS = ACCOUNT_FUNCTIONS.values()
TOKENS = [21, 34, 55, 89, 144, 233, 377, 77]
LENGTH = len(TOKENS) - 1
CLIPPED = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


class Recorded:
    """A client that notes which methods were called, and with which of their parameters."""

    def __init__(self, target: Any, seen: dict[str, set[str]]) -> None:
        self.target, self._seen = target, seen
        self._name = (target if inspect.isclass(target) else type(target)).__name__

    def __getattr__(self, name: str) -> Any:
        return self._noted(name, getattr(self.target, name))

    def __call__(self, **keywords: Any) -> Any:
        return self._noted("__init__", self.target)(**keywords)

    def _noted(self, name: str, method: Any) -> Any:
        if not callable(method):
            return method

        def call(*args: Any, **keywords: Any) -> Any:
            given = inspect.signature(method).bind(*args, **keywords).arguments
            self._seen[f"{self._name}.{name}"].update(given)
            return method(*args, **keywords)

        return call


class World:
    """A running engine and one client of each kind, all recorded."""

    def __init__(self, url: str, base_model: str) -> None:
        self.seen: dict[str, set[str]] = defaultdict(set)
        self.url, self.base_model = url, base_model
        self.Service = Recorded(tinker.ServiceClient, self.seen)
        self.Rest = Recorded(tinker.RestClient, self.seen)
        self.Sampling = Recorded(tinker.SamplingClient, self.seen)
        self.service = Recorded(tinker.ServiceClient(base_url=url, api_key=KEY, project_id="surface"), self.seen)
        self.rest = Recorded(tinker.RestClient(base_url=url, api_key=KEY), self.seen)
        client = self.service.target.create_lora_training_client(base_model, rank=2, seed=1).result()
        self.training = Recorded(client, self.seen)
        self.model_id = client.model_id
        self.session_id = client.model_id.split(":")[0]
        self.sampling = Recorded(client.save_weights_and_get_sampling_client().result(), self.seen)
        self._numbers = 0

    def name(self) -> str:
        """A checkpoint name that was not used before."""
        self._numbers += 1
        return f"c{self._numbers}"

    def state(self) -> str:
        """The path of a new saved state."""
        return self.training.target.save_state(self.name()).result().path

    def listed(self, path: str) -> Any:
        """The checkpoint at `path` as its run lists it, or None."""
        run_id = path.removeprefix("tinker://").split("/")[0]
        found = self.rest.target.list_checkpoints(run_id).result().checkpoints
        return next((item for item in found if item.tinker_path == path), None)


def prompt() -> types.ModelInput:
    return types.ModelInput.from_ints(TOKENS)


def tensor(values: Sequence[float], dtype: Any = "float32", shape: list[int] | None = None) -> types.TensorData:
    return types.TensorData(data=list(values), dtype=dtype, shape=shape or [len(values)])


def data(*inputs: str) -> list[tinker.Datum]:
    """One datum with these loss inputs beside its targets."""
    values = {
        "weights": tensor([0.0] + [1.0] * (LENGTH - 1)),
        "logprobs": tensor([-9.0] * LENGTH),
        "advantages": tensor([0.5] * LENGTH),
        "sequence_ratio_mask": tensor([0.0] + [1.0] * (LENGTH - 1)),
    }
    fields = {"target_tokens": tensor(TOKENS[1:], "int64"), **{name: values[name] for name in inputs}}
    return [tinker.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=fields)]


def greedy(tokens: int = 2) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=tokens, temperature=0.0, stop=[])


# What follows exercises the service client.


def construct_service(w: World) -> None:
    client = w.Service(
        user_metadata={"why": "surface"},
        project_id="project-a",
        display_name="A display name",
        base_url=w.url,
        api_key=KEY,
        default_headers_overrides={"X-Extra": "1"},
    )
    session_id = client.holder.get_session_id()
    session = w.rest.target.get_session(session_id).result()
    assert (session.user_metadata, session.display_name) == ({"why": "surface"}, "A display name")
    found = w.rest.target.search_sessions(types.SessionSearchRequest(project_ids=["project-a"])).result()
    assert session_id in [summary.session_id for summary in found.sessions]
    client.close("success").result()


def close(w: World) -> None:
    client = Recorded(tinker.ServiceClient(base_url=w.url, api_key=KEY), w.seen)
    session_id = client.holder.get_session_id()
    client.close("errored", detail="out of luck").result()
    found = w.rest.target.search_sessions(types.SessionSearchRequest(session_id=session_id)).result().sessions[0]
    assert (found.status.reason.type, found.status.detail) == ("errored", "out of luck")


def service_copy_weights(w: World) -> None:
    copied = w.service.copy_weights(w.state(), ttl_seconds=3600, weights_access_token="tml-theirs").result()
    assert w.listed(copied).expires_at is not None


def create_custom_loss(w: World) -> None:
    def weighted(logprobs: torch.Tensor, weights: torch.Tensor) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/weighted:sum": loss}

    handle = w.service.create_custom_loss(weighted, input_ranks={"logprobs": 1, "weights": 1}).result()
    output = w.training.target.forward_backward_custom(data("weights"), handle).result()
    expected = w.training.target.forward(data("weights"), "cross_entropy").result().metrics["loss:sum"]
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert output.metrics["custom/weighted:sum"] == pytest.approx(expected, rel=1e-5)


def create_lora_training_client(w: World) -> None:
    client = w.service.create_lora_training_client(
        w.base_model,
        rank=3,
        seed=5,
        train_mlp=True,
        train_attn=False,
        train_unembed=False,
        user_metadata={"a": "b"},
        optimizer=types.AdamOptimizerConfig(),
    ).result()
    path = client.save_state("x").result().path
    info = w.rest.target.get_weights_info_by_tinker_path(path).result()
    assert (info.lora_rank, info.train_mlp, info.train_attn, info.train_unembed) == (3, True, False, False)
    assert w.rest.target.get_training_run(client.model_id).result().user_metadata == {"a": "b"}


def create_training_client_from_state(w: World) -> None:
    client = w.service.create_training_client_from_state(
        w.state(),
        base_model=w.base_model,
        user_metadata={"from": "state"},
        weights_access_token="tml-theirs",
        optimizer=types.AdamOptimizerConfig(),
    ).result()
    assert client.get_info().lora_rank == 2
    assert w.rest.target.get_training_run(client.model_id).result().user_metadata == {"from": "state"}


def create_training_client_from_state_with_optimizer(w: World) -> None:
    client = w.service.create_training_client_from_state_with_optimizer(
        w.state(), base_model=w.base_model, user_metadata={"from": "state"}, weights_access_token="tml-theirs"
    ).result()
    assert client.forward(data("weights"), "cross_entropy").result().metrics["loss:sum"] > 0


def service_create_sampling_client(w: World) -> None:
    base = w.service.create_sampling_client(
        base_model=w.base_model, retry_config=RetryConfig(), record_stability_info=False
    ).result()
    tuned = w.service.create_sampling_client(model_path=w.state()).result()
    assert tuned.get_base_model() == base.get_base_model() == w.base_model
    assert len(tuned.sample(prompt(), 1, greedy()).result().sequences[0].tokens) == 2


def service_capabilities(w: World) -> None:
    assert w.base_model in [model.model_name for model in w.service.get_server_capabilities().supported_models]


def service_telemetry(w: World) -> None:
    assert w.service.get_telemetry() is None, "switched off for the tests"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "1")
        client = tinker.ServiceClient(base_url=w.url, api_key=KEY)
        telemetry = client.holder.get_telemetry()
        assert client.get_telemetry() is telemetry is not None
    client.close("success").result()
    body = {"session_id": w.session_id, "events": [], "platform": "x", "sdk_version": "0"}
    assert requests.post(f"{w.url}/api/v1/telemetry", json=body, timeout=30).json() == {"status": "accepted"}


# What follows exercises the training client.


def forward(w: World) -> None:
    output = w.training.forward(data("weights"), "cross_entropy", {}).result()
    assert output.loss_fn_outputs[0]["logprobs"].shape == [LENGTH]


def forward_backward(w: World) -> None:
    output = w.training.forward_backward(data("logprobs", "advantages"), "ppo", loss_fn_config=CLIPPED).result()
    assert "loss:sum" in output.metrics


def forward_backward_custom(w: World) -> None:
    def half(batch: Any, logprobs: Any) -> Any:
        return 0.5 * -logprobs[0].sum(), {"mine": 2.0}

    output = w.training.forward_backward_custom(data(), half, loss_type_input="logprobs").result()
    assert output.metrics["mine"] == 2.0
    assert output.metrics["loss:sum"] > 0


def optim_step(w: World) -> None:
    params = types.AdamParams(learning_rate=1e-3, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)
    assert set(types.AdamParams.model_fields) == params.model_fields_set, "each is sent"
    for keyword in ("optim_params", "adam_params"):
        w.training.target.forward_backward(data("weights"), "cross_entropy").result()
        assert w.training.optim_step(**{keyword: params}).result().metrics["unclipped_grad_l2_norm:mean"] > 0


def save_state(w: World) -> None:
    name = w.name()
    w.training.save_state(name).result()
    path = w.training.save_state(name, ttl_seconds=7200, overwrite=True, user_metadata={"a": "b"}).result().path
    listed = w.listed(path)
    assert (listed.checkpoint_type, listed.user_metadata) == ("training", {"a": "b"})
    assert 7000 < listed.expires_at.timestamp() - time.time() <= 7200


def save_weights_for_sampler(w: World) -> None:
    path = w.training.save_weights_for_sampler(w.name(), ttl_seconds=7200, user_metadata={"a": "b"}).result().path
    listed = w.listed(path)
    assert (listed.checkpoint_type, listed.user_metadata) == ("sampler", {"a": "b"})
    assert listed.expires_at is not None


def save_weights_external(w: World) -> None:
    key = str(pyrage.x25519.Identity.generate().to_public())
    path = w.training.save_weights_external(w.name(), ttl_seconds=7200, age_encryption_recipients=[key]).result().path
    files = w.rest.target.get_external_weights_urls(path).result().urls
    assert all(name.endswith(".age") for name in files)
    assert w.listed(path).checkpoint_type == "external"
    assert w.listed(path).expires_at is not None


def save_weights_and_get_sampling_client(w: World) -> None:
    kinds = get_args(types.SamplingClientKind)
    assert set(kinds) == {"snapshot", "inflight"}
    for kind in kinds:
        sampler = w.training.save_weights_and_get_sampling_client(
            name="ignored", retry_config=RetryConfig(), record_stability_info=False, kind=kind
        ).result()
        assert len(sampler.sample(prompt(), 1, greedy()).result().sequences[0].tokens) == 2


def load_state(w: World) -> None:
    path = w.state()
    assert w.training.load_state(path, weights_access_token="tml-theirs").result().path == path


def load_state_with_optimizer(w: World) -> None:
    path = w.state()
    assert w.training.load_state_with_optimizer(path, weights_access_token="tml-theirs").result().path == path


def training_create_sampling_client(w: World) -> None:
    sampler = w.training.create_sampling_client(
        w.state(), retry_config=RetryConfig(), record_stability_info=False
    ).result()
    assert sampler.get_base_model() == w.base_model


def training_info(w: World) -> None:
    info = w.training.get_info()
    assert (info.model_id, info.model_data.model_name, info.lora_rank) == (w.model_id, w.base_model, 2)


def training_tokenizer(w: World) -> None:
    tokenizer = w.training.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a word")) == "a word"


# What follows exercises the sampling client.


def sample(w: World) -> None:
    params = types.SamplingParams(max_tokens=3, seed=1, stop=[], temperature=0.7, top_k=20, top_p=0.9)
    assert set(types.SamplingParams.model_fields) == params.model_fields_set, "each is sent"
    result = w.sampling.sample(
        prompt(),
        2,
        params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=tensor([cell for token in TOKENS[1:] for cell in (token, -1)], "int64", [LENGTH, 2]),
        prompt_alt_tokens_k=4,
        prompt_logprobs_last_n=3,
    ).result()
    assert [len(sequence.tokens) for sequence in result.sequences] == [3, 3]
    assert [logprob is None for logprob in result.prompt_logprobs] == [True] * 5 + [False] * 3
    assert [len(row) for row in result.topk_prompt_logprobs[-3:]] == [2, 2, 2]
    assert [len(row) for row in result.sequences[0].topk_logprobs] == [3, 3, 3]
    scored = result.target_prompt_logprobs.to_numpy().reshape(LENGTH, 2)
    assert scored[-3:, 0].tolist() == pytest.approx(result.prompt_logprobs[-3:], abs=1e-4)
    assert result.prompt_alt_tokens.tokens.shape == [LENGTH, 4]
    assert max(result.prompt_alt_tokens.logprobs.data) <= 0


def compute_logprobs(w: World) -> None:
    last = w.sampling.compute_logprobs(prompt(), prompt_logprobs_last_n=2).result()
    whole = w.sampling.compute_logprobs(prompt()).result()
    assert last[:-2] == [None] * (len(TOKENS) - 2)
    assert last[-2:] == pytest.approx(whole[-2:], abs=1e-4)


def sampling_create(w: World) -> None:
    holder = w.service.target.holder
    options = {"retry_config": RetryConfig(), "record_stability_info": False}
    tuned = w.Sampling.create(holder, model_path=w.state(), **options).result()
    again = w.Sampling.create(holder, base_model=w.base_model, sampling_session_id=tuned._sampling_session_id).result()
    results = [client.sample(prompt(), 1, greedy()).result().sequences[0].tokens for client in (tuned, again)]
    assert results[0] == results[1]


def sampling_from_handle(w: World) -> None:
    """The handle, and a pickle, are used in another process, which asks beside this one without clashing."""
    handle = w.sampling.get_sampler_handle()
    assert KEY not in handle
    here = w.Sampling.from_sampler_handle(handle, api_key=KEY)
    expected = here.sample(prompt(), 1, greedy(4)).result().sequences[0].tokens
    # The other process is a worker that only samples: it has no torch, which also spares it seconds.
    code = """
import pickle, sys
sys.modules["torch"] = None
from tinker import SamplingClient, types
handle, pickled = sys.argv[1], bytes.fromhex(sys.argv[2])
prompt = types.ModelInput.from_ints([int(token) for token in sys.argv[3].split(",")])
for client in (SamplingClient.from_sampler_handle(handle, api_key=sys.argv[4]), pickle.loads(pickled)):
    params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    sequence = client.sample(prompt, 1, params).result(timeout=60).sequences[0]
    print(sequence.tokens, sequence.sequence_id, sep="|")
"""
    pickled = pickle.dumps(w.sampling.target).hex()
    arguments = [handle, pickled, ",".join(map(str, TOKENS)), KEY]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    rows = [line.split("|") for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == [str(expected)] * 2
    assert len({row[1] for row in rows}) == 2


def sampling_tokenizer(w: World) -> None:
    # The SDK looks a sampler's tokenizer up by the model's name alone; a folder is found without a hub.
    sampler = tinker.SamplingClient.create(w.service.target.holder, base_model=str(base_models.STAND_IN)).result()
    tokenizer = Recorded(sampler, w.seen).get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a word")) == "a word"


def queue_state(w: World) -> None:
    w.sampling.on_queue_state_change(queue_state=QueueState.ACTIVE, queue_state_reason=None)
    assert w.sampling.target._last_queue_state_logged == 0


# What follows exercises the REST client.


def construct_rest(w: World) -> None:
    assert w.Rest(base_url=w.url, api_key=KEY).list_sessions(limit=1).result().sessions
    assert w.Rest(_holder=w.service.target.holder).list_sessions(limit=1).result().sessions


def rest_copy_weights(w: World) -> None:
    copied = w.rest.copy_weights(
        w.state(), destination_project_id="project-b", ttl_seconds=3600, weights_access_token="tml-theirs"
    ).result()
    assert w.listed(copied).checkpoint_type == "training"


def delete_checkpoint(w: World) -> None:
    path = w.state()
    w.rest.delete_checkpoint(w.model_id, f"weights/{path.rsplit('/', 1)[1]}").result()
    assert w.listed(path) is None


def delete_checkpoint_from_tinker_path(w: World) -> None:
    path = w.state()
    w.rest.delete_checkpoint_from_tinker_path(path).result()
    assert w.listed(path) is None


def export_session_trace(w: World) -> None:
    url = w.rest.export_session_trace(w.session_id).result()
    assert requests.get(url, timeout=30).json()["traceEvents"]


def get_external_weights_urls(w: World) -> None:
    path = w.training.target.save_weights_external(w.name()).result().path
    urls = w.rest.get_external_weights_urls(path).result().urls
    assert requests.get(urls["adapter_config.json"], timeout=30).json()["r"] == 2


def storage_usage(w: World) -> None:
    w.state()
    usage = w.rest.get_current_checkpoint_storage_usage(project_id="surface").result()
    assert usage.data[0].checkpoint_count > 0


def get_sampler(w: World) -> None:
    found = w.rest.get_sampler(w.sampling.target._sampling_session_id).result()
    assert found.base_model == w.base_model


def rest_capabilities(w: World) -> None:
    models = w.rest.get_server_capabilities().result().supported_models
    assert w.base_model in [model.model_name for model in models]


def get_session(w: World) -> None:
    for scope in ("owned", "accessible"):
        session = w.rest.get_session(w.session_id, access_scope=scope).result()
        assert w.model_id in session.training_run_ids
        assert w.sampling.target._sampling_session_id in session.sampler_ids


def get_training_run(w: World) -> None:
    for scope in ("owned", "accessible"):
        run = w.rest.get_training_run(w.model_id, access_scope=scope).result()
        assert (run.training_run_id, run.is_lora, run.lora_rank) == (w.model_id, True, 2)


def get_training_run_by_tinker_path(w: World) -> None:
    path = w.state()
    run = w.rest.get_training_run_by_tinker_path(path, access_scope="accessible").result()
    assert run.last_checkpoint.tinker_path == path


def get_weights_info(w: World) -> None:
    info = w.rest.get_weights_info_by_tinker_path(w.state()).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (w.base_model, True, 2)


def list_checkpoints(w: World) -> None:
    path = w.state()
    assert path in [item.tinker_path for item in w.rest.list_checkpoints(w.model_id).result().checkpoints]


def list_sessions(w: World) -> None:
    everything = w.rest.list_sessions(limit=500, offset=0, access_scope="accessible").result().sessions
    assert w.session_id in everything
    assert w.rest.list_sessions(limit=1, offset=1).result().sessions == everything[1:2]


def list_training_runs(w: World) -> None:
    page = w.rest.list_training_runs(limit=1, offset=0, access_scope="accessible", project_id="surface").result()
    assert len(page.training_runs) == 1
    assert page.cursor.total_count >= 1


def list_user_checkpoints(w: World) -> None:
    path = w.state()
    page = w.rest.list_user_checkpoints(limit=1, offset=0).result()
    assert [item.tinker_path for item in page.checkpoints] == [path], "the newest comes first"


def publish(w: World) -> None:
    path = w.state()
    w.rest.publish_checkpoint_from_tinker_path(path).result()
    assert w.listed(path).public


def unpublish(w: World) -> None:
    path = w.state()
    w.rest.target.publish_checkpoint_from_tinker_path(path).result()
    w.rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert not w.listed(path).public


def set_checkpoint_ttl(w: World) -> None:
    path = w.state()
    w.rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    assert w.listed(path).expires_at is not None
    w.rest.set_checkpoint_ttl_from_tinker_path(path, ttl_seconds=None).result()
    assert w.listed(path).expires_at is None


def search_sessions(w: World) -> None:
    found = w.rest.search_sessions(types.SessionSearchRequest(session_id=w.session_id)).result().sessions[0]
    assert (found.project_id, found.status.type) == ("surface", "active")


def whoami(w: World) -> None:
    assert w.rest.whoami().result().user_urn == w.rest.target.get_training_run(w.model_id).result().model_owner


EXERCISES: dict[str, Callable[[World], None]] = {
    "ServiceClient.__init__": construct_service,
    "ServiceClient.close": close,
    "ServiceClient.copy_weights": service_copy_weights,
    "ServiceClient.create_custom_loss": create_custom_loss,
    "ServiceClient.create_lora_training_client": create_lora_training_client,
    "ServiceClient.create_rest_client": lambda w: holds(w.service.create_rest_client().list_sessions().result()),
    "ServiceClient.create_sampling_client": service_create_sampling_client,
    "ServiceClient.create_training_client_from_state": create_training_client_from_state,
    "ServiceClient.create_training_client_from_state_with_optimizer": create_training_client_from_state_with_optimizer,
    "ServiceClient.get_console_url": lambda w: holds(w.session_id in w.service.get_console_url()),
    "ServiceClient.get_server_capabilities": service_capabilities,
    "ServiceClient.get_telemetry": service_telemetry,
    "TrainingClient.create_sampling_client": training_create_sampling_client,
    "TrainingClient.forward": forward,
    "TrainingClient.forward_backward": forward_backward,
    "TrainingClient.forward_backward_custom": forward_backward_custom,
    "TrainingClient.get_console_url": lambda w: holds(w.model_id in w.training.get_console_url()),
    "TrainingClient.get_info": training_info,
    "TrainingClient.get_telemetry": lambda w: holds(w.training.get_telemetry() is None),
    "TrainingClient.get_tokenizer": training_tokenizer,
    "TrainingClient.load_state": load_state,
    "TrainingClient.load_state_with_optimizer": load_state_with_optimizer,
    "TrainingClient.optim_step": optim_step,
    "TrainingClient.save_state": save_state,
    "TrainingClient.save_weights_and_get_sampling_client": save_weights_and_get_sampling_client,
    "TrainingClient.save_weights_external": save_weights_external,
    "TrainingClient.save_weights_for_sampler": save_weights_for_sampler,
    "SamplingClient.compute_logprobs": compute_logprobs,
    "SamplingClient.create": sampling_create,
    "SamplingClient.from_sampler_handle": sampling_from_handle,
    "SamplingClient.get_base_model": lambda w: holds(w.sampling.get_base_model() == w.base_model),
    "SamplingClient.get_sampler_handle": lambda w: holds(w.sampling.get_sampler_handle()),
    "SamplingClient.get_telemetry": lambda w: holds(w.sampling.get_telemetry() is None),
    "SamplingClient.get_tokenizer": sampling_tokenizer,
    "SamplingClient.on_queue_state_change": queue_state,
    "SamplingClient.sample": sample,
    "RestClient.__init__": construct_rest,
    "RestClient.copy_weights": rest_copy_weights,
    "RestClient.delete_checkpoint": delete_checkpoint,
    "RestClient.delete_checkpoint_from_tinker_path": delete_checkpoint_from_tinker_path,
    "RestClient.export_session_trace": export_session_trace,
    "RestClient.get_current_checkpoint_storage_usage": storage_usage,
    "RestClient.get_external_weights_urls": get_external_weights_urls,
    "RestClient.get_sampler": get_sampler,
    "RestClient.get_server_capabilities": rest_capabilities,
    "RestClient.get_session": get_session,
    "RestClient.get_telemetry": lambda w: holds(w.rest.get_telemetry() is None),
    "RestClient.get_training_run": get_training_run,
    "RestClient.get_training_run_by_tinker_path": get_training_run_by_tinker_path,
    "RestClient.get_weights_info_by_tinker_path": get_weights_info,
    "RestClient.list_checkpoints": list_checkpoints,
    "RestClient.list_sessions": list_sessions,
    "RestClient.list_training_runs": list_training_runs,
    "RestClient.list_user_checkpoints": list_user_checkpoints,
    "RestClient.publish_checkpoint_from_tinker_path": publish,
    "RestClient.search_sessions": search_sessions,
    "RestClient.set_checkpoint_ttl_from_tinker_path": set_checkpoint_ttl,
    "RestClient.unpublish_checkpoint_from_tinker_path": unpublish,
    "RestClient.whoami": whoami,
}

# Methods about an account, which a local engine does not have: the reason that they answer, and a call.
ACCOUNT: dict[str, tuple[str, Callable[[World], Any]]] = {
    "RestClient.get_billing_usage": (
        BILLING,
        lambda w: w.rest.get_billing_usage(starting_on="2026-07-13T00:00:00Z", ending_before="2026-07-14T00:00:00Z"),
    ),
    "RestClient.get_audit_log": (AUDIT, lambda w: w.rest.get_audit_log(event_type="all", day=date(2026, 7, 13))),
    "RestClient.assign_session_project": (
        PROJECTS,
        lambda w: w.rest.assign_session_project(session_id=w.session_id, project_id="p"),
    ),
}

UNPUBLISHED = "the formulas of stable_reinforce, and what sampling records for it, are not published"
DIMUON = "the formulas of the optimizer dimuon are not published"
# Values of keywords that the engine refuses by design: why, what its message says, and a call.
UNSUPPORTED: dict[str, tuple[str, str, Callable[[World], Any]]] = {
    "SamplingClient.sample, of a client with record_stability_info": (
        UNPUBLISHED,
        "record_stability_info",
        lambda w: (
            w.service.create_sampling_client(base_model=w.base_model, record_stability_info=True)
            .result()
            .sample(prompt(), 1, greedy())
        ),
    ),
    "TrainingClient.forward_backward(loss_fn='stable_reinforce')": (
        UNPUBLISHED,
        "stable_reinforce",
        lambda w: w.training.forward_backward(data("logprobs", "advantages"), "stable_reinforce"),
    ),
    "ServiceClient.create_lora_training_client(optimizer=DimuonOptimizerConfig())": (
        DIMUON,
        "dimuon",
        lambda w: w.service.create_lora_training_client(w.base_model, optimizer=types.DimuonOptimizerConfig()),
    ),
    "ServiceClient.create_training_client_from_state(optimizer=DimuonOptimizerConfig())": (
        DIMUON,
        "dimuon",
        lambda w: w.service.create_training_client_from_state(w.state(), optimizer=types.DimuonOptimizerConfig()),
    ),
    "TrainingClient.optim_step(optim_params=DimuonParams())": (
        DIMUON,
        "dimuon",
        lambda w: w.training.optim_step(types.DimuonParams(learning_rate=1e-3)),
    ),
}
# Losses that the SDK names: what a datum brings for them, and the settings a client may send.
LOSSES: dict[str, tuple[list[str], dict[str, float]]] = {
    "cross_entropy": (["weights"], {}),
    "importance_sampling": (["logprobs", "advantages"], {}),
    "ppo": (["logprobs", "advantages"], CLIPPED),
    "cispo": (["logprobs", "advantages"], CLIPPED),
    "gspo": (["logprobs", "advantages", "sequence_ratio_mask"], CLIPPED),
    "dro": (["logprobs", "advantages"], {"beta": 0.1}),
}


def holds(value: Any) -> None:
    """A one-line exercise's assertion."""
    assert value
