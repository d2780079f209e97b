"""The verify service as a process: loads, listens, says that it is ready, and serves until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import torch
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from draftwood.address import join
from draftwood.config import VerifyConfig
from draftwood.errors import DraftwoodError, UnavailableError
from draftwood.garbage import freeze_startup
from draftwood.v1 import verify_pb2, verify_pb2_grpc
from verify_service.api.request_hooks import RequestHooks
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


async def serve(config: VerifyConfig, service: Service) -> None:
    """Listens, says so on standard output, and serves until a signal."""
    telemetry = Telemetry.start(config, service)
    server = service.security.server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(
        VerifyServicer(
            service.engine,
            service.client,
            service.defaults,
            service.facts,
            telemetry.watch if telemetry is not None else RequestHooks,
        ),
        server,
    )
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = service.security.listen(server, config.host, config.port)
    except RuntimeError as error:
        raise UnavailableError(f"--port {config.port}: cannot listen on {join(config.host, config.port)}") from error
    service.engine.start()
    if service.client is not None:
        service.client.start()
    await server.start()
    stopped = _stop_on_signals(service)
    sys.stdout.write(f"verify service ready on {join(config.host, port)} ({service.description})\n")
    sys.stdout.flush()
    await _watch(checks, service, stopped)
    await checks.enter_graceful_shutdown()
    if not await asyncio.to_thread(service.engine.drain, config.drain_timeout_s):
        log.warning("stopping: requests that were not done within %g s end with UNAVAILABLE", config.drain_timeout_s)
    await asyncio.to_thread(service.engine.stop)
    await server.stop(GOODBYE_S)
    if service.client is not None:
        await asyncio.to_thread(service.client.stop)
    if telemetry is not None:
        await asyncio.to_thread(telemetry.close)


def _stop_on_signals(service: Service) -> asyncio.Event:
    """The event is set by the first SIGTERM or SIGINT; another one does not wait for running requests."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if stopped.is_set():
            loop.run_in_executor(None, service.engine.stop)
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stopped


async def _watch(checks: health.aio.HealthServicer, service: Service, stopped: asyncio.Event) -> None:
    """Healthy as long as the device loop turns; returns when told to stop."""
    while not stopped.is_set():
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if service.engine.is_turning(PATIENCE_S) else kinds.NOT_SERVING
        for name in ("", SERVICE):
            await checks.set(name, status)
        try:
            await asyncio.wait_for(stopped.wait(), HEALTH_PERIOD_S)
        except TimeoutError:
            continue


def started(config: VerifyConfig) -> Service:
    """Everything loaded and warm. Raises a DraftwoodError; a GPU that is too small is told by the sizes of what it
    would have to hold."""
    try:
        service = build(config)
        service.warm_up()
    except torch.OutOfMemoryError:
        raise too_large(plan(config)) from None
    return service


def main(args: list[str]) -> int:
    """Exit code 0 after a clean stop, 2 for a setting or model that cannot be served."""
    config = VerifyConfig.from_args(args, prog="draftwood verify")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        service = started(config)
        freeze_startup()
        uvloop.run(serve(config, service))
    except DraftwoodError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2
    return 0
