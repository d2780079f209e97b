"""The environment that services run in, whoever starts them here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import draftwood


def service_environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`base` with the project's defaults; what is set already stays."""
    cache = Path(base.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftwood"
    defaults = {
        # Two processes compute in turn on the same cores. libgomp's workers spin for about 1 ms after a parallel
        # region by default, so the drafter's slow the target's down and the other way round: a draft cost 2-4 ms a
        # step in bfloat16 and up to 12 ms in float32. A shorter spin helps; OMP_WAIT_POLICY=PASSIVE (no spin) and
        # ACTIVE both measured worse.
        "GOMP_SPINCOUNT": "20000",
        # Compiled steps persist here, so that only the first start is slow.
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        # The readiness line must not wait in a buffer.
        "PYTHONUNBUFFERED": "1",
    }
    environment = defaults | dict(base)
    checkout = Path(draftwood.__file__).parent.parent
    if (checkout / "pyproject.toml").is_file():  # services run from a checkout that need not be installed
        search_path = [path for path in (base.get("PYTHONPATH"), str(checkout)) if path]
        environment["PYTHONPATH"] = os.pathsep.join(search_path)
    return environment
