"""tinker-cookbook's own programs, unmodified, against the local engine: what was run, and what came out.

    python benchmarks/clients/run.py                    # all of them, some minutes
    python benchmarks/clients/run.py sl_loop rl         # some; `--help` lists them
    python benchmarks/clients/run.py --folder kept      # keep logs and checkpoints in ./kept

The engine is started as a process of its own and serves the small stand-in model under the name `Qwen/Qwen3-8B`. Each
client is a process too, which knows of the engine only `TINKER_BASE_URL` and a key. Tokenizers and data sets, which
these programs load from a hub, are laid out for them in the working folder. The exit code is 1 when a client fails or
does not learn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = "Qwen/Qwen3-8B"
RENDERER = "qwen3_disable_thinking"
API_KEY = "tml-local"
CLIENT_LIMIT_S = 1800.0


class ClientError(Exception):
    """A client's process failed or did not end; the message holds the end of its output."""


@dataclass(frozen=True)
class Outcome:
    """What came out of a client, in words, and whether that shows that the model learned."""

    text: str
    learned: bool


@dataclass(frozen=True)
class Workplace:
    """The folder that clients run in, and the engine that they talk to."""

    folder: Path
    base_url: str

    def run(self, name: str, *command: str, until: Path | None = None) -> str:
        """Run `python *command` in the folder and return its output, which is also written to `<name>.log`.

        With `until` the process is killed as soon as that file holds a line. Raises `ClientError`.
        """

        def reached() -> bool:
            return until is not None and until.exists() and "\n" in until.read_text(encoding="utf-8")

        shown = [argument.replace(str(HERE), HERE.relative_to(ROOT).as_posix()) for argument in command]
        print(f"  $ python {shlex.join(shown)}", flush=True)
        log = self.folder / f"{name}.log"
        deadline = time.monotonic() + CLIENT_LIMIT_S
        with log.open("w", encoding="utf-8") as output:
            client = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=client_environment(self.folder, self.base_url),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                while client.poll() is None and not reached() and time.monotonic() < deadline:
                    time.sleep(0.05)
                ended = client.poll() is not None
            finally:
                client.kill()
                code = client.wait()
        text = log.read_text(encoding="utf-8", errors="replace")
        if ended and code != 0:
            raise ClientError(f"ended with {code}:\n{_tail(text)}")
        if not ended and not reached():
            raise ClientError(f"did not end within {CLIENT_LIMIT_S:.0f} s:\n{_tail(text)}")
        return text

    def rows(self, name: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """The rows of a JSON-lines file that a client wrote to its log folder."""
        return [json.loads(line) for line in (self.folder / name / file).read_text(encoding="utf-8").splitlines()]


def sl_loop(place: Workplace) -> Outcome:
    """recipes/sl_loop.py: supervised training in a flat loop."""
    place.run(
        "sl_loop",
        *("-m", "tinker_cookbook.recipes.sl_loop", f"model_name={MODEL}", "log_path=sl_loop"),
        *("batch_size=16", "learning_rate=2e-3", "train_on_what=LAST_ASSISTANT_MESSAGE"),
    )
    return _fall(place.rows("sl_loop"), "train_mean_nll")


def chat_sl(place: Workplace) -> Outcome:
    """recipes/chat_sl/train.py on a local file; killed at its first checkpoint, then started again."""
    command = [
        *("-m", "tinker_cookbook.recipes.chat_sl.train", "dataset=tickets.jsonl", f"model_name={MODEL}"),
        *(f"renderer_name={RENDERER}", "log_path=chat_sl", "behavior_if_log_dir_exists=resume"),
        *("batch_size=16", "learning_rate=2e-3", "num_epochs=2", "save_every=10"),
    ]
    place.run("chat_sl-killed", *command, until=place.folder / "chat_sl" / "checkpoints.jsonl")
    output = place.run("chat_sl", *command)
    resumed = re.search(r"Resumed training from tinker://\S+/weights/(\w+)", output)
    outcome = _fall(place.rows("chat_sl"), "train_mean_nll")
    if resumed is None:
        return Outcome(f"{outcome.text}; it did not resume", learned=False)
    return Outcome(f"{outcome.text}; killed, then resumed from checkpoint {resumed.group(1)}", outcome.learned)


def supervised(place: Workplace) -> Outcome:
    """supervised/train.py with the Inspect evaluator between its steps."""
    place.run("supervised", str(HERE / "sft_quiz.py"), "log_path=supervised")
    rows = place.rows("supervised")
    outcome = _fall(rows, "train_mean_nll")
    scores = [row["quiz/mean"] for row in rows if "quiz/mean" in row]
    return Outcome(
        f"{outcome.text}; Inspect's score {' -> '.join(f'{score:.2f}' for score in scores)}",
        outcome.learned and scores[-1] > scores[0],
    )


def rl(place: Workplace) -> Outcome:
    """rl/train.py on an environment of our own."""
    place.run("rl", str(HERE / "rl_one_word.py"), "log_path=rl")
    rows = place.rows("rl")
    rewards = [row["env/all/reward/total"] for row in rows]
    drift = max(abs(row["optim/kl_sample_train_v2"]) for row in rows)
    text = f"{len(rows)} iterations: mean reward {rewards[0]:.2f} -> {rewards[-1]:.2f}"
    return Outcome(
        f"{text}; KL between the sampler's logprobs and training's at most {drift:.0e}",
        rewards[-1] > rewards[0] + 0.3 and drift < 1e-6,
    )


def dpo(place: Workplace) -> Outcome:
    """recipes/preference/dpo/train.py: training on pairs of a preferred and a rejected reply."""
    place.run(
        "dpo",
        *("-m", "tinker_cookbook.recipes.preference.dpo.train", "dataset=hhh", f"model_name={MODEL}"),
        *(f"renderer_name={RENDERER}", "log_path=dpo", "batch_size=8", "learning_rate=1e-3"),
    )
    rows = place.rows("dpo")
    outcome = _fall(rows, "dpo_loss")
    return Outcome(f"{outcome.text}; preferred reply ahead in {rows[-1]['accuracy']:.0%}", outcome.learned)


def inspect(place: Workplace) -> Outcome:
    """eval/run_inspect_evals.py on the base model and on what `supervised` trained."""
    if not (place.folder / "supervised").exists():
        supervised(place)
    trained = place.rows("supervised", "checkpoints.jsonl")[-1]["sampler_path"]
    scores = []
    for name, model in (("base", f"model_name={MODEL}"), ("trained", f"model_path={trained}")):
        output = place.run(
            f"inspect-{name}",
            *("-m", "tinker_cookbook.eval.run_inspect_evals", f"tasks={HERE / 'quiz_task.py'}@quiz", model),
            *(f"renderer_name={RENDERER}", "temperature=0", "max_tokens=16", "log_dir=inspect-logs"),
        )
        found = re.findall(r"quiz/mean: ([\d.]+)", output)
        if not found:
            raise ClientError(f"no score in its output:\n{_tail(output)}")
        scores.append(float(found[-1]))
    return Outcome(
        f"score of the base model {scores[0]:.2f}, of the trained one {scores[1]:.2f}", scores[1] > scores[0]
    )


CLIENTS: dict[str, Callable[[Workplace], Outcome]] = {
    client.__name__: client for client in (sl_loop, chat_sl, supervised, rl, dpo, inspect)
}


def client_environment(folder: Path, base_url: str) -> dict[str, str]:
    """The environment of a client's process: the engine's address and a private, offline hub cache in `folder`."""
    return {
        **os.environ,
        "TINKER_BASE_URL": base_url,
        "TINKER_API_KEY": API_KEY,
        "TINKER_TELEMETRY": "0",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "HF_HOME": str(folder / "hub-cache"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


def prepare(folder: Path, base_url: str) -> None:
    """Lay out in `folder` what clients would fetch from a hub: the tokenizer, and data sets of our own."""
    store_tokenizer(folder / "hub-cache" / "hub", base_url, MODEL)
    tickets = [*_read_jsonl("tickets_train.jsonl"), *_read_jsonl("tickets_pool.jsonl")]
    held_out = _read_jsonl("tickets_eval.jsonl")
    _write_jsonl(folder / "tickets.jsonl", _read_jsonl("tickets_train.jsonl"))
    # `datasets.load_dataset` takes a folder of the data set's name in the working folder before it asks the hub.
    _write_jsonl(folder / "HuggingFaceH4" / "no_robots" / "train.jsonl", tickets)
    _write_jsonl(folder / "HuggingFaceH4" / "no_robots" / "test.jsonl", held_out)
    _write_jsonl(folder / "Anthropic" / "hh-rlhf" / "train.jsonl", [_preference(row) for row in tickets[:96]])
    _write_jsonl(folder / "Anthropic" / "hh-rlhf" / "test.jsonl", [_preference(row) for row in held_out[:8]])


def store_tokenizer(hub: Path, base_url: str, model: str) -> None:
    """Write the tokenizer of the model that the engine serves as `model` into a hub cache, under that name."""
    query = urllib.parse.urlencode({"model": model})
    with urllib.request.urlopen(f"{base_url}/api/v1/tokenizer_files?{query}", timeout=30) as response:
        files = json.load(response)["files"]
    entry = hub / f"models--{model.replace('/', '--')}"
    snapshot = entry / "snapshots" / "local"
    snapshot.mkdir(parents=True, exist_ok=True)
    (entry / "refs").mkdir(exist_ok=True)
    (entry / "refs" / "main").write_text("local", encoding="utf-8")
    for name, text in files.items():
        (snapshot / name).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def engine_process(state_dir: Path) -> Iterator[str]:
    """A running `mock_tinker.py`; gives its URL, and stops it at the end."""
    command = [sys.executable, str(ROOT / "mock_tinker.py"), "--port", "0", "--state-dir", str(state_dir)]
    server = subprocess.Popen([*command, "--log-level", "warning"], stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline() if server.stdout else ""
        ready = re.search(r"ready at (\S+),", line)
        if ready is None:
            raise ClientError("the local engine did not start")
        yield ready.group(1)
    finally:
        server.terminate()
        server.wait(timeout=30)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Clients: " + "; ".join(f"{name} ({client.__doc__})" for name, client in CLIENTS.items()),
    )
    parser.add_argument("names", nargs="*", metavar="CLIENT", help="which to run (default: all)")
    parser.add_argument("--folder", type=Path, help="new folder to work in and to keep (default: a temporary one)")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in CLIENTS]:
        parser.error(f"there is no client {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    if args.folder and args.folder.exists():
        parser.error(f"--folder {args.folder} is there already; clients would resume what it holds")
    # Without this a SIGTERM would end this process and leave the engine and a client running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = []
    with contextlib.ExitStack() as stack:
        folder = (args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        base_url = stack.enter_context(engine_process(folder / "engine"))
        prepare(folder, base_url)
        for name in args.names or CLIENTS:
            print(name, flush=True)
            started = time.monotonic()
            try:
                outcome = CLIENTS[name](Workplace(folder, base_url))
            except ClientError as error:
                outcome = Outcome(str(error), learned=False)
            print(f"  {time.monotonic() - started:.0f} s; {outcome.text}", flush=True)
            if not outcome.learned:
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all learned")
    return 1 if failed else 0


def _fall(rows: Sequence[dict[str, Any]], key: str) -> Outcome:
    first, last = rows[0][key], rows[-1][key]
    return Outcome(f"{rows[-1]['step'] + 1} steps: {key} {first:.3f} -> {last:.3f}", last < 0.7 * first)


def _preference(row: dict[str, Any]) -> dict[str, str]:
    ticket, label = row["messages"][1]["content"], row["category"]
    replies = {
        "chosen": f"Thank you for telling us. A colleague who looks after {label} will answer today.",
        "rejected": f"Noted, {label}. Do not write twice.",
    }
    return {name: f"\n\nHuman: {ticket}\n\nAssistant: {reply}" for name, reply in replies.items()}


def _read_jsonl(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "data" / name).read_text(encoding="utf-8").splitlines()]


def _write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-15:])


if __name__ == "__main__":
    sys.exit(main())
