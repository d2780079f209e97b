"""The gateway as a process: loads the tokenizer, listens, says that it is ready, and serves until SIGTERM or Ctrl-C."""

from __future__ import annotations

from draftwood.config import GatewayConfig
from draftwood.service import run, say_ready
from gateway.api.served_model import ServedModel
from gateway.http.http_server import Server


def load(config: GatewayConfig) -> Server:
    """The tokenizer loaded and the port bound. Raises a DraftwoodError."""
    return Server.bind(config, ServedModel.load(config))


async def serve(_config: GatewayConfig, server: Server) -> None:
    """Serves until a signal; answers that run then may go on for a while, unless a second Ctrl-C comes."""
    server.stop_on_signals()
    await server.serve_until_stopped(
        on_ready=lambda: say_ready(f"gateway ready on {server.address}/v1 (model {server.model_name})")
    )


def main(args: list[str]) -> int:
    """Runs the service; the process's exit code."""
    return run(GatewayConfig, args, prog="draftwood gateway", build=load, serve=serve)
