"""A draft service over a random drafter in this process, with a client, and the messages to send it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from draft_service.api.codec import DrafterFacts
from draft_service.build import Service
from draft_service.draft.drafter import Drafter
from draft_service.server import DraftServer
from draftwood.security.security import OPEN
from draftwood.v1 import draft_pb2, draft_pb2_grpc, tree_pb2


def service_of(drafter: Drafter) -> Service:
    """A service as `build` makes it, of a drafter that is there."""
    facts = DrafterFacts("tiny", drafter.config, drafter.cache.max_context, "aa", "bb", incarnation=5)
    return Service(drafter, ThreadPoolExecutor(1), facts, OPEN, "tiny")


ROWS = torch.randn(40, 48, generator=torch.Generator().manual_seed(0))
FLOAT32 = draft_pb2.FEATURE_FORMAT_FLOAT32


class Running:
    """A served drafter with a client."""

    def __init__(self, service: Service, server: DraftServer, channel: Any) -> None:
        self.drafter, self.worker, self.server, self.channel = service.drafter, service.worker, server, channel
        self.stub: Any = draft_pb2_grpc.DraftServiceStub(channel)

    async def until_free(self, slots: int) -> None:
        """Waits until so many slots are free."""
        for _ in range(200):
            if self.drafter.cache.num_free == slots:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{self.drafter.cache.num_free} slots are free, not {slots}")


def rows(start: int, end: int, kind: str = "f4") -> draft_pb2.ContextRows:
    part = ROWS[start:end]
    data = part.numpy().tobytes() if kind == "f4" else part.bfloat16().view(torch.int16).numpy().tobytes()
    names = {"f4": draft_pb2.FEATURE_FORMAT_FLOAT32, "bf": draft_pb2.FEATURE_FORMAT_BFLOAT16}
    return draft_pb2.ContextRows(start=start, features=data, format=names[kind])


def options(**values: Any) -> tree_pb2.TreeOptions:
    given: dict[str, Any] = {"algorithm": tree_pb2.ALGORITHM_DDTREE, "tree_budget": 9, "width_cap": 4} | values
    return tree_pb2.TreeOptions(**given)


def sequence(base: int, context: Any = None, **values: Any) -> draft_pb2.DraftSequence:
    given: dict[str, Any] = {"sequence_id": 1, "epoch": 1, "root_token_id": 17, "tree": options()} | values
    return draft_pb2.DraftSequence(base_length=base, context=context, **given)


def request(*sequences: draft_pb2.DraftSequence, **values: Any) -> draft_pb2.DraftRequest:
    given: dict[str, Any] = {"stream_id": 77, "step_id": 1, "sequences": sequences} | values
    return draft_pb2.DraftRequest(**given)


async def exchange(call: Any, message: draft_pb2.DraftRequest) -> draft_pb2.DraftResponse:
    await call.write(message)
    return await call.read()


async def prefill(running: Running, *chunks: draft_pb2.ContextRows, stream_id: int = 77, **values: Any) -> int:
    call = running.stub.Prefill()
    for chunk in chunks:
        given: dict[str, Any] = {"stream_id": stream_id, "sequence_id": 1, "epoch": 1} | values
        await call.write(draft_pb2.PrefillRequest(context=chunk, **given))
    await call.done_writing()
    return (await call).num_rows
