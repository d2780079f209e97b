"""Real servers and clients over TLS: with wrong, expired or missing certificates and tokens nothing is served, and the
error says which side refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from draftwood.address import join
from draftwood.cli.check import problem
from draftwood.config import PeerConfig
from draftwood.errors import DraftwoodError, UnauthenticatedError, UnavailableError
from draftwood.rpc.conventions import from_rpc_error, refusal_in_handshake
from draftwood.security.security import OPEN, Security
from tests.support.authority import Authority

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
WE, THEY = "this side refused the other's certificate: ", "the other side closed the connection at once"


@dataclass
class Served:
    """A server with a method of each kind, health and reflection, and what was called."""

    address: str
    calls: list[str] = field(default_factory=list[str])


def methods(calls: list[str]) -> grpc.GenericRpcHandler:
    def one(kind: str) -> Any:
        async def answer(_request: Any, _context: Any) -> bytes:
            calls.append(kind)
            return b"x"

        async def answers(_request: Any, _context: Any) -> AsyncGenerator[bytes]:
            calls.append(kind)
            yield b"x"

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(answers if kind.endswith("stream") else answer)

    return grpc.method_handlers_generic_handler("t.T", {kind: one(kind) for kind in KINDS})


@asynccontextmanager
async def serving(security: Security) -> AsyncGenerator[Served]:
    server, checks, served = security.server(), health.aio.HealthServicer(), Served("")
    server.add_generic_rpc_handlers((methods(served.calls),))
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection(("t.T",), server)
    served.address = f"127.0.0.1:{security.listen(server, '127.0.0.1', 0)}"
    await server.start()
    try:
        yield served
    finally:
        await server.stop(None)


async def ask_all(security: Security, address: str) -> list[DraftwoodError | None]:
    """Calls everything that is there, by each kind of call; what came of it."""

    async def messages() -> AsyncGenerator[bytes]:
        yield b"x"

    async def questions() -> AsyncGenerator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async def outcome(call: Any, *, streams: bool) -> DraftwoodError | None:
        try:
            if streams:
                assert [message async for message in call]
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        return None

    channel: Any = security.channel(address)
    async with channel:
        outcomes: list[DraftwoodError | None] = []
        for kind in KINDS:
            call = getattr(channel, kind)(f"/t.T/{kind}")(messages() if kind.startswith("stream") else b"x", timeout=10)
            outcomes.append(await outcome(call, streams=kind.endswith("stream")))
        health_stub: Any = health_pb2_grpc.HealthStub(channel)
        outcomes.append(await outcome(health_stub.Check(health_pb2.HealthCheckRequest(), timeout=10), streams=False))
        mirror: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        outcomes.append(await outcome(mirror.ServerReflectionInfo(questions(), timeout=10), streams=True))
    return outcomes


def ask_from_a_thread(security: Security, address: str) -> None:
    with security.sync_channel(address) as channel:
        for kind in KINDS:
            argument = iter([b"x"]) if kind.startswith("stream") else b"x"
            answer: Any = getattr(channel, kind)(f"/t.T/{kind}")(argument, timeout=10)
            assert (list(answer) if kind.endswith("stream") else [answer]) == [b"x"]


async def refusal(server: Security, client: Security) -> DraftwoodError:
    """The one error that everything ends in, without a method having been called."""
    async with serving(server) as served:
        outcomes = await ask_all(client, served.address)
    assert served.calls == []
    assert None not in outcomes
    errors = [outcome for outcome in outcomes if outcome is not None]
    assert len({(type(error), error.message) for error in errors}) == 1, errors
    return errors[0]


def read(authority: Authority, certificate: str) -> tuple[bytes, bytes]:
    """A certificate that `Security.load` would not take."""
    return tuple(Path(authority.path(certificate + end)).read_bytes() for end in (".pem", "-key.pem"))  # pyright: ignore[reportReturnType]


def shown(security: Security, authority: Authority, certificate: str) -> Security:
    chain, key = read(authority, certificate)
    return replace(security, chain=chain, key=key)


@pytest.mark.parametrize(
    ("certificate", "token", "asks"),
    [("", "", False), ("", "token", False), ("good", "", False), ("good", "", True), ("good", "token", True)],
)
async def test_what_belongs_together_is_served(authority: Authority, certificate: str, token: str, asks: bool) -> None:
    server = Security.load(authority.service(certificate, token, asks=asks))
    client = Security.load(authority.peer(certificate if asks else "", "ca" if certificate else "", token))
    async with serving(server) as served:
        assert await ask_all(client, served.address) == [None] * 6
        await asyncio.to_thread(ask_from_a_thread, client, served.address)
    assert served.calls == [*KINDS, *KINDS]


@pytest.mark.parametrize("presented", ["", "other-token"])
@pytest.mark.parametrize("certificate", ["", "good"])
async def test_the_server_refuses_tokens(authority: Authority, certificate: str, presented: str) -> None:
    server = Security.load(authority.service(certificate, "token"))
    error = await refusal(server, Security.load(authority.peer("", "ca" if certificate else "", presented)))
    assert isinstance(error, UnauthenticatedError)  # rebuilt from the reason in the ErrorInfo
    how = "with another token than its own" if presented else "without its token"
    assert error.message == f"the service refuses calls {how} (--token-file)"


async def test_the_server_takes_each_token_of_its_file(authority: Authority) -> None:
    server = Security.load(authority.service("", "both-tokens"))
    async with serving(server) as served:
        for token in ("token", "other-token", "both-tokens"):
            assert await ask_all(Security.load(authority.peer(token=token)), served.address) == [None] * 6


@pytest.mark.parametrize(
    ("shows", "why"),
    [
        ("expired", "it has expired"),
        ("early", "it is not valid yet"),
        ("foreign", "--tls-ca does not trust who signed it"),
        ("elsewhere", "it is for another name"),
    ],
)
async def test_the_client_refuses_certificates(authority: Authority, shows: str, why: str) -> None:
    server = shown(Security(), authority, shows)
    error = await refusal(server, Security.load(authority.peer(trusts="ca")))
    assert isinstance(error, UnavailableError)
    assert error.message == WE + why


@pytest.mark.parametrize("shows", ["", "expired", "early", "foreign"])
async def test_the_server_refuses_certificates(authority: Authority, shows: str) -> None:
    client = Security.load(authority.peer(trusts="ca"))
    if shows:
        client = shown(client, authority, shows)
    error = await refusal(Security.load(authority.service("good", asks=True)), client)
    assert isinstance(error, UnavailableError)
    assert error.message.startswith(THEY)


async def test_tls_on_one_side_only(authority: Authority) -> None:
    plain, secure = Security(), Security.load(authority.peer(trusts="ca"))
    error = await refusal(plain, secure)
    assert error.message == "the other side does not speak TLS, this side does (--tls-ca)"
    error = await refusal(Security.load(authority.service("good")), plain)
    assert error.message.startswith(THEY)
    assert "it speaks TLS and this side does not (--tls-ca)" in error.message


async def test_a_right_certificate_does_not_replace_the_token(authority: Authority) -> None:
    server = Security.load(authority.service("good", "token", asks=True))
    assert isinstance(await refusal(server, Security.load(authority.peer("good", "ca"))), UnauthenticatedError)


async def test_check_says_the_same(authority: Authority) -> None:
    async with serving(Security.load(authority.service("good", "token", asks=True))) as served:
        ask = served.address, "", 10.0
        assert await problem(*ask, authority.peer("good", "ca", "token")) is None
        without_token = await problem(*ask, authority.peer("good", "ca"))
        assert without_token == "the service refuses calls without its token (--token-file)"
        assert (await problem(*ask, authority.peer("", "ca", "token")) or "").startswith(THEY)
        assert (await problem(*ask) or "").startswith(THEY)
        stranger = await problem(*ask, authority.peer("good", "stranger", "token"))
        assert stranger == WE + "--tls-ca does not trust who signed it"


def test_other_errors_are_not_about_certificates() -> None:
    assert refusal_in_handshake(grpc.RpcError("nothing known")) is None


async def test_an_ipv6_address_is_listened_on() -> None:
    """Without brackets gRPC would take the port for its last part."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback address")
    server, checks = OPEN.server(), health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    port = OPEN.listen(server, "::1", 0)
    await server.start()
    try:
        assert await problem(join("::1", port), "", 10.0, PeerConfig()) is None
    finally:
        await server.stop(None)
