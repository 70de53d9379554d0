"""Evaluation speed: the same 84 tickets through the built-in evaluator and through Inspect AI, in one process.

    python benchmarks/evaluation_throughput.py                 # the small model
    python benchmarks/evaluation_throughput.py --model HuggingFaceTB/SmolLM2-135M-Instruct

The two take turns on the same checkpoint; printed are samples per second (the median over the rounds) and the ratio of
the two. What Inspect costs beyond the sampling itself is the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

EVAL_FILE = ROOT / "data" / "tickets_eval.jsonl"


async def measure(model: str, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Samples per second of each evaluator, one figure a round; a round before them warms up."""
    import chat_sampler
    import data_loader
    import inspect_eval
    import rendering
    import simple_eval
    import tinker_backend

    rows = data_loader.load_rows(EVAL_FILE, purpose="eval").rows
    task = inspect_eval.TaskSpec(inspect_eval.LABELLED_ROWS, {"eval_file": str(EVAL_FILE)}, name="eval_file")
    rates: dict[str, list[float]] = {"built-in": [], "inspect": []}
    with tinker_backend.connect(env={"TINKER_MOCK": "1"}) as backend:
        chat_format = rendering.get_chat_format(model, backend.get_tokenizer(model))
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
                rates["built-in"].append(len(rows) / (between - started))
                rates["inspect"].append(len(rows) / (ended - between))
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="base model (default: the small stand-in)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each evaluator (default 5)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rates = asyncio.run(measure(args.model, args.rounds, Path(folder)))
    for name, values in rates.items():
        print(f"{name:<9} {statistics.median(values):6.1f} samples/s (from {min(values):.1f} to {max(values):.1f})")
    ratios = [inspect / simple for simple, inspect in zip(rates["built-in"], rates["inspect"], strict=True)]
    print(f"inspect / built-in: {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
