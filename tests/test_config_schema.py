import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from config_schema import (
    EvalTask,
    TrainingConfig,
    check_environment,
    describe_config,
    load_and_validate_config,
)
from error_handling import EXIT_USAGE, ConfigurationError

MINIMAL: dict[str, Any] = {"base_model": "Qwen/Qwen3-8B", "train_file": "train.jsonl", "eval_file": "eval.jsonl"}


@pytest.fixture
def write(tmp_path):
    """Write a configuration file: MINIMAL changed by keywords, or the text given."""

    def _write(text=None, **changes):
        path = tmp_path / "conf.json"
        content = {key: value for key, value in {**MINIMAL, **changes}.items() if value is not Ellipsis}
        path.write_text(json.dumps(content) if text is None else text, encoding="utf-8")
        return path

    return _write


def refusal(path, *overrides):
    with pytest.raises(ConfigurationError) as caught:
        load_and_validate_config(path, overrides)
    return str(caught.value)


def test_defaults_are_those_of_the_design(write):
    config = load_and_validate_config(write())
    flat = {key: value for key, value in config.to_json_dict().items() if not isinstance(value, dict)}
    assert {key: flat[key] for key in flat if key not in MINIMAL} == {
        "init_from": None, "eval_tasks": [], "renderer_name": None, "train_on_what": "last_assistant_turn",
        "lora_rank": 16, "learning_rate": 1e-4, "use_recommended_lr": False, "lr_decay": 0.8, "min_lr": 1e-6,
        "warmup_steps": None, "max_steps": 1000, "batch_size": 8, "steps_per_round": 1, "eval_threshold": 0.85,
        "max_rounds": 3, "max_seq_length": 2048, "save_every": 20, "seed": 42, "allow_overlap": False,
        "evalops_enabled": False, "evalops_test_suite_id": None, "evalops_api_url": None, "trackers": [],
        "notify": None,
    }  # fmt: skip
    assert config.evaluation.evaluator == "inspect"
    assert (config.evaluation.temperature, config.evaluation.max_errors) == (0.0, 0.05)
    assert config.decision.model_dump() == {
        "target_rule": "point", "on_regression": "rollback", "patience": None, "lr_policy": "decay",
    }  # fmt: skip
    assert config.selection.model_dump() == {
        "strategy": "balanced_failures", "pool_file": None, "hard_fraction": 0.25, "max_repeats": 1,
        "label_guard": True, "embedding_model": None,
    }  # fmt: skip


def test_two_typos_are_told_with_the_nearest_name_and_nothing_else(write):
    lines = refusal(write(learning_rte=1e-4, eval_treshold=0.9)).splitlines()
    assert len(lines) == 2
    assert "conf.json:1: learning_rte: unknown key; did you mean learning_rate?" in lines[0]
    assert "eval_treshold: unknown key; did you mean eval_threshold?" in lines[1]


def test_each_fault_names_its_own_line(write):
    message = refusal(
        write('{\n "base_model": "m",\n "train_file": "t",\n "eval_file": "e",\n "lora_rnk": 4,\n'
              ' "evaluation": {\n  "max_tokens": 0\n }\n}')
    )  # fmt: skip
    assert "conf.json:5: lora_rnk" in message
    assert "conf.json:7: evaluation.max_tokens: must be at least 1, got 0" in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [("max_tokens", "evaluation.max_tokens"), ("test_file", "heldout.test_file"), ("strategi", "selection.strategy")],
)
def test_a_key_of_a_group_written_flat_is_pointed_to_its_group(write, key, meant):
    assert f"{key}: unknown key; did you mean {meant}?" in refusal(write(**{key: 1}))


def test_an_unknown_key_of_a_small_object_lists_the_valid_ones(write):
    message = refusal(write(budget={"zzz": 1}, prices={"m": {"prefill": 1, "sample": 1, "train": 1, "zzz": 2}}))
    assert "budget.zzz: unknown key; known here: tokens, money, seconds" in message
    assert "prices.m.zzz: unknown key; known here: prefill, sample, train" in message


def test_a_written_warmup_that_is_not_shorter_than_the_planned_steps_is_refused(write):
    message = refusal(write(warmup_steps=100, steps_per_round=5, max_rounds=3))
    assert "warmup_steps" in message
    assert "15 steps planned" in message
    assert "warm-up 100 written" in message
    assert "warmup_steps" in refusal(write(warmup_steps=15, steps_per_round=5, max_rounds=3))
    assert load_and_validate_config(write(warmup_steps=14, steps_per_round=5)).resolved_warmup_steps == 14


