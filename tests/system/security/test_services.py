"""The services' own clients among themselves: what each says when it is refused, and that it goes on without."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import httpx
import openai
import pytest

from bench.run.client import VerifyClient
from draftwood.cli.check import problem
from draftwood.cli.gateway_client import RestClient
from draftwood.cli.stack.drafter import drafter_status
from draftwood.config import GatewayConfig
from draftwood.errors import InvalidRequestError, UnauthenticatedError
from draftwood.noise import NOISE_VERSION
from draftwood.rpc.wire import PROTOCOL_VERSION
from draftwood.security.security import Security
from draftwood.v1 import draft_pb2, draft_pb2_grpc
from gateway.api.served_model import ServedModel
from tests.gateway.conftest import running_gateway
from tests.gateway.fake_verify import FakeVerify, serve
from tests.support.authority import OTHER_TOKEN, TOKEN, Authority
from verify_service.draft.client import DraftClient, Expected

EXPECTED = Expected((1, 4), 6, 100, "aa", "bb")
PATIENCE_S = 20.0


class OpenDrafter(draft_pb2_grpc.DraftServiceServicer):
    """A drafter that any verify service matches, and that keeps its stream open."""

    def __init__(self) -> None:
        self.streams = 0

    async def GetDraftModel(self, request: Any, context: Any) -> draft_pb2.GetDraftModelResponse:
        return draft_pb2.GetDraftModelResponse(
            model=draft_pb2.DraftModel(
                target_layer_ids=EXPECTED.target_layer_ids,
                hidden_size=EXPECTED.hidden_size,
                vocab_size=EXPECTED.vocab_size,
                tokenizer_hash=EXPECTED.tokenizer_hash,
                projection_checksum=EXPECTED.projection_checksum,
                protocol_version=PROTOCOL_VERSION,
                noise_version=NOISE_VERSION,
            )
        )

    async def Prefill(self, request_iterator: Any, context: Any) -> draft_pb2.PrefillResponse:
        raise NotImplementedError

    async def Draft(self, request_iterator: Any, context: Any) -> AsyncIterator[draft_pb2.DraftResponse]:
        self.streams += 1
        async for _ in request_iterator:
            yield draft_pb2.DraftResponse()


@asynccontextmanager
async def serving(drafter: OpenDrafter, security: Security) -> AsyncGenerator[str]:
    server = security.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(drafter, server)
    port = security.listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("certificate", "trusts", "token", "status"),
    [
        ("good", "ca", "token", "ready"),
        ("good", "ca", "", "refused: the service refuses calls without its token (--token-file)"),
        ("good", "ca", "other-token", "refused: the service refuses calls with another token than its own"),
        ("good", "stranger", "token", "refused: this side refused the other's certificate: --tls-ca does not trust"),
        ("", "ca", "token", "refused: the other side closed the connection at once"),
        ("", "", "token", "refused: the other side closed the connection at once"),
    ],
)
async def test_the_drafter_refuses_a_verify_service(
    authority: Authority, certificate: str, trusts: str, token: str, status: str
) -> None:
    drafter = OpenDrafter()
    async with serving(drafter, Security.load(authority.service("good", "token", asks=True))) as address:
        client = DraftClient(address, EXPECTED, Security.load(authority.peer(certificate, trusts, token)))
        client.start()
        assert await asyncio.to_thread(client.settled.wait, PATIENCE_S)
        found = client.status
        await asyncio.to_thread(client.stop)
    assert found.startswith(status)
    assert drafter.streams == (status == "ready")


async def test_a_draft_stream_without_the_token_is_refused(authority: Authority) -> None:
    """Whoever leaves the handshake out gets no further; not even a first message is waited for."""
    drafter = OpenDrafter()
    guarded = Security.load(authority.service("", "token"))
    async with serving(drafter, guarded) as address, Security().channel(address) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        call = stub.Draft(timeout=PATIENCE_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert drafter.streams == 0


async def test_the_verify_service_refuses_commands(authority: Authority) -> None:
    fake, guarded = FakeVerify(), Security.load(authority.service("good", "token"))
    async with serve(fake, security=guarded) as port:
        address = f"127.0.0.1:{port}"
        right, wrong = (Security.load(authority.peer("", "ca", token)) for token in ("token", "other-token"))
        async with VerifyClient(address, right) as client:
            assert (await client.target()).model_id == "sprout"
        assert await drafter_status(address, security=right) == "ready"
        async with VerifyClient(address, wrong) as client:
            with pytest.raises(UnauthenticatedError, match="another token"):
                await client.target()
        with pytest.raises(UnauthenticatedError, match="another token"):
            await drafter_status(address, security=wrong)


@pytest.mark.parametrize(
    ("trusts", "token", "reason"),
    [
        ("ca", "other-token", "the service refuses calls with another token than its own (--token-file)"),
        ("stranger", "token", "this side refused the other's certificate: --tls-ca does not trust who signed it"),
        ("", "token", "the other side closed the connection at once"),
    ],
)
async def test_the_verify_service_refuses_a_gateway(
    authority: Authority, model: ServedModel, trusts: str, token: str, reason: str
) -> None:
    """A client of the gateway reads 503, not 401: it is not its token that is wrong."""
    fake = FakeVerify()
    async with serve(fake, security=Security.load(authority.service("good", "token"))) as port:
        files: dict[str, Any] = authority.files("", trusts, token)
        config = GatewayConfig(port=0, verify=f"127.0.0.1:{port}", **files)
        async with running_gateway(config, model) as url, httpx.AsyncClient(trust_env=False) as http:
            health = await http.get(f"{url}/health")
            answer = await http.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert (health.status_code, answer.status_code) == (503, 503)
    expected = f"the verify service at 127.0.0.1:{port} is not available: {reason}"
    assert health.json()["reason"].startswith(expected)
    assert answer.json()["error"]["message"].startswith(expected)
    assert fake.requests == []


async def test_https_and_api_keys(authority: Authority, model: ServedModel) -> None:
    trust = ssl.create_default_context(cafile=authority.path("ca.pem"))
    async with serve(FakeVerify()) as port:
        config = GatewayConfig(
            port=0,
            verify=f"127.0.0.1:{port}",
            https_cert=authority.path("good.pem"),
            https_key=authority.path("good-key.pem"),
            api_key_file=authority.path("token"),
        )
        async with running_gateway(config, model) as url, httpx.AsyncClient(trust_env=False, verify=trust) as http:
            assert url.startswith("https://127.0.0.1:")
            for key, what in (("", "no API key"), (OTHER_TOKEN, "a wrong API key")):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                for path in ("/v1/models", "/v1/completions", "/version", "/nowhere"):
                    answer = await http.request("GET", url + path, headers=headers)
                    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                    error = answer.json()["error"]
                    assert error["code"] == "unauthenticated"
                    assert error["message"].startswith(f"the request carries {what}")
                assert (await http.get(f"{url}/health", headers=headers)).json() == {"status": "ok"}
            whole = await http.get(f"{url}/health", headers={"authorization": f"Bearer {TOKEN}"})
            assert whole.json()["drafter"]["status"] == "ready"
            preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
            assert (await http.options(f"{url}/v1/completions", headers=preflight)).status_code == 200

            inner = openai.DefaultAsyncHttpxClient(verify=trust, trust_env=False)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, http_client=inner) as client:
                assert [entry.id for entry in (await client.models.list()).data] == [model.name]
            async with RestClient(url, authorities=authority.path("ca.pem"), key=TOKEN) as client:
                assert await client.model() == model.name
            async with RestClient(url, authorities=authority.path("ca.pem")) as client:
                with pytest.raises(InvalidRequestError, match="401: the request carries no API key"):
                    await client.model()
            assert await problem(url, "", PATIENCE_S, authority.peer(trusts="ca")) is None
            assert "CERTIFICATE_VERIFY_FAILED" in (await problem(url, "", PATIENCE_S) or "")
