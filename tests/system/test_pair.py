"""Both services as processes over real sockets, with the embedded pair: text is the target's own whatever becomes of
the drafter. The tests of this file run in order: the drafter comes late, is killed, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3_5ForCausalLM

from draftwood.checkpoint import EMBEDDED_TARGET
from draftwood.rpc.conventions import CLIENT_OPTIONS
from draftwood.v1 import sampling_pb2, tree_pb2, verify_pb2, verify_pb2_grpc
from tests.system.processes import Process, free_port

NONE, DFLASH, DDTREE = tree_pb2.ALGORITHM_NONE, tree_pb2.ALGORITHM_DFLASH, tree_pb2.ALGORITHM_DDTREE
QUESTIONS = (
    "Write a short story about a dog who finds a lost toy in the park.",
    "What is the capital of France, and why do people like to visit it?",
    "Explain in simple words how rain is made.",
)
NEW_TOKENS = 32
FILLERS = ("Name three fruits.", "Tell me about the sea.")  # to fill a batch


@dataclass
class Pair:
    """The services under test and a client."""

    verify: Process
    stub: Any
    draft_port: int
    folder: Path
    draft: Process | None = None

    def start_drafter(self) -> None:
        assert self.draft is None
        args = ["--port", str(self.draft_port)]
        self.draft = Process("draft_service", args, self.folder / "draft.log").until_ready()

    def kill_drafter(self) -> None:
        assert self.draft is not None
        self.draft.kill()
        self.draft = None

    def load(self) -> verify_pb2.GetLoadResponse:
        return self.stub.GetLoad(verify_pb2.GetLoadRequest(), timeout=30)

    def until_drafter_is(self, status: str) -> None:
        """Each question gives the other process time; the test's own timeout ends what never comes."""
        while not self.load().drafter_status.startswith(status):
            pass


@dataclass
class Reply:
    """An answer and its statistics."""

    tokens: list[int]
    stats: verify_pb2.GenerateStats


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp("pair")
    draft_port = free_port()
    args = ["--port", "0", "--drafter", f"127.0.0.1:{draft_port}", "--draft-timeout-ms", "30000"]
    verify = Process("verify_service", args, folder / "verify.log")
    pair = Pair(verify, None, draft_port, folder)
    try:
        verify.until_ready()
        with grpc.insecure_channel(verify.address, options=CLIENT_OPTIONS) as channel:
            pair.stub = verify_pb2_grpc.VerifyServiceStub(channel)
            yield pair
        if pair.draft is not None:
            assert pair.draft.stop() == 0
        assert verify.stop() == 0
    finally:
        verify.kill()
        if pair.draft is not None:
            pair.draft.kill()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(EMBEDDED_TARGET / "tokenizer.json"))
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(turn.format(q), add_special_tokens=False).ids for q in (*QUESTIONS, *FILLERS)]


@pytest.fixture(scope="module")
def truths(prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' own generate says in float32, stop tokens and all."""
    torch.set_num_threads(1)
    model: Any = Qwen3_5ForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32).eval()
    answers: list[list[int]] = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
            answers.append(out[0, len(prompt) :].tolist())
    return answers


def request(prompt: list[int], **values: Any) -> verify_pb2.GenerateRequest:
    given: dict[str, Any] = {"prompt_token_ids": prompt, "max_new_tokens": NEW_TOKENS}
    return verify_pb2.GenerateRequest(**(given | values))


def generate(pair: Pair, prompt: list[int], **values: Any) -> Reply:
    tokens = list[int]()
    for message in pair.stub.Generate(request(prompt, **values), timeout=100):
        tokens += message.chunk.token_ids
        if message.HasField("finished"):
            return Reply(tokens, message.finished.stats)
    raise AssertionError("the stream ended without an end")


def together(pair: Pair, requests: list[tuple[list[int], dict[str, Any]]]) -> list[Reply]:
    with ThreadPoolExecutor(len(requests)) as pool:
        calls = [pool.submit(generate, pair, prompt, **values) for prompt, values in requests]
        return [call.result() for call in calls]


