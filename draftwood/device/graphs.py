"""CUDA graphs of functions over static buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM_UP_RUNS = 2


def bucket(count: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(count - 1, 0).bit_length()


class Graphs:
    """Captures functions as CUDA graphs that share one memory pool; elsewhere, functions run as they are."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """The function as a graph, after a run or two for compilers; its data must be harmless by then."""
        if not self.enabled:
            return run
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay
