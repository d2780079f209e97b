"""Whom a request belongs to, so that the verify service can serve its clients in fair shares."""

from __future__ import annotations

import hashlib

from starlette.requests import Request


def client_key(request: Request, user: str) -> str:
    """A hash over the API key and the request's `user`; without one, over the API key and the client's address.

    Neither leaves the gateway in the clear.
    """
    address = request.client.host if request.client is not None else ""
    parts = (request.headers.get("authorization", ""), "user" if user else "address", user or address)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
