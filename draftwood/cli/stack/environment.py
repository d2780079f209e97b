"""The environment that services run in, whoever starts them here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import draftwood


def service_environment(module: str = "", base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`base` with the project's defaults for the service `module`; what is set already stays."""
    cache = Path(base.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftwood"
    defaults = {
        # Compiled steps persist here, so that only the first start is slow.
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        # The readiness line must not wait in a buffer.
        "PYTHONUNBUFFERED": "1",
    }
    if module in ("draft_service", "verify_service"):
        # Two processes compute in turn on the same cores, and libgomp's workers spin for milliseconds after a parallel
        # region unless told otherwise: each slows the other, and both the threads that move messages. Shorter spins
        # give a tree step 4 % (two cores, float32).
        defaults["GOMP_SPINCOUNT"] = "2000"
        # Passes of many shapes make temporaries of many sizes. One heap that is never given back reaches its size in
        # the warm-up and keeps it; by default each thread has its own, and large pieces come and go with their pages.
        defaults["MALLOC_ARENA_MAX"] = "1"
        defaults["MALLOC_MMAP_THRESHOLD_"] = str(32 << 20)
        defaults["MALLOC_TRIM_THRESHOLD_"] = str(1 << 30)
    environment = defaults | dict(base)
    checkout = Path(draftwood.__file__).parent.parent
    if (checkout / "pyproject.toml").is_file():  # services run from a checkout that need not be installed
        search_path = [path for path in (base.get("PYTHONPATH"), str(checkout)) if path]
        environment["PYTHONPATH"] = os.pathsep.join(search_path)
    return environment
