"""Writes the tables of docs/gpu.md from the files in benchmarks/results/h200.

    python -m benchmarks.gpu_tables

The region between the two comments is this script's own: a test compares it with what the script writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown
from docs.region import rewritten

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "gpu.md"
RESULTS = Path(__file__).parent / "results" / "h200"
SHAPE = "Qwen3.6-27B"


def region() -> str:
    """The text between the two comments."""
    step, draft = _read(f"step_{SHAPE}"), _read(f"draft_{SHAPE}-DFlash")
    attention, gdn, mamba2, sampling = (_read(name) for name in ("attention", "gdn", "mamba2", "sampling"))
    parts = (_step(step), _draft(draft), _attention(attention), _gdn(gdn), _commits(gdn), _mamba2(mamba2))
    return "\n\n".join((*parts, _sampling(sampling)))


def write(text: str) -> str:
    """`text` with the region replaced."""
    return rewritten(text, "gpu", region())


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _step(result: dict[str, Any]) -> str:
    rows = [
        (row["batch"], row["nodes"], f"{row['step']:.2f}", f"{row['products']:.2f}", f"{row['step_over_products']:.3f}")
        for row in sorted(result["rows"], key=lambda row: (row["batch"], row["nodes"]))
    ]
    context = result["rows"][0]["context"]
    return _table(
        f"Verify step, {result['shape']}, {result['dtype']}, context {context}, {_where(result, result)}. Reading the "
        f"weights once takes {result['floor_ms']:.2f} ms at the run's copy bandwidth; the GPU is idle for "
        f"{result['idle_ms']:.2f} ms between two steps.",
        ("batch", "nodes", "step, ms", "matrix products alone, ms", "ratio"),
        rows,
    )


def _draft(result: dict[str, Any]) -> str:
    rows = [
        (row["batch"], row["budget"], f"{row['pass_and_tree_ms']:.2f}", f"{row['with_7_new_rows_ms']:.2f}")
        for row in result["rows"]
    ]
    return _table(
        f"Draft pass and tree, {result['shape']}, {result['dtype']}, {_where(result, result)}; its weights are "
        f"{result['weight_bytes'] / 1e9:.2f} GB.",
        ("batch", "tree budget", "pass and tree, ms", "with 7 new context rows, ms"),
        rows,
    )


def _attention(result: dict[str, Any]) -> str:
    rows = [
        (row["batch"], row["prefix"], row["nodes"], f"{row['us']:.1f}", f"{row['floor_bytes_us']:.1f}",
         f"{row['floor_operations_us']:.1f}", _or_dash(row.get("flex_us")), _or_dash(row.get("sdpa_us")))
        for row in result["attention"]
    ]  # fmt: skip
    return _table(
        f"Tree attention, one layer of 24 query and 4 KV heads of 256, bfloat16, {_where(result['environment'], {})}, "
        "µs. FlexAttention's block mask is built outside the timing; both rivals get unpaged keys.",
        (
            "batch",
            "prefix",
            "nodes",
            "µs",
            "floor by bytes",
            "floor by operations",
            "FlexAttention",
            "SDPA, dense mask",
        ),
        rows,
    )


def _gdn(result: dict[str, Any]) -> str:
    rows = [
        (row["batch"], row["nodes"], f"{row['all_layers_ms']:.2f}", f"{row['all_layers_with_norm_ms']:.2f}",
         f"{row['floor_ms']:.2f}", f"{row['error']:.1e}")
        for row in sorted(result["verify"], key=lambda row: (row["batch"], row["nodes"]))
    ]  # fmt: skip
    rivals, worst = result["rivals"], max(row["error"] for row in result["precision"])
    return _table(
        f"Gated DeltaNet, 48 layers of 16 key and 48 value heads of 128, {_where(result['environment'], {})}: "
        "convolution, gates and verify. Errors are relative (Frobenius) to float64, of float32 outputs; the worst over "
        f"three regimes of keys, trees and chains of up to 256 nodes, is {worst:.1e}. For one layer and 64 "
        f"nodes, verify takes {_verify_us(result, 1, 64):.1f} µs, flash-linear-attention's recurrence over a chain of "
        f"64 {rivals['fla_chain_us']:.1f} µs ({rivals['times_fla_chain']:.1f} ×), and one state per node "
        f"{rivals['state_per_node_us']:.1f} µs ({rivals['times_state_per_node']:.1f} ×; the floor of its bytes is "
        f"{rivals['state_per_node_floor_us']:.1f} µs), with {rivals['state_per_node_mib']:.0f} MiB of states per "
        f"request where {rivals['memory_mib']:.0f} MiB are kept here.",
        ("batch", "nodes", "all layers, ms", "with gated norms, ms", "floor by bytes, ms", "error"),
        rows,
    )


def _verify_us(result: dict[str, Any], batch: int, nodes: int) -> float:
    return next(row["verify_us"] for row in result["verify"] if (row["batch"], row["nodes"]) == (batch, nodes))


def _commits(result: dict[str, Any]) -> str:
    rows = [
        (row["batch"], row["path"], f"{row['ms']:.3f}", f"{row['floor_ms']:.3f}")
        for row in sorted(result["commit"], key=lambda row: (row["batch"], row["path"]))
    ]
    return _table(
        f"Commit of those 48 layers, one launch, {_where(result['environment'], {})}.",
        ("batch", "path", "ms", "floor by bytes, ms"),
        rows,
    )


def _mamba2(result: dict[str, Any]) -> str:
    shape = result["shape"]
    rows = [(row["batch"], row["nodes"], f"{row['us']:.1f}", f"{row['floor_us']:.1f}") for row in result["rows"]]
    return _table(
        f"Mamba2 tree verify, one layer of {shape['heads']} heads of {shape['head_dim']}, state {shape['state']}, "
        f"{shape['groups']} groups, {_where(result['environment'], {})}.",
        ("batch", "nodes", "µs", "floor by bytes, µs"),
        rows,
    )


def _sampling(result: dict[str, Any]) -> str:
    rows = [
        (row["rows"], row["kind"], f"{row['us']:.1f}", f"{row['floor_us']:.1f}", _or_dash(row.get("torch_argmax_us")))
        for row in result["rows"]
        if row["kernel"] == "sample"
    ]
    return _table(
        f"Draws at every node, vocabulary 248320, bfloat16 logits, {_where(result['environment'], {})}.",
        ("rows", "what", "µs", "floor by bytes, µs", "torch.argmax, µs"),
        rows,
    )


def _where(result: dict[str, Any], with_versions: dict[str, Any]) -> str:
    versions = with_versions.get("versions") or {name: result[name] for name in ("torch", "triton") if name in result}
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{result['gpu']}, {said}, commit {result['commit'][:7]}"


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return f"{title}\n\n{markdown(columns, ([str(cell) for cell in row] for row in rows))}"


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
