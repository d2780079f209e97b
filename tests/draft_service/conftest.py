"""Tiny random draft models and drafters made from them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.config import read_drafter_config
from draft_service.drafter import Drafter
from draft_service.model import DraftModel
from draft_service.tensors import load_drafter_tensors, load_target_tensors
from tests.draft_service.plain_dflash import write_pair

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
