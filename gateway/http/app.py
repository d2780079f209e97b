"""The REST application: routes, and errors as OpenAI writes them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from draftwood.config import GatewayConfig
from draftwood.errors import DraftwoodError, InternalError, UnavailableError
from gateway.api.chat import ChatFormat
from gateway.api.completion import CompletionFormat
from gateway.api.error_object import CLIENT_CLOSED_REQUEST, error_object, error_response
from gateway.api.planning import Caller, make_plan
from gateway.api.prompt import encode_chat, encode_prompts
from gateway.api.refusal import UnknownFields, show
from gateway.api.reply import Format, Head, Reply
from gateway.api.schemas import ChatRequest, CompletionRequest, GenerationRequest
from gateway.api.served_model import ServedModel
from gateway.generation.generation import Generator
from gateway.generation.hooks import NO_HOOKS, GenerationHooks
from gateway.generation.plan import Plan
from gateway.generation.verify_client import Target, VerifyClient
from gateway.http.api_keys import ApiKeyMiddleware, Trust
from gateway.http.client_key import client_key
from gateway.http.interruption import InterruptionMiddleware
from gateway.http.request_body import read_request
from gateway.http.request_id import RequestIdMiddleware
from gateway.http.sse import EventStream, unless_hung_up
from gateway.telemetry.metrics import Telemetry, TelemetryMiddleware

HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "request_too_large"}


class Gateway:
    """The endpoints, over one model and one verify service."""

    def __init__(
        self, config: GatewayConfig, model: ServedModel, trust: Trust, telemetry: Telemetry | None = None
    ) -> None:
        self._config = config
        self._model = model
        self.trust = trust
        self.telemetry = telemetry
        self._unknown_fields = UnknownFields()
        self._client: VerifyClient | None = None

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        """Holds the channel, which belongs to the running event loop."""
        self._client = VerifyClient(self._config.verify, self.trust.security)
        try:
            yield
        finally:
            await self._client.close()

    @property
    def client(self) -> VerifyClient:
        """The channel; there is none before the start and after the end."""
        assert self._client is not None, "the application has not been started"
        return self._client

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await read_request(ChatRequest, request, self._config, self._unknown_fields)
        target = await self._target_for(body)
        prompt = await encode_chat(body, self._model.template, self._model.tokenizer)
        plan = make_plan(body, [prompt], target, self._model.defaults, _caller(request, body))
        return await self._respond(request, body, self._reply(request, ChatFormat(self._model.tokenizer), plan, target))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await read_request(CompletionRequest, request, self._config, self._unknown_fields)
        target = await self._target_for(body)
        tokenizer = self._model.tokenizer
        prompts = await encode_prompts(body, tokenizer, target)
        plan = make_plan(body, prompts, target, self._model.defaults, _caller(request, body))
        echoes = [
            tokenizer.decode(list(choice.options.prompt_token_ids)) if body.echo else "" for choice in plan.choices
        ]
        return await self._respond(
            request, body, self._reply(request, CompletionFormat(tokenizer, echoes), plan, target)
        )

    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model.to_object(await self._target_or_none())]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        self._model.check_name(request.path_params["name"])
        return JSONResponse(self._model.to_object(await self._target_or_none()))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 if a request would be served now; without the API key that is asked for, no details."""
        response = await self._health()
        if request.state.is_trusted:
            return response
        return JSONResponse({"status": "ok" if response.status_code == 200 else "unavailable"}, response.status_code)

    async def _health(self) -> Response:
        try:
            target, load = await asyncio.gather(self.client.target(fresh=True), self.client.load())
            self._model.check_target(target)
            if not load.is_serving:
                raise UnavailableError("the verify service says that it is not serving")
        except DraftwoodError as error:
            headers = {"retry-after": "1"}
            return JSONResponse(
                {"status": "unavailable", "model": self._model.name, "reason": error.message}, 503, headers
            )
        return JSONResponse(
            {
                "status": "ok",
                "model": self._model.name,
                "verify": {"address": self._config.verify, "running": load.num_running, "queued": load.num_queued},
                "drafter": {"status": load.drafter_status, "model": target.draft_model_id or None},
            }
        )

    async def version(self, _request: Request) -> Response:
        """GET /version: of the gateway, and of the verify service where it answers."""
        target = await self._target_or_none()
        return JSONResponse({"version": own_version(), "verify": target.version if target is not None else None})

    async def _target_for(self, body: GenerationRequest) -> Target:
        self._model.check_name(body.model)
        target = await self.client.target()
        self._model.check_target(target)
        return target

    async def _target_or_none(self) -> Target | None:
        try:
            return await self.client.target()
        except DraftwoodError:
            return None

    def _reply(self, request: Request, form: Format, plan: Plan, target: Target) -> Reply:
        hooks: GenerationHooks = getattr(request.state, "hooks", NO_HOOKS)
        head = Head(
            form.id_prefix + uuid.uuid4().hex, int(time.time()), self._model.name, self._model.fingerprint(target)
        )
        hooks.named(head.id, head.model)
        generator = Generator(self.client, self._model.tokenizer, self._config.request_timeout_s, hooks)
        return Reply(head, form, plan, generator)

    async def _respond(self, request: Request, body: GenerationRequest, reply: Reply) -> Response:
        if body.stream:
            include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return EventStream(reply.chunks(include_usage=include_usage), self._config.keepalive_s)
        whole = await unless_hung_up(request, reply.whole())
        return Response(status_code=CLIENT_CLOSED_REQUEST) if whole is None else JSONResponse(whole)


