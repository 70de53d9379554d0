"""Evaluation speed: what the built-in evaluator costs beside the requests, and how Inspect AI compares, in one process.

    python benchmarks/evaluation_throughput.py                 # the small model
    python benchmarks/evaluation_throughput.py --model HuggingFaceTB/SmolLM2-135M-Instruct

The same 84 tickets go through both evaluators on the same checkpoint, taking turns: samples per second (the median over
the rounds) and the ratio of the two; what Inspect costs beyond the sampling itself is the difference. Then the built-in
evaluator's own overhead: CPU per sample over 2,000 tickets with everything a run does (the prompt rendered and
tokenized, the reply decoded and scored, the sample appended to the run folder and synced, the interval), while a
service made of canned tokens answers at once, so that no model's time is in the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

EVAL_FILE = ROOT / "data" / "tickets_eval.jsonl"
OVERHEAD_SAMPLES = 2_000
OVERHEAD_AIM_MS = 2.0


class CannedService:
    """Stands for the service alone: every request is answered at once with the same tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self._sequence = SimpleNamespace(tokens=tokens, logprobs=None, stop_reason="stop")

    async def sample(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(sequences=[self._sequence])


async def overhead_ms(chat_format: Any, rounds: int, folder: Path) -> list[float]:
    """CPU milliseconds per sample of the built-in evaluator without its requests, one figure a round."""
    import chat_sampler
    import data_loader
    import simple_eval
    from checkpoint_manager import CheckpointManager

    tickets = data_loader.load_rows(EVAL_FILE, purpose="eval").rows
    rows = [
        dataclasses.replace(tickets[number % len(tickets)], id=f"ticket {number}") for number in range(OVERHEAD_SAMPLES)
    ]
    service: Any = CannedService(chat_format.tokenizer.encode("billing"))
    sampler = chat_sampler.ChatSampler(service, chat_format, max_tokens=8)
    spent = []
    with CheckpointManager.create(folder, {}) as run:
        for number in range(rounds + 1):
            before = time.process_time()
            await simple_eval.run_simple_evaluation(
                sampler, rows, on_samples=lambda samples, number=number: run.append_samples(number, samples)
            )
            if number:
                spent.append(1000 * (time.process_time() - before) / len(rows))
    return spent


async def rates(model: str, backend: Any, chat_format: Any, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Samples per second of each evaluator, one figure a round; a round before them warms up."""
    import chat_sampler
    import data_loader
    import inspect_eval
    import simple_eval

    rows = data_loader.load_rows(EVAL_FILE, purpose="eval").rows
    task = inspect_eval.TaskSpec(inspect_eval.LABELLED_ROWS, {"eval_file": str(EVAL_FILE)}, name="eval_file")
    found: dict[str, list[float]] = {"built-in": [], "inspect": []}
    client = await backend.create_sampling_client(base_model=model)
    sampler = chat_sampler.ChatSampler(client, chat_format, max_tokens=8)
    for number in range(rounds + 1):
        started = time.monotonic()
        simple = await simple_eval.run_simple_evaluation(sampler, rows)
        between = time.monotonic()
        inspected = await inspect_eval.run_inspect_evaluation(
            sampler, [task], model_name=model, log_dir=folder, metadata={"round": number}
        )
        ended = time.monotonic()
        if simple.score != inspected.score:
            raise SystemExit(f"the evaluators disagree: {simple.score} and {inspected.score}")
        if number:
            found["built-in"].append(len(rows) / (between - started))
            found["inspect"].append(len(rows) / (ended - between))
    return found


async def measure(model: str, rounds: int, folder: Path) -> tuple[list[float], dict[str, list[float]]]:
    import rendering
    import tinker_backend

    with tinker_backend.connect(env={"TINKER_MOCK": "1"}) as backend:
        chat_format = rendering.get_chat_format(model, backend.get_tokenizer(model))
        found = await rates(model, backend, chat_format, rounds, folder / "evals")
    # Only now: the engine's threads in this process would be counted.
    return await overhead_ms(chat_format, rounds, folder / "runs"), found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="base model (default: the small stand-in)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each evaluator (default 5)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spent, found = asyncio.run(measure(args.model, args.rounds, Path(folder)))
    print(
        f"built-in evaluator's own overhead: {statistics.median(spent):.2f} ms CPU per sample "
        f"(from {min(spent):.2f} to {max(spent):.2f}; aim: under {OVERHEAD_AIM_MS:g})"
    )
    for name, values in found.items():
        print(f"{name:<9} {statistics.median(values):6.1f} samples/s (from {min(values):.1f} to {max(values):.1f})")
    ratios = [inspect / simple for simple, inspect in zip(found["built-in"], found["inspect"], strict=True)]
    print(f"inspect / built-in: {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
