"""The verify step of a shape on this GPU, over nodes and batch, beside what its products and its weights alone take.

    python benchmarks/step.py benchmarks/shapes/Qwen3.6-27B --out benchmarks/results/h200

Weights are random. Times are medians of graph launches, in milliseconds; compare ratios within one run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from draftwood.device.graphs import Graphs
from draftwood.device.layers import PackedLinear
from verify_service.cache.pages import PageAllocator, SlotAllocator
from verify_service.cache.pools import allocate_pools
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.draft.coordinator import DraftCoordinator
from verify_service.gpu.memory import PassLimits
from verify_service.gpu.runner import GraphRunner
from verify_service.gpu.step_graphs import StepGraphs
from verify_service.gpu.target import GraphTarget
from verify_service.kernels.triton.kernel_set import TritonKernels
from verify_service.model.features import load_projector
from verify_service.model.loading import load_target
from verify_service.model.target import TargetParts

DEVICE = torch.device("cuda")
PAGE_SIZE = 64
MARGIN = 512


@dataclass(frozen=True)
class Row:
    """One measured shape of a step; times in ms."""

    batch: int
    nodes: int
    context: int
    step: float  # from the host's inputs to the host's results
    products: float  # the matrix products of as many rows alone
    step_over_products: float


def random_tree(num_nodes: int, rng: random.Random, depth: int = 15) -> list[int]:
    """Parents of a tree as a best-first search makes it: long paths with siblings."""
    parents, depths = [-1], [0]
    while len(parents) < num_nodes:
        parent = len(parents) - 1 if rng.random() < 0.5 else rng.randrange(len(parents))
        if depths[parent] < depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents


def milliseconds(run: Callable[[], object], repeats: int = 15) -> float:
    """The median of launches, by events."""
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth(device: torch.device, size: int = 4 << 30) -> float:
    """Bytes read plus written per second."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.random_(0, 255)
    return 2 * size / (milliseconds(lambda: target.copy_(source)) / 1e3)


def products(target: GraphTarget) -> list[PackedLinear]:
    """Every matrix product of a step, in order."""
    found: list[PackedLinear] = []
    for group in target.layer_groups:
        for layer in group.layers:
            found += [part for part in layer.modules() if isinstance(part, PackedLinear)]
    return [*found, target.head]


def products_graph(parts: list[PackedLinear], m: int, graphs: Graphs) -> Callable[[], None]:
    """The products of `m` rows alone."""
    weights = [part.weight for part in parts]
    rows = {w.shape[1]: torch.randn(m, w.shape[1], device=w.device, dtype=w.dtype) for w in weights}
    outs = {w.shape[0]: torch.empty(m, w.shape[0], device=w.device, dtype=w.dtype) for w in weights}

    def run() -> None:
        for w in weights:
            torch.mm(rows[w.shape[1]], w.t(), out=outs[w.shape[0]])

    return graphs.captured(run)


def fill(graphs: StepGraphs, context: int, vocab: int, pages: PageAllocator, table: Tensor) -> None:
    """A random tree for every row, behind a context of random keys."""
    rng = random.Random(0)
    buffers = graphs.buffers
    buffers.clear()
    host = buffers.inputs.host
    for row in range(buffers.b):
        host["input_ids"][row] = [rng.randrange(vocab) for _ in range(buffers.n)]
        host["parents"][row] = random_tree(buffers.n, rng)
        host["num_nodes"][row] = buffers.n
        host["base_lengths"][row] = context
        host["state_slots"][row] = row + 1
        host["remaining"][row] = 1 << 20
        if not int(table[row].max()):
            owned = pages.allocate(context + 32)
            table[row, : len(owned)] = torch.tensor(owned, dtype=torch.int32)


