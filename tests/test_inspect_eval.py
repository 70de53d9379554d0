"""Evaluation with Inspect AI: real runs of real task files; only replies that no model would give are scripted."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_sampler import ScriptedSampler, write_rows

import inspect_planning
from data_loader import load_rows
from error_handling import AuthenticationError, ConfigurationError, DataError, EvaluationError, ServiceError
from evaluation import EvaluationResult, SampleResult
from inspect_eval import LABELLED_ROWS, TaskSpec, check_tasks, inspect_available, run_inspect_evaluation
from simple_eval import Sampler, run_simple_evaluation

ROOT = Path(__file__).resolve().parents[1]
TASKS = ROOT / "tests" / "inspect_tasks" / "small_tasks.py"


def small(task: str, /, **more: object) -> TaskSpec:
    return TaskSpec(f"{TASKS}@{task}", **more)  # type: ignore[arg-type]


def right(question: str, epoch: int = 1) -> str:
    return question.replace("question", "answer")


async def run(sampler: Sampler, tmp_path: Path, *specs: TaskSpec, **more: object) -> EvaluationResult:
    settings = {"model_name": "Qwen/Qwen3-8B", "log_dir": tmp_path / "evals", "metadata": {"round": 1}, **more}
    return await run_inspect_evaluation(sampler, specs, **settings)  # type: ignore[arg-type]


# ---- before anything is paid for


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TaskSpec("nowhere/tasks.py@numbers"), r"there is no file .*nowhere/tasks\.py"),
        (TaskSpec(str(TASKS.with_name("no_tasks.py"))), "holds no function decorated with @task"),
        (small("nombers"), r"holds no task 'nombers'; it holds .*numbers"),
        (small("numbers", args={"cuont": 3}), r"unknown argument cuont; it takes count"),
        (small("nothing", args={"x": 1}), r"unknown argument x; it takes no arguments"),
        (small("needs_argument"), "the argument level is not given"),
        (small("nothing"), "is empty"),
        (small("ungraded"), "it has no scorer"),
        (small("doubled"), "has the id 'q000' twice"),
        (small("other_model"), "names a model of its own"),
        (small("broken"), r"could not be built: FileNotFoundError: questions\.csv is gone"),
        (TaskSpec("not_installed_evals/arc"), "the package not_installed_evals is not installed"),
        (TaskSpec("arc_easy"), "neither a file nor registered"),
        (TaskSpec(LABELLED_ROWS), "the argument eval_file is not given"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused_with_its_name(spec: TaskSpec, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_tasks([small("numbers"), spec])
    assert spec.task in str(caught.value)


def test_tasks_that_could_not_be_told_apart_or_weigh_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two evaluation tasks are called 'numbers'"):
        check_tasks([small("numbers"), small("numbers", args={"count": 3})])
    with pytest.raises(ConfigurationError, match="add up to zero"):
        check_tasks([small("numbers", weight=0.0)])
    with pytest.raises(ConfigurationError, match="nothing to measure"):
        check_tasks([])
    named = check_tasks([small("numbers"), small("numbers", args={"count": 3}, name="three")])
    assert [(plan.name, len(plan.keys)) for plan in named] == [("numbers", 10), ("three", 3)]


def test_a_file_s_tasks_share_its_weight_and_paths_may_hold_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my tasks @home [1]"
    folder.mkdir()
    head = "from inspect_ai import Task, task\nfrom inspect_ai.dataset import Sample, json_dataset\n"
    head += "from inspect_ai.scorer import exact\n"
    body = "@task\ndef {}() -> Task:\n    return Task(dataset=json_dataset('rows.jsonl'), scorer=exact())\n"
    (folder / "two.py").write_text(head + body.format("first") + body.format("second"), encoding="utf-8")
    write_rows(folder / "rows.jsonl", [{"input": "q", "target": "a"}])
    before = Path.cwd()
    plans = check_tasks([TaskSpec(str(folder / "two.py"), weight=3.0, threshold=0.5)])
    assert [(plan.name, plan.weight, plan.spec.threshold) for plan in plans] == [
        ("first", 1.5, 0.5),
        ("second", 1.5, 0.5),
    ]
    assert Path.cwd() == before
    monkeypatch.chdir(tmp_path)
    assert check_tasks([TaskSpec("my tasks @home [1]/two.py@second")])[0].keys == (("second", "1", 1),)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def t(:\n    pass\n", "SyntaxError"),
        ("import sys\nfrom inspect_ai import task\n\n\n@task\ndef t():\n    sys.exit(7)\n", "SystemExit: 7"),
    ],
)
def test_a_file_that_does_not_parse_or_ends_the_program_is_a_task_that_cannot_be_built(tmp_path, source, reason):
    path = tmp_path / "odd.py"
    path.write_text(source)
    with pytest.raises(ConfigurationError, match=rf"could not be built: {reason}"):
        check_tasks([TaskSpec(f"{path}@t")])


def test_a_file_that_does_not_even_load_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import not_there_at_all\nfrom inspect_ai import task\n@task\ndef t(): ...\n")
    with pytest.raises(ConfigurationError, match=r"bad\.py@t' could not be built: ModuleNotFoundError"):
        check_tasks([TaskSpec(f"{tmp_path / 'bad.py'}@t")])


def test_a_bad_evaluation_file_is_told_by_its_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "eval.jsonl", [{"input": "q", "target": "a"}, {"nothing": "known"}])
    with pytest.raises(DataError, match=r"eval\.jsonl:2"):
        check_tasks([TaskSpec(LABELLED_ROWS, {"eval_file": str(path)})])


def test_importing_the_evaluators_does_not_import_inspect_and_works_without_it() -> None:
    code = (
        "import sys, inspect_eval, simple_eval\n"
        "assert inspect_eval.inspect_available() and 'inspect_ai' not in sys.modules\n"
        "sys.modules['inspect_ai'] = None\n"
        "sys.meta_path.insert(0, type('Absent', (), {'find_spec': staticmethod(lambda *a: None)}))\n"
        "inspect_eval.labelled_rows\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert inspect_available()


# ---- what an evaluation yields


async def test_right_wrong_and_failed_replies_are_counted_over_all_samples(tmp_path: Path) -> None:
    def script(question: str, epoch: int) -> str | BaseException:
        n = int(question.rsplit(maxsplit=1)[-1])
        return ServiceError("HTTP 503") if n >= 90 else ("no idea" if n >= 80 else right(question))

    sampler, spec = ScriptedSampler(script), small("numbers", args={"count": 100}, threshold=0.7)
    result = await run(sampler, tmp_path, spec, max_errors=0.10)
    assert (result.score, result.n, result.errors) == (0.80, 100, 10)
    assert (result.tasks[0].task, result.tasks[0].threshold) == ("numbers", 0.7)
    assert [sample.id for sample in result.samples] == [f"q{n:03d}" for n in range(100)]
    failed = [sample for sample in result.samples if sample.error]
    assert {(sample.score, sample.output, sample.stop_reason) for sample in failed} == {(0.0, "", "unknown")}
    assert "HTTP 503" in str(failed[0].error)
    with pytest.raises(EvaluationError, match=r"10 of 100 samples of numbers failed.*HTTP 503"):
        await run(ScriptedSampler(script), tmp_path, spec, done=result.samples, max_errors=0.05)


async def test_all_samples_failed_is_no_score(tmp_path: Path) -> None:
    sampler = ScriptedSampler(lambda *_: ServiceError("HTTP 500"))
    delivered: list[SampleResult] = []
    with pytest.raises(EvaluationError, match="10 of 10 samples of numbers failed"):
        await run(sampler, tmp_path, small("numbers"), on_samples=delivered.extend)
    assert [bool(sample.error) for sample in delivered] == [True] * 10


async def test_a_missing_or_unreadable_grade_counts_as_not_correct_and_is_told(tmp_path: Path) -> None:
    values = {"right": "C", "part": 0.25, "none": None, "nan": float("nan"), "word": "GRADE: ?", "no": "no", "n": "1"}
    result = await run(ScriptedSampler(lambda *_: "x"), tmp_path, small("graded", args={"values": values}))
    found = {sample.id: (sample.score, sample.grade_missing) for sample in result.samples}
    assert found == {
        "right": (1.0, False),
        "part": (0.25, False),
        "none": (0.0, True),
        "nan": (0.0, True),
        "word": (0.0, True),
        "no": (0.0, False),
        "n": (1.0, False),
    }
    assert (result.n, result.errors) == (7, 0)
    assert result.score == pytest.approx(2.25 / 7)


async def test_a_grade_outside_zero_to_one_ends_the_evaluation(tmp_path: Path) -> None:
    spec = small("graded", args={"values": {"a": 7.0}})
    with pytest.raises(EvaluationError, match=r"scorer by_question: the score 7 is outside \[0, 1\]"):
        await run(ScriptedSampler(lambda *_: "x"), tmp_path, spec)


async def test_the_named_scorer_counts_and_else_the_first(tmp_path: Path) -> None:
    sampler = ScriptedSampler(lambda *_: "wrong")
    result = await run(
        sampler, tmp_path, small("two_scorers"), small("two_scorers", name="own/strict", scorer="exact", weight=3.0)
    )
    assert {task.task: task.score for task in result.tasks} == {"two_scorers": 1.0, "own/strict": 0.0}
    assert result.score == 0.25


async def test_a_grader_s_failure_is_a_failed_sample(tmp_path: Path) -> None:
    result = await run(ScriptedSampler(right), tmp_path, small("grader_away"), max_errors=0.5)
    assert (result.errors, result.score) == (1, pytest.approx(2 / 3))
    assert "the grader is away" in str(result.samples[1].error)


async def test_stop_reasons_usage_and_category_are_the_true_ones(tmp_path: Path) -> None:
    from inspect_ai.log import read_eval_log

    sampler = ScriptedSampler(lambda question, _: "it is answer 0" if question.endswith("0") else "cut here…")
    result = await run(
        sampler,
        tmp_path,
        small("mentions", category_field="topic"),
        metadata={"round": 3, "checkpoint": "tinker://run/7"},
    )
    assert [sample.stop_reason for sample in result.samples] == ["stop", "max_tokens", "max_tokens", "max_tokens"]
    assert [(s.tokens_in, s.tokens_out) for s in result.samples] == [(2, 4), (2, 2), (2, 2), (2, 2)]
    assert [sample.category for sample in result.samples] == ["even", "odd", "even", "odd"]
    assert (result.samples[0].score, result.metrics["truncated"]) == (1.0, 0.75)
    assert result.samples[0].input == "question 0"
    log = read_eval_log(result.log_paths[0])
    assert log.samples is not None
    assert [sample.output.stop_reason for sample in log.samples] == ["stop", "max_tokens", "max_tokens", "max_tokens"]
    assert log.stats.model_usage["evalloop/Qwen/Qwen3-8B"].total_tokens == 18
    assert (log.eval.metadata or {})["checkpoint"] == "tinker://run/7"
    assert sorted(log.eval.tags or []) == ["checkpoint:tinker://run/7", "round:3"]
    assert (log.eval.model_generate_config.max_tokens, log.eval.model_generate_config.temperature) == (32, 0.0)


async def test_the_run_s_settings_outrank_a_task_s_configuration_but_not_its_solver_s(tmp_path: Path) -> None:
    sampler = ScriptedSampler(lambda question, _: right(question) + "\n\nand more…", temperature=0.0)
    result = await run(sampler, tmp_path, small("brief"))
    assert sampler.settings == [(3, 0.0), (3, 0.0)]
    assert sampler.max_tokens == 32
    assert (result.score, result.samples[0].stop_reason) == (1.0, "stop")


async def test_epochs_are_asked_each_and_combined_as_the_task_says(tmp_path: Path) -> None:
    def script(question: str, epoch: int) -> str:
        return right(question) if epoch == 2 and question != "question 3" else "no"

    sampler = ScriptedSampler(script, temperature=1.0)
    specs = [small("repeated"), small("repeated", name="best", args={"reducer": "max"})]
    result = await run(sampler, tmp_path, *specs)
    assert sorted(sampler.asked[:12]) == [(f"question {n}", epoch) for n in range(4) for epoch in (1, 2, 3)]
    assert {task.task: (task.n, round(task.score, 6)) for task in result.tasks} == {
        "repeated": (4, 0.25),
        "best": (4, 0.75),
    }
    assert [sample.epoch for sample in result.samples[:3]] == [1, 2, 3]


async def test_done_samples_are_not_asked_again_but_failed_ones_are(tmp_path: Path) -> None:
    def script(question: str, epoch: int) -> str | BaseException:
        return ServiceError("HTTP 502") if (question, epoch) == ("question 1", 2) else right(question)

    whole = await run(ScriptedSampler(script), tmp_path, small("repeated"), small("numbers"), max_errors=0.5)
    lost = {("repeated", "q002", 3), ("repeated", "q003", 1), ("numbers", "q004", 1)}
    done = [sample for sample in whole.samples if sample.key not in lost]
    sampler = ScriptedSampler(right)
    delivered: list[SampleResult] = []
    result = await run(sampler, tmp_path, small("repeated"), small("numbers"), done=done, on_samples=delivered.extend)
    assert sorted(sampler.asked) == [("question 1", 2), ("question 2", 3), ("question 3", 1), ("question 4", 1)]
    assert {sample.key for sample in delivered} == {*lost, ("repeated", "q001", 2)}
    assert (result.n, result.errors, result.score) == (14, 0, 1.0)
    assert [sample.key for sample in result.samples] == [sample.key for sample in whole.samples]
    nothing_left = ScriptedSampler({})
    again = await run(nothing_left, tmp_path, small("repeated"), small("numbers"), done=result.samples)
    assert (again.samples, again.log_paths, nothing_left.asked) == (result.samples, (), [])


async def test_a_task_that_asks_something_else_by_now_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    text = (
        "from inspect_ai import Task, task\n"
        "from inspect_ai.dataset import MemoryDataset, Sample\n"
        "from inspect_ai.scorer import exact\n"
        "@task\n"
        "def own():\n"
        "    return Task(dataset=MemoryDataset([Sample(input='QUESTION', target='blue', id=1)]), scorer=exact())\n"
    )
    file.write_text(text.replace("QUESTION", "first"))
    spec = TaskSpec(f"{file}@own")
    digests = {plan.name: plan.digest for plan in check_tasks([spec])}
    sampler = ScriptedSampler(lambda question, _: "blue")
    assert (await run(sampler, tmp_path, spec, digests=digests)).score == 1.0
    asked = len(sampler.asked)
    file.write_text(text.replace("QUESTION", "second"))
    with pytest.raises(EvaluationError, match="questions or answers of own are not those of the run's start"):
        await run(sampler, tmp_path, spec, digests=digests)
    assert len(sampler.asked) == asked


def test_shuffled_choices_are_the_same_question_and_another_answer_is_not() -> None:
    from inspect_ai.dataset import Sample

    def digest(choices: list[str], target: str) -> str:
        return inspect_planning._digest([Sample(input="which", choices=choices, target=target, id=1)])

    assert digest(["red", "blue"], "A") == digest(["blue", "red"], "B")
    assert digest(["red", "blue"], "A") != digest(["red", "blue"], "B")


async def test_results_of_samples_that_are_gone_are_refused(tmp_path: Path) -> None:
    result = await run(ScriptedSampler(right), tmp_path, small("numbers"))
    with pytest.raises(EvaluationError, match="7 samples measured before the interruption are no longer"):
        await run(ScriptedSampler(right), tmp_path, small("numbers", args={"count": 3}), done=result.samples)


async def test_the_same_replies_give_the_same_result_in_the_same_order(tmp_path: Path) -> None:
    delays = iter([0.03, 0.0, 0.02, 0.0, 0.01] * 8)

    class Uneven(ScriptedSampler):
        async def reply(self, messages, *, epoch=1):
            await asyncio.sleep(next(delays))
            return await super().reply(messages, epoch=epoch)

    arrived: list[str] = []
    first = await run(
        Uneven(right),
        tmp_path,
        small("numbers"),
        on_samples=lambda samples: arrived.extend(sample.id for sample in samples),
    )
    second = await run(Uneven(right), tmp_path, small("numbers"), max_connections=1)
    assert [(s.key, s.output, s.score) for s in first.samples] == [(s.key, s.output, s.score) for s in second.samples]
    assert sorted(arrived) == [sample.id for sample in first.samples]
    assert arrived != [sample.id for sample in first.samples]


# ---- what ends an evaluation


@pytest.mark.parametrize("error", [AuthenticationError("wrong key"), KeyError("a bug in our code")])
async def test_a_refused_key_or_a_bug_ends_the_evaluation_at_once(tmp_path: Path, error: Exception) -> None:
    sampler = ScriptedSampler(lambda question, _: error if question == "question 2" else "x", delay_s=0.002)
    delivered: list[SampleResult] = []
    with pytest.raises(type(error)) as caught:
        await run(
            sampler,
            tmp_path,
            small("numbers", args={"count": 60}),
            on_samples=delivered.extend,
            max_connections=2,
            max_errors=1.0,
        )
    assert caught.value is error
    assert len(sampler.asked) < 30
    assert not any(sample.error for sample in delivered)
    after = await run(ScriptedSampler(right), tmp_path, small("numbers"))
    assert after.score == 1.0


async def test_an_error_of_the_receiver_is_not_swallowed(tmp_path: Path) -> None:
    def full(_: object) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        await run(ScriptedSampler(right), tmp_path, small("numbers"), on_samples=full)


async def test_tools_are_refused_clearly(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"offers the model tools \(lookup\)"):
        await run(ScriptedSampler(right), tmp_path, small("uses_tools"), max_errors=1.0)


async def test_cancelling_an_evaluation_cancels_it_and_leaves_room_for_the_next(tmp_path: Path) -> None:
    sampler = ScriptedSampler(right, delay_s=30)
    delivered: list[SampleResult] = []
    running = asyncio.create_task(run(sampler, tmp_path, small("numbers"), on_samples=delivered.extend))
    while not sampler.asked:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sampler.in_flight[0] == 0
    assert delivered == []
    assert (await run(ScriptedSampler(right), tmp_path, small("numbers"))).score == 1.0


async def test_evaluations_started_together_run_one_by_one(tmp_path: Path) -> None:
    samplers = [ScriptedSampler(right), ScriptedSampler(lambda *_: "no")]
    results = await asyncio.gather(*(run(sampler, tmp_path, small("numbers")) for sampler in samplers))
    assert [result.score for result in results] == [1.0, 0.0]


# ---- what it leaves behind


async def test_nothing_is_printed_and_logging_is_left_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level, os.environ.get("XDG_DATA_HOME"))
    await run(ScriptedSampler(right), tmp_path, small("numbers"))
    assert (list(root.handlers), root.level, os.environ.get("XDG_DATA_HOME")) == before
    assert capfd.readouterr() == ("", "")


def test_a_fresh_process_prints_nothing_and_writes_only_into_the_log_folder(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    code = (
        "import asyncio, sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "from pathlib import Path\n"
        "from scripted_sampler import ScriptedSampler\n"
        "from inspect_eval import TaskSpec, run_inspect_evaluation\n"
        f"task = TaskSpec({str(TASKS) + '@numbers'!r})\n"
        "coroutine = run_inspect_evaluation(ScriptedSampler(lambda q, _: q), [task], model_name='m',\n"
        "    log_dir='evals', metadata={})\n"
        "assert asyncio.run(coroutine).n == 10\n"
    )
    env = {**os.environ, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    env = {name: value for name, value in env.items() if not name.startswith(("XDG_", "INSPECT_", "PYTEST_"))}
    done = subprocess.run([sys.executable, "-c", code], cwd=work, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in work.iterdir()] == ["evals"]
    assert list(home.rglob("*")) == []
    assert len(list((work / "evals").glob("*.eval"))) == 1


# ---- our own task


def triage(tmp_path: Path) -> Path:
    labels = ("billing", "bug")
    rows: list[dict[str, object]] = [
        {
            "id": f"r{n:02d}",
            "messages": [
                {"role": "system", "content": "Answer with one label."},
                {"role": "user", "content": f"ticket {n}"},
                {"role": "assistant", "content": labels[n % 2]},
            ],
        }
        for n in range(12)
    ]
    return write_rows(tmp_path / "eval.jsonl", rows)


def vague(question: str, epoch: int) -> str:
    replies = ("billing", "Bug.", "bug, not billing", "it is a bug", "none…", " billing\n")
    return replies[int(question.rsplit(maxsplit=1)[-1]) % 6]


def seen(sample: SampleResult) -> dict[str, object]:
    return {name: value for name, value in sample.to_row().items() if name not in ("seconds", "metadata")}


async def test_both_evaluators_ask_the_same_and_score_the_same(tmp_path: Path) -> None:
    path = triage(tmp_path)
    turns = [("user", "ticket 90"), ("assistant", "Which?"), ("user", "ticket 91"), ("assistant", "bug")]
    dialogue = {"id": "two turns", "messages": [{"role": role, "content": content} for role, content in turns]}
    with path.open("a") as file:
        file.write(json.dumps(dialogue) + "\n")
    by_inspect, by_us = ScriptedSampler(vague), ScriptedSampler(vague)
    spec = TaskSpec(LABELLED_ROWS, {"eval_file": str(path)}, name="eval_file")
    one = await run(by_inspect, tmp_path, spec)
    two = await run_simple_evaluation(by_us, load_rows(path, purpose="eval").rows)
    assert sorted(map(json.dumps, by_inspect.messages)) == sorted(map(json.dumps, by_us.messages))
    assert [seen(sample) for sample in one.samples] == [seen(sample) for sample in two.samples]
    assert (two.samples[-1].input, two.samples[-1].turns) == ("ticket 91", dialogue["messages"][:-1])
    assert (one.score, dict(one.metrics)) == (two.score, dict(two.metrics))
    assert 0.2 < one.score < one.metrics["lenient_score"] < 0.8
    # An evaluation that one of them began can be finished by the other.
    assert (await run(ScriptedSampler({}), tmp_path, spec, done=two.samples)).samples == two.samples


async def test_the_category_field_names_the_category(tmp_path: Path) -> None:
    rows = [{"input": f"q {n}", "target": f"answer {n}", "area": "north" if n else "south"} for n in range(3)]
    path = write_rows(tmp_path / "eval.jsonl", rows)
    spec = TaskSpec(LABELLED_ROWS, {"eval_file": str(path), "category_field": "area"})
    result = await run(ScriptedSampler(lambda *_: "x"), tmp_path, spec)
    assert [sample.category for sample in result.samples] == ["south", "north", "north"]


def test_inspect_s_own_evaluation_finds_and_runs_our_task(tmp_path: Path) -> None:
    # What its command line calls, in a process of its own; there, a mock model would count tokens over the network.
    code = (
        "import sys\n"
        "from inspect_ai import eval\n"
        "from inspect_ai.model import ModelOutput, ModelUsage, get_model\n"
        "said = ModelOutput.from_content('mock', 'It is a bug')\n"
        "said.usage = ModelUsage()\n"
        "model = get_model('mockllm/model', custom_outputs=[said] * 12)\n"
        "(log,) = eval('inspect_eval.py@labelled_rows', model=model, task_args={'eval_file': sys.argv[1]},\n"
        "    log_dir=sys.argv[2], display='none')\n"
        "(score,) = log.results.scores\n"
        "print(log.status, score.name, sorted(score.metrics), score.metrics['accuracy'].value)\n"
        "print(sum(sample.scores['label_match'].metadata['lenient'] for sample in log.samples))\n"
    )
    command = [sys.executable, "-c", code, str(triage(tmp_path)), str(tmp_path / "logs")]
    env = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == ["success label_match ['accuracy', 'stderr'] 0.0", "6.0"]


# ---- on a model


async def test_on_a_trained_model_both_evaluators_see_the_same_replies(tmp_path: Path) -> None:
    import rendering
    from chat_sampler import ChatSampler
    from data_loader import DataLoader
    from tinker_backend import connect, forward_backward_async, optim_step_async, wait_for

    red, blue, green = ("fire", "blood", "rose", "cherry"), ("sky", "sea", "ice", "rain"), ("moss", "leaf", "grass")
    rows = [{"question": f"{word}?", "answer": "red" if word in red else "blue"} for word in (*red, *blue)]
    taught = load_rows(write_rows(tmp_path / "train.jsonl", rows), purpose="train").rows
    # The third answer is not taught, and one of the two that are is always found: some replies are right, not all.
    rows += [{"question": f"{word}?", "answer": "green"} for word in green]
    path = write_rows(tmp_path / "eval.jsonl", rows)
    with connect(tmp_path / "engine", {"TINKER_MOCK": "1"}) as backend:
        chat_format = rendering.get_chat_format("Qwen/Qwen3-8B", backend.get_tokenizer("Qwen/Qwen3-8B"))
        loader = DataLoader(chat_format, max_seq_length=256, train_on_what="last_assistant_turn")
        data = [example.datum for row in taught for example in loader.render(row)]
        client = await backend.create_training_client("Qwen/Qwen3-8B", rank=8, seed=1)
        for _ in range(14):
            step, update = await forward_backward_async(client, data), await optim_step_async(client, 3e-3)
            await wait_for(step, "a step")
            await wait_for(update, "its update")
        saved = await wait_for(client.save_weights_for_sampler("taught"), "the weights")
        weights = await backend.create_sampling_client(model_path=saved.path)
        sampler = ChatSampler(weights, chat_format, max_tokens=8)
        spec = TaskSpec(LABELLED_ROWS, {"eval_file": str(path)}, name="eval_file")
        one = await run(sampler, tmp_path, spec)
        two = await run_simple_evaluation(sampler, load_rows(path, purpose="eval").rows)
    assert [seen(sample) for sample in one.samples] == [seen(sample) for sample in two.samples]
    assert one.errors == two.errors == 0
    assert 0.2 <= one.score == two.score <= 0.8
    assert all(sample.tokens_in > 0 for sample in one.samples)
