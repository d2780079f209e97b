"""How kernels are timed: medians of CUDA graph replays, over more memory than the L2 cache holds.

`sweep` takes one call for each layer, each with tensors of its own, captures all of them in one graph and gives the
time of one. Ratios hold within one run only, so `copy_bandwidth` is measured beside whatever is compared with it.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

RESULTS = Path(__file__).parent.parent / "results"


def result_path(doc: str | None, name: str) -> Path:
    """Where the results of the script with this docstring go, by its flags. Without a GPU the script ends here."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "h200", help=f"Directory for {name}.")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("measures on a GPU, and torch finds none here")
    torch.manual_seed(0)
    return args.out / name


def graph_seconds(call: Callable[[], object], *, repeats: int = 20) -> float:
    """Median time of one replay of `call` captured as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def sweep(calls: Sequence[Callable[[], object]], *, repeats: int = 20) -> float:
    """Time of one call: all of them in one graph, divided by their number."""

    def run() -> None:
        for call in calls:
            call()

    return graph_seconds(run, repeats=repeats) / len(calls)


def copies(size: int) -> int:
    """How many tensors of `size` bytes are more than twice what the L2 cache holds."""
    return 2 * torch.cuda.get_device_properties(0).L2_cache_size // max(size, 1) + 1


def copy_bandwidth(size: int = 4 << 30) -> float:
    """Bytes per second, read and written ones counted, of an elementwise kernel over `size` bytes."""
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / graph_seconds(lambda: torch.neg(source, out=target), repeats=10)


def environment() -> dict[str, Any]:
    """What a result is good for: commit, GPU, versions."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """A result with its environment, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n", encoding="utf-8")
