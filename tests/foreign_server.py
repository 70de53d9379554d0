"""A server of the Tinker API with other habits than ours: the local engine behind a real HTTP server on loopback.

It stands for SkyRL 0.4.0, which cannot be installed here, in what `server_differences` copes with: samples come without
ids, no model is made from a saved state, training sends no metrics, the listing tells no context length, models and
samplers are named otherwise, there is no tokenizer to fetch, and a training run that the server let go of cannot be
sampled. It also notices optimizer steps that come before their gradients are fetched, which SkyRL may run too early.
Everything else goes through to the engine and back unchanged.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NOT_FOUND = (404, {"detail": "Not Found"})
MISSING_MODEL_ID = (422, {"detail": [{"type": "missing", "loc": ["body", "model_id"], "msg": "Field required"}]})


class ForeignServer:
    """Serves `base_model` from the engine at `engine_url`. `met` counts how often each habit showed.

    `lose_models_after` = (call, n) makes the n-th such call from now find every model forgotten; `refusal` is what the
    server says of one.
    """

    def __init__(self, engine_url: str, base_model: str) -> None:
        self.base_url = ""
        self.base_model = base_model
        self.met: Counter[str] = Counter()
        self.lose_models_after: tuple[str, int] | None = None
        self.refusal = "not loaded"
        self._engine = urllib.parse.urlsplit(engine_url)
        self._lost: set[str] = set()
        self._models: dict[str, str] = {}
        self._sampler_models: dict[str, str] = {}
        self._training: set[str] = set()
        self._unfetched: set[str] = set()
        self._doomed: dict[str, str] = {}
        self._lock = threading.Lock()

    def lose_models(self) -> None:
        """Forget every model, as a restart does; what was saved stays."""
        self._lost |= set(self._models)

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        """Status, content type and body of the answer to one request."""
        call = path.partition("?")[0].rsplit("/", 1)[-1]
        with self._lock:
            if self.lose_models_after is not None and self.lose_models_after[0] == call:
                left = self.lose_models_after[1] - 1
                self.lose_models_after = (call, left) if left else None
                if not left:
                    self.lose_models()
        is_json = headers.get("content-type", "").startswith("application/json")
        sent = json.loads(body) if is_json and body else {}
        refusal = self._refuse(call, sent)
        if refusal is not None:
            return refusal[0], "application/json", json.dumps(refusal[1]).encode()
        if call == "create_sampling_session" and (short := sent.get("model_path")):
            model, _, name = short.removeprefix("tinker://").rpartition("/")
            body = json.dumps({**sent, "model_path": f"tinker://{model}/sampler_weights/{name}"}).encode()
        if call == "forward_backward":
            body = self._with_engines_name(headers, body)
        for name, real in self._models.items():
            body = body.replace(name.encode(), real.encode()) if is_json else body
        status, kind, content = self._forward(method, path, headers, body)
        if status == 200:
            content = self._change(call, sent, kind, content)
        return status, kind, content

    def _refuse(self, call: str, sent: dict[str, Any]) -> tuple[int, Any] | None:
        """The answer to a request that does not reach the engine; None for one that does."""
        if call == "tokenizer_files":
            return NOT_FOUND
        if call == "get_server_capabilities":
            return 200, {"supported_models": [{"model_name": self.base_model}]}
        if call == "load_weights" and "model_id" not in sent:
            self.met["no create from state"] += 1
            return MISSING_MODEL_ID
        if call == "optim_step" and self._unfetched:
            self.met["optimizer step before its gradients"] += 1
        if call == "retrieve_future" and (doomed := self._doomed.get(sent["request_id"])):
            self._unfetched.discard(sent["request_id"])
            return 400, {"detail": f"Model {doomed} {self.refusal}"}
        return None

    def _change(self, call: str, sent: dict[str, Any], kind: str, content: bytes) -> bytes:
        """The engine's answer as this server gives it."""
        if not kind.startswith("application/json"):
            self._unfetched.discard(sent["request_id"])
            return self._without_metrics(content) if sent["request_id"] in self._training else content
        reply = json.loads(content)
        if call == "create_model":
            self._models[f"model_{len(self._models):04d}"] = reply["model_id"]
        if call == "asample":
            self.met["no sequence ids"] += 1
            del reply["sample_sequence_ids"]
        content = json.dumps(reply).encode().replace(b"/sampler_weights/", b"/")
        for name, real in self._models.items():
            content = content.replace(real.encode(), name.encode())
        reply = json.loads(content)
        if call == "create_sampling_session" and sent.get("model_path"):
            self._sampler_models[reply["sampling_session_id"]] = sent["model_path"].split("/")[2]
        elif call == "forward_backward":
            self._training.add(reply["request_id"])
            self._unfetched.add(reply["request_id"])
            self._doom(reply["request_id"], reply["model_id"])
        elif call == "asample":
            self._doom(reply["request_id"], self._sampler_models.get(sent["sampling_session_id"]))
        return content

    def _doom(self, request_id: str, model: str | None) -> None:
        if model in self._lost:
            self.met["model not loaded"] += 1
            self._doomed[request_id] = str(model)

    def _with_engines_name(self, headers: dict[str, str], body: bytes) -> bytes:
        import zstandard
        from tinker.proto import tinker_public_pb2 as pb

        if headers.pop("content-encoding", "") == "zstd":
            body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
        message = pb.ForwardBackwardRequest.FromString(body)
        message.model_id = self._models[message.model_id]
        return message.SerializeToString()

    def _without_metrics(self, content: bytes) -> bytes:
        from tinker.proto import tinker_public_pb2 as pb

        message = pb.ForwardBackwardOutput.FromString(content)
        if message.metrics:
            self.met["no metrics"] += 1
        message.metrics.clear()
        return message.SerializeToString()

    def _forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        assert self._engine.hostname is not None
        connection = http.client.HTTPConnection(self._engine.hostname, self._engine.port, timeout=60)
        kept = {name: value for name, value in headers.items() if name not in ("host", "content-length")}
        connection.request(method, path, body or None, {**kept, "Connection": "close"})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, response.getheader("Content-Type", ""), content


@contextmanager
def foreign_server(engine_url: str, base_model: str) -> Iterator[ForeignServer]:
    """A running `ForeignServer`; `base_url` is its address."""
    foreign = ForeignServer(engine_url, base_model)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, kind, content = foreign.answer(self.command, self.path, headers, body)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = _serve

        def log_message(self, format: str, *args: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    foreign.base_url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield foreign
    finally:
        server.shutdown()
        server.server_close()