@pytest.mark.parametrize(("steps", "rounds", "warmup"), [(5, 3, 1), (1, 3, 0), (100, 9, 90), (500, 3, 100)])
def test_an_unwritten_warmup_is_100_or_a_tenth_of_the_planned_steps(write, steps, rounds, warmup):
    config = load_and_validate_config(write(steps_per_round=steps, max_rounds=rounds))
    assert config.planned_steps == steps * rounds
    assert config.resolved_warmup_steps == warmup


def test_a_schedule_that_ends_within_its_warmup_is_refused(write):
    assert "max_steps" in refusal(write(max_steps=10, warmup_steps=10, steps_per_round=40))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("learning_rate", 0, "above 0"),
        ("learning_rate", -1e-4, "above 0"),
        ("learning_rate", "1e-4", "must be a number"),
        ("learning_rate", True, "must be a number"),
        ("batch_size", True, "must be a whole number, got true"),
        ("batch_size", 2.5, "must be a whole number, got 2.5"),
        ("batch_size", 0, "at least 1"),
        ("lora_rank", 0, "at least 1"),
        ("min_lr", -1, "at least 0"),
        ("lr_decay", 1.1, "at most 1"),
        ("eval_threshold", 1.5, "at most 1"),
        ("allow_overlap", "true", 'must be true or false, got "true"'),
        ("allow_overlap", 1, "must be true or false"),
        ("train_file", "", "must not be empty"),
        ("eval_file", 7, "must be text, got 7"),
        ("eval_tasks", "arc", "must be a list"),
        ("evaluation", [], "must be an object"),
        ("evaluation", {"evaluator": "inspct"}, "'inspect' or 'simple'"),
        ("selection", {"hard_fraction": 2}, "at most 1"),
        ("decision", {"patience": 0}, "at least 1"),
        ("init_from", "runs/x", "tinker://"),
        ("init_from", "tinker://run/sampler_weights/round_02", "weights for sampling, which cannot be trained on"),
        ("seed", -1, "at least 0"),
        ("evalops_api_url", "api.evalops.dev", "https://host"),
        ("evalops_api_url", "https://me:pw@h", "EVALOPS_API_KEY"),
    ],
)
def test_wrong_types_and_ranges_are_refused(write, key, value, reason):
    message = refusal(write(**{key: value}))
    assert key in message
    assert reason in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "key", ["max_rounds", "steps_per_round", "batch_size", "max_steps", "warmup_steps", "evaluation.max_tokens"]
)
@pytest.mark.parametrize("value", ["1000000001", "9" * 4000, "9" * 5000, "１２"])
def test_a_count_beyond_any_run_is_refused(write, key, value):
    (line,) = [line for line in refusal(write(), f"{key}={value}").splitlines() if f": {key}: must be " in line]
    assert len(line) < 200


def test_a_whole_number_is_a_number(write):
    assert load_and_validate_config(write(evaluation={"temperature": 1}, min_lr=0)).evaluation.temperature == 1.0


def test_required_keys_and_contradictions_come_in_one_message(write):
    message = refusal(
        write(base_model=..., eval_file=..., min_lr=1e-2, learning_rate=1e-3, batch_size="8", evalops_enabled=True)
    )
    for part in (
        "base_model: is required",
        "neither eval_file nor eval_tasks",
        "min_lr: 0.01 is above learning_rate 0.001",
        "batch_size: must be a whole number",
        "evalops_test_suite_id",
    ):
        assert part in message
    assert len(message.splitlines()) == 5


def test_a_contradiction_that_rests_on_a_faulty_key_is_not_told(write):
    message = refusal(write(learning_rate="high", min_lr=1e-2))
    assert message.count("\n") == 0
    assert "learning_rate: must be a number" in message


def test_text_that_cannot_be_stored_is_refused_without_further_complaint(write):
    message = refusal(write(eval_file="a\0b", notify="\ud800"))
    assert [line.partition(": ")[2][:10] for line in message.splitlines()] == ["eval_file:", "notify: ho"]


