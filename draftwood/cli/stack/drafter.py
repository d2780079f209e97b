"""Whether a verify service uses its drafter."""

from __future__ import annotations

import asyncio

import grpc.aio

from draftwood.errors import UnavailableError
from draftwood.rpc.conventions import from_rpc_error
from draftwood.security.security import OPEN, Security
from draftwood.v1 import verify_pb2, verify_pb2_grpc

HANDSHAKE_S = 30.0
_POLL_S = 0.1


async def drafter_status(address: str, *, wait_s: float = HANDSHAKE_S, security: Security = OPEN) -> str:
    """What the verify service says of its drafter: "ready", "mismatch: …", "refused: …", or "absent…" after waiting for
    `wait_s`.

    The two services start side by side, so the handshake may still be under way when both are ready.
    """
    deadline = asyncio.get_running_loop().time() + wait_s
    async with security.channel(address) as channel:
        stub: verify_pb2_grpc.VerifyServiceAsyncStub = verify_pb2_grpc.VerifyServiceStub(channel)
        while True:
            try:
                response = await stub.GetTargetModel(verify_pb2.GetTargetModelRequest(), timeout=wait_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            status = response.drafter_status
            if not status.startswith("absent") or asyncio.get_running_loop().time() >= deadline:
                return status
            await asyncio.sleep(_POLL_S)


async def require_drafter(address: str, security: Security = OPEN) -> None:
    """Raises UnavailableError where the verify service does not use a drafter, saying why."""
    status = await drafter_status(address, security=security)
    if status != "ready":
        raise UnavailableError(f"the verify service at {address} does not use a drafter: {status}")
