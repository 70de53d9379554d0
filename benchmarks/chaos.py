"""Kill runs of the loop at any moment, resume them, and compare each with one run that was never interrupted.

    python benchmarks/chaos.py --kills 200                    # a few seconds a kill
    python benchmarks/chaos.py --kills 200 --folder chaos     # the same again goes on where it was interrupted

Each run is killed by SIGKILL several times: at a named moment (`killed_runs` has them), shortly after one, or at any
time; some by way of the plain command line. In the end its decisions, learning rates, losses, rows, scores, samples,
summary and exit code must be those of the unbroken run, its adapters and optimizers bit for bit, and its folder
well-formed. A kill counts once a step of round 1 was submitted. Every run is a line of `results.jsonl` in the folder;
the folder of a run that differs is kept. The exit code is 0 when no run differs and every phase had its kills.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import killed_runs  # noqa: E402
from benchmarks.killed_runs import Aim, Attempt  # noqa: E402

THINGS = (
    "apple moss coal rust slate bone sand clay fern plum wine jade lead milk tar sky brick chalk straw ink rose ivy"
)
SMALL = {
    "base_model": "Qwen/Qwen3-8B",
    "train_file": "train.jsonl",
    "allow_overlap": True,
    "lora_rank": 8,
    "learning_rate": 4e-3,
    "lr_decay": 0.9,
    "warmup_steps": 2,
    "batch_size": 6,
    "steps_per_round": 5,
    "max_rounds": 3,
    "save_every": 2,
    "seed": 1,
}
# The rule behind the training rows is learned in two rounds, and the first one learns the commoner label alone. Where
# the evaluation asks for that label, round 2 is therefore worse than round 1 beyond noise.
ALWAYS_RED = {"eval_file": "always_red.jsonl", "eval_threshold": 1.0, "decision": {"target_rule": "lower_bound"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "goes back": {
        **ALWAYS_RED,
        "evaluation": {"evaluator": "simple", "max_tokens": 2},
        "selection": {"strategy": "none"},
    },
    "meets the target": {
        "eval_file": "eval.jsonl",
        "eval_threshold": 0.9,
        "evaluation": {"evaluator": "simple", "max_tokens": 2, "category_field": "label"},
        "selection": {"pool_file": "pool.jsonl"},
    },
    "goes back, by Inspect": {
        **ALWAYS_RED,
        "evaluation": {"evaluator": "inspect", "max_tokens": 2},
        "selection": {"strategy": "none"},
    },
}

# Moments to aim at, by what they are in the midst of, and up to how many seconds after them (None: exactly there).
AIMS: dict[str, tuple[tuple[str, float | None], ...]] = {
    "training": (
        ("ask forward_backward", None),
        ("answered forward_backward", 0.1),
        ("ask optim_step", None),
        ("answered optim_step", None),
        ("answered optim_step", 0.1),
        ("append metrics.jsonl", None),
    ),
    "saving": (
        ("ask save_weights*", None),
        ("answered save_weights*", 0.05),
        ("write engine/*weights/.tmp/*.safetensors", None),
        ("replace engine/*weights/.tmp/checkpoint.json", None),
        ("replace engine/*weights/round_*", None),
        ("sync engine/*weights", None),
        ("append checkpoints.jsonl", None),
        ("append checkpoints.jsonl", 0.05),
    ),
    "evaluation": (
        ("ask create_sampling_session", None),
        ("ask asample", None),
        ("answered asample", 0.1),
        ("append samples/*", None),
        ("append samples/*", 0.1),
        ("replace likelihood/*", None),
    ),
    "file replacement": (
        ("write *.tmp", None),
        ("write *.tmp", 0.01),
        ("replace *", None),
        ("sync ", None),
        ("write .summary.json.tmp", 0.01),
        ("write plots/*", 0.01),
        ("replace report.html", None),
        ("replace engine/sessions/*", None),
        ("replace engine/*run.json", None),
    ),
    "between phases": (("write .state.json.tmp", 0.1), ("replace selection/*", 0.05), ("replace state.json", 0.05)),
    "any time": (),
}
FIRST_STEP = (("replace selection/round_01.jsonl", 1), ("ask optim_step", 1))
COUNTED = ("training", "saving", "evaluation", "file replacement")
AT_LEAST = 15
"""Kills that each of these phases needs, of 200."""


@dataclass(frozen=True)
class Reference:
    """An unbroken run in `run`: its outcome, its exit code, the moments it passed, the seconds it took, and how many
    samples a round's evaluation has."""

    config: Path
    run: Path
    outcome: dict[str, Any]
    code: int
    moments: tuple[str, ...]
    seconds: float
    samples: int


@dataclass
class Kill:
    """One kill: the moment aimed at, the phase it hit, and whether a step had been submitted before."""

    aim: str
    phase: str
    counted: bool


