"""A draft pass with its tree for a drafter's shape on this GPU, beside what reading its weights takes.

    python benchmarks/draft.py benchmarks/shapes/Qwen3.6-27B-DFlash benchmarks/shapes/Qwen3.6-27B --out DIR

Weights are random. Times are medians in milliseconds, the wait for the tree on the host included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path

import torch

from draft_service.cache.context_cache import SequenceKey
from draft_service.draft.drafter import Drafter
from draft_service.draft.types import ContextRows, SequenceStep
from draft_service.kernels.triton.kernel_set import triton_set
from draft_service.model.config import read_drafter_config
from draft_service.model.draft_model import DraftModel
from draft_service.model.tensors import random_drafter_tensors, random_target_tensors
from draftwood.device.layers import PackedLinear
from draftwood.tree_options import TreeOptions

DEVICE = torch.device("cuda")
REPEATS = 30


def build(draft: Path, target: Path, dtype: torch.dtype, *, max_context: int) -> Drafter:
    """The drafter over random weights."""
    config = read_drafter_config(draft)
    tensors = random_drafter_tensors(config, dtype, DEVICE)
    borrowed = random_target_tensors(target, config, dtype, DEVICE)
    model = DraftModel(tensors, borrowed, config, dtype=dtype, device=DEVICE)
    return Drafter(model, max_context=max_context, max_batch=8, compile=True, kernels=triton_set())


def measure(drafter: Drafter, batch: int, budget: int, context: int) -> dict[str, float]:
    """Steps of sequences with so many context rows: the whole of it, and with 7 new rows each step as a step brings."""
    width = drafter.config.hidden_size
    options = TreeOptions("ddtree", budget, 16)
    rows = torch.randn(context, width, dtype=drafter.model.dtype)
    base = [SequenceStep(i, 1, context, 5 + i, ContextRows(0, rows), options) for i in range(batch)]
    drafter.step(1, base, (), lambda: False)
    bare, whole = list[float](), list[float]()
    length = context
    for i in range(REPEATS):
        steps = [SequenceStep(i, 1, length, 5 + i, None, options) for i in range(batch)]
        bare.append(seconds(drafter, steps))
        new = torch.randn(7, width, dtype=drafter.model.dtype)
        steps = [SequenceStep(i, 1, length + 7, 5 + i, ContextRows(length, new), options) for i in range(batch)]
        length += 7
        if i < REPEATS // 2:
            whole.append(seconds(drafter, steps))
        else:
            drafter.step(1, steps, (), lambda: False)
    for i in range(batch):
        drafter.cache.close(SequenceKey(1, i))
    return {"pass_and_tree_ms": statistics.median(bare) * 1e3, "with_7_new_rows_ms": statistics.median(whole) * 1e3}


def seconds(drafter: Drafter, steps: list[SequenceStep]) -> float:
    """Wall time of one message."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    drafter.step(1, steps, (), lambda: False)
    return time.perf_counter() - started


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("draft", type=Path, help="Directory with the drafter's config.json.")
    parser.add_argument("target", type=Path, help="Directory with the target's config.json.")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--budget", type=int, nargs="+", default=[31, 63])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="Directory for draft_SHAPE.json.")
    parser.add_argument("--commit", help="The commit that is measured, where git does not say it.")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("measures on a GPU, and torch finds none here")
    drafter = build(args.draft, args.target, torch.bfloat16, max_context=args.context + 1024)
    parts = [part for part in drafter.model.modules() if isinstance(part, PackedLinear)]
    weights = sum(part.weight.nbytes for part in parts if part is not drafter.model.context_kv)
    rows = [
        {"batch": b, "budget": n, "context": args.context, **measure(drafter, b, n, args.context)}
        for b in args.batch
        for n in args.budget
    ]
    for row in rows:
        print(row, flush=True)
    print(f"weights of a pass: {weights / 1e9:.2f} GB")
    if args.out is not None:
        commit = args.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
        result = {
            "shape": args.draft.name,
            "dtype": "bfloat16",
            "commit": commit,
            "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__},
            "weight_bytes": weights,
            "rows": rows,
        }
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"draft_{args.draft.name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
