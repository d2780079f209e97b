"""Every metric of the three services: name, kind, help, labels, buckets. docs/telemetry.md has a table of them.

Names follow Prometheus: seconds and counts, `_total` at the end of a counter. Labels take few values, and none of them
comes from a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
ServiceName = Literal["gateway", "verify", "draft"]

SERVICES: tuple[ServiceName, ...] = ("gateway", "verify", "draft")
STAGES = ("draft", "tree", "verify", "accept", "commit")
MAX_DEPTH_LABEL = 32  # deeper nodes are counted at this depth

# Seconds. From what a lone token costs a small model to a request that fills a long context.
STAGE_BUCKETS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)
TRANSPORT_BUCKETS = (5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 0.01, 0.02, 0.05)
TOKEN_BUCKETS = (1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 7.5e-3, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5)
WAIT_BUCKETS = (1e-3, 5e-3, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
REQUEST_BUCKETS = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
    163.84,
    327.68,
)
TREE_BUCKETS = (1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 127.0, 255.0)
PATH_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 15.0)
BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of one service. `label` is empty where there is only one series."""

    service: ServiceName
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(service: ServiceName, name: str, text: str, *labels: str) -> Metric:
    return Metric(service, f"draftwood_{name}_total", "counter", text, labels)


def _gauge(service: ServiceName, name: str, text: str, *labels: str) -> Metric:
    return Metric(service, f"draftwood_{name}", "gauge", text, labels)


