"""Spans of steps without a model: whom they belong to, and what becomes of a step that fails."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftwood.config import GatewayConfig
from draftwood.errors import ConfigError
from draftwood.telemetry.metrics import STAGES
from draftwood.telemetry.tracing import Tracing, context_of, is_sampled, traceparent_of
from draftwood.tree import DraftTree
from draftwood.v1 import verify_pb2
from verify_service.api.codec import Defaults, request_from_wire
from verify_service.core.request import Limits, Request
from verify_service.core.sequence import SequenceState
from verify_service.core.stats import SequenceStep, StageTimes
from verify_service.step.observer import StepObserver
from verify_service.telemetry.spans import StepSpans

FIRST, SECOND = f"00-{'1' * 32}-{'2' * 16}-01", f"00-{'3' * 32}-{'4' * 16}-01"
TREE = DraftTree.chain(5, [6, 7, 8])
TIMES = StageTimes(
    draft=0.004, tree=0.001, verify=0.02, accept=0.002, commit=0.003, drafter_busy=0.003, transport=0.001
)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def observer(exporter: InMemorySpanExporter) -> StepObserver:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    observer = StepObserver()
    spans = StepSpans(Tracing(provider))
    observer.begin = spans.begin
    observer.recorders.append(spans.step)
    return observer


def sequence(traceparent: str) -> SequenceState:
    request = Request(request_id="r", prompt_token_ids=(1, 2), max_new_tokens=9, traceparent=traceparent)
    return SequenceState(1, request, lambda _: None, 0.0)


def named(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    (span,) = [span for span in exporter.get_finished_spans() if span.name == name]
    return span


def test_a_batch_belongs_to_the_first_and_is_linked_to_the_others(
    observer: StepObserver, exporter: InMemorySpanExporter
) -> None:
    told = observer.begin([sequence(""), sequence(FIRST), sequence(SECOND)])
    lone = DraftTree.root_only(5)
    observer.step([SequenceStep(lone, 0, False), SequenceStep(TREE, 2, True), SequenceStep(lone, 0, True)], TIMES)
    step, draft = named(exporter, "step"), named(exporter, "draft")
    assert step.parent is not None
    assert f"{step.parent.trace_id:032x}-{step.parent.span_id:016x}" == FIRST[3:-3]
    assert [f"{link.context.trace_id:032x}" for link in step.links] == ["3" * 32]
    assert draft.context is not None
    assert told == f"00-{'1' * 32}-{draft.context.span_id:016x}-01"
    assert step.attributes is not None
    assert {key: step.attributes[f"draftwood.{key}"] for key in ("batch", "drafted_tokens", "accepted_tokens")} == {
        "batch": 3,
        "drafted_tokens": 3,
        "accepted_tokens": 2,
    }
    assert step.attributes["draftwood.fallbacks"] == 1
    lengths = {span.name: (span.end_time or 0) - (span.start_time or 0) for span in exporter.get_finished_spans()}
    assert {name: lengths[name] for name in STAGES} == {
        "draft": 4_000_000,
        "tree": 1_000_000,
        "verify": 20_000_000,
        "accept": 2_000_000,
        "commit": 3_000_000,
    }
    assert lengths["step"] == 30_000_000


def test_untraced_steps_make_no_spans(observer: StepObserver, exporter: InMemorySpanExporter) -> None:
    assert observer.begin([sequence(""), sequence("")]) == ""
    observer.step([SequenceStep(TREE, 2, True)], TIMES)
    assert exporter.get_finished_spans() == ()
    assert observer.totals.num_drafted_steps == 1
    assert observer.totals.accepted_histogram == [0, 0, 1]


def test_a_step_that_failed_ends_with_the_next(observer: StepObserver, exporter: InMemorySpanExporter) -> None:
    observer.begin([sequence(FIRST)])
    assert observer.begin([sequence("")]) == ""
    assert named(exporter, "step").status.status_code.name == "ERROR"


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, True), (0.0, False)])
def test_the_ratio_decides_where_the_caller_does_not(ratio: float, expected: bool) -> None:
    tracing = Tracing.start(GatewayConfig(trace_ratio=ratio), "gateway")
    root = tracing.span("request", "")
    assert is_sampled(root) is expected
    assert is_sampled(tracing.span("request", FIRST)) is True
    assert is_sampled(tracing.span("request", FIRST[:-2] + "00")) is False
    assert is_sampled(tracing.span("request", "not a traceparent")) is expected
    assert traceparent_of(tracing.span("step", root)).startswith(traceparent_of(root)[:35])
    tracing.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"otlp_endpoint": "collector:4317"},
            "--otlp-endpoint is 'collector:4317', not an http:// or https:// address",
        ),
        ({"trace_ratio": 1.5}, "--trace-ratio is 1.5, not in"),
        ({"metrics_port": -1}, "--metrics-port is -1, not in"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        GatewayConfig(**settings)  # pyright: ignore[reportArgumentType]


def test_a_file_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ConfigError, match="--trace-file /nowhere/spans: cannot be written"):
        Tracing.start(GatewayConfig(trace_file="/nowhere/spans"), "gateway")


def test_what_is_too_long_for_a_traceparent_is_not_kept() -> None:
    """Contexts are kept parsed by their text, which callers choose."""
    long = FIRST + "-" + "x" * 100_000
    assert context_of(long) is context_of("")
    assert context_of(FIRST) is context_of(FIRST)
    message = verify_pb2.GenerateRequest(prompt_token_ids=[1], traceparent=long)
    defaults = Defaults(
        limits=Limits(100, 64, 7, 64), algorithm="none", tree_budget=7, width_cap=4, spine=False, shadow_linear=False,
        stop_token_ids=frozenset(),
    )  # fmt: skip
    assert request_from_wire(message, defaults).traceparent == ""
    message.traceparent = FIRST
    assert request_from_wire(message, defaults).traceparent == FIRST
