"""VerifyService over a real connection around a real engine: bad input, hang-ups, options, reported figures."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

from draftwood.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from draftwood.rpc.conventions import SERVER_OPTIONS, from_rpc_error, open_channel
from draftwood.rpc.wire import tree_from_wire
from draftwood.tree import DraftTree
from draftwood.v1 import sampling_pb2, tree_pb2, verify_pb2, verify_pb2_grpc
from tests.verify_service.harness import ScriptedDrafter, config_of, oracle_tree
from tests.verify_service.models import save_tiny
from verify_service.api.servicer import VerifyServicer
from verify_service.build import Service, build
from verify_service.core.sequence import SequenceState
from verify_service.telemetry.metrics import Telemetry

VOCAB, CONTEXT = 256, 2048
PROMPT = [5, 9, 60, 33, 7]
NONE, DFLASH, DDTREE = tree_pb2.ALGORITHM_NONE, tree_pb2.ALGORITHM_DFLASH, tree_pb2.ALGORITHM_DDTREE


@dataclass
class Served:
    """A running engine whose drafts the test scripts."""

    service: Service
    script: dict[str, Any] = field(default_factory=dict[str, Any])
    sequences: list[SequenceState] = field(default_factory=list[SequenceState])  # that drafts were asked for
    freed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def propose(self, sequence: SequenceState) -> DraftTree | None:
        self.sequences.append(sequence)
        make = self.script.get("make")
        return make(sequence) if make is not None else None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory: Path = tmp_path_factory.mktemp("tiny")
    torch.set_num_threads(1)
    layers = ["linear_attention", "full_attention"]
    save_tiny("qwen3_5_text", directory, num_hidden_layers=2, layer_types=layers, max_position_embeddings=CONTEXT)
    built = build(config_of(directory, max_batch=3, max_queue=1, tree_budget=15))
    drafted = replace(built.defaults, algorithm="ddtree", is_drafted=True)  # by the test's script
    served = Served(replace(built, defaults=drafted))
    engine = served.service.engine
    engine.coordinator = ScriptedDrafter(served.propose)  # pyright: ignore[reportAttributeAccessIssue]
    remove = engine.scheduler.remove

    def remove_and_say(sequence: SequenceState) -> None:
        remove(sequence)
        served.freed.release()

    engine.scheduler.remove = remove_and_say
    engine.start()
    yield served
    engine.stop()


@pytest.fixture
async def stub(served: Served) -> AsyncIterator[Any]:
    served.script.clear()
    served.sequences.clear()
    service = served.service
    server = grpc.aio.server(options=SERVER_OPTIONS)
    servicer = VerifyServicer(
        service.engine, service.client, service.defaults, service.facts, Telemetry(service.engine, service.client)
    )
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield verify_pb2_grpc.VerifyServiceStub(channel)
        await until_idle(verify_pb2_grpc.VerifyServiceStub(channel))
    await server.stop(0)
    assert service.engine.is_alive


@dataclass
class Reply:
    """One answer, message by message."""

    started: verify_pb2.GenerateStarted
    chunks: list[verify_pb2.TokenChunk]
    finished: verify_pb2.GenerateFinished

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]


def request(**values: Any) -> verify_pb2.GenerateRequest:
    given: dict[str, Any] = {"prompt_token_ids": PROMPT, "max_new_tokens": 24, "ignore_model_stop": True}
    return verify_pb2.GenerateRequest(**(given | values))


async def generate(stub: Any, **values: Any) -> Reply:
    messages = [message async for message in stub.Generate(request(**values), timeout=60)]
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["started", *["chunk"] * (len(kinds) - 2), "finished"]
    chunks = [message.chunk for message in messages[1:-1]]
    return Reply(messages[0].started, chunks, messages[-1].finished)


async def read_all(call: Any) -> None:
    """Reads to the end of a call that is being read already."""
    while await call.read():
        pass


async def error_of(stub: Any, **values: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, **values)
    return caught.value


async def until_load(stub: Any, condition: Callable[[verify_pb2.GetLoadResponse], bool]) -> None:
    """Each call gives the engine time; the test's own timeout ends what never comes."""
    while not condition(await stub.GetLoad(verify_pb2.GetLoadRequest())):
        pass


async def until_idle(stub: Any) -> None:
    """Until nothing runs, waits or is held."""
    await until_load(stub, lambda load: not (load.num_running or load.num_queued or load.pages_used or load.slots_used))


