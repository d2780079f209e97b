"""What the draft service says that it will hold, against what it allocates."""

from __future__ import annotations

from draft_service.build import build
from draft_service.memory_plan import plan
from draft_service.model.draft_model import DraftModel
from draftwood.config import DraftConfig


def test_a_plan_is_what_the_service_allocates() -> None:
    config = DraftConfig(compile=False, dtype="float32", max_batch=3, max_context=100)
    sizes, service = plan(config), build(config)
    service.worker.shutdown()
    drafter = service.drafter
    assert sizes["context cache"] == drafter.cache.keys.nbytes + drafter.cache.values.nbytes
    held = _bytes(drafter.model)
    assert abs(sizes["weights"] - held) < 0.01 * held


def _bytes(model: DraftModel) -> int:
    return model.embedding.nbytes + sum(b.numel() * b.element_size() for b in model.buffers())
