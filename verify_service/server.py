"""The verify service as a process: loads, listens, says that it is ready, and serves until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import logging

import torch

from draftwood.address import join
from draftwood.config import VerifyConfig
from draftwood.rpc.server import RpcServer
from draftwood.service import run, say_ready, stop_on_signals
from draftwood.v1 import verify_pb2, verify_pb2_grpc
from verify_service.api.servicer import VerifyServicer
from verify_service.build import Service, build
from verify_service.engine.engine import PATIENCE_S
from verify_service.gpu.memory import too_large
from verify_service.memory_plan import plan
from verify_service.telemetry.metrics import Telemetry

log = logging.getLogger(__name__)

SERVICE = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name
HEALTH_PERIOD_S = 1.0
GOODBYE_S = 1.0  # for the last messages of calls that have ended


def load(config: VerifyConfig) -> Service:
    """Everything loaded and warm. Raises a DraftwoodError; a GPU that is too small is told by the sizes of what it
    would have to hold."""
    try:
        service = build(config)
        service.warm_up()
    except torch.OutOfMemoryError:
        raise too_large(plan(config)) from None
    return service


async def serve(config: VerifyConfig, service: Service) -> None:
    """Serves until a signal; requests that run then may go on for a while, unless another signal comes."""
    engine, client = service.engine, service.client
    telemetry = Telemetry.start(config, engine, client)
    servicer = VerifyServicer(engine, client, service.defaults, service.facts, telemetry)
    server = RpcServer(SERVICE, service.security)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server.grpc)
    port = server.listen(config.host, config.port)
    engine.start()
    if client is not None:
        client.start()
    await server.start()
    loop = asyncio.get_running_loop()
    stopped = stop_on_signals(on_another=lambda: loop.run_in_executor(None, engine.stop))
    say_ready(f"verify service ready on {join(config.host, port)} ({service.description})")
    while not stopped.is_set():
        await server.set_health(is_serving=engine.is_turning(PATIENCE_S))
        try:
            await asyncio.wait_for(stopped.wait(), HEALTH_PERIOD_S)
        except TimeoutError:
            continue
    await server.begin_shutdown()
    if not await asyncio.to_thread(engine.drain, config.drain_timeout_s):
        log.warning("stopping: requests that were not done within %g s end with UNAVAILABLE", config.drain_timeout_s)
    await asyncio.to_thread(engine.stop)
    await server.stop(GOODBYE_S)
    if client is not None:
        await asyncio.to_thread(client.stop)
    await asyncio.to_thread(telemetry.close)


def main(args: list[str]) -> int:
    """Runs the service; the process's exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    return run(VerifyConfig, args, prog="draftwood verify", build=load, serve=serve)