def oracle(truth: list[int], depth: int = 6, budget: int = 12) -> Callable[[SequenceState], DraftTree]:
    rng = random.Random(1)

    def make(sequence: SequenceState) -> DraftTree:
        known = truth[len(sequence.answer) :]
        return oracle_tree(rng, sequence.root, known, VOCAB, depth=depth, budget=budget)

    return make


def sampling(**values: Any) -> dict[str, Any]:
    return {"sampling": sampling_pb2.SamplingParams(**values)}


NAN, INF = math.nan, math.inf
BIAS = sampling_pb2.LogitBias
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"prompt_token_ids": []}, "prompt_token_ids"),
    "id is the vocabulary size": ({"prompt_token_ids": [1, VOCAB]}, "prompt_token_ids"),
    "id is -1 unsigned": ({"prompt_token_ids": [2**32 - 1]}, "prompt_token_ids"),
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens"),
    "min over max": ({"min_new_tokens": 25}, "min_new_tokens"),
    "min without a token left": ({"min_new_tokens": 1, "stop_token_ids": range(VOCAB)}, "min_new_tokens"),
    "budget 0": ({"tree_budget": 0}, "tree_budget"),
    "budget over the limit": ({"tree_budget": 64}, "tree_budget"),
    "width 0": ({"width_cap": 0}, "width_cap"),
    "width 65": ({"width_cap": 65}, "width_cap"),
    "log-probs 21": ({"num_log_probs": 21}, "num_log_probs"),
    "prompt log-probs 21": ({"num_prompt_log_probs": 21}, "num_prompt_log_probs"),
    "stop id": ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    "unknown algorithm": ({"algorithm": 99}, "algorithm"),
    "temperature nan": (sampling(temperature=NAN), "temperature"),
    "temperature inf": (sampling(temperature=INF), "temperature"),
    "temperature below 0": (sampling(temperature=-0.5), "temperature"),
    "temperature 101": (sampling(temperature=101.0), "temperature"),
    "top_p 0": (sampling(top_p=0.0), "top_p"),
    "top_p 1.5": (sampling(top_p=1.5), "top_p"),
    "top_p nan": (sampling(top_p=NAN), "top_p"),
    "top_k 0": (sampling(top_k=0), "top_k"),
    "top_k 2^32 - 1": (sampling(top_k=2**32 - 1), "top_k"),
    "min_p 2": (sampling(min_p=2.0), "min_p"),
    "presence": (sampling(presence_penalty=2.5), "presence_penalty"),
    "frequency": (sampling(frequency_penalty=-2.5), "frequency_penalty"),
    "repetition 0": (sampling(repetition_penalty=0.0), "repetition_penalty"),
    "bias 101": (sampling(logit_bias=[BIAS(token_id=1, bias=101.0)]), "logit_bias"),
    "bias nan": (sampling(logit_bias=[BIAS(token_id=1, bias=NAN)]), "logit_bias"),
    "shadow of a chain": ({"shadow_linear": True, "algorithm": DFLASH}, "shadow_linear"),
    "client": ({"client": "x" * 257}, "client"),
    "request id of 257 characters": ({"request_id": "x" * 257}, "request_id"),
    "request id of two lines": ({"request_id": "a\nERROR all is lost"}, "request_id"),
    "bias token": (sampling(logit_bias=[BIAS(token_id=VOCAB, bias=1.0)]), "logit_bias"),
}


@pytest.mark.parametrize("kind", BAD)
async def test_bad_input_names_its_field_and_harms_nobody(stub: Any, served: Served, kind: str) -> None:
    values, name = BAD[kind]
    status = await error_of(stub, **values)
    assert status.code() == grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(status)
    assert isinstance(error, InvalidRequestError)
    assert error.field == name
    assert name in error.message
    assert served.service.engine.is_alive


async def test_engine_lives_after_bad_input(stub: Any) -> None:
    """Field bug 10: the same answer before and after all that cannot be served."""
    before = await generate(stub)
    for values, _ in BAD.values():
        await error_of(stub, **values)
    assert (await generate(stub)).tokens == before.tokens