def build(shape: Path, draft: Path | None, dtype: torch.dtype, *, batch: int, nodes: int, context: int) -> GraphRunner:
    """The engine over random weights, with the feature rows of a drafter if there is one."""
    device = DEVICE
    model, spec = load_target(shape, dtype, device, random_weights=True)
    projector = load_projector(draft, spec, dtype, device, random_weights=True) if draft else None
    pages = PageAllocator(batch * (-(-(context + MARGIN) // PAGE_SIZE)), PAGE_SIZE)
    feature_size = projector.hidden_size if projector else 0
    pools = allocate_pools(spec, pages, SlotAllocator(batch), feature_size, dtype, device)
    for tensor in (pools.keys, pools.values, pools.states, pools.windows):
        tensor.normal_(0.0, 0.3)
    layer_ids = projector.target_layer_ids if projector else ()
    parts = TargetParts(model, spec, pools, layer_ids, context + MARGIN, compile_steps=True)
    target = GraphTarget(parts, TritonKernels(), PAGE_SIZE)
    return GraphRunner(target, projector, Graphs(device, enabled=True), PassLimits(batch, nodes, prefill_tokens=256))


def measure(runner: GraphRunner, batches: list[int], nodes: list[int], context: int) -> Iterator[Row]:
    """Steps of every shape, largest first, so that their graphs share memory."""
    target = runner.target
    pages = PageAllocator(target.pools.keys.shape[2] // PAGE_SIZE - 1, PAGE_SIZE)
    parts = products(target)
    shapes = [(b, n) for b in sorted(batches, reverse=True) for n in sorted(nodes, reverse=True)]
    for b, n in shapes:
        graphs = runner.graphs_of("step", b, n)
        graphs.buffers.clear()
        graphs.step(has_filters=False)
    for b, n in shapes:
        graphs = runner.graphs_of("step", b, n)
        fill(graphs, context, target.spec.vocab_size, pages, graphs.buffers.tree.page_table)
        step = milliseconds(lambda graphs=graphs: graphs.step(has_filters=False))
        alone = milliseconds(products_graph(parts, b * n, runner.capture))
        row = Row(b, n, context, step, alone, step / alone)
        print(f"batch {b} nodes {n:3d}: step {step:7.3f} products {alone:7.3f} ratio {step / alone:.3f}", flush=True)
        yield row


def idle(runner: GraphRunner, context: int, steps: int = 40) -> float:
    """Milliseconds between two steps of one answer without drafts in which the GPU has nothing to do: wall time of the
    engine's own steps, less the time of their graphs one behind the other."""
    pages = PageAllocator(runner.pools.keys.shape[2] // PAGE_SIZE - 1, PAGE_SIZE)
    request = Request(request_id="idle", prompt_token_ids=(1,) * context, max_new_tokens=MARGIN)
    sequence = SequenceState(1, request, lambda _: None, 0.0)
    sequence.pages, sequence.state_slot, sequence.base_length = pages.allocate(context + 2 * steps), 1, context
    sequence.answer = [1]
    drafter = DraftCoordinator(None, runner.pools, timeout_s=1.0)
    graphs = runner.graphs_of("step", 1, 1)
    walls: list[float] = []
    for _ in range(steps):
        started = time.perf_counter()
        runner.step([sequence], drafter)
        walls.append((time.perf_counter() - started) * 1e3)

    def queued() -> None:
        for _ in range(10):
            graphs.step(has_filters=False)

    return statistics.median(walls) - milliseconds(queued, repeats=5) / 10


def profile(graphs: StepGraphs, rows: int = 40) -> str:
    """Where the time of one step goes, by kernel."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            graphs.step(has_filters=False)
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        entry = totals.setdefault(event.name[:110], [0.0, 0.0])
        entry[0] += event.device_time_total / 3e3
        entry[1] += 1 / 3
    lines = sorted(totals.items(), key=lambda item: -item[1][0])[:rows]
    total = sum(entry[0] for entry in totals.values())
    return "\n".join([f"{total:8.3f} ms in all", *(f"{t:8.3f} ms {c:6.0f} x {name}" for name, (t, c) in lines)])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", type=Path, help="Directory with the target's config.json.")
    parser.add_argument("--draft", type=Path, help="Directory with the drafter's config.json: feature rows count, too.")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--profile", action="store_true", help="Print where the time of batch 1 goes.")
    parser.add_argument("--out", type=Path, help="Directory for step_SHAPE.json.")
    parser.add_argument("--commit", help="The commit that is measured, where git does not say it.")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("measures on a GPU, and torch finds none here")
    bandwidth = copy_bandwidth(DEVICE)
    torch.cuda.empty_cache()
    dtype: torch.dtype = getattr(torch, args.dtype)
    runner = build(args.shape, args.draft, dtype, batch=max(args.batch), nodes=max(args.nodes), context=args.context)
    weights = sum(part.weight.nbytes for part in products(runner.target))
    floor = weights / bandwidth * 1e3
    print(
        f"copy {bandwidth / 1e12:.2f} TB/s; products' weights {weights / 1e9:.2f} GB; floor {floor:.3f} ms", flush=True
    )
    rows = list(measure(runner, args.batch, args.nodes, args.context))
    by = {(row.batch, row.nodes): row.step for row in rows}
    ratios = {f"batch {b}": by[b, max(args.nodes)] / by[b, min(args.nodes)] for b in args.batch}
    print(f"largest over smallest: {ratios}; smallest over floor: {by[min(args.batch), min(args.nodes)] / floor:.3f}")
    between = idle(runner, args.context)
    print(f"idle between two steps: {between:.3f} ms", flush=True)
    if args.profile:
        for n in args.nodes:
            print(f"nodes {n}\n{profile(runner.graphs_of('step', min(args.batch), n))}", flush=True)
    if args.out is not None:
        commit = args.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
        result = {
            "shape": args.shape.name,
            "dtype": args.dtype,
            "commit": commit,
            "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "copy_bandwidth_bytes_per_s": bandwidth,
            "weight_bytes": weights,
            "floor_ms": floor,
            "idle_ms": between,
            "rows": [asdict(row) for row in rows],
        }
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"step_{args.shape.name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
