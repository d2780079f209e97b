"""The draft service as a process: loads, listens, says that it is ready, and serves until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import uvloop

from draft_service.build import DraftServer, load
from draft_service.telemetry import Telemetry
from draftwood.address import join
from draftwood.config import DraftConfig
from draftwood.errors import DraftwoodError
from draftwood.garbage import freeze_startup
from draftwood.security.security import Security


async def serve(config: DraftConfig) -> None:
    """Serves until SIGTERM or SIGINT."""
    security = Security.load(config)
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    worker = ThreadPoolExecutor(1, thread_name_prefix="drafter")
    loading = loop.run_in_executor(worker, load, config)
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        os._exit(0)  # a compiler cannot be interrupted, and nothing is being served that would have to end well
    loaded = loading.result()
    loop.add_signal_handler(signal.SIGINT, stopping.set)
    telemetry = Telemetry.start(config, loaded.drafter)
    server = DraftServer(loaded, worker, telemetry=telemetry, security=security)
    await server.start(config.host, config.port)
    freeze_startup()
    what = f"{loaded.handshake.model.model_id}, {loaded.dtype}, {loaded.num_threads} threads"
    sys.stdout.write(f"draft service ready on {join(config.host, server.port)} ({what})\n")
    sys.stdout.flush()
    await stopping.wait()
    await server.stop()


def main(args: list[str]) -> int:
    """Runs the service; the process's exit status."""
    config = DraftConfig.from_args(args, "draft_service")
    try:
        uvloop.run(serve(config))
    except DraftwoodError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2
    return 0