@pytest.mark.parametrize(
    ("length", "new_tokens", "name"),
    [(CONTEXT, 1, "prompt_token_ids"), (CONTEXT + 500, None, "prompt_token_ids"), (40, CONTEXT - 39, "max_new_tokens")],
)
async def test_over_long_is_out_of_range(stub: Any, length: int, new_tokens: int | None, name: str) -> None:
    status = await error_of(stub, prompt_token_ids=[3] * length, max_new_tokens=new_tokens)
    assert status.code() == grpc.StatusCode.OUT_OF_RANGE
    error = from_rpc_error(status)
    assert isinstance(error, ContextLengthError)
    assert error.field == name
    assert str(CONTEXT) in error.message
    assert str(length) in error.message


async def test_lists_longer_than_the_vocabulary_are_refused(stub: Any) -> None:
    bias = [sampling_pb2.LogitBias(token_id=1, bias=1.0)] * 9000
    for name, values in (("logit_bias", {"sampling": sampling_pb2.SamplingParams(logit_bias=bias)}),
                         ("stop_token_ids", {"stop_token_ids": [1] * 9000})):  # fmt: skip
        status = await error_of(stub, **values)
        assert status.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert f"{name} has 9000 entries" in (status.details() or "")


async def test_context_to_its_last_token(stub: Any) -> None:
    """Without max_new_tokens the answer fills the context; drafts near the edge need room beyond it."""
    prompt = [3 + i % 200 for i in range(CONTEXT - 9)]
    truth = (await generate(stub, prompt_token_ids=prompt, max_new_tokens=9, algorithm=NONE)).tokens
    for _ in range(2):
        reply = await generate(stub, prompt_token_ids=prompt, max_new_tokens=None, tree_budget=63)
        assert reply.tokens == truth
        assert reply.finished.reason == verify_pb2.FINISH_REASON_LENGTH


async def test_finish_reasons(stub: Any, served: Served) -> None:
    plain = await generate(stub, algorithm=NONE)
    assert len(plain.tokens) == 24
    assert plain.finished.reason == verify_pb2.FINISH_REASON_LENGTH
    assert not plain.finished.HasField("stop_token_id")
    served.script["make"] = oracle(plain.tokens)
    for position in (0, 1, 7, 23):
        stop = plain.tokens[position]
        first = plain.tokens.index(stop)
        for algorithm in (NONE, DDTREE):
            reply = await generate(stub, algorithm=algorithm, stop_token_ids=[stop])
            assert reply.tokens == plain.tokens[: first + 1]
            assert reply.finished.reason == verify_pb2.FINISH_REASON_STOP
            assert reply.finished.stop_token_id == stop


async def test_models_own_stop_token(stub: Any, served: Served) -> None:
    """It ends the answer unless it is ignored or too early."""
    defaults, bias = served.service.defaults, [BIAS(token_id=2, bias=100.0)]
    assert defaults.stop_token_ids == {2}
    reply = await generate(stub, ignore_model_stop=False, **sampling(logit_bias=bias))
    assert (reply.tokens, reply.finished.stop_token_id) == ([2], 2)
    reply = await generate(stub, ignore_model_stop=True, max_new_tokens=3, **sampling(logit_bias=bias))
    assert reply.tokens == [2, 2, 2]
    reply = await generate(stub, ignore_model_stop=False, min_new_tokens=4, **sampling(logit_bias=bias))
    assert len(reply.tokens) == 5
    assert reply.tokens.index(2) == 4


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_short_limits(stub: Any, served: Served, limit: int) -> None:
    truth = (await generate(stub, algorithm=NONE)).tokens
    served.script["make"] = oracle(truth)
    reply = await generate(stub, max_new_tokens=limit)
    assert reply.tokens == truth[:limit]
    assert reply.finished.stats.num_steps <= limit - 1
    served.sequences.clear()
    await generate(stub, max_new_tokens=1)
    assert not served.sequences  # nothing to draft for


async def test_trace_and_statistics(stub: Any, served: Served) -> None:
    """The traces rebuild the answer, and the figures are those of the traces."""
    truth = (await generate(stub, algorithm=NONE)).tokens
    served.script["make"] = oracle(truth)
    reply = await generate(stub, trace_steps=True, request_id="mine", **sampling(seed=2**64 - 1))
    assert (reply.started.request_id, reply.started.seed) == ("mine", 2**64 - 1)
    assert not reply.chunks[0].HasField("trace")
    tokens, base = list(reply.chunks[0].token_ids), len(PROMPT)
    assert len(tokens) == 1
    accepted: list[int] = []
    drafted: list[DraftTree] = []
    for chunk in reply.chunks[1:]:
        trace = chunk.trace
        assert (trace.base_length, trace.root_token_id) == (base, tokens[-1])
        tree = tree_from_wire(trace.tree, tokens[-1], vocab_size=VOCAB, tree_budget=15, max_depth=15)
        path = list(trace.accepted_path)
        assert path[0] == 0
        assert [tree.parents[node] for node in path[1:]] == path[:-1]
        assert [tree.token_ids[node] for node in path[1:]] == list(chunk.token_ids)[:-1]
        assert chunk.num_accepted_tokens == len(path) - 1
        assert chunk.num_drafted_tokens == tree.num_nodes - 1
        assert trace.verify_us > 0
        tokens += chunk.token_ids
        base += len(path)
        accepted.append(len(path) - 1)
        drafted += [tree] if tree.num_nodes > 1 else []
    assert tokens == truth
    stats = reply.finished.stats
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (len(PROMPT), 24)
    assert (stats.num_steps, stats.num_accepted_tokens) == (len(accepted), sum(accepted))
    assert (stats.num_drafted_steps, stats.num_drafted_tokens) == (
        len(drafted),
        sum(tree.num_nodes - 1 for tree in drafted),
    )
    assert list(stats.accepted_histogram) == [accepted.count(n) for n in range(max(accepted) + 1)]
    depths = [sum(tree.max_depth > d for tree in drafted) for d in range(max(tree.max_depth for tree in drafted))]
    assert list(stats.drafted_by_depth) == depths
    assert sum(accepted) + len(accepted) + 1 == 24
    plain = await generate(stub, algorithm=NONE)
    assert not any(chunk.HasField("trace") for chunk in plain.chunks)
    assert plain.finished.stats.num_steps == 23
    assert plain.finished.stats.num_fallback_steps == plain.finished.stats.num_drafted_steps == 0


async def test_steps_without_the_draft_that_was_wanted_are_counted(stub: Any) -> None:
    before = (await stub.GetLoad(verify_pb2.GetLoadRequest())).fallback_steps
    stats = (await generate(stub)).finished.stats
    # The last token needs no draft.
    assert (stats.num_steps, stats.num_fallback_steps, stats.num_drafted_steps) == (23, 22, 0)
    load = await stub.GetLoad(verify_pb2.GetLoadRequest())
    assert load.fallback_steps - before == 22