def write_inputs(folder: Path) -> dict[str, Path]:
    """Write data and configurations into `folder`; returns the configurations' paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(("Blue", "Red", "Red")[n % 3], name) for n, name in enumerate(f"{THINGS} ivy mint smoke".split())]
    asked = [{"question": f"{colour} thing: {name}?", "answer": colour.lower()} for colour, name in rows]
    files = {
        "train.jsonl": asked,
        "always_red.jsonl": [{**row, "answer": "red"} for row in asked],
        "eval.jsonl": [{**row, "label": row["answer"]} for row in asked[:18]],
        "pool.jsonl": [{**row, "question": f"Colour? {row['question']}"} for row in asked],
    }
    for name, lines in files.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    paths = {}
    for number, (name, changes) in enumerate(CONFIGS.items()):
        config = {**SMALL, **changes}
        for key in ("train_file", "eval_file"):
            config[key] = str(folder / config[key])
        if "pool_file" in config["selection"]:
            config["selection"] = {"pool_file": str(folder / config["selection"]["pool_file"])}
        paths[name] = folder / f"config_{number}.json"
        paths[name].write_text(json.dumps(config, indent=2), "utf-8")
    return paths


def reference_run(config: Path, runs_dir: Path) -> Reference:
    """Run `config` to its end without an interruption."""
    killed_runs.start_fork_server()
    attempt = killed_runs.one_attempt(["--config", str(config), "--runs-dir", str(runs_dir)], runs_dir)
    run = killed_runs.run_folder(runs_dir)
    if run is None or attempt.code not in (0, 3):
        raise RuntimeError(f"the unbroken run ended with exit code {attempt.code}:\n{attempt.output[-3000:]}")
    wrong = killed_runs.faults(run, kills=0)
    if wrong:
        raise RuntimeError("the unbroken run is not as it should be:\n  " + "\n  ".join(wrong))
    outcome = killed_runs.outcome(run)
    samples = len(outcome["samples/round_00.jsonl"])
    return Reference(config, run, outcome, attempt.code, attempt.moments, attempt.seconds, samples)


def draw_aim(chance: random.Random, reference: Reference, kills: int, *, fresh: bool) -> tuple[str, Aim]:
    """What to aim at next, in words and as an `Aim`, in a run that is to be killed `kills` times."""
    before = FIRST_STEP if fresh and chance.random() < 0.9 else ()
    group = chance.choice([name for name in AIMS for _ in range(1 if name in ("between phases", "any time") else 2)])
    if group == "any time":
        delay = round(chance.uniform(0.0, 1.5 * reference.seconds / kills), 3)
        return f"{delay} s after {'the first step' if before else 'the start'}", Aim(before, delay)
    pattern, longest = chance.choice(AIMS[group])
    times = sum(fnmatchcase(moment, pattern) for moment in reference.moments)
    count = 1 + int(chance.random() * max(1, times // kills))
    exact = f"{pattern} number {count}{' after the first step' if before else ''}"
    if longest is None:
        return exact, Aim((*before, (pattern, count)), None)
    delay = round(chance.uniform(0.0, longest), 4)
    return f"{delay} s after {exact}", Aim((*before, (pattern, count)), delay)


def killed_run(
    reference: Reference,
    runs_dir: Path,
    chance: random.Random,
    *,
    kills: int,
    plain: Literal["no", "last", "all"] = "no",
) -> dict[str, Any]:
    """Run the reference's configuration with up to `kills` kills, then to its end, and compare.

    `plain` says which processes are the shell's own, in a fresh interpreter: none, the last one, which ends the run,
    or all, whose kills then come at any time.
    """
    started = time.monotonic()
    shutil.rmtree(runs_dir, ignore_errors=True)
    made: list[Kill] = []
    wrong: list[str] = []
    while True:
        run = killed_runs.run_folder(runs_dir)
        words = ["--resume", str(run)] if run else ["--config", str(reference.config), "--runs-dir", str(runs_dir)]
        known = killed_runs.answered(run) if run else 0
        left = killed_runs.traces(run) if run else frozenset()
        told = ""
        if plain == "all" or (plain == "last" and len(made) == kills):
            delay = round(chance.uniform(0.0, reference.seconds), 3) if len(made) < kills else None
            told = f"{delay} s after the plain command line took the run up"
            attempt = killed_runs.plain_attempt(words, runs_dir, delay)
        else:
            aim = None
            if len(made) < kills:
                told, aim = draw_aim(chance, reference, kills, fresh=run is None)
            attempt = killed_runs.one_attempt(words, runs_dir, aim)
        run = killed_runs.run_folder(runs_dir)
        if run is not None:
            wrong += asked_too_often(attempt, run, known, reference.samples)
        if not attempt.killed:
            break
        if run is None:  # killed before there was a run: nothing to resume
            shutil.rmtree(runs_dir, ignore_errors=True)
            made.append(Kill(told, "before the run", counted=False))
            continue
        phase = killed_runs.phase_of_kill(run, attempt.at, killed_runs.traces(run) - left)
        made.append(Kill(told, phase, counted=step_was_submitted(attempt, run)))
    if attempt.code != reference.code:
        wrong.append(f"exit code {attempt.code}, {reference.code} expected: {attempt.output[-1500:]}")
    else:
        assert run is not None
        wrong += killed_runs.faults(run, len(made))
        wrong += killed_runs.differences(reference.outcome, killed_runs.outcome(run))
    if not wrong:
        shutil.rmtree(runs_dir, ignore_errors=True)
    return {
        "kills": [asdict(kill) for kill in made],
        "differences": wrong,
        "seconds": round(time.monotonic() - started, 1),
    }


def step_was_submitted(attempt: Attempt, run: Path) -> bool:
    """Whether a step of round 1 was submitted, by this process or an earlier one."""
    chosen, submitted = (moment for moment, _ in FIRST_STEP)
    here = attempt.moments[attempt.moments.index(chosen) :] if chosen in attempt.moments else ()
    return submitted in here or killed_runs.has_trained(run)


def asked_too_often(attempt: Attempt, run: Path, known: int, samples: int) -> list[str]:
    """A complaint when a process asked more samples than were unanswered in the rounds it came to.

    One more is asked by a process that finds saved weights, to see whether the server still has them.
    """
    asked = sum(moment == "ask asample" for moment in attempt.moments)
    rounds = json.loads((run / "state.json").read_text("utf-8"))["round"] + 1
    unanswered = rounds * samples - known
    if asked > unanswered + 1:
        return [f"{asked} samples were asked where {unanswered} were unanswered in rounds 0 to {rounds - 1}"]
    return []


def chaos(folder: Path, kills: int, seed: int, only: str | None = None) -> Iterator[dict[str, Any]]:
    """Kill runs until `kills` kills counted; yields each run's result, those of an earlier call first.

    `only` names the one kind of run to make, else all of `CONFIGS` take turns.
    """
    results = folder / "results.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    earlier = [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.exists() else []
    done = {row["run"]: row for row in earlier if row["seed"] == seed}
    configs = write_inputs(folder / "inputs")
    references: dict[str, Reference] = {}
    counted = number = 0
    while counted < kills:
        if number not in done:
            chance = random.Random(f"{seed}:{number}")
            name = only or list(configs)[2 if number % 6 == 5 else number % 2]
            plain: Literal["no", "last", "all"] = "all" if number % 8 == 7 else "last" if number % 4 == 0 else "no"
            if name not in references:
                where = folder / f"reference_{list(configs).index(name)}"
                shutil.rmtree(where, ignore_errors=True)
                references[name] = reference_run(configs[name], where)
            wanted = chance.randint(2, 3) if plain == "all" else chance.randint(4, 8)
            outcome = killed_run(references[name], folder / f"run_{number}", chance, kills=wanted, plain=plain)
            done[number] = {"run": number, "seed": seed, "config": name, "plain": plain, **outcome}
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[number]) + "\n")
        counted += sum(kill["counted"] for kill in done[number]["kills"])
        yield done[number]
        number += 1


def main() -> int:
    """Kill as often as was asked for, and print the tally."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="kills after the first step (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the plan of kills (default 0)")
    parser.add_argument("--only", choices=list(CONFIGS), help="the one kind of run to make (default: all take turns)")
    parser.add_argument("--folder", type=Path, help="where runs and results are kept (default: a new temporary folder)")
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))).resolve()
    print(f"runs and results are in {folder}", flush=True)
    tally: Counter[str] = Counter()
    runs = differing = uncounted = 0
    seconds = 0.0
    for result in chaos(folder, args.kills, args.seed, args.only):
        tally.update(kill["phase"] for kill in result["kills"] if kill["counted"])
        uncounted += sum(not kill["counted"] for kill in result["kills"])
        runs += 1
        seconds += result["seconds"]
        differing += bool(result["differences"])
        for line in result["differences"]:
            print(f"run {result['run']} ({result['config']}): {line}")
        if result["differences"]:
            print("  kills: " + "; ".join(f"{kill['aim']} ({kill['phase']})" for kill in result["kills"]))
            print(f"  kept: {folder / 'run_'}{result['run']}")
        made = ", ".join(f"{tally[phase]} {phase}" for phase in (*COUNTED, "between phases"))
        print(f"{runs} runs, {tally.total()} kills: {made}", flush=True)
    print(
        f"{tally.total()} kills after the first step ({uncounted} before it) in {runs} runs, {differing} of them "
        f"different from the unbroken run; {seconds / max(1, tally.total() + uncounted):.1f} s a kill"
    )
    enough = all(tally[phase] >= args.kills * AT_LEAST // 200 for phase in COUNTED)
    if not enough:
        print(f"each of {', '.join(COUNTED)} needs {args.kills * AT_LEAST // 200}")
    return 0 if enough and not differing else 1


if __name__ == "__main__":
    sys.exit(main())
