"""Kernels compile ahead of time for each architecture that is served, within its shared memory and without spills."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels import compiled_kernels
from tests.kernels.compiled_attention import ATTENTION
from tests.kernels.compiled_drafting import DRAFTING
from tests.kernels.compiled_gdn import GDN_LAYERS
from tests.kernels.compiled_kernels import SHARED_LIMIT, Entry
from tests.kernels.compiled_layers import LAYERS
from tests.kernels.compiled_mamba2 import MAMBA2
from tests.kernels.compiled_rotation import ROTATION
from tests.kernels.compiled_sampling import SAMPLING

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ENTRIES = (*compiled_kernels.ENTRIES, *ATTENTION, *ROTATION, *GDN_LAYERS, *SAMPLING, *DRAFTING, *MAMBA2, *LAYERS)
CASES = [(entry, architecture) for entry in ENTRIES for architecture in entry.architectures]


def compiled(entry: Entry, architecture: int) -> Any:
    """Pointers and sizes are taken as multiples of 16, as those of static buffers are."""
    kernel = entry.load()
    names: list[str] = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in entry.constants else entry.types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in entry.constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name not in entry.constants and entry.types[name].startswith("*")
        },
    )
    options = {"num_warps": entry.num_warps, "num_stages": entry.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Bytes of local memory per thread: what did not fit into registers."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", str(path)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", usage))


@pytest.mark.parametrize(("entry", "architecture"), CASES, ids=[f"{entry.name}-sm_{a}" for entry, a in CASES])
def test_compiles_within_limits(entry: Entry, architecture: int, tmp_path: Path) -> None:
    kernel = compiled(entry, architecture)
    assert kernel.metadata.shared <= SHARED_LIMIT[architecture] * 1024
    assert stack_bytes(kernel.asm["cubin"], tmp_path) <= entry.stack_limit.get(architecture, 0)


def test_names_are_distinct() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
