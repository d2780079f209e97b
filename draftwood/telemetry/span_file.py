"""Spans in a file, one JSON object a line, for tests and for small set-ups without a collector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from draftwood.errors import ConfigError


class SpanFile(SpanExporter):
    """Appends. Several services may share a file: what ends together goes out in one write.

    Raises ConfigError where it cannot be written.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 closed by `shutdown`
        except OSError as error:
            raise ConfigError(
                f"--trace-file {path}: cannot be written ({error.strerror or error})", field="trace_file"
            ) from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes them."""
        self._file.write("".join(span.to_json(indent=None) + "\n" for span in spans).encode())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Closes the file."""
        self._file.close()
