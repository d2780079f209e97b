"""Settings of draws as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwood.sampling import SamplingParams
from verify_service.kernels.arguments import DrawSettings


def draw_settings_of(
    rows: Sequence[SamplingParams],
    device: torch.device,
    *,
    stop_ids: Sequence[Sequence[int]] = (),  # of each row, equally many, padded with -1
    remaining: Sequence[int] = (),
) -> DrawSettings:
    """From requests' settings; without stop ids and nearly without an end where none are given."""

    def column(values: Sequence[object], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    seeds = np.array([row.seed for row in rows], dtype=np.uint64).view(np.int64)
    return DrawSettings(
        temperature=column([row.temperature for row in rows], torch.float32),
        top_k=column([row.top_k for row in rows]),
        top_p=column([row.top_p for row in rows], torch.float64),
        min_p=column([row.min_p for row in rows], torch.float64),
        seeds=torch.from_numpy(seeds).to(device),
        stop_ids=column(stop_ids or [[-1, -1]] * len(rows)),
        remaining=column(remaining or [100] * len(rows)),
    )