@pytest.fixture(autouse=True)
def _all_free(pair: Pair) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Whatever a test did, nothing is held when it ends."""
    yield
    load = pair.load()
    while load.num_running or load.num_queued:
        load = pair.load()
    assert (load.pages_used, load.slots_used) == (0, 0)


MODES: list[dict[str, Any]] = [
    {"algorithm": NONE},
    {"algorithm": DFLASH, "tree_budget": 15},
    *({"algorithm": DDTREE, "tree_budget": budget} for budget in (1, 15, 31, 63)),
]


def test_without_a_drafter(pair: Pair, prompts: list[list[int]], truths: list[list[int]]) -> None:
    """Absent at the start: requests are served all the same, and the missing drafts are counted."""
    assert pair.load().drafter_status.startswith("absent")
    before = pair.load().fallback_steps
    reply = generate(pair, prompts[0])
    assert reply.tokens == truths[0]
    assert reply.stats.num_drafted_steps == 0
    assert reply.stats.num_fallback_steps > 0
    assert pair.load().fallback_steps - before == reply.stats.num_fallback_steps


def test_drafter_that_comes_late_is_found(pair: Pair, prompts: list[list[int]], truths: list[list[int]]) -> None:
    pair.start_drafter()
    pair.until_drafter_is("ready")
    reply = generate(pair, prompts[0])
    assert reply.tokens == truths[0]
    assert reply.stats.num_fallback_steps == 0
    assert reply.stats.num_accepted_tokens > len(truths[0]) // 3
    said = pair.stub.GetTargetModel(verify_pb2.GetTargetModelRequest(), timeout=30)
    assert said.draft_model_id == "sprout-DFlash-b16"


@pytest.mark.parametrize("mode", range(len(MODES)))
def test_text_is_transformers_own(pair: Pair, prompts: list[list[int]], truths: list[list[int]], mode: int) -> None:
    for prompt, truth in zip(prompts[:3], truths[:3], strict=True):
        reply = generate(pair, prompt, **MODES[mode])
        assert reply.tokens == truth
        assert reply.stats.num_fallback_steps == 0
        assert (reply.stats.num_drafted_steps > 0) == (MODES[mode]["algorithm"] != NONE)


def test_text_is_transformers_own_in_a_batch(pair: Pair, prompts: list[list[int]], truths: list[list[int]]) -> None:
    """All algorithms and budgets in one batch."""
    modes = [{"algorithm": DDTREE, "tree_budget": b} for b in (63, 1, 31)] + [MODES[0], MODES[1]]
    replies = together(pair, list(zip(prompts, modes, strict=True)))
    assert [reply.tokens for reply in replies] == truths
    assert pair.load().rejected_trees == 0


def test_seeded_text_does_not_depend_on_the_drafter(pair: Pair, prompts: list[list[int]]) -> None:
    """Field bug 6, with a drafter that ranks its nodes by the same noise."""
    for temperature in (0.7, 2.0):
        hot: dict[str, Any] = {"sampling": sampling_pb2.SamplingParams(temperature=temperature, seed=42)}
        plain = generate(pair, prompts[1], algorithm=NONE, **hot).tokens
        assert generate(pair, prompts[1], tree_budget=31, **hot).tokens == plain
        other: dict[str, Any] = {"sampling": sampling_pb2.SamplingParams(temperature=2.0, seed=7)}
        mixed = together(pair, [(prompts[1], hot), (prompts[0], other), (prompts[2], {})])
        assert mixed[0].tokens == plain


def test_drafter_killed_and_restarted_in_mid_request(pair: Pair, prompts: list[list[int]]) -> None:
    """Field bug 4: SIGKILL once drafts are being accepted; the text does not change, and drafts resume."""
    prompt, length = prompts[2], 96
    plain = generate(pair, prompt, max_new_tokens=length, ignore_model_stop=True, algorithm=NONE).tokens
    before = pair.load()
    call = pair.stub.Generate(
        request(prompt, max_new_tokens=length, ignore_model_stop=True, tree_budget=15, trace_steps=True), timeout=110
    )
    tokens, drafted, stats = list[int](), list[bool](), None
    for message in call:
        if message.HasField("finished"):
            stats = message.finished.stats
            continue
        tokens += message.chunk.token_ids
        if message.chunk.HasField("trace"):
            drafted.append(message.chunk.num_drafted_tokens > 0)
            if len(drafted) == 4 and pair.draft is not None:
                pair.kill_drafter()
    assert stats is not None
    assert tokens == plain
    assert all(drafted[:3])
    assert not drafted[-2]  # the last step wants none anyway
    assert stats.num_fallback_steps > 0
    assert pair.load().fallback_steps - before.fallback_steps == stats.num_fallback_steps
    assert pair.load().drafter_status.startswith("absent")
    pair.start_drafter()
    pair.until_drafter_is("ready")
    reply = generate(pair, prompt, max_new_tokens=60, ignore_model_stop=True)
    assert reply.tokens == plain[:60]
    assert reply.stats.num_fallback_steps == 0
