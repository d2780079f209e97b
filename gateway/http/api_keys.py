"""Whom the gateway trusts. Requests carry an API key as `Authorization: Bearer KEY`, as OpenAI's clients do, or are
refused with 401."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from draftwood.config import GatewayConfig
from draftwood.errors import UnauthenticatedError
from draftwood.security.auth_tokens import is_known, read_tokens
from draftwood.security.certificates import read_certificates, read_key
from draftwood.security.security import Security, is_loopback
from gateway.api.error_object import error_response

log = logging.getLogger(__name__)

HEALTH = "/health"  # open to load balancers, which send no keys; it then says no more than whether there is service


@dataclass(frozen=True, slots=True)
class Trust:
    """Contents of the gateway's certificate, token and key files."""

    security: Security
    api_keys: tuple[str, ...]

    @classmethod
    def load(cls, config: GatewayConfig) -> Self:
        """Reads and checks the files, and warns where others may reach the API. Raises ConfigError."""
        if config.https_cert:
            chain = read_certificates(config.https_cert, "--https-cert")
            read_key(config.https_key, "--https-key", chain, config.https_cert)
        api_keys = read_tokens(config.api_key_file, "--api-key-file") if config.api_key_file else ()
        if not is_loopback(config.host):
            if not config.https_cert:
                log.warning("listening on %s without HTTPS: whoever reads the network reads every prompt", config.host)
            if not api_keys:
                log.warning("listening on %s for everybody: no --api-key-file says who may ask", config.host)
        return cls(Security.load(config), api_keys)


class ApiKeyMiddleware:
    """Without keys everybody is let in."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Puts into the request's state whether it may see everything."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        presented = Headers(scope=scope).get("authorization", "")
        is_trusted = not self._keys or is_known(presented, self._keys)
        scope.setdefault("state", {})["is_trusted"] = is_trusted
        if is_trusted or scope["path"] == HEALTH:
            await self._app(scope, receive, send)
            return
        what = "a wrong API key" if presented else "no API key"
        response = error_response(UnauthenticatedError(f"the request carries {what}: Authorization: Bearer KEY"))
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)
