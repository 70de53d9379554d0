"""Training and sampling speed through the SDK and the local engine, against plain peft and transformers.

    python benchmarks/training_throughput.py                       # the small model; SmolLM2 too where it is installed
    python benchmarks/training_throughput.py --models small --rounds 3
    python benchmarks/training_throughput.py --server own          # the engine as a process of its own

Both sides do the same work on the same batches, in turn, and the median over the rounds is printed with each side's
parts and its target; the exit code is 1 when one is missed. Training: LoRA rank 16 on every linear layer, float32,
AdamW, loss on the last fifth of each sequence. Sampling: 64 greedy requests at once of 32 tokens, against `generate`
one prompt at a time and against one padded batch of all 64.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["TINKER_TELEMETRY"] = "0"
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RANK = 16
LEARNING_RATE = 1e-4
SAMPLES = 64
SAMPLE_TOKENS = 32
# The least that the SDK's rate may be, as a multiple of the other side's.
TARGETS = {
    ("small", "plain peft"): 0.7,
    ("smollm2", "plain peft"): 0.95,
    ("small", "one at a time"): 6.0,
    ("smollm2", "one at a time"): 3.5,
    ("smollm2", "one padded batch"): 0.9,
}


def make_batches(vocabulary: int, count: int, rows: int, length: int) -> list[list[tuple[list[int], list[float]]]]:
    """`count` batches of `rows` (tokens, weights); lengths vary by a third around `length`, as chat examples do."""
    import random

    rng = random.Random(0)
    batches = []
    for _ in range(count):
        batch = []
        for _ in range(rows):
            size = rng.randint(length * 2 // 3, length * 4 // 3)
            tokens = [rng.randrange(100, vocabulary - 100) for _ in range(size + 1)]
            trained = size // 5
            batch.append((tokens, [0.0] * (size - trained) + [1.0] * trained))
        batches.append(batch)
    return batches


def plain_trainer(folder: Path) -> Callable[[Sequence[Any]], None]:
    """A plain training loop: right padding, attention mask, labels, mean loss scaled to a sum."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)

    def train(batches: Sequence[Any]) -> None:
        for batch in batches:
            longest = max(len(tokens) for tokens, _ in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            labels = torch.full_like(ids, -100)
            for row, (tokens, weights) in enumerate(batch):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                mask[row, : len(tokens)] = 1
                trained = int(sum(weights))
                labels[row, len(tokens) - trained : len(tokens)] = ids[row, len(tokens) - trained : len(tokens)]
            output = model(input_ids=ids, attention_mask=mask, labels=labels)
            (output.loss * (labels != -100).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def sdk_trainer(service: Any, name: str) -> Callable[[Sequence[Any]], None]:
    """The same through the SDK, the next batch submitted before the last one is awaited."""
    import tinker
    from tinker import types

    client = service.create_lora_training_client(base_model=name, rank=RANK, seed=0).result()

    def train(batches: Sequence[Any]) -> None:
        futures = []
        for batch in batches:
            data = [
                tinker.Datum(
                    model_input=types.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
                )
                for tokens, weights in batch
            ]
            futures.append(client.forward_backward(data, "cross_entropy"))
            futures.append(client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)))
        for future in futures:
            future.result()

    return train


def timed(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(key: str, task: str, sides: dict[str, tuple[float, Callable[[], Any]]], rounds: int) -> bool:
    """Run the sides in turn and print the median rate of each and of the first over each other, round by round.

    Returns whether the targets for the model `key` are met.
    """
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for work in (work for _, work in sides.values()):
        work()
    for _ in range(rounds):
        for side, (amount, work) in sides.items():
            rates[side].append(amount / timed(work))
    first, *others = rates
    print(f"{key}, {task}: " + ", ".join(f"{side} {statistics.median(found):.1f}" for side, found in rates.items()))
    all_met = True
    for other in others:
        ratios = [ours / theirs for ours, theirs in zip(rates[first], rates[other], strict=True)]
        ratio, target = statistics.median(ratios), TARGETS.get((key, other))
        verdict = "no target"
        if target is not None:
            all_met = all_met and ratio >= target
            verdict = f"at least {target:g}: {'met' if ratio >= target else 'MISSED'}"
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"    {first} / {other}: {ratio:.2f} (median of {rounds}, {spread}; {verdict})", flush=True)
    return all_met


