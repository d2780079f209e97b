"""The HTTP endpoint that Prometheus reads: GET /metrics, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

PATH = "/metrics"
PATIENCE_S = 10.0  # for a request's next bytes, and for a client that does not read

WsgiApp = Callable[[dict[str, Any], Any], Iterable[bytes]]


class QuietHandler(WSGIRequestHandler):
    """Logs nothing, and closes connections that ask for nothing: each of them has a thread."""

    timeout = PATIENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """No line a scrape."""

    def handle(self) -> None:
        """One request."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()


class Endpoint:
    """Answers on threads of its own, until it is closed."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Raises OSError where the port cannot be listened on."""

        class Server(ThreadingWSGIServer):
            address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]

        app: Any = _only_metrics(make_wsgi_app(registry))
        self._server = make_server(host, port, app, Server, QuietHandler)
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stops answering."""
        self._server.shutdown()
        self._server.server_close()


def _only_metrics(app: Any) -> WsgiApp:
    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] != PATH:
            start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"nothing is here; metrics are at {PATH}\n".encode()]
        return app(environ, start_response)

    return answer
