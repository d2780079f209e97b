"""The draft service as a process: loads, listens, says that it is ready, and serves until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import NoReturn, Self

from draft_service.api.servicer import DraftServicer
from draft_service.build import Service, build
from draft_service.telemetry import UNWATCHED, Telemetry
from draftwood.address import join
from draftwood.config import DraftConfig
from draftwood.rpc.server import RpcServer
from draftwood.service import run, say_ready, stop_on_signals
from draftwood.v1 import draft_pb2, draft_pb2_grpc

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
DRAIN_S = 2.0
HEARTBEAT_S = 5.0
LONGEST_PASS_S = 30.0


class DraftServer:
    """A listening draft service. Ends the service's worker when it stops."""

    def __init__(self, service: Service, telemetry: Telemetry | None = None, lease_s: float = 60.0) -> None:
        self._worker, self._telemetry = service.worker, telemetry
        watch = telemetry if telemetry is not None else UNWATCHED
        self._servicer = DraftServicer(service.drafter, service.worker, service.facts, lease_s, watch)
        if telemetry is not None:
            telemetry.read_streams(lambda: self._servicer.streams.num_open)
        self._server = RpcServer(SERVICE, service.security)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, self._server.grpc)
        self._heartbeat: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> Self:
        """Listens. Raises ConfigError where the address cannot be had."""
        self.port = self._server.listen(host, port)
        await self._server.start()
        await self._server.set_health(is_serving=True)
        self._heartbeat = asyncio.create_task(self._watch_worker())
        return self

    async def stop(self, grace_s: float = DRAIN_S) -> None:
        """Says NOT_SERVING, lets calls finish for `grace_s` seconds, ends the rest and the worker."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heartbeat
        await self._server.begin_shutdown()
        await self._server.stop(grace_s)
        self._servicer.streams.close()
        self._worker.shutdown()
        if self._telemetry is not None:
            self._telemetry.close()

    async def _watch_worker(self) -> None:
        """Health follows the thread that owns the model: it must get round to an empty job."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            turn = loop.run_in_executor(self._worker, lambda: None)
            done, _ = await asyncio.wait({turn}, timeout=LONGEST_PASS_S)
            if not done:
                await self._server.set_health(is_serving=False)
                await turn
                await self._server.set_health(is_serving=True)


def load(config: DraftConfig) -> Service:
    """Everything loaded and warm. SIGTERM ends the process meanwhile: a compiler cannot be interrupted, and nothing is
    being served that would have to end well."""

    def end(_number: int, _frame: object) -> NoReturn:
        os._exit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        return build(config)
    except BaseException:
        signal.signal(signal.SIGTERM, before)
        raise


async def serve(config: DraftConfig, service: Service) -> None:
    """Serves until a signal."""
    telemetry = Telemetry.start(config, service.drafter)
    server = await DraftServer(service, telemetry).start(config.host, config.port)
    stopped = stop_on_signals()
    say_ready(f"draft service ready on {join(config.host, server.port)} ({service.description})")
    await stopped.wait()
    await server.stop()


def main(args: list[str]) -> int:
    """Runs the service; the process's exit code."""
    return run(DraftConfig, args, prog="draftwood draft", build=load, serve=serve)
