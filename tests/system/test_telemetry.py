"""The three services as processes, scraped and traced."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftwood.telemetry.metrics import SERVICES, STAGES, metrics_of
from tests.system.processes import Process, free_port
from tests.system.scraping import Samples, scrape, value

QUESTION = "What is the capital of France, and why do people like to visit it?"
NEW_TOKENS = 24


@dataclass
class SpanLine:
    """One line of a trace file."""

    name: str
    context: dict[str, str]
    kind: str
    parent_id: str | None
    start_time: str
    end_time: str
    status: dict[str, str]
    attributes: dict[str, Any]
    events: list[Any]
    links: list[Any]
    resource: dict[str, Any]

    @property
    def span_id(self) -> str:
        return self.context["span_id"]

    def children(self, spans: list[SpanLine]) -> list[SpanLine]:
        """In the order in which they began."""
        return sorted((s for s in spans if s.parent_id == self.span_id), key=lambda s: (s.start_time, s.end_time))


@dataclass
class Stack:
    """Where everything is."""

    url: str
    metrics_ports: dict[str, int]
    folder: Path

    def scrape(self, service: str) -> Samples:
        return scrape(self.metrics_ports[service])

    def spans(self, service: str, trace_id: str) -> list[SpanLine]:
        """What is in the service's file of a trace, in the order of their ends."""
        lines = (self.folder / f"{service}.jsonl").read_text().splitlines()
        return [span for line in lines if (span := SpanLine(**json.loads(line))).context["trace_id"] == f"0x{trace_id}"]

    def until_spans(self, service: str, trace_id: str, name: str) -> list[SpanLine]:
        """The same, once there is one of this name; the test's own timeout ends what never comes."""
        pause = threading.Event()
        while not any(span.name == name for span in self.spans(service, trace_id)):
            pause.wait(0.02)
        return self.spans(service, trace_id)

    def ask(self, headers: dict[str, str] | None = None, **more: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": NEW_TOKENS}
        with httpx.Client(trust_env=False, timeout=100) as client:
            return client.post(f"{self.url}/v1/chat/completions", json=body | more, headers=headers)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("stack")
    patch = pytest.MonkeyPatch()
    patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds that ended spans wait for company
    ports = {name: free_port() for name in ("gateway", "verify", "draft")}
    started: list[Process] = []

    def start(module: str, name: str, *args: str) -> Process:
        spans = str(folder / f"{name}.jsonl")
        common = ["--port", "0", "--metrics-port", str(ports[name]), "--trace-file", spans]
        started.append(Process(module, [*common, *args], folder / f"{name}.log"))
        return started[-1].until_ready()

    try:
        draft = start("draft_service", "draft")
        verify = start("verify_service", "verify", "--drafter", draft.address, "--draft-timeout-ms", "30000")
        gateway = start("gateway", "gateway", "--verify", verify.address)
        while value(scrape(ports["verify"]), "draftwood_drafter_state", state="ready") != 1:
            pass  # the test's own timeout ends what never comes
        yield Stack(f"http://{gateway.address}", ports, folder)
        assert [process.stop() for process in reversed(started)] == [0, 0, 0]
    finally:
        patch.undo()
        for process in started:
            process.kill()


def test_every_metric_is_exported_and_nothing_else(stack: Stack) -> None:
    """Series without a value yet have no label values: their names are in the help lines."""
    for service in SERVICES:
        port = stack.metrics_ports[service]
        with httpx.Client(trust_env=False) as client:
            lines = client.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
        words = [line.split() for line in lines if line.startswith("# TYPE draftwood_")]
        kinds = {name: kind for _, _, name, kind in words}
        kinds.pop("draftwood_build_info")
        assert kinds == {metric.name: metric.kind for metric in metrics_of(service)}


def test_a_request_leaves_its_mark_everywhere(stack: Stack) -> None:
    before = {name: stack.scrape(name) for name in stack.metrics_ports}
    answer = stack.ask().raise_for_status().json()
    usage, figures = answer["usage"], answer["draftwood"]

    def grown(service: str, name: str, **labels: str) -> float:
        after = stack.scrape(service)
        return value(after, name, **labels) - before[service].get((name, frozenset(labels.items())), 0.0)

    route = "/v1/chat/completions"
    while grown("gateway", "draftwood_gateway_requests_total", route=route, status="200") < 1:
        pass  # counted once the last byte is out
    assert grown("gateway", "draftwood_gateway_request_seconds_count", route=route) == 1
    assert grown("gateway", "draftwood_gateway_first_token_seconds_count") == 1
    assert grown("gateway", "draftwood_gateway_input_tokens_total") == usage["prompt_tokens"]
    assert grown("gateway", "draftwood_gateway_output_tokens_total") == usage["completion_tokens"]
    while grown("verify", "draftwood_requests_total", outcome="length") < 1:
        pass
    assert grown("verify", "draftwood_steps_total") == figures["steps"]
    assert grown("verify", "draftwood_drafted_tokens_total") == figures["drafted"]
    assert grown("verify", "draftwood_accepted_tokens_total") == figures["accepted"]
    assert grown("verify", "draftwood_prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("verify", "draftwood_generated_tokens_total") == usage["completion_tokens"]
    assert grown("verify", "draftwood_time_per_output_token_seconds_count") == 1
    drafted = grown("verify", "draftwood_sequence_steps_total", kind="drafted")
    assert grown("verify", "draftwood_tree_nodes_sum") == figures["drafted"]
    assert grown("verify", "draftwood_tree_nodes_count") == drafted
    assert grown("verify", "draftwood_accepted_path_tokens_sum") == figures["accepted"]
    assert grown("verify", "draftwood_drafted_depth_total", depth="1") == drafted
    for stage in ("draft", "tree", "verify", "accept", "commit"):
        assert grown("verify", "draftwood_stage_seconds_count", stage=stage) == figures["steps"]
    assert grown("verify", "draftwood_transport_seconds_count") == drafted
    depths = {
        dict(labels)["depth"] for name, labels in stack.scrape("verify") if name == "draftwood_accepted_depth_total"
    }
    assert sum(grown("verify", "draftwood_accepted_depth_total", depth=d) for d in depths) == figures["accepted"]
    assert grown("draft", "draftwood_draft_messages_total") == drafted
    assert grown("draft", "draftwood_draft_trees_total") == drafted
    assert grown("draft", "draftwood_draft_pass_seconds_count") == drafted


def test_what_is_held_is_given_back(stack: Stack) -> None:
    stack.ask().raise_for_status()
    verify = stack.scrape("verify")
    for name in ("draftwood_requests_running", "draftwood_requests_queued", "draftwood_pages_used"):
        assert value(verify, name) == 0
    assert value(verify, "draftwood_pages") > 0
    while value(stack.scrape("draft"), "draftwood_draft_sequences"):
        pass  # closed ids go with the next message
    assert value(stack.scrape("draft"), "draftwood_draft_context_tokens") == 0
    assert value(stack.scrape("draft"), "draftwood_draft_streams") == 1


def test_refusals_are_counted_by_status(stack: Stack) -> None:
    before = stack.scrape("gateway")
    assert stack.ask(temperature=-1).status_code == 400
    key = ("draftwood_gateway_requests_total", frozenset({("route", "/v1/chat/completions"), ("status", "400")}))
    while stack.scrape("gateway").get(key, 0) - before.get(key, 0) < 1:
        pass
    assert value(stack.scrape("gateway"), "draftwood_gateway_requests_open") == 0


def test_one_trace_goes_through_all_three(stack: Stack) -> None:
    """Spans of a chat request, from three files: one trace id, parents across processes, five stages a step."""
    trace_id, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    answer = stack.ask({"traceparent": f"00-{trace_id}-{caller}-01"}).raise_for_status().json()
    figures = answer["draftwood"]

    gateway = stack.until_spans("gateway", trace_id, "chat sprout")
    assert len(gateway) == 1
    request = gateway[0]
    assert (request.kind, request.parent_id) == ("SpanKind.SERVER", f"0x{caller}")
    assert request.attributes["gen_ai.response.id"] == answer["id"]
    assert request.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert request.attributes["http.response.status_code"] == 200

    verify = stack.until_spans("verify", trace_id, "draftwood.v1.VerifyService/Generate")
    call = next(span for span in verify if span.name == "draftwood.v1.VerifyService/Generate")
    assert (call.kind, call.parent_id) == ("SpanKind.SERVER", request.span_id)
    assert call.attributes["draftwood.outcome"] == "length"
    below = call.children(verify)
    steps = [span for span in below if span.name == "step"]
    assert sorted(span.name for span in below if span not in steps) == ["prefill", "queue"]
    assert len(steps) == figures["steps"]
    stages = [step.children(verify) for step in steps]
    for step, parts in zip(steps, stages, strict=True):
        assert tuple(part.name for part in parts) == STAGES
        assert parts[0].start_time == step.start_time
        assert parts[-1].end_time == step.end_time
        assert all(a.end_time == b.start_time for a, b in pairwise(parts))
    assert sum(step.attributes["draftwood.accepted_tokens"] for step in steps) == figures["accepted"]

    drafted = [
        parts[0] for parts, step in zip(stages, steps, strict=True) if step.attributes["draftwood.drafted_tokens"]
    ]
    draft = stack.until_spans("draft", trace_id, "draftwood.v1.DraftService/Draft")
    while len(draft) < len(drafted):
        draft = stack.spans("draft", trace_id)
    assert sorted(str(span.parent_id) for span in draft) == sorted(stage.span_id for stage in drafted)
    assert {span.kind for span in draft} == {"SpanKind.SERVER"}
    names = {span.resource["attributes"]["service.name"] for span in (*gateway, *verify, *draft)}
    assert names == {"draftwood-gateway", "draftwood-verify", "draftwood-draft"}

    text = answer["choices"][0]["message"]["content"]
    for span in (*gateway, *verify, *draft):
        values = json.dumps([span.attributes, span.events])
        assert QUESTION not in values
        assert text not in values


def test_a_caller_that_is_not_traced_leaves_no_spans(stack: Stack) -> None:
    silent, loud = "a" * 32, "b" * 32
    stack.ask({"traceparent": f"00-{silent}-{'c' * 16}-00"}).raise_for_status()
    stack.ask({"traceparent": f"00-{loud}-{'c' * 16}-01"}).raise_for_status()
    for service, name in (
        ("gateway", "chat sprout"),
        ("verify", "draftwood.v1.VerifyService/Generate"),
        ("draft", "draftwood.v1.DraftService/Draft"),
    ):
        assert stack.until_spans(service, loud, name)
        assert stack.spans(service, silent) == []
