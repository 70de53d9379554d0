"""Fine-tune a model until its evaluation says it is good enough.

    python trainer_with_eval.py --config eval_loop_config.json learning_rate=2e-4
    python trainer_with_eval.py --config eval_loop_config.json --dry-run
    python trainer_with_eval.py --config eval_loop_config.json --tune 12
    python trainer_with_eval.py --resume

Measure the base model; then select rows, train a round, checkpoint, evaluate, submit and decide, until the target is
met or the rounds, the patience or the budget are spent. Kill it anywhere; `--resume` goes on from the last completed
phase. Exit codes: 0 target met, 1 failed, 2 bad usage, configuration or data, 3 finished below the target,
130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from error_handling import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    CheckpointError,
    EvalLoopError,
    InterruptedRunError,
    NoEffectError,
    TrainingError,
)

if TYPE_CHECKING:
    from types import FrameType

    from checkpoint_manager import CheckpointManager
    from config_schema import TrainingConfig
    from preparation import Prepared
    from tinker_backend import Backend
    from training_run import TrainingRun

DEFAULT_RUNS_DIR = "runs"


def build_parser() -> argparse.ArgumentParser:
    """The command line of the loop; words with `=` are taken out before it sees them."""
    parser = argparse.ArgumentParser(
        prog="trainer_with_eval.py",
        description="Fine-tune with LoRA on Tinker, evaluate after every round, stop at the target.",
        epilog="key=value arguments override the configuration: learning_rate=2e-4 evaluation.max_tokens=64. "
        "Set TINKER_API_KEY for the hosted service, or TINKER_MOCK=1 for the local engine.",
    )
    parser.add_argument("--config", metavar="FILE", help="the configuration, a JSON object")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue the newest run, or the named one, from its last completed phase",
    )
    parser.add_argument(
        "--runs-dir", default=DEFAULT_RUNS_DIR, metavar="DIR", help="where run folders are (default: %(default)s)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check configuration, data, tasks and model, show the plan, and stop"
    )
    parser.add_argument(
        "--tune",
        type=positive,
        metavar="N",
        help="search learning rate and LoRA rank over N short runs, and write the best configuration",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    return parser


def positive(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")


async def loop(run: TrainingRun) -> dict[str, Any]:
    """The loop itself. Every phase is a no-op when an earlier process completed it."""
    await run.send_kept()
    while (round := run.next_round()) is not None:
        run.check_stop()
        if round == 0:
            await run.baseline()
        elif await run.begin(round):
            await run.select(round)
            run.check_stop()
            await run.train(round)
            await run.checkpoint(round)
            run.check_stop()
            await run.evaluate(round)
        else:
            continue
        await run.submit(round)
        run.decide(round)
    return await run.finish()


async def run_loop(
    config: TrainingConfig | None,
    *,
    runs_dir: Path | str = DEFAULT_RUNS_DIR,
    resume: str | None = None,
    dry_run: bool = False,
    command: str = "",
    console: bool = True,
) -> dict[str, Any]:
    """Run the loop to its end and return the summary (the content of `summary.json`; empty for a dry run).

    `resume` continues a run: "" the newest in `runs_dir`, else its name or path; `config` may then be None, and when it
    is given it must be the run's own but for limits that may be raised. Raises `EvalLoopError`s; the run folder says
    `interrupted` or `failed` then, and can be resumed.
    """
    import cost_estimate
    import run_opening
    import tinker_backend
    from checkpoint_manager import CheckpointManager, resolve_run
    from logger import StructuredLogger
    from preparation import prepare

    screen = StructuredLogger(None, console=console)
    if resume is not None:
        with CheckpointManager.open(resolve_run(runs_dir, resume or None), command=command) as folder:
            reopening = run_opening.reopen(folder, config)
            if reopening.config is None:
                return run_opening.tell_finished(folder, reopening.obstacle, screen, send=not dry_run)
            # A run killed early may not have the adapter that it starts from in its engine yet.
            with tinker_backend.connect(
                folder.engine_dir, adopt=reopening.config.init_from, adopt_from=folder.run_dir.parent
            ) as backend:
                warmup_steps = folder.load_state().get("hparams", {}).get("warmup_steps")
                prepared = prepare(reopening.config, backend, warmup_steps=warmup_steps)
                run_opening.refuse_changed_inputs(folder, prepared)
                run_opening.show_plan(prepared, screen)
                if reopening.obstacle:
                    screen.warn(f"the changed settings are left out: {reopening.obstacle}")
                if not folder.is_done(0, "baseline"):
                    cost_estimate.refuse_over_budget("the baseline", prepared.estimate.baseline, prepared.config)
                if dry_run:
                    screen.say("dry run: the run can go on as planned; nothing was changed")
                    return {}
                await asyncio.sleep(0)  # a Ctrl-C during the checks takes effect here, before anything is written
                run_opening.take_over(folder, reopening, prepared, command)
                return await to_the_end(prepared, folder, backend, console=console)

    assert config is not None, "run_loop needs a configuration unless it resumes"
    open_for_checks = tinker_backend.connect_if_possible if dry_run else tinker_backend.connect
    with open_for_checks(adopt=config.init_from, adopt_from=runs_dir) as backend:
        prepared = prepare(config, backend)
    run_opening.show_plan(prepared, screen)
    cost_estimate.refuse_over_budget("the baseline", prepared.estimate.baseline, config)
    await asyncio.sleep(0)  # a Ctrl-C during the checks takes effect here, before there is a run
    if dry_run:
        screen.say("dry run: all of this was checked; nothing was trained, sampled or saved")
        return {}
    with (
        run_opening.create_run_folder(prepared, runs_dir, command) as folder,
        tinker_backend.connect(folder.engine_dir, adopt=config.init_from, adopt_from=runs_dir) as backend,
    ):
        return await to_the_end(prepared, folder, backend, console=console)


async def tune(
    config: TrainingConfig | None,
    *,
    trials: int | None = None,
    runs_dir: Path | str = DEFAULT_RUNS_DIR,
    resume: str | None = None,
    dry_run: bool = False,
    command: str = "",
    console: bool = True,
) -> dict[str, Any]:
    """Search learning rate and rank over `trials` short runs; see `hyperparameter_search.search`."""
    import hyperparameter_search

    def run_trial(search_dir: Path) -> hyperparameter_search.RunTrial:
        return partial(to_the_end, console=console, resume_from=search_dir)

    return await hyperparameter_search.search(
        config,
        run_trial,
        trials=trials,
        runs_dir=runs_dir,
        resume=resume,
        dry_run=dry_run,
        command=command,
        console=console,
    )


async def to_the_end(
    prepared: Prepared,
    folder: CheckpointManager,
    backend: Backend,
    *,
    console: bool,
    resume_from: Path | None = None,
) -> dict[str, Any]:
    """Work on an open run until it is finished, leaving its state true whatever ends it.

    `resume_from` is what a person resumes when it is interrupted (default: the run's own folder).
    """
    import run_opening
    from durable_files import StorageError
    from logger import StructuredLogger
    from training_run import TrainingRun

    log = StructuredLogger(folder.metrics_path, console=console)
    for note in folder.notes:
        log.warn(note)
    folder.on_note = log.warn
    log.say(f"run {folder.run_id}")
    resume_command = shlex.join([sys.executable, sys.argv[0], "--resume", str(resume_from or folder.run_dir)])
    if backend.kind == "embedded":
        resume_command = f"TINKER_MOCK=1 {resume_command}"
    run: TrainingRun | None = None

    def leave(status: str, error: str | None = None) -> None:
        # The disk may be what ends the run; without these notes it reads as interrupted.
        with contextlib.suppress(StorageError):
            run_opening.record_interruption(folder, status, run.wall_seconds() if run else None)
            if error is not None:
                log.event("failed", error=error)

    try:
        with stop_on_signals(resume_command) as stop:
            run = TrainingRun(prepared, folder, backend, log, stop)
            keeping_time = asyncio.create_task(run.keep_time())
            try:
                summary = await loop(run)
            finally:
                keeping_time.cancel()
    except InterruptedRunError as err:
        leave("interrupted")
        raise InterruptedRunError(f"{err}. Continue with: {resume_command}") from err
    except EvalLoopError as err:
        leave("failed", str(err))
        if not isinstance(err, TrainingError | CheckpointError | NoEffectError):
            tell(f"Everything finished so far is kept. Continue with: {resume_command}")
        raise
    run_opening.tell_outcome(folder, summary, log)
    return summary


@contextlib.contextmanager
def stop_on_signals(resume_command: str) -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one leaves at once."""
    stop = asyncio.Event()
    running = asyncio.get_running_loop()
    asked = False

    # Not the loop's own handlers: those wait while Python computes, and the second Ctrl-C must not.
    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            _tell_at_once(f"leaving at once. Continue with: {resume_command}")
            os._exit(EXIT_INTERRUPTED)
        asked = True
        _tell_at_once("stopping: finishing what is in flight (again to leave at once)")
        running.call_soon_threadsafe(stop.set)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask_to_stop)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell_at_once(text: str) -> None:
    """Write a line to standard error from a signal handler, which may have interrupted another write to it."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def tell(text: str) -> None:
    """Write a line to standard error; nobody may be reading it any more."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def load_config(args: argparse.Namespace, overrides: Sequence[str]) -> TrainingConfig | None:
    """The configuration that the command line names; None for a resume that names none."""
    import config_schema
    from error_handling import ConfigurationError

    path = args.config
    if path is None and args.resume is None:
        raise ConfigurationError("--config FILE is needed (or --resume to continue a run); see --help")
    if path is None and overrides:
        path = str(resumed_folder(args) / "config.json")
    if path is None:
        return None
    config = config_schema.load_and_validate_config(path, overrides)
    config_schema.check_environment(config, os.environ)
    return config


