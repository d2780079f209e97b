"""Generated parts of the documents are what the code says now."""

from __future__ import annotations

import pytest

from benchmarks import gpu_tables
from docs import flags, metrics, modules


def test_the_flag_tables_are_current() -> None:
    text = flags.PAGE.read_text(encoding="utf-8")
    assert flags.write(text) == text, "run `python -m docs.flags`"


def test_every_setting_of_every_service_has_a_row() -> None:
    rows = flags.region()
    for config in flags.SERVICES.values():
        for name in config.__dataclass_fields__:
            assert f"| `{flags.flag(name)}" in rows
    assert rows.count("| `--port` |") == len(flags.SERVICES)  # each has a default of its own
    assert rows.count("| `--threads` |") == 1


def test_the_table_of_metrics_is_current() -> None:
    text = metrics.PAGE.read_text(encoding="utf-8")
    assert metrics.write(text) == text, "run `python -m docs.metrics`"


@pytest.mark.parametrize("region", modules.PAGES)
def test_the_tables_of_modules_are_current(region: str) -> None:
    text = modules.PAGES[region].read_text(encoding="utf-8")
    assert modules.write(region, text) == text, "run `python -m docs.modules`"


def test_the_tables_of_gpu_results_are_current() -> None:
    text = gpu_tables.PAGE.read_text(encoding="utf-8")
    assert gpu_tables.write(text) == text, "run `python -m benchmarks.gpu_tables`"