@contextlib.contextmanager
def serving(kind: str, threads: int, state: str) -> Iterator[str]:
    """The address of a running engine: in this process ("embedded") or in one of its own ("own")."""
    if kind == "embedded":
        from mock_tinker import LocalTinkerServer

        with LocalTinkerServer(state, threads=threads) as server:
            yield server.base_url
        return
    program = Path(__file__).resolve().parent.parent / "mock_tinker.py"
    options = ["--port", "0", "--state-dir", state, "--threads", str(threads), "--log-level", "warning"]
    command = [sys.executable, str(program), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None, "its output is read below"
            ready = process.stdout.readline()
            if "ready at " not in ready:
                raise SystemExit("the engine did not start; its messages stand above")
            yield ready.partition("ready at ")[2].partition(",")[0]
        finally:
            process.terminate()


def sampling_sides(service: Any, name: str, folder: Path, vocabulary: int) -> dict[str, tuple[float, Any]]:
    """Sampling through the SDK, plain one at a time (an eighth of the prompts), plain as one padded batch."""
    import random

    import torch
    from tinker import types
    from transformers import AutoModelForCausalLM

    rng = random.Random(1)
    common = [rng.randrange(100, vocabulary - 100) for _ in range(20)]
    prompts = [
        common + [rng.randrange(100, vocabulary - 100) for _ in range(rng.randint(15, 45))] for _ in range(SAMPLES)
    ]
    sampler = service.create_sampling_client(base_model=name).result()
    params = types.SamplingParams(max_tokens=SAMPLE_TOKENS, temperature=0.0, stop=[])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options: dict[str, Any] = {
        "max_new_tokens": SAMPLE_TOKENS,
        "min_new_tokens": SAMPLE_TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }

    def through_sdk() -> None:
        for future in [sampler.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]:
            future.result()

    def one_by_one() -> None:
        for prompt in prompts[: SAMPLES // 8]:
            model.generate(torch.tensor([prompt]), **options)

    def padded_batch() -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model.generate(ids, attention_mask=mask, **options)

    return {
        "SDK": (SAMPLES, through_sdk),
        "one at a time": (SAMPLES // 8, one_by_one),
        "one padded batch": (SAMPLES, padded_batch),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["small", "smollm2"], help="default: those that are here")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side (default 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="cores for both sides (default: all)")
    parser.add_argument("--server", choices=["embedded", "own"], default="embedded", help="default: embedded")
    parser.add_argument("--skip-sampling", action="store_true", help="training only")
    parser.add_argument("--skip-training", action="store_true", help="sampling only")
    args = parser.parse_args()

    import tinker
    import torch
    from transformers.utils import logging as transformers_logging

    import base_models

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    names = {"small": "Qwen/Qwen3-8B", "smollm2": base_models.SMOLLM2_NAME}
    offered = base_models.available_models()
    chosen = args.models or [key for key, name in names.items() if name in offered]
    shapes = {"small": (8, 16, 60), "smollm2": (2, 8, 60)}  # batches a measurement, rows, tokens a row
    met = []
    with tempfile.TemporaryDirectory() as state, serving(args.server, args.threads, state) as url:
        service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
        load = os.getloadavg()[0]
        print(
            f"{args.threads} threads, torch {torch.__version__}, the engine {args.server}, load {load:.1f}", flush=True
        )
        for key in chosen:
            base = base_models.resolve_base_model(names[key])
            vocabulary = len(base_models.load_tokenizer(base.folder))
            if not args.skip_training:
                batches = make_batches(vocabulary, *shapes[key])
                tokens = sum(len(row) - 1 for batch in batches for row, _ in batch)
                through_sdk, plain = sdk_trainer(service, names[key]), plain_trainer(base.folder)
                training: dict[str, tuple[float, Callable[[], Any]]] = {
                    "SDK": (tokens, partial(through_sdk, batches)),
                    "plain peft": (tokens, partial(plain, batches)),
                }
                met.append(compare(key, "training, tokens/s", training, args.rounds))
            if not args.skip_sampling:
                sampling = sampling_sides(service, names[key], base.folder, vocabulary)
                met.append(compare(key, f"samples of {SAMPLE_TOKENS} tokens/s", sampling, args.rounds))
        service.close("success").result()
    print("all targets met" if all(met) else "a target is missed")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
