"""The local Tinker server: start it, point the `tinker` SDK at it, and train and sample a real small model.

    python mock_tinker.py --port 8000 --state-dir engine
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python your_program.py

Inside a process, which is what the project's own programs do with `TINKER_MOCK=1`::

    with LocalTinkerServer(state_dir) as server:
        client = tinker.ServiceClient(base_url=server.base_url, api_key="tml-local")

Any base model that the hosted service names is answered by the small stand-in (the log says so); SmolLM2 and local
folders in Hugging Face's format are served as what they are. This module starts and stops the server; its routes are
in `engine_routes`, what requests do in `local_engine`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from error_handling import ConfigurationError, EvalLoopError, ServiceUnavailableError
from torch_device import DEVICE_VARIABLE, choose_device

if TYPE_CHECKING:
    from fault_plan import FaultPlan

# Waiting OpenMP threads spin by default: with other work on the same cores a training step takes twenty times as long.
# The setting is read when torch is first imported in the process.
WAIT_POLICY = ("OMP_WAIT_POLICY", "passive")
KEY_VARIABLE = "MOCK_TINKER_API_KEY"


FAULTS_HELP = """\
a fault plan is a JSON file such as
    {"faults": [
      {"call": "optim_step", "kind": "status", "status": 429, "retry_after": 1, "after": 2, "times": 3},
      {"call": "save_weights", "kind": "drop", "when": "after"}]}
where "call" is a path below /api/v1 without the ids in it, or * for all; "after" calls pass first, then "times" (1;
null: all) go wrong. Kinds: status (400..599 in place of the answer), drop (the connection), delay (by "seconds"),
expire (the checkpoint at "path", or the "newest" of a kind), fail (the request itself, with an error of "category"
server). With "when": "after" the request is carried out all the same.
"""


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    return host in ("localhost", "::1") or host.startswith("127.")


class LocalTinkerServer:
    """The server in a thread of this process. `state_dir` keeps its checkpoints; port 0 takes a free one.

    `fault_plan` (a file, or the faults in it) lets calls go wrong on purpose; `allow_faults` opens `/api/v1/faults`,
    which changes the plan while the server runs. With either, `faults` is the plan once the server has started.

    `device` is what `torch_device.choose_device` takes.

    Raises `ConfigurationError` for a host other machines reach without an `api_key`, for a device that cannot be used
    and for a wrong fault plan,
    `RunLockedError` when another process holds `state_dir`, `ServiceUnavailableError` when the port is taken.
    """

    def __init__(
        self,
        state_dir: Path | str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        models: Sequence[str] = (),
        threads: int | None = None,
        device: str | None = None,
        log_level: str = "warning",
        fault_plan: Path | str | Sequence[Mapping[str, Any]] | None = None,
        allow_faults: bool = False,
    ) -> None:
        if not is_loopback(host) and not api_key:
            raise ConfigurationError(
                f"--host {host} can be reached from other machines: give --api-key, or set {KEY_VARIABLE}"
            )
        os.environ.setdefault(*WAIT_POLICY)
        from local_engine import LocalEngine

        self.engine = LocalEngine(state_dir, models=models, threads=threads, device=choose_device(device))
        self._address = (host, port)
        self._api_key = api_key
        self._log_level = log_level
        self._fault_plan = fault_plan
        self._allow_faults = allow_faults
        self.faults: FaultPlan | None = None
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None
        self.base_url = ""

    def start(self) -> str:
        """Start serving and return the base URL."""
        import uvicorn

        from engine_routes import build_app

        app = build_app(self.engine, self._api_key)
        settings: dict[str, Any] = {}
        if self._fault_plan is not None or self._allow_faults:
            from fault_injection import DroppableProtocol, inject_faults

            self.faults = inject_faults(app, self.engine, self._fault_plan, endpoint=self._allow_faults)
            settings["http"] = DroppableProtocol
        self.engine.start()
        try:
            self._socket = _listen(*self._address)
        except BaseException:
            self.engine.stop()
            raise
        config = uvicorn.Config(
            app,
            log_level=self._log_level,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            # To find out, it would ask a standard output that may be closed.
            use_colors=None if sys.stdout else False,
            **settings,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="tinker-http", daemon=True
        )
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                self.stop()
                raise ServiceUnavailableError("the local engine's HTTP server did not start; its log says why")
            time.sleep(0.005)
        host, port = self._socket.getsockname()[:2]
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        return self.base_url

    def stop(self) -> None:
        """Stop serving. Waiting clients are told that the server stops; safe to call twice."""
        self.engine.stop()
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> LocalTinkerServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _listen(host: str, port: int) -> socket.socket:
    # With the protocol left at 0 asyncio does not switch Nagle's algorithm off, and each answer waits 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if os.name != "nt":
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as err:
        listening.close()
        raise ServiceUnavailableError(
            f"cannot listen on {host}:{port} ({err.strerror}); choose another --port"
        ) from err
    listening.listen(2048)
    return listening


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mock_tinker.py",
        description=(__doc__ or "").split("Inside a process")[0],
        epilog=FAULTS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default 8000)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--state-dir", default="engine", help="folder for checkpoints (default ./engine)")
    parser.add_argument(
        "--model",
        nargs="+",
        default=[],
        metavar="NAME",
        help="serve only these: a name, or a folder in Hugging Face's format (default: every name known)",
    )
    parser.add_argument("--threads", type=int, help="cores to compute with (default: all); part of reproducibility")
    parser.add_argument(
        "--device",
        help="torch device: cpu, cuda, cuda:1, or auto, which is cuda where torch sees it, else cpu (default "
        f"${DEVICE_VARIABLE}, else cpu)",
    )
    parser.add_argument("--api-key", help=f"key that clients must send; also ${KEY_VARIABLE}; needed off loopback")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument(
        "--fault-plan",
        metavar="FILE",
        help="let calls go wrong on purpose, to test a client: a JSON file that says which, how and how often",
    )
    parser.add_argument(
        "--allow-faults",
        action="store_true",
        help="open /api/v1/faults, through which the fault plan is read (GET), replaced (PUT) and emptied (DELETE)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. Prints one line with the URL once requests are answered."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    from base_models import share_cache_dir

    share_cache_dir()
    try:
        server = LocalTinkerServer(
            args.state_dir,
            host=args.host,
            port=args.port,
            api_key=args.api_key or os.environ.get(KEY_VARIABLE),
            models=args.model,
            threads=args.threads,
            device=args.device,
            log_level="warning",
            fault_plan=args.fault_plan,
            allow_faults=args.allow_faults,
        )
        url = server.start()
    except EvalLoopError as err:
        print(err, file=sys.stderr)
        return err.exit_code
    print(f"Tinker server ready at {url}, state in {args.state_dir}", flush=True)
    stopped = threading.Event()
    _on_termination(stopped)
    with contextlib.suppress(KeyboardInterrupt):
        stopped.wait()
    server.stop()
    return 0


def _on_termination(stopped: threading.Event) -> None:
    import signal

    signal.signal(signal.SIGTERM, lambda *_: stopped.set())


if __name__ == "__main__":
    sys.exit(main())
