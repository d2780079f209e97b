"""The HTTP server: binds its port before it starts, says when it is ready, and drains on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Generator
from typing import Self

import uvicorn

from draftwood.config import GatewayConfig
from draftwood.errors import ConfigError
from gateway.api.served_model import ServedModel
from gateway.http.api_keys import Trust
from gateway.http.app import Gateway, create_app
from gateway.http.connection import Connection
from gateway.telemetry.metrics import Telemetry

KEEP_ALIVE_S = 30  # longer than clients keep idle connections, so that they do not find them just closed
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server(uvicorn.Server):
    """One gateway. A signal stops it cleanly: uvicorn would raise it again once it is done, which ends in an error."""

    def __init__(self, config: GatewayConfig, model: ServedModel, trust: Trust, listener: socket.socket) -> None:
        self._telemetry = Telemetry.start(config)
        options = uvicorn.Config(
            create_app(Gateway(config, model, trust, self._telemetry)),
            loop="uvloop",
            http=Connection,
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(config.drain_timeout_s),
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=config.https_cert or None,
            ssl_keyfile=config.https_key or None,
        )
        super().__init__(options)
        self._listener = listener
        self._on_ready: Callable[[], None] = _nothing
        self.address = _url(listener, "https" if config.https_cert else "http")
        self.model_name = model.name

    @classmethod
    def bind(cls, config: GatewayConfig, model: ServedModel) -> Self:
        """Binds the port. Raises ConfigError, also for wrong certificates and keys."""
        trust = Trust.load(config)
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            listener.close()
            raise ConfigError(f"--port {config.port}: cannot listen on {config.host}: {error}", field="port") from error
        return cls(config, model, trust, listener)

    def stop_on_signals(self) -> None:
        """From now on SIGTERM and SIGINT stop the server; a second SIGINT does not wait for running answers."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)

    async def serve_until_stopped(self, on_ready: Callable[[], None]) -> None:
        """Serves until `should_exit` is set; `on_ready` is called once requests are accepted."""
        self._on_ready = on_ready
        try:
            await self.serve([self._listener])
        finally:
            if self._telemetry is not None:
                self._telemetry.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening, then tells."""
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Left to `stop_on_signals`."""
        yield


def _nothing() -> None:
    pass


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
