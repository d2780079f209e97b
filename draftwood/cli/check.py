"""`draftwood check`: health of running services, for people and for container health checks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import click

from draftwood.cli.console import out
from draftwood.cli.options import FiniteRange, build, settings
from draftwood.config import DraftConfig, GatewayConfig, PeerConfig, VerifyConfig

PLAIN = PeerConfig()


@click.command()
@click.argument("addresses", nargs=-1, metavar="[ADDRESS]...")
@click.option(
    "--service",
    default="",
    help="gRPC service name to ask about, such as draftwood.v1.VerifyService; empty asks about the whole server.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="Seconds to wait for an answer.",
)
@settings(PeerConfig)
def check(addresses: tuple[str, ...], service: str, timeout_s: float, **values: Any) -> None:
    """Say whether services are healthy.

    Prints one line each; the exit code is 0 if all are, else 1.

    An ADDRESS is host:port of a gRPC service, or http://host:port or https://host:port of a gateway. Without any the
    three default addresses are checked.

    \b
    Examples:
      draftwood check
      draftwood check 127.0.0.1:50051 --service draftwood.v1.VerifyService
      draftwood check 127.0.0.1:50051 http://127.0.0.1:8000
      draftwood check verify.example:50051 --tls-ca ca.pem --token-file token
    """
    healthy = asyncio.run(_check_all(addresses or default_addresses(), service, timeout_s, build(PeerConfig, values)))
    raise SystemExit(0 if healthy else 1)


def default_addresses() -> list[str]:
    """Where `draftwood up` puts the services."""
    draft, verify, gateway = DraftConfig(), VerifyConfig(), GatewayConfig()
    return [
        f"{draft.host}:{draft.port}",
        f"{verify.host}:{verify.port}",
        f"http://{gateway.host}:{gateway.port}",
    ]


async def _check_all(addresses: Sequence[str], service: str, timeout_s: float, peers: PeerConfig) -> bool:
    problems = await asyncio.gather(*(problem(address, service, timeout_s, peers) for address in addresses))
    for address, trouble in zip(addresses, problems, strict=True):
        out.print(
            f"{address} {'healthy' if trouble is None else f'not healthy: {trouble}'}", markup=False, soft_wrap=True
        )
    return all(trouble is None for trouble in problems)


async def problem(address: str, service: str, timeout_s: float, peers: PeerConfig = PLAIN) -> str | None:
    """What is wrong at an address; None if it is healthy. Raises ConfigError where a file of `peers` is wrong."""
    if address.startswith(("http://", "https://")):
        return await _http_problem(address, timeout_s, peers)
    return await _grpc_problem(address, service, timeout_s, peers)


async def _http_problem(address: str, timeout_s: float, peers: PeerConfig) -> str | None:
    import httpx

    from draftwood.security.security import https_trust

    url = address.rstrip("/").removesuffix("/v1").removesuffix("/health") + "/health"
    try:
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False, verify=https_trust(peers.tls_ca)) as client:
            response = await client.get(url)
    except httpx.TimeoutException:
        return f"no answer within {timeout_s:g} s"
    except httpx.ConnectError as error:
        if "connection attempts failed" in str(error):
            return _nothing(httpx.URL(url).netloc.decode())
        return _unknown(httpx.URL(url).host) if isinstance(_root(error), socket.gaierror) else str(error)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return None if response.status_code == 200 else f"{url} answers {response.status_code}"


def explain(address: str, details: str) -> str:
    """gRPC's words for the usual mistakes are about its inside."""
    if "Connection refused" in details:
        return _nothing(address)
    if "Failed to parse port" in details:
        return f"{address} is not host:port"
    if "lookup error" in details:
        return _unknown(address.rpartition(":")[0] or address)
    is_http = "http1.x server" in details or "Failed parsing HTTP/2" in details
    return f"this is no gRPC service; for a gateway say http://{address}" if is_http else details


def _root(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _unknown(host: str) -> str:
    return f"the name {host} is not known"


def _nothing(address: str) -> str:
    return f"nothing listens at {address} (is it still starting?)"


async def _grpc_problem(address: str, service: str, timeout_s: float, peers: PeerConfig) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from draftwood.rpc.conventions import refusal_in_handshake
    from draftwood.security.security import Security

    async with Security.load(peers).channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer within {timeout_s:g} s"
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return f"no such service: {service}"
            return refusal_in_handshake(error) or explain(address, error.details() or error.code().name)
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return None if status == "SERVING" else status