def test_the_recommended_rate_replaces_learning_rate(write):
    config = load_and_validate_config(write(use_recommended_lr=True, min_lr=2e-4))
    assert config.min_lr > config.learning_rate
    message = refusal(write(use_recommended_lr=True, min_lr=1e-3))
    assert "min_lr: 0.001 is above the recommended learning rate 0.00047" in message


def test_the_builtin_evaluator_cannot_run_inspect_tasks(write):
    message = refusal(write(eval_tasks=["arc"], evaluation={"evaluator": "simple"}))
    assert "evaluation.evaluator" in message
    assert "cannot run the Inspect tasks" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"trackers": ["wandb"]},
        {"trackers": {"wandb": 1}},
        {"notify": "mail"},
        {"heldout": {"bar": 0.5}},
        {"heldout": {"test_file": "t.jsonl", "guardrails": 3}},
    ],
)
def test_keys_that_nothing_serves_are_refused_rather_than_ignored(write, changes):
    message = refusal(write(**changes))
    assert "not available in this version" in message
    assert len(message.splitlines()) == 1


def test_unserved_keys_at_their_defaults_are_no_fault(write):
    config = load_and_validate_config(write(trackers=[], notify=None, heldout={"bar": None, "guardrails": []}))
    assert config.heldout.guardrails == ()


def test_a_limit_in_money_needs_the_base_models_price(write):
    price = {"prefill": 0.1, "sample": 0.4, "train": 0.5}
    assert "prices for Qwen/Qwen3-8B" in refusal(write(budget={"money": 2}, prices={"other/model": price}))
    config = load_and_validate_config(write(budget={"money": 2}, prices={"Qwen/Qwen3-8B": price}))
    assert config.prices["Qwen/Qwen3-8B"].train == 0.5
    assert "train: is required" in refusal(write(prices={"m": {"prefill": 1, "sample": 1}}))


def test_eval_tasks_are_names_or_objects(write):
    config = load_and_validate_config(
        write(eval_tasks=["arc", {"task": "gsm8k", "weight": 2, "args": {"n": 3}, "threshold": 0.5}])
    )
    assert config.eval_tasks[0] == EvalTask(task="arc")
    assert (config.eval_tasks[1].weight, config.eval_tasks[1].args) == (2.0, {"n": 3})
    assert "named twice" in refusal(write(eval_tasks=["arc", {"task": "arc"}]))
    assert "weights add up to 0" in refusal(write(eval_file=None, eval_tasks=[{"task": "arc", "weight": 0}]))


@pytest.mark.parametrize(
    ("key", "variable"),
    [("api_key", "TINKER"), ("TINKER_API_KEY", "TINKER"), ("evalopsApiKey", "EVALOPS"), ("password", "TINKER")],
)
def test_a_key_that_holds_a_secret_is_answered_with_its_environment_variable(write, key, variable):
    message = refusal(write(**{key: "tml-very-secret"}))
    assert f"set the environment variable {variable}_API_KEY" in message
    assert "very-secret" not in message
    assert "very-secret" not in refusal(write(), f"{key}=tml-very-secret")


def test_secrets_in_the_arguments_of_a_task_are_refused_too(write):
    message = refusal(write(eval_tasks=[{"task": "arc", "args": {"auth_token": "abc123"}}]))
    assert "eval_tasks[0].args.auth_token: a secret" in message
    assert "abc123" not in message


def test_keys_about_tokens_are_no_secrets(write):
    assert load_and_validate_config(write(budget={"tokens": 5}), ["evaluation.max_tokens=9"]).budget.tokens == 5


