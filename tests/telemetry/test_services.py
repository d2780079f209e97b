"""The three services as processes, scraped and traced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from draftwood.telemetry.metrics import SERVICES, metrics_of
from tests.system.processes import Process, free_port
from tests.telemetry.scraping import Samples, scrape, value

QUESTION = "What is the capital of France, and why do people like to visit it?"
NEW_TOKENS = 24


@dataclass
class Stack:
    """Where everything is."""

    url: str
    metrics_ports: dict[str, int]

    def scrape(self, service: str) -> Samples:
        return scrape(self.metrics_ports[service])

    def ask(self, **more: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": NEW_TOKENS}
        with httpx.Client(trust_env=False, timeout=100) as client:
            return client.post(f"{self.url}/v1/chat/completions", json=body | more)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("stack")
    ports = {name: free_port() for name in ("gateway", "verify", "draft")}
    started: list[Process] = []

    def start(module: str, name: str, *args: str) -> Process:
        common = ["--port", "0", "--metrics-port", str(ports[name])]
        started.append(Process(module, [*common, *args], folder / f"{name}.log"))
        return started[-1].until_ready()

    try:
        draft = start("draft_service", "draft")
        verify = start("verify_service", "verify", "--drafter", draft.address, "--draft-timeout-ms", "60000")
        gateway = start("gateway", "gateway", "--verify", verify.address)
        while value(scrape(ports["verify"]), "draftwood_drafter_state", state="ready") != 1:
            pass  # the test's own timeout ends what never comes
        yield Stack(f"http://{gateway.address}", ports)
        assert [process.stop() for process in reversed(started)] == [0, 0, 0]
    finally:
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
