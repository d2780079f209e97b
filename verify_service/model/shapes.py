"""The few numbers of rows that passes have on a CPU."""

from __future__ import annotations

ROW_MULTIPLE, LARGE_ROW_MULTIPLE = 4, 16


def padded(num_rows: int) -> int:
    """The number of rows that so many are padded to: 1, 2, a multiple of 4, beyond 16 a multiple of 16. Each number
    costs code for its products (about 170 KB a product, made in 2 ms), each shape temporaries of sizes of its own: few
    of them keep memory in bounds (docs/decisions/0015)."""
    if num_rows <= 2:
        return num_rows
    return rounded_up(num_rows, ROW_MULTIPLE if num_rows <= LARGE_ROW_MULTIPLE else LARGE_ROW_MULTIPLE)


def rounded_up(count: int, multiple: int) -> int:
    """The least multiple that is not smaller."""
    return -(-count // multiple) * multiple