def test_paths_in_the_file_count_from_its_folder(write, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    path = write(
        base_model="model",
        eval_tasks=["tasks/mine.py@label", "registered_task", {"task": "../up.py"}],
        selection={"pool_file": "pool.jsonl"},
    )
    config = load_and_validate_config(os.path.relpath(path))
    assert Path(config.train_file) == tmp_path / "train.jsonl"
    assert Path(config.base_model) == tmp_path / "model"
    assert config.selection.pool_file == str(tmp_path / "pool.jsonl")
    assert [task.task for task in config.eval_tasks] == [
        f"{tmp_path}/tasks/mine.py@label", "registered_task", f"{tmp_path.parent}/up.py",
    ]  # fmt: skip


def test_paths_in_overrides_count_from_the_working_folder(write, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "model").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    overrides = ["eval_file=e.jsonl", "selection.pool_file=../p.jsonl", "base_model=model", "eval_tasks=[t.py@a]"]
    config = load_and_validate_config(write(), overrides)
    assert config.eval_file == str(elsewhere / "e.jsonl")
    assert config.selection.pool_file == str(tmp_path / "p.jsonl")
    assert config.base_model == str(elsewhere / "model")
    assert config.eval_tasks[0].task == f"{elsewhere}/t.py@a"
    assert config.train_file == str(tmp_path / "train.jsonl")


def test_a_hosted_name_without_such_a_folder_stays_a_name(write):
    assert load_and_validate_config(write()).base_model == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("learning_rate=1e-12", lambda c: c.learning_rate, 1e-12),
        ("learning_rate=.5", lambda c: c.learning_rate, 0.5),
        ("allow_overlap=true", lambda c: c.allow_overlap, True),
        ("eval_tasks=[a,b]", lambda c: [t.task for t in c.eval_tasks], ["a", "b"]),
        ('eval_tasks=["a", "b"]', lambda c: [t.task for t in c.eval_tasks], ["a", "b"]),
        ('eval_tasks=[a,{"task":"b","args":{"x":[1,2]}}]', lambda c: c.eval_tasks[1].args, {"x": [1, 2]}),
        ("eval_tasks=[]", lambda c: c.eval_tasks, ()),
        ("eval_tasks=null", lambda c: c.eval_tasks, ()),
        ("evaluation.max_tokens=32", lambda c: c.evaluation.max_tokens, 32),
        ("decision.patience=null", lambda c: c.decision.patience, None),
        ("evalops_test_suite_id=123", lambda c: c.evalops_test_suite_id, "123"),
        ("renderer_name=null", lambda c: c.renderer_name, None),
        ('renderer_name="null"', lambda c: c.renderer_name, "null"),
        ("renderer_name=a=b", lambda c: c.renderer_name, "a=b"),
        ("evaluation.evaluator=simple", lambda c: c.evaluation.evaluator, "simple"),
        ('prices={"m": {"prefill": 1, "sample": 2, "train": 3}}', lambda c: c.prices["m"].sample, 2.0),
    ],
)
def test_overrides_are_read_by_what_their_key_takes(write, override, read, value):
    config = load_and_validate_config(write(min_lr=0), [override])
    assert read(config) == value


def test_the_last_of_duplicate_overrides_wins(write):
    config = load_and_validate_config(write(seed=1), ["seed=2", "evaluation.max_tokens=3", "seed=4"])
    assert (config.seed, config.evaluation.max_tokens) == (4, 3)


def test_a_group_given_as_an_object_changes_the_keys_it_names(write):
    path = write(evaluation={"max_tokens": 7, "temperature": 0.5})
    config = load_and_validate_config(path, ['evaluation={"max_tokens": 9}'])
    assert (config.evaluation.max_tokens, config.evaluation.temperature) == (9, 0.5)


def test_faulty_overrides_are_told_as_command_line_beside_the_files_faults(write):
    message = refusal(write(lora_rnk=1), "batchsize=4", "evaluation.max_token=4", "seed", "learning_rate=NaN", "=3")
    assert "conf.json:1: lora_rnk" in message
    assert "command line: batchsize: unknown key; did you mean batch_size?" in message
    assert "command line: evaluation.max_token: unknown key; did you mean evaluation.max_tokens?" in message
    assert "command line: 'seed' is not of the form key=value" in message
    assert "command line: learning_rate: must be a finite number" in message
    assert "'=3' is not of the form" in message


@pytest.mark.parametrize("value", ["[a,,b]", "[{x]", '{"task": ', "{task: a}"])
def test_broken_lists_and_objects_in_overrides_are_refused(write, value):
    assert "command line: eval_tasks" in refusal(write(), f"eval_tasks={value}")


def test_an_override_mends_a_fault_of_the_file(write):
    assert load_and_validate_config(write(seed="x"), ["seed=5"]).seed == 5


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ('{"a": 1,\n "b": }', ":2:7:", "not valid JSON"),
        ('{"a": 1} x', ":1:10:", "Extra data"),
        ("", ":1:1:", "not valid JSON"),
        ("[1, 2]", "", "one JSON object"),
        ("null", "", "one JSON object"),
        ("{" + '"a":{' * 100_000, "", "nested too deeply"),
        ('{"seed": ' + "9" * 5000 + "}", ":1", "seed: must be a finite number"),
        ('{"prices": ' + '{"a": ' * 200 + "1" + "}" * 201, ":1", "prices.a: nested too deeply, more than 100"),
    ],
    ids=["value missing", "extra data", "empty", "list", "null", "deep", "long number", "levels"],
)
def test_a_file_that_is_no_json_object_is_told_with_its_place(write, text, place, reason):
    message = refusal(write(text))
    assert f"conf.json{place}" in message
    assert reason in message