def resumed_folder(args: argparse.Namespace) -> Path:
    """The folder of the run, or of the search, that the command line resumes."""
    if is_tuning(args):
        from search_folder import resolve_search

        return resolve_search(args.runs_dir, args.resume)
    from checkpoint_manager import resolve_run

    return resolve_run(args.runs_dir, args.resume or None)


def is_tuning(args: argparse.Namespace) -> bool:
    """Whether the command line is about a search: it says so, or resumes the folder of one."""
    if args.tune is not None or not args.resume:
        return args.tune is not None
    from search_folder import is_search

    return is_search(Path(args.runs_dir, args.resume)) or is_search(Path(args.resume))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Only a bug shows a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    # A word with "=" is an override, also after --resume, which takes a word or none; --config and --runs-dir always
    # take the next one.
    overrides = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if "=" in word and not word.startswith("-") and before not in ("--config", "--runs-dir", "--tune")
    ]
    args = build_parser().parse_args([word for word in words if word not in overrides])
    if args.overrides:
        tell(f"error: {args.overrides[0]!r} is neither an option nor key=value; see --help")
        return EXIT_USAGE
    try:
        from base_models import share_cache_dir
        from logger import redact, show_library_logs, visible

        share_cache_dir()
        show_library_logs()
        config = load_config(args, overrides)
        work = partial(tune, trials=args.tune) if is_tuning(args) else run_loop
        summary = asyncio.run(
            work(
                config,
                runs_dir=args.runs_dir,
                resume=args.resume,
                dry_run=args.dry_run,
                command=" ".join([sys.executable, *sys.argv]),
            )
        )
        return int(summary.get("exit_code", 0))
    except EvalLoopError as err:
        prefix = "" if err.exit_code == EXIT_INTERRUPTED else "error: "
        tell(f"{prefix}{redact(visible(str(err)))}")
        return err.exit_code
    except ModuleNotFoundError as err:
        requirements = Path(__file__).with_name("requirements.txt")
        tell(
            f"error: the package {err.name!r} is not installed for {sys.executable}. Install what is needed with "
            f"python -m pip install -r {requirements}, or use the environment that run_demo.sh made: "
            ".venv/bin/python"
        )
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as err:
        tell(f"error: {redact(visible(str(err)))}")
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
