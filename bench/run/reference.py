"""transformers' own decoding, in a process of its own: the reference for exactness, and a rival for speed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.figures.values import Answer, Judgement, Stats
from draftwood.cli.stack.environment import service_environment
from draftwood.cli.stack.process import launch_command
from draftwood.errors import InternalError

WORKER = "bench.run.reference_worker"
_MAX_LINE_BYTES = 64 << 20


class Reference:
    """A running reference process: requests and replies are JSON lines, one at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lock = asyncio.Lock()

    async def generate(self, prompt: Sequence[int], *, max_new: int, sampling: Mapping[str, float]) -> Answer:
        """Decodes one prompt; the time runs from the first token to the last, as in the verify service."""
        reply = await self._ask({"op": "generate", "prompt": list(prompt), "max_new": max_new, **sampling})
        ids: list[int] = reply["ids"]
        stats = Stats(
            num_steps=len(ids) - 1, decode_us=round(reply["decode_s"] * 1e6), prefill_us=round(reply["prefill_s"] * 1e6)
        )
        return Answer(tuple(ids), stats)

    async def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> list[Judgement]:
        """One pass over prompt and answer: what the reference would have said at each of the answer's positions."""
        reply = await self._ask({"op": "judge", "prompt": list(prompt), "answer": list(answer)})
        return [Judgement(*entry) for entry in reply["positions"]]

    async def peak_memory_bytes(self) -> int:
        """Peak resident memory of the process."""
        return (await self._ask({"op": "memory"}))["peak_memory_bytes"]

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        if not line:
            raise InternalError("the reference process ended; its messages are above")
        reply = json.loads(line)
        if "error" in reply:
            raise InternalError(f"the reference process failed: {reply['error']}")
        return reply


@asynccontextmanager
async def reference(target: Path, *, dtype: str, device: str, threads: int) -> AsyncGenerator[Reference]:
    """Starts the process with the model loaded, and ends it."""
    command = [
        sys.executable, "-m", WORKER, "--target", str(target), "--dtype", dtype, "--device", device,
        "--threads", str(threads),
    ]  # fmt: skip
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *launch_command(command),
        stdin=pipe, stdout=pipe, limit=_MAX_LINE_BYTES, env=service_environment(), start_new_session=True,
    )  # fmt: skip
    try:
        yield Reference(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), timeout=10)
        except TimeoutError:
            process.kill()
            await process.wait()
