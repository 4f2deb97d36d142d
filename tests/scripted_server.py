"""A server with scripted responses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from areal_jax.evaluation.remote import ModelServer

Response = tuple[int, Any]
"""Status and body of a response."""


@contextmanager
def serving(answer: Callable[[str, dict[str, Any]], Response]) -> Iterator[ModelServer]:
    """Serve these responses to path and body; yield a client."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, said = answer(self.path, json.loads(body or "{}"))
            data = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            with closing(
                ModelServer(f"http://127.0.0.1:{http.server_port}/v1/", None, 20.0)
            ) as server:
                yield server
        finally:
            http.shutdown()
            thread.join(20)
