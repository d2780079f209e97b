"""The gRPC server of a service: one port with the service itself, its health and reflection."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from draftwood.address import join
from draftwood.errors import ConfigError
from draftwood.security.security import Security


class RpcServer:
    """Serves what is added to `grpc`, under the full name `service`, beside grpc.health.v1 and reflection."""

    def __init__(self, service: str, security: Security) -> None:
        self.service, self._security = service, security
        self.grpc: grpc.aio.Server = security.server()
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)

    def listen(self, host: str, port: int) -> int:
        """Opens the port, 0 for a free one; the port. Raises ConfigError where the address cannot be had."""
        try:
            return self._security.listen(self.grpc, host, port)
        except RuntimeError as error:
            raise ConfigError(f"--port {port}: cannot listen on {join(host, port)}", field="port") from error

    async def start(self) -> None:
        """Calls are taken from now on."""
        await self.grpc.start()

    async def set_health(self, *, is_serving: bool) -> None:
        """What health says of the service and of the server as a whole."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", self.service):
            await self._health.set(name, status)

    async def begin_shutdown(self) -> None:
        """Health says NOT_SERVING, whatever is set from now on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls, and ends those that are not done within the grace period."""
        await self.grpc.stop(grace_s)
