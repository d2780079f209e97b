"""The gateway as a process: loads the tokenizer, listens, says that it is ready, and serves until SIGTERM or Ctrl-C."""

from __future__ import annotations

import sys

import uvloop

from draftwood.config import GatewayConfig
from draftwood.errors import DraftwoodError
from draftwood.garbage import freeze_startup
from gateway.api.served_model import ServedModel
from gateway.http.http_server import Server


def main(args: list[str]) -> int:
    """Returns the exit status."""
    config = GatewayConfig.from_args(args, "python -m gateway")
    try:
        server = Server.bind(config, ServedModel.load(config))
    except DraftwoodError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2

    uvloop.run(serve(server))
    return 0


async def serve(server: Server) -> None:
    """Serves until a signal; says on standard output when requests are accepted."""

    def on_ready() -> None:
        freeze_startup()
        sys.stdout.write(f"gateway ready on {server.address}/v1 (model {server.model_name})\n")
        sys.stdout.flush()

    server.stop_on_signals()
    await server.serve_until_stopped(on_ready)
