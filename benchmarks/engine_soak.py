"""How the local engine bears long use, sudden death and a machine without a network. Each part is one option.

    python benchmarks/engine_soak.py --steps 10000     # the server's memory: after 100 steps and at the end
    python benchmarks/engine_soak.py --kills 50        # SIGKILL at random moments while it saves
    python benchmarks/engine_soak.py --no-network      # a step and a sample in a network namespace with loopback alone

The server is a process of its own (the small model, one thread) and everything asked of it goes through the SDK. The
exit code is 0 when each part asked for held: memory at the end within 10 % of what it was after 100 steps; every
checkpoint that is listed after a kill loads and gives finite logprobs, and none that was confirmed is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
MODEL = "Qwen/Qwen3-8B"
KEY = "tml-soak"
ALLOWED_GROWTH = 1.10
BASELINE_STEP = 100
# Runs whose checkpoints stay for the next starts of the server; older ones are deleted once they have been checked.
KEPT_RUNS = 3
# What a process that serves or asks has imported.
PRELOADED = ["local_engine", "local_model", "engine_routes", "uvicorn", "tinker", "benchmarks.engine_soak"]


@contextlib.contextmanager
def server(state: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process on `state` and its address; it is killed at the end, if it still lives."""
    command = [sys.executable, str(ROOT / "mock_tinker.py"), "--port", "0", "--state-dir", str(state)]
    process = subprocess.Popen(
        [*command, "--threads", "1", "--log-level", "warning"], stdout=subprocess.PIPE, text=True, cwd=state.parent
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if "ready at " not in line:
            raise RuntimeError(f"the server did not start: {line or 'it said nothing'}")
        yield process, line.split("ready at ")[1].split(",")[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def connect(url: str) -> Any:
    """A service client of the server at `url`."""
    import tinker

    return tinker.ServiceClient(base_url=url, api_key=KEY)


def example(size: int = 6) -> Any:
    """One short training example."""
    import tinker

    tokens = list(range(300, 301 + size))
    inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * size}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def step(client: Any, learning_rate: float = 1e-3) -> float:
    """One training step; its loss."""
    import tinker

    gradients = client.forward_backward([example()], "cross_entropy")
    update = client.optim_step(tinker.AdamParams(learning_rate=learning_rate))
    loss = gradients.result(timeout=120).metrics["loss:sum"]
    update.result(timeout=120)
    return loss


def sample(sampler: Any) -> list[int]:
    """Four greedy tokens."""
    import tinker

    params = tinker.SamplingParams(max_tokens=4, temperature=0.0)
    return sampler.sample(tinker.ModelInput.from_ints([300, 301]), 1, params).result(timeout=120).sequences[0].tokens


def side_work(url: str, client: Any, number: int) -> None:
    """What a long-lived server sees beside steps: a state, samplers, a client that comes and goes or just goes."""
    if number % 2:
        client.save_state("newest", overwrite=True).result(timeout=120)
    else:
        client.save_state(f"brief-{number}", ttl_seconds=3600).result(timeout=120)
    sample(client.save_weights_and_get_sampling_client().result(timeout=120))
    visitor = connect(url)
    other = visitor.create_lora_training_client(base_model=MODEL, rank=8).result(timeout=120)
    step(other)
    path = other.save_weights_for_sampler("named").result(timeout=120).path
    sample(visitor.create_sampling_client(model_path=path).result(timeout=120))
    visitor.close("success").result(timeout=120)


def train_and_sample(url: str) -> tuple[list[float], list[int]]:
    """The losses of three steps, and what is sampled after them."""
    client = connect(url).create_lora_training_client(base_model=MODEL, rank=8, seed=1).result(timeout=120)
    losses = [step(client) for _ in range(3)]
    return losses, sample(client.save_weights_and_get_sampling_client().result(timeout=120))


def resident_mb(pid: int) -> float:
    """Resident memory of a process in MB."""
    import psutil

    return psutil.Process(pid).memory_info().rss / 1e6


def check_memory(steps: int, every: int) -> bool:
    """Train `steps` steps with side work every so many; True when memory stayed flat."""
    with tempfile.TemporaryDirectory() as folder, server(Path(folder) / "state") as (process, url):
        client = connect(url).create_lora_training_client(base_model=MODEL, rank=8, seed=1).result(timeout=120)
        first = last = 0.0
        started = time.monotonic()
        for number in range(1, steps + 1):
            step(client)
            if number % every == 0:
                side_work(url, client, number // every)
            if number == BASELINE_STEP:
                first = resident_mb(process.pid)
            if number in (BASELINE_STEP, steps) or number % max(1, steps // 20) == 0:
                last = resident_mb(process.pid)
                ratio = f", {last / first:.3f} of that after {BASELINE_STEP} steps" if first else ""
                print(f"step {number}: {last:.1f} MB{ratio}, {time.monotonic() - started:.0f} s", flush=True)
    flat = last <= ALLOWED_GROWTH * first
    print(
        f"memory of the server: {first:.1f} MB after {BASELINE_STEP} steps, {last:.1f} MB after {steps}, ratio "
        f"{last / first:.3f} (at most {ALLOWED_GROWTH:.2f}): {'flat' if flat else 'IT GROWS'}"
    )
    return flat


def check_kills(kills: int, seed: int, longest: float = 0.8) -> bool:
    """Kill the server `kills` times while it saves; True when every listed checkpoint loaded after each restart.

    `longest` bounds the seconds from the first save to the kill.
    """
    chance = random.Random(seed)
    tally: Counter[str] = Counter()
    confirmed: set[str] = set()
    # Each server and each client is a process of its own; forked from one that has imported what they need, they are
    # up in a second instead of twenty.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        for number in range(kills + 1):
            (from_server, to_parent), (from_client, to_us) = context.Pipe(duplex=False), context.Pipe(duplex=False)
            process = context.Process(target=run_server, args=(state, to_parent), daemon=True)
            process.start()
            client = context.Process(
                target=run_client, args=(receive(from_server), number, sorted(confirmed), to_us), daemon=True
            )
            client.start()
            for end in (to_parent, to_us):
                end.close()
            found = receive(from_client)
            tally.update(found["tally"])
            for fault in found["faults"]:
                print(f"after kill {number}: {fault}", flush=True)
            confirmed = set(found["kept"])
            if number < kills:
                threading.Timer(chance.uniform(0.0, longest), process.kill).start()
                # Confirmations are read on while the timer runs, so that what was promised is known.
                reader = threading.Thread(target=read_confirmations, args=(from_client, confirmed))
                reader.start()
                process.join()
                time.sleep(0.2)  # for answers that were on their way
            stop(process)
            stop(client)
            if number < kills:
                reader.join()
                tally["kills"] += 1
                tally["kills that left something half done"] += leftovers(state)
                if (number + 1) % 10 == 0:
                    print(f"after {number + 1} kills: {in_words(tally)}", flush=True)
            from_server.close()
            from_client.close()
    print(f"kills while saving: {in_words(tally)}")
    loaded = tally["training checkpoints loaded"] + tally["sampler checkpoints loaded"]
    return loaded > 0 and not tally["did not load"] and not tally["confirmed but gone"]


def in_words(tally: Counter[str]) -> str:
    """The counts, one after the other."""
    return ", ".join(f"{count} {what}" for what, count in sorted(tally.items()))


def stop(process: Any) -> None:
    """End a process at once."""
    process.kill()
    process.join()


def receive(pipe: Any, timeout: float = 300.0) -> Any:
    """The next message of another process. Raises `RuntimeError` when it ended, or said nothing for so long."""
    try:
        if not pipe.poll(timeout):
            raise RuntimeError(f"a process of this benchmark said nothing for {timeout:.0f} s")
        return pipe.recv()
    except EOFError as error:
        raise RuntimeError("a process of this benchmark ended early; its traceback stands above") from error


def read_confirmations(pipe: Any, confirmed: set[str]) -> None:
    """Add the paths that the client's saves were answered with, until the client is gone."""
    with contextlib.suppress(EOFError):
        while True:
            confirmed.add(pipe.recv())


def leftovers(state: Path) -> bool:
    """Whether the kill hit a save half way."""
    half_done = [path for pattern in (".tmp-*", ".old-*") for path in state.glob(f"runs/*/*/{pattern}")]
    return bool(half_done) or any(path.name.startswith(".tmp-") for path in state.glob("ephemeral/*"))


def run_server(state: Path, pipe: Any) -> None:
    """Serve until killed; tells the address through `pipe`."""
    from mock_tinker import LocalTinkerServer

    pipe.send(LocalTinkerServer(state, threads=1).start())
    threading.Event().wait()


def run_client(url: str, number: int, expected: list[str], pipe: Any) -> None:
    """Check every listed checkpoint and tell what was found, then save until killed, telling what was confirmed."""
    import tinker

    service = connect(url)
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    listed = rest.list_user_checkpoints(limit=10_000).result(timeout=120).checkpoints
    tally: Counter[str] = Counter()
    faults: list[str] = []
    clients = {}
    for checkpoint in listed:
        path, kind = checkpoint.tinker_path, checkpoint.checkpoint_type
        try:
            if kind == "training":
                clients[path] = service.create_training_client_from_state_with_optimizer(path).result(timeout=120)
                output = clients[path].forward([example()], "cross_entropy").result(timeout=120)
                values = output.loss_fn_outputs[0]["logprobs"].tolist()
                step(clients[path])
            else:
                sampler = service.create_sampling_client(model_path=path).result(timeout=120)
                values = sampler.compute_logprobs(tinker.ModelInput.from_ints([300, 301, 302])).result(timeout=120)[1:]
            if not all(value is not None and math.isfinite(value) for value in values):
                raise ValueError(f"logprobs {values}")
            tally[f"{kind} checkpoints loaded"] += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what this benchmark counts
            tally["did not load"] += 1
            faults.append(f"{path}: {type(error).__name__}: {error}")
    paths = [checkpoint.tinker_path for checkpoint in listed]
    for path in sorted(set(expected) - set(paths)):
        tally["confirmed but gone"] += 1
        faults.append(f"{path}: it was confirmed, and is not listed")
    runs = list(dict.fromkeys(path.split("/")[2] for path in paths))
    for path in [path for path in paths if path.split("/")[2] in runs[KEPT_RUNS:]]:
        rest.delete_checkpoint_from_tinker_path(path).result(timeout=120)
        paths.remove(path)
    newest = next((clients[path] for path in paths if path in clients), None)
    client = newest or service.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result(timeout=120)
    step(client)
    pipe.send({"tally": tally, "faults": faults, "kept": paths})
    for save in itertools.count():
        # Several in flight, so that the server is always at one of them.
        futures = [
            client.save_state("again", overwrite=True),
            client.save_weights_for_sampler("again"),
            client.save_state(f"new-{number}-{save}") if save < 3 else client.save_state("again", overwrite=True),
        ]
        snapshot = client.save_weights_and_get_sampling_client()
        for future in futures:
            pipe.send(future.result().path)
        snapshot.result()
        step(client)


def check_no_network() -> bool:
    """Serve, train a step and sample in a network namespace that has loopback alone; True when it worked."""
    inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, __file__, "--inside"]
    for unshare in (["unshare", "-n"], ["unshare", "-rn"]):
        permitted = subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode == 0
        if permitted:
            return subprocess.run([*unshare, *inside], check=False).returncode == 0
    print("a network namespace could not be made: it takes root, or a kernel that lets users make them")
    return False


def run_inside() -> int:
    """The part of `check_no_network` that runs in the namespace."""
    interfaces = [name for _, name in socket.if_nameindex()]
    try:
        # Documentation's own address: a route to it would mean a network.
        socket.create_connection(("192.0.2.1", 80), timeout=2).close()
        reached = True
    except OSError as error:
        reached, reason = False, error
    print(f"interfaces: {', '.join(interfaces)}; outside: {'REACHED' if reached else reason}", flush=True)
    with tempfile.TemporaryDirectory() as folder, server(Path(folder) / "state") as (_, url):
        losses, tokens = train_and_sample(url)
    print(f"without a network: losses {', '.join(f'{loss:.3f}' for loss in losses)}; sampled {tokens}")
    return 0 if not reached and losses[-1] < losses[0] and tokens else 1


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="training steps of the memory part")
    parser.add_argument("--every", type=int, default=20, help="side work every so many steps (default 20)")
    parser.add_argument("--kills", type=int, help="kills of the killing part")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills (default 0)")
    parser.add_argument("--no-network", action="store_true", help="run the part without a network")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return run_inside()
    if not (args.steps or args.kills or args.no_network):
        parser.error("choose at least one of --steps, --kills and --no-network")
    held = []
    if args.no_network:
        held.append(check_no_network())
    if args.kills:
        held.append(check_kills(args.kills, args.seed))
    if args.steps:
        held.append(check_memory(args.steps, args.every))
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
