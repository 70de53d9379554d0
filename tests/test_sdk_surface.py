"""Every public method and keyword of the installed SDK's clients is served by the engine, or refused with a reason.

`sdk_exercises` calls each method with each of its keywords; what was passed is compared here with the method's
signature. A method or keyword that a new SDK brings belongs to no list and fails here by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import tinker
from sdk_exercises import ACCOUNT, EXERCISES, LENGTH, LOSSES, TOKENS, UNSUPPORTED, World, data, greedy, prompt
from tinker import types
from tinker.types.optimizer import OptimizerConfigBase, OptimParamsBase

from rest_routes import ACCOUNT_FUNCTIONS

pytestmark = [
    # Deprecated methods and keywords are part of the SDK as well.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental"),
]
CLIENTS = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient)
# Clients that a program makes itself: their constructors count as methods.
CONSTRUCTED = (tinker.ServiceClient, tinker.RestClient)


@pytest.fixture(scope="module")
def world(engine: Any, base_model_name: str) -> Iterator[World]:
    made = World(engine.base_url, base_model_name)
    yield made
    made.service.target.close("success").result()


def public_methods() -> dict[str, Any]:
    """Every public method of the SDK's clients by its name, with their constructors where a program calls them."""
    found = {}
    for cls in CLIENTS:
        names = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]
        names += ["__init__"] if cls in CONSTRUCTED else []
        found.update({f"{cls.__name__}.{name}": getattr(cls, name) for name in names})
    return found


def keywords(method: Any) -> set[str]:
    """The parameters of a method, without those that it takes only to ignore them."""
    parameters = inspect.signature(method).parameters.values()
    open_ended = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {parameter.name for parameter in parameters if parameter.kind not in open_ended} - {"self"}


def is_twin(name: str, methods: dict[str, Any]) -> bool:
    """True for `x_async` beside `x`: the SDK implements the first by the second."""
    return name.endswith("_async") and name.removesuffix("_async") in methods


def unlisted(methods: dict[str, Any]) -> set[str]:
    """The methods that no exercise and no list names."""
    known = EXERCISES.keys() | ACCOUNT.keys()
    return {name for name in methods if name not in known and not is_twin(name, methods)}


def left_out(name: str, given: set[str]) -> set[str]:
    """The keywords of a method that are not in `given`."""
    return keywords(public_methods()[name]) - given


def test_every_public_method_is_exercised_or_stands_on_a_list() -> None:
    methods = public_methods()
    new = unlisted(methods)
    assert not new, f"the installed SDK has {sorted(new)}: exercise them, or list them with the reason they are refused"
    assert not (EXERCISES.keys() | ACCOUNT.keys()) - methods.keys(), "these are listed, but not in the installed SDK"
    assert not EXERCISES.keys() & ACCOUNT.keys()


def test_a_method_or_keyword_that_is_new_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker.RestClient, "rename_checkpoint", lambda self, path, name: None, raising=False)
    monkeypatch.setattr(tinker.SamplingClient, "sample", lambda self, prompt, priority: None)
    methods = public_methods()
    assert unlisted(methods) == {"RestClient.rename_checkpoint"}
    assert left_out("SamplingClient.sample", {"prompt"}) == {"priority"}


@pytest.mark.parametrize("name", sorted(EXERCISES))
def test_a_method_is_served_with_all_its_keywords(name: str, world: World) -> None:
    EXERCISES[name](world)
    new = left_out(name, world.seen[name])
    assert not new, f"{name} has {sorted(new)}, which no call here passes: exercise them"


@pytest.mark.parametrize("name", sorted(ACCOUNT))
def test_a_method_about_an_account_is_refused_with_the_reason(name: str, world: World) -> None:
    reason, call = ACCOUNT[name]
    with pytest.raises(tinker.NotFoundError) as caught:
        call(world).result(timeout=30)
    assert reason in str(caught.value)
    assert world.seen[name] == keywords(public_methods()[name])


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_fails_that_request_alone(name: str, world: World) -> None:
    reason, message, call = UNSUPPORTED[name]
    with pytest.raises(tinker.RequestFailedError) as caught:
        call(world).result(timeout=60)
    assert reason
    assert str(caught.value.category) == "user"
    assert message in str(caught.value)
    output = world.training.target.forward(data("weights"), "cross_entropy").result(timeout=60)
    assert output.metrics["loss:sum"] > 0, "the client goes on"


def test_every_loss_that_the_sdk_names_is_served_or_refused(world: World) -> None:
    named = set(get_args(types.LossFnType))
    by_handle = {"custom"}
    assert named == LOSSES.keys() | by_handle | {"stable_reinforce"}
    for loss, (inputs, config) in LOSSES.items():
        for settings in (None, config):
            output = world.training.target.forward_backward(data(*inputs), loss, settings).result(timeout=60)
            assert "loss:sum" in output.metrics, loss
            assert output.loss_fn_outputs[0]["logprobs"].shape == [LENGTH], loss


def test_every_optimizer_that_the_sdk_names_is_served_or_refused() -> None:
    configs = {cls.__name__ for cls in OptimizerConfigBase.__subclasses__()}
    params = {cls.__name__ for cls in OptimParamsBase.__subclasses__()}
    assert configs == {"AdamOptimizerConfig", "DimuonOptimizerConfig"}
    assert params == {"DimuonParams"}
    assert all(any(f"{name}()" in entry for entry in UNSUPPORTED) for name in ("DimuonOptimizerConfig", *params))


def test_async_twins_take_the_same_keywords() -> None:
    methods = public_methods()
    twins = {name for name in methods if is_twin(name, methods)}
    assert len(twins) > 30
    differing = [name for name in twins if keywords(methods[name]) != keywords(methods[name.removesuffix("_async")])]
    assert differing == []


async def test_async_twins_do_what_the_others_do(world: World) -> None:
    service, training = world.service.target, world.training.target
    sampling, rest = world.sampling.target, world.rest.target
    client = await service.create_lora_training_client_async(world.base_model, rank=2, seed=1)
    output = await (await client.forward_backward_async(data("weights"), "cross_entropy"))
    await (await client.optim_step_async(types.AdamParams(learning_rate=1e-3)))
    assert output.metrics["loss:sum"] > 0
    path = (await (await training.save_state_async(world.name()))).path
    assert (await training.get_info_async()).model_id == world.model_id
    restored = await service.create_training_client_from_state_async(path)
    sampler = await restored.save_weights_and_get_sampling_client_async()
    expected = sampling.sample(prompt(), 1, greedy()).result().sequences[0].tokens
    assert (await sampling.sample_async(prompt(), 1, greedy())).sequences[0].tokens == expected
    assert len(await sampler.compute_logprobs_async(prompt())) == len(TOKENS)
    assert (await rest.get_training_run_async(client.model_id)).training_run_id == client.model_id
    assert (await rest.copy_weights_async(path, "p")).endswith(path.rsplit("/", 1)[1])
    await rest.delete_checkpoint_from_tinker_path_async(path)
    assert world.listed(path) is None


def test_the_lists_name_their_reasons() -> None:
    reasons = [reason for reason, _ in ACCOUNT.values()] + [reason for reason, _, _ in UNSUPPORTED.values()]
    assert all(len(reason.split()) > 6 for reason in reasons)
    assert {reason for reason, _ in ACCOUNT.values()} == set(ACCOUNT_FUNCTIONS.values())
