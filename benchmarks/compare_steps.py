"""The verify step of a shape in two checkouts of this project, measured in turn in one run on this GPU.

    python benchmarks/compare_steps.py OTHER_CHECKOUT benchmarks/shapes/Qwen3.6-27B --out benchmarks/results/h200

Each checkout builds the model with random weights in a process of its own; both stay on the GPU and take turns, shape
by shape and round by round. The figure is the ratio of this checkout's median to the other's, for each shape.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORKER = """
import json, sys, torch
from pathlib import Path
from benchmarks import step
from verify_service.cache.pages import PageAllocator
shape, batches, nodes, context = Path(sys.argv[1]), *(json.loads(a) for a in sys.argv[2:5])
with torch.inference_mode():
    runner = step.build(shape, None, torch.bfloat16, batch=max(batches), nodes=max(nodes), context=context)
    graphs_of = getattr(runner, "graphs_of", None) or runner.program
    pages = PageAllocator(runner.pools.keys.shape[2] // step.PAGE_SIZE - 1, step.PAGE_SIZE)
    made = {}
    for b in sorted(batches, reverse=True):
        for n in sorted(nodes, reverse=True):
            made[b, n] = graphs = graphs_of("step", b, n)
            graphs.buffers.clear()
            graphs.step(has_filters=False)
    for (b, n), graphs in made.items():
        table = runner.rows.pages[:b]
        step.fill(graphs, context, runner.target.spec.vocab_size, pages, table)
    print("ready", flush=True)
    for line in sys.stdin:
        b, n, repeats = json.loads(line)
        run = made[b, n].step
        print(json.dumps(step.milliseconds(lambda: run(has_filters=False), repeats)), flush=True)
"""


class Checkout:
    """One checkout's process."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-c", WORKER, *arguments]
        self._process: Any = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def wait(self) -> None:
        """Until its graphs are captured."""
        while (line := self._process.stdout.readline().strip()) != "ready":
            if not line and self._process.poll() is not None:
                raise SystemExit("a checkout ended before it was ready")

    def measure(self, batch: int, nodes: int, repeats: int) -> float:
        """Milliseconds of a step, the median of so many."""
        self._process.stdin.write(json.dumps([batch, nodes, repeats]) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("other", type=Path, help="The other checkout's directory.")
    parser.add_argument("shape", type=Path, help="Directory with the target's config.json.")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=15, help="Steps of each measurement.")
    parser.add_argument(
        "--commits", nargs=2, default=["", ""], help="Names of this commit and of the other, for --out."
    )
    parser.add_argument("--out", type=Path, help="Directory for compare_SHAPE.json.")
    args = parser.parse_args()
    arguments = [str(args.shape.resolve()), *map(json.dumps, (args.batch, args.nodes, args.context))]
    checkouts = [Checkout(folder.resolve(), arguments) for folder in (ROOT, args.other)]
    for checkout in checkouts:
        checkout.wait()
    rows: list[dict[str, Any]] = []
    for b in args.batch:
        for n in args.nodes:
            times: list[list[float]] = [[], []]
            for i in range(args.rounds):
                for which in (0, 1) if i % 2 else (1, 0):
                    times[which].append(checkouts[which].measure(b, n, args.repeats))
            ratios = [ours / theirs for ours, theirs in zip(*times, strict=True)]
            ours, theirs = map(statistics.median, times)
            row = {"batch": b, "nodes": n, "ms": ours, "other_ms": theirs, "ratio": statistics.median(ratios)}
            rows.append(row | {"ratios": [min(ratios), max(ratios)]})
            print(f"batch {b} nodes {n:3d}: {ours:7.3f} and {theirs:7.3f} ms, ratio {row['ratio']:.4f}", flush=True)
    for checkout in checkouts:
        checkout.close()
    if args.out is not None:
        settings = {"context": args.context, "rounds": args.rounds, "repeats": args.repeats}
        result = {"shape": args.shape.name, "commits": args.commits, **settings, "rows": rows}
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"compare_{args.shape.name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
