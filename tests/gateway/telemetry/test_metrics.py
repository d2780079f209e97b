"""What the gateway says of requests that end badly, and what it tells the verify service of a trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from draftwood.config import GatewayConfig
from draftwood.errors import OverloadedError, UnavailableError
from gateway.api.served_model import ServedModel
from gateway.telemetry.metrics import route_of
from tests.gateway.conftest import Stand, stand_for
from tests.gateway.fake_verify import FakeVerify, Script, serve
from tests.system.processes import free_port
from tests.system.scraping import Samples, scrape, value

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}
REQUESTS = "draftwood_gateway_requests_total"


class Measured:
    """A gateway with its metrics, and what they say."""

    def __init__(self, stand: Stand, metrics_port: int) -> None:
        self.stand, self.metrics_port = stand, metrics_port

    async def scrape(self) -> Samples:
        return await asyncio.to_thread(scrape, self.metrics_port)

    async def until(self, route: str, status: int, count: int = 1) -> Samples:
        """What is said once so many requests have ended so."""
        key = (REQUESTS, frozenset({("route", route), ("status", str(status))}))
        async with asyncio.timeout(20):
            while (samples := await self.scrape()).get(key, 0) < count:
                pass
        return samples


@pytest_asyncio.fixture(loop_scope="session")
async def measured(model: ServedModel, tmp_path: Path) -> AsyncIterator[Measured]:
    fake, port = FakeVerify(), free_port()
    async with serve(fake) as verify_port:
        config = GatewayConfig(
            port=0,
            verify=f"127.0.0.1:{verify_port}",
            metrics_port=port,
            trace_file=str(tmp_path / "spans.jsonl"),
            keepalive_s=0.05,
        )
        async with stand_for(config, model, fake) as stand:
            yield Measured(stand, port)


async def test_a_client_that_hangs_up(measured: Measured) -> None:
    fake = measured.stand.verify
    fake.script = Script([300], hang_after=True)
    async with measured.stand.http.stream("POST", CHAT, json=BODY | {"stream": True}) as reply:
        lines = reply.aiter_lines()
        await anext(lines)
        during = await measured.scrape()
        assert value(during, "draftwood_gateway_streams_open") == 1
        assert value(during, "draftwood_gateway_requests_open") == 1
    after = await measured.until(CHAT, 499)
    assert value(after, "draftwood_gateway_hang_ups_total") == 1
    assert value(after, "draftwood_gateway_streams_open") == 0
    assert value(after, "draftwood_gateway_requests_open") == 0


async def test_errors_before_and_in_the_midst_of_an_answer(measured: Measured) -> None:
    fake, http = measured.stand.verify, measured.stand.http
    fake.script = Script(error_at_start=OverloadedError("full", retry_after_s=1))
    assert (await http.post(CHAT, json=BODY)).status_code == 429
    fake.script = Script([300, 301], error_after=UnavailableError("going down"))
    assert (await http.post(CHAT, json=BODY | {"stream": True})).status_code == 200  # it had begun
    samples = await measured.until(CHAT, 200)
    errors = "draftwood_gateway_generation_errors_total"
    assert value(samples, errors, reason="overloaded") == 1
    assert value(samples, errors, reason="unavailable") == 1
    assert value(samples, REQUESTS, route=CHAT, status="429") == 1
    assert "draftwood_gateway_hang_ups_total" in {name for name, _ in samples}
    assert value(samples, "draftwood_gateway_hang_ups_total") == 0


async def test_paths_of_clients_are_no_labels(measured: Measured) -> None:
    for path in ("/etc/passwd", "/v1/chat/completions/../x", "/v1/models/a/b", "/health"):
        await measured.stand.http.get(path)
    samples = await measured.until("/health", 200)
    routes = {dict(labels)["route"] for name, labels in samples if name == REQUESTS}
    assert routes == {"other", "/v1/models/{name}", "/health"}
    assert route_of("/v1/models") == "/v1/models"


async def test_the_verify_service_is_told_the_gateways_own_span(measured: Measured) -> None:
    trace_id, caller = "1" * 32, "2" * 16
    headers = {"traceparent": f"00-{trace_id}-{caller}-01"}
    await measured.stand.http.post(CHAT, json=BODY | {"n": 2}, headers=headers)
    told = {request.traceparent for request in measured.stand.verify.requests}
    assert len(told) == 1  # both choices
    (traceparent,) = told
    assert traceparent.startswith(f"00-{trace_id}-")
    assert traceparent.endswith("-01")
    assert caller not in traceparent


async def test_without_tracing_the_callers_context_goes_on_as_it_is(stand: Stand) -> None:
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    await stand.http.post(CHAT, json=BODY, headers=headers)
    assert [request.traceparent for request in stand.verify.requests] == [headers["traceparent"]]