def test_keys_written_twice_and_nan_are_told(write):
    rest = '"seed": 1,\n"seed": 2,\n"learning_rate": NaN,\n"evaluation": {"max_errors": 1e999}}'
    message = refusal(write(json.dumps(MINIMAL)[:-1] + ",\n" + rest))
    assert "conf.json:3: seed: written twice, first on line 2" in message
    assert "conf.json:4: learning_rate: must be a finite number" in message
    assert "conf.json:5: evaluation.max_errors: must be a finite number" in message
    assert len(message.splitlines()) == 3


def test_the_same_key_in_two_objects_is_not_a_duplicate(write):
    config = load_and_validate_config(write(eval_tasks=[{"task": "a"}, {"task": "b"}]))
    assert len(config.eval_tasks) == 2


def test_a_byte_order_mark_is_tolerated(write):
    path = write()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_and_validate_config(path).base_model == "Qwen/Qwen3-8B"


def test_a_file_that_is_not_utf8_is_told_with_line_and_byte(write):
    path = write()
    path.write_bytes(b'{\n"base_model": "caf\xe9"}')
    assert "conf.json:2: not UTF-8 (byte 0xe9" in refusal(path)


def test_a_missing_file_and_a_folder_are_told(tmp_path):
    assert "no such configuration file" in refusal(tmp_path / "nowhere.json")
    assert "cannot be read" in refusal(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        load_and_validate_config(tmp_path / "nowhere.json")
    assert caught.value.exit_code == EXIT_USAGE


def test_the_stored_configuration_loads_as_an_equal_one(write, tmp_path):
    price = {"prefill": 0, "sample": 0.5, "train": 1}
    config = load_and_validate_config(
        write(eval_tasks=["x.py@t"], prices={"Qwen/Qwen3-8B": price}, budget={"money": 1}, min_lr=1e-7)
    )
    folder = tmp_path / "runs" / "r1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_json_dict()))
    assert load_and_validate_config(folder / "config.json") == config
    assert load_and_validate_config(folder / "config.json", ["max_rounds=9"]).max_rounds == 9


def test_a_configuration_cannot_be_changed_or_built_wrong():
    config = TrainingConfig(**MINIMAL)
    with pytest.raises(ValidationError):
        config.seed = 1
    with pytest.raises(ValidationError, match="min_lr"):
        TrainingConfig(**MINIMAL, min_lr=1.0)


def test_evalops_needs_its_key_in_the_environment(write):
    config = load_and_validate_config(write(evalops_enabled=True, evalops_test_suite_id="suite"))
    check_environment(config, {"EVALOPS_API_KEY": "k"})
    check_environment(load_and_validate_config(write()), {})
    with pytest.raises(ConfigurationError, match="EVALOPS_API_KEY"):
        check_environment(config, {"EVALOPS_API_KEY": " "})


def test_every_key_is_described_with_a_sentence():
    rows = {key: (kind, default, text) for key, kind, default, text in describe_config()}
    assert len(rows) == len(TrainingConfig.model_fields) - 5 + 7 + 4 + 6 + 3 + 6
    assert all(text.endswith(".") and kind for kind, _, text in rows.values())
    assert rows["base_model"][:2] == ("text", "required")
    assert rows["warmup_steps"][:2] == ("whole number or null", "null")
    assert rows["evaluation.evaluator"][:2] == ("one of inspect, simple", '"inspect"')
    assert rows["learning_rate"][:2] == ("number", "0.0001")


@pytest.mark.parametrize("name", ["eval_loop_config.json", "demo_config.json"])
def test_the_shipped_configurations_are_valid_and_their_files_exist(name):
    config = load_and_validate_config(Path(__file__).parent.parent / name)
    files = [config.train_file, config.eval_file, config.selection.pool_file]
    assert [path for path in files if path is None or not os.path.isfile(path)] == []
    assert config.resolved_warmup_steps < config.planned_steps