async def test_request_overrides_algorithm_budget_width_and_spine(stub: Any, served: Served) -> None:
    truth = (await generate(stub, algorithm=NONE)).tokens
    assert not served.sequences
    served.script["make"] = oracle(truth, depth=9, budget=60)  # more than anybody asked for: it is cut
    reply = await generate(stub, trace_steps=True, max_new_tokens=6)
    default = served.sequences[-1].request
    assert (default.algorithm, default.tree_budget, default.width_cap, default.spine) == ("ddtree", 15, 16, False)
    assert max(len(c.trace.tree.parents) // 2 for c in reply.chunks[1:]) <= 15
    reply = await generate(
        stub, trace_steps=True, max_new_tokens=6, algorithm=DFLASH, tree_budget=3, width_cap=2, spine=True
    )
    given = served.sequences[-1].request
    assert (given.algorithm, given.tree_budget, given.width_cap, given.spine) == ("dflash", 3, 2, True)
    assert max(len(c.trace.tree.parents) // 2 for c in reply.chunks[1:]) <= 3
    assert reply.tokens == truth[:6]


async def test_seeds(stub: Any, served: Served) -> None:
    """Without one, a random seed is drawn and reported, and it gives the same tokens again."""
    first = await generate(stub, **sampling(temperature=1.0))
    second = await generate(stub, **sampling(temperature=1.0))
    assert first.started.seed != second.started.seed
    assert first.started.request_id != second.started.request_id
    assert first.tokens != second.tokens
    again = await generate(stub, **sampling(temperature=1.0, seed=first.started.seed))
    assert again.tokens == first.tokens
    assert again.started.seed == first.started.seed
    assert (await generate(stub, **sampling(temperature=1.0, seed=0))).started.seed == 0


async def test_seeded_request_alone_twice_and_in_a_mixed_batch(stub: Any, served: Served) -> None:
    """Field bug 6: temperature 2.0, seed 42."""
    hot = sampling(temperature=2.0, seed=42)
    alone = (await generate(stub, **hot)).tokens
    assert (await generate(stub, **hot)).tokens == alone
    right = oracle(alone)

    def make(sequence: SequenceState) -> DraftTree | None:
        return right(sequence) if sequence.request.sampling.seed == 42 else None

    served.script["make"] = make
    assert (await generate(stub, **hot)).tokens == alone
    prompts = [PROMPT, [8, 8, 8], [200] * 40, PROMPT]
    settings = [hot, sampling(temperature=0.7, seed=43), {}, sampling(temperature=2.0, seed=44)]
    pairs = zip(prompts, settings, strict=True)
    replies = await asyncio.gather(*(generate(stub, prompt_token_ids=p, **s) for p, s in pairs))
    assert replies[0].tokens == alone
    assert replies[3].tokens != alone
    assert replies[0].finished.stats.num_accepted_tokens > 0
    for prompt, values, reply in zip(prompts[1:3], settings[1:3], replies[1:3], strict=True):
        assert (await generate(stub, prompt_token_ids=prompt, **values)).tokens == reply.tokens


async def test_drafts_that_stop_coming_change_nothing(stub: Any, served: Served) -> None:
    """Field bug 4: a step that accepts several tokens, followed by steps without a draft."""
    truth = (await generate(stub, max_new_tokens=60, algorithm=NONE)).tokens
    right = oracle(truth, depth=3, budget=15)
    for last in (1, 4, 9):

        def make(sequence: SequenceState, last: int = last) -> DraftTree | None:
            return right(sequence) if sequence.stats.num_steps < last else None

        served.script["make"] = make
        reply = await generate(stub, max_new_tokens=60)
        assert reply.tokens == truth
        assert reply.finished.stats.num_drafted_steps == last
        assert reply.finished.stats.num_fallback_steps > 0


@pytest.mark.parametrize("num_top", [0, 1, 20])
async def test_log_probs(stub: Any, served: Served, num_top: int) -> None:
    truth = await generate(stub, algorithm=NONE)
    assert not any(chunk.log_probs for chunk in truth.chunks)
    served.script["make"] = oracle(truth.tokens)
    reply = await generate(stub, num_log_probs=num_top, num_prompt_log_probs=num_top)
    for chunk in reply.chunks:
        assert [entry.token_id for entry in chunk.log_probs] == list(chunk.token_ids)
    entries = [entry for chunk in reply.chunks for entry in chunk.log_probs]
    assert [entry.token_id for entry in reply.started.prompt_log_probs] == PROMPT[1:]
    for entry in (*entries, *reply.started.prompt_log_probs):
        assert entry.log_prob <= 0
        assert len(entry.top_token_ids) == len(entry.top_log_probs) == num_top
        assert list(entry.top_log_probs) == sorted(entry.top_log_probs, reverse=True)
        assert len(set(entry.top_token_ids)) == num_top
    if num_top:
        assert [entry.top_token_ids[0] for entry in entries] == truth.tokens  # greedy
        assert all(entry.top_log_probs[0] == entry.log_prob for entry in entries)


async def hang_up(call: Any, served: Served) -> None:
    """Cancels a call and waits until the engine has taken the sequence out."""
    while served.freed.acquire(blocking=False):
        pass
    call.cancel()
    assert await asyncio.to_thread(served.freed.acquire, timeout=20)


async def test_hanging_up_frees_everything(stub: Any, served: Served) -> None:
    """Field bug 9: in mid-answer, and with nobody reading."""
    for has_read in (True, False):
        call = stub.Generate(request(max_new_tokens=CONTEXT - 100))
        if has_read:
            assert (await call.read()).HasField("started")
            assert (await call.read()).HasField("chunk")
            load = await stub.GetLoad(verify_pb2.GetLoadRequest())
            assert load.num_running == 1
            assert load.pages_used > 400
            assert load.slots_used == 1
        else:
            await until_load(stub, lambda load: load.num_running > 0)
        await hang_up(call, served)
        await until_idle(stub)
    assert len((await generate(stub)).tokens) == 24


async def test_full_queue_is_refused_and_waiting_can_be_given_up(stub: Any, served: Served) -> None:
    """Three run, one waits, the fifth is refused with a retry time; field bug 9 in the queue."""
    calls = [stub.Generate(request(max_new_tokens=CONTEXT - 100)) for _ in range(3)]
    for call in calls:
        assert (await call.read()).HasField("started")
    waiting = stub.Generate(request())
    await until_load(stub, lambda load: load.num_queued > 0)
    status = await error_of(stub)
    assert status.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    error = from_rpc_error(status)
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0
    await hang_up(waiting, served)
    await until_load(stub, lambda load: (load.num_running, load.num_queued, load.slots_used) == (3, 0, 3))
    queued = asyncio.create_task(generate(stub))
    await hang_up(calls[0], served)
    assert len((await queued).tokens) == 24  # it moved up
    for call in calls[1:]:
        await hang_up(call, served)


async def test_the_service_itself_keeps_the_calls_deadline(
    stub: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is over when the engine takes the request; the call's own stays far away."""

    engine = served.service.engine
    submit = engine.submit

    def submit_late(*args: Any, timeout_s: float) -> int:
        return submit(*args, timeout_s=timeout_s - 61)

    monkeypatch.setattr(engine, "submit", submit_late)
    status = await error_of(stub)
    assert status.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    error = from_rpc_error(status)
    assert isinstance(error, DeadlineError)
    assert "waited for its turn" in error.message
    assert error.retry_after_s is not None


async def test_an_answer_ends_at_its_calls_deadline(stub: Any, served: Served) -> None:
    while served.freed.acquire(blocking=False):
        pass
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(request(max_new_tokens=CONTEXT - 100), timeout=0.3):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert await asyncio.to_thread(served.freed.acquire, timeout=20)


async def test_whom_a_request_belongs_to(stub: Any, served: Served) -> None:
    """The client that it names; else the connection it came on."""
    for name in ("somebody", ""):
        await generate(stub, client=name)
    named, unnamed = served.sequences[0].request.client, served.sequences[-1].request.client
    assert named == "somebody"
    assert unnamed.startswith("ipv4:127.0.0.1:")


async def test_step_that_fails_ends_its_requests_and_not_the_service(
    stub: Any, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: SequenceState) -> DraftTree:
        raise RuntimeError("a fault of ours")

    before = (await generate(stub, algorithm=NONE)).tokens
    served.script["make"] = broken
    status = await error_of(stub)
    assert status.code() == grpc.StatusCode.INTERNAL
    assert "a fault of ours" not in (status.details() or "")
    assert "a fault of ours" in caplog.text
    served.script.clear()
    await until_idle(stub)
    assert (await generate(stub, algorithm=NONE)).tokens == before


async def test_target_model_and_load(stub: Any, served: Served) -> None:
    said = await stub.GetTargetModel(verify_pb2.GetTargetModelRequest())
    assert (said.model.vocab_size, said.model.max_context) == (VOCAB, CONTEXT)
    assert (said.model.hidden_size, said.model.dtype, said.model.model_type) == (64, "float32", "qwen3_5_text")
    assert list(said.model.stop_token_ids) == [2]
    assert (said.default_algorithm, said.default_tree_budget, said.max_tree_budget) == (DDTREE, 15, 63)
    assert said.max_batch == 3
    assert said.incarnation
    assert said.drafter_status.startswith("none")
    assert said.draft_model_id == ""
    load = await stub.GetLoad(verify_pb2.GetLoadRequest())
    assert load.pages_total >= 3 * CONTEXT // 4
    assert load.slots_total == 3
    assert load.peak_memory_bytes > 0


async def test_pages_for_fewer_tokens_bound_the_context(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    service = build(config_of(tmp_path, cache_tokens=100, page_size=16))
    assert service.engine.scheduler.pages.num_pages == 7
    assert service.defaults.limits.max_context == 100
    with pytest.raises(ConfigError, match="--cache-tokens is 100, less than the 200 of --max-context"):
        config_of(tmp_path, cache_tokens=100, max_context=200)


async def test_service_that_goes_down_says_so(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    service = build(config_of(tmp_path))
    service.engine.start()
    server = grpc.aio.server()
    servicer = VerifyServicer(service.engine, None, service.defaults, service.facts, Telemetry(service.engine, None))
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
        call = stub.Generate(request(max_new_tokens=400))
        assert (await call.read()).HasField("started")
        await asyncio.to_thread(service.engine.stop)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        for status in (caught.value, await error_of(stub)):
            error = from_rpc_error(status)
            assert isinstance(error, UnavailableError)
            assert error.retry_after_s is not None
        assert service.engine.scheduler.pages.num_used == service.engine.scheduler.slots.num_used == 0
    await server.stop(0)
