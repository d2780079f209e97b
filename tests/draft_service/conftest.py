"""Tiny random draft models, drafters made from them, and a service that serves one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.build import warm_up
from draft_service.draft.drafter import Drafter
from draft_service.model.config import read_drafter_config
from draft_service.model.draft_model import DraftModel
from draft_service.model.tensors import load_drafter_tensors, load_target_tensors
from draft_service.server import DraftServer
from draftwood.rpc.conventions import open_channel
from tests.draft_service.plain_dflash import write_pair
from tests.draft_service.served import Running, service_of

MakeDrafter = Callable[..., tuple[Drafter, Path, Path]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load_drafter(draft: Path, target: Path, **settings: Any) -> Drafter:
    config = read_drafter_config(draft).with_window(settings.pop("window", 0))
    tensors, borrowed = load_drafter_tensors(draft, config), load_target_tensors(target, config)
    model = DraftModel(tensors, borrowed, config, dtype=torch.float32, device=torch.device("cpu"))
    sizes: dict[str, Any] = {"max_context": 96, "max_batch": 3} | settings
    return Drafter(model, **sizes)


@pytest.fixture
def make_drafter(tmp_path: Path) -> MakeDrafter:
    """Writes a random pair with changes to its config and loads it; returns the drafter and both directories."""

    def make(settings: dict[str, Any] | None = None, **changes: Any) -> tuple[Drafter, Path, Path]:
        draft, target = write_pair(tmp_path, **changes)
        return load_drafter(draft, target, **(settings or {})), draft, target

    return make


@pytest.fixture
async def running(make_drafter: MakeDrafter) -> AsyncIterator[Running]:
    drafter, _, _ = make_drafter()
    service = service_of(drafter)
    await asyncio.get_running_loop().run_in_executor(service.worker, warm_up, drafter)
    server = await DraftServer(service, lease_s=0.3).start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield Running(service, server, channel)
    await server.stop(0)