def _histogram(service: ServiceName, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(service, f"draftwood_{name}", "histogram", text, labels, buckets)


# Gateway
HTTP_REQUESTS = _counter(
    "gateway", "gateway_requests", "HTTP requests, by route and status; 499 is a client's hang-up.", "route", "status"
)
HTTP_SECONDS = _histogram(
    "gateway", "gateway_request_seconds", "Time of HTTP requests, streams to their end.", REQUEST_BUCKETS, "route"
)
HTTP_FIRST_TOKEN = _histogram(
    "gateway", "gateway_first_token_seconds", "Time from a request's arrival to its first text.", WAIT_BUCKETS
)
HTTP_OPEN = _gauge("gateway", "gateway_requests_open", "HTTP requests being served.")
HTTP_STREAMS = _gauge("gateway", "gateway_streams_open", "Event streams being sent.")
HANG_UPS = _counter("gateway", "gateway_hang_ups", "Requests whose client went away before the end.")
INPUT_TOKENS = _counter("gateway", "gateway_input_tokens", "Prompt tokens, each prompt once.")
OUTPUT_TOKENS = _counter("gateway", "gateway_output_tokens", "Tokens of answers that ended well.")
GENERATION_ERRORS = _counter(
    "gateway", "gateway_generation_errors", "Answers that ended with an error, by its reason.", "reason"
)

# Verify service: load
RUNNING = _gauge("verify", "requests_running", "Requests being prefilled or decoded.")
QUEUED = _gauge("verify", "requests_queued", "Requests waiting for a place.")
QUEUE_LIMIT = _gauge("verify", "queue_limit", "Requests that may wait: --max-queue.")
BATCH_LIMIT = _gauge("verify", "batch_limit", "Requests decoded together at most: --max-batch.")
PAGES_USED = _gauge("verify", "pages_used", "KV pages in use.")
PAGES = _gauge("verify", "pages", "KV pages in all.")
SLOTS_USED = _gauge("verify", "slots_used", "Recurrent-state slots in use.")
SLOTS = _gauge("verify", "slots", "Recurrent-state slots in all.")
LOOP_TURNING = _gauge("verify", "device_loop_turning", "1 while the device loop waits for work or turns, else 0.")

# Verify service: requests
REQUESTS = _counter("verify", "requests", "Requests that ended, by outcome.", "outcome")
REQUEST_SECONDS = _histogram("verify", "request_seconds", "Time of requests that were answered.", REQUEST_BUCKETS)
QUEUE_SECONDS = _histogram("verify", "queue_seconds", "Time in the queue.", WAIT_BUCKETS)
PREFILL_SECONDS = _histogram("verify", "prefill_seconds", "Time from admission to the first token.", WAIT_BUCKETS)
TIME_TO_FIRST_TOKEN = _histogram(
    "verify", "time_to_first_token_seconds", "Time from a request's arrival to its first token.", WAIT_BUCKETS
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "verify",
    "time_per_output_token_seconds",
    "Mean time of a request's tokens after its first.",
    TOKEN_BUCKETS,
)
PROMPT_TOKENS = _counter("verify", "prompt_tokens", "Prompt tokens of answered requests.")
GENERATED_TOKENS = _counter("verify", "generated_tokens", "Tokens of answered requests.")

# Verify service: steps
STEPS = _counter("verify", "steps", "Steps, each for the whole batch.")
SEQUENCE_STEPS = _counter(
    "verify",
    "sequence_steps",
    "Steps times their sequences, by kind: drafted, fallback (a draft was wanted and not to be had), plain.",
    "kind",
)
DRAFTED_TOKENS = _counter("verify", "drafted_tokens", "Draft nodes verified, roots not counted.")
ACCEPTED_TOKENS = _counter("verify", "accepted_tokens", "Draft nodes accepted, bonus tokens not counted.")
SHADOW_TOKENS = _counter(
    "verify", "shadow_tokens", "Draft nodes that the tree would have accepted beside the chain, in shadow-linear mode."
)
DRAFTED_DEPTH = _counter("verify", "drafted_depth", "Drafted steps whose tree reached this depth.", "depth")
ACCEPTED_DEPTH = _counter("verify", "accepted_depth", "Drafted steps that accepted a node of this depth.", "depth")
TREE_NODES = _histogram("verify", "tree_nodes", "Nodes of verified trees, the root not counted.", TREE_BUCKETS)
ACCEPTED_PATH = _histogram(
    "verify", "accepted_path_tokens", "Draft nodes that a drafted step accepted for a sequence.", PATH_BUCKETS
)
STAGE_SECONDS = _histogram(
    "verify", "stage_seconds", "Time of a step's stages: draft, tree, verify, accept, commit.", STAGE_BUCKETS, "stage"
)
TRANSPORT_SECONDS = _histogram(
    "verify",
    "transport_seconds",
    "Time from the sending of a step to its answer, less the drafter's own time.",
    TRANSPORT_BUCKETS,
)

# Verify service: the drafter
FALLBACKS = _counter("verify", "fallbacks", "Fallback steps times their sequences, by cause.", "cause")
REFUSED_TREES = _counter("verify", "refused_trees", "Trees refused by the drafter or by the check, by cause.", "cause")
STALE_TREES = _counter(
    "verify",
    "stale_trees",
    "Results dropped as stale, by cause: late (after the deadline), mismatched (another epoch, base length or root).",
    "cause",
)
DRAFTER_STATE = _gauge(
    "verify", "drafter_state", "1 for the drafter's state, 0 for the others; none: to serve without.", "state"
)
DRAFTER_MISMATCH = _gauge("verify", "drafter_mismatch", "Alarm: 1 while a drafter answers that does not match.")
ACCEPTANCE_COLLAPSE = _gauge(
    "verify", "acceptance_collapse", "Alarm: 1 while drafts are paid for and next to none of their tokens is accepted."
)

# Draft service
DRAFT_STREAMS = _gauge("draft", "draft_streams", "Open Draft streams, each of one verify service.")
DRAFT_SEQUENCES = _gauge("draft", "draft_sequences", "Sequences with a context cache.")
DRAFT_SLOTS = _gauge("draft", "draft_slots", "Context slots in all.")
DRAFT_CONTEXT_TOKENS = _gauge("draft", "draft_context_tokens", "Tokens in the context caches.")
DRAFT_MESSAGES = _counter("draft", "draft_messages", "Messages of Draft streams that asked for trees.")
DRAFT_TREES = _counter("draft", "draft_trees", "Trees sent.")
DRAFT_REFUSALS = _counter("draft", "draft_refusals", "Trees refused, by cause.", "cause")
DRAFT_BATCH = _histogram(
    "draft", "draft_batch_sequences", "Sequences that a message asked for trees for.", BATCH_BUCKETS
)
DRAFT_PASS_SECONDS = _histogram("draft", "draft_pass_seconds", "Time of a message's draft passes.", STAGE_BUCKETS)
DRAFT_TREE_SECONDS = _histogram("draft", "draft_tree_seconds", "Time of a message's tree builds.", STAGE_BUCKETS)
DRAFT_BUSY_SECONDS = _histogram(
    "draft", "draft_busy_seconds", "Time from a message's receipt to its answer, waiting included.", STAGE_BUCKETS
)

# All three
BUILD_INFO = "draftwood_build_info"  # always 1; its labels say which service and version it is

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


def metrics_of(service: ServiceName) -> tuple[Metric, ...]:
    """The metrics that a service exports."""
    return tuple(metric for metric in METRICS if metric.service == service)