def create_app(gateway: Gateway) -> Starlette:
    """The ASGI application."""
    routes = [
        Route("/v1/chat/completions", gateway.chat, methods=["POST"]),
        Route("/v1/completions", gateway.complete, methods=["POST"]),
        Route("/v1/models", gateway.models),
        Route("/v1/models/{name:path}", gateway.model),
        Route("/health", gateway.health),
        Route("/version", gateway.version),
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_methods=["GET", "POST", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", "x-should-retry"],
    )
    handlers: dict[Any, Any] = {
        DraftwoodError: _on_error,
        HTTPException: _on_http_exception,
        ClientDisconnect: _on_disconnect,
        Exception: _on_fault,
    }
    middleware = [
        Middleware(RequestIdMiddleware),
        cors,
        Middleware(ApiKeyMiddleware, keys=gateway.trust.api_keys),
        Middleware(InterruptionMiddleware),
    ]
    if gateway.telemetry is not None:
        middleware.insert(1, Middleware(TelemetryMiddleware, gateway.telemetry))
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=gateway.lifespan)


def own_version() -> str:
    """Version of the installed distribution; "unknown" when run from a bare checkout."""
    try:
        return version("draftwood")
    except PackageNotFoundError:
        return "unknown"


def _caller(request: Request, body: GenerationRequest) -> Caller:
    client = client_key(request, body.end_user)
    given = request.headers.get("traceparent", "")
    return Caller(request.state.request_id, getattr(request.state, "traceparent", given), client)


async def _on_error(_request: Request, error: DraftwoodError) -> Response:
    return error_response(error)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    code, message = HTTP_CODES.get(error.status_code, "http_error"), error.detail
    match code:
        case "not_found":
            paths = ", ".join(route.path_format for route in request.app.routes)
            message = f"nothing is served at {show(request.url.path)}; there are {paths}"
        case "method_not_allowed":
            allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
            message = f"{request.url.path} takes {allowed}, not {request.method}"
        case _:
            pass
    return JSONResponse(error_object(message, error.status_code, code), error.status_code, error.headers)


async def _on_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_fault(_request: Request, _error: Exception) -> Response:
    return error_response(InternalError("internal error; the gateway's log has the details"))
