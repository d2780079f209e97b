"""A service's metrics in a registry of its own, and the endpoint that Prometheus reads.

What the service counts anyway is read when somebody asks (`read`); only what nobody else keeps is recorded here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from draftwood import __version__
from draftwood.errors import ConfigError
from draftwood.telemetry.endpoint import Endpoint
from draftwood.telemetry.metrics import BUILD_INFO, Metric, ServiceName

log = logging.getLogger(__name__)

Reading = Callable[[], float | Mapping[str, float]]  # by the label's value, where the metric has a label


class Instruments:
    """Metrics of one service. Recording is thread-safe; readings are taken on the endpoint's threads."""

    def __init__(self, service: ServiceName) -> None:
        disable_created_metrics()  # when a series began is not worth a series of its own
        self.service = service
        self._registry = CollectorRegistry()
        self._readings: dict[Metric, Reading] = {}
        self._endpoint: Endpoint | None = None
        name = BUILD_INFO.removesuffix("_info")
        Info(name, "Which service and version this is.", registry=self._registry).info(
            {"service": service, "version": __version__}
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(_Readings(self._readings))

    def counter(self, metric: Metric) -> Counter:
        """A counter to record with."""
        return Counter(metric.name, metric.help, metric.labels, registry=self._registry)

    def histogram(self, metric: Metric) -> Histogram:
        """A histogram to record with."""
        return Histogram(metric.name, metric.help, metric.labels, registry=self._registry, buckets=metric.buckets)

    def read(self, metric: Metric, reading: Reading) -> None:
        """A counter or gauge whose value is kept elsewhere."""
        self._readings[metric] = reading

    def exposition(self) -> str:
        """What the endpoint answers: Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def serve(self, host: str, port: int) -> None:
        """Answers GET /metrics on threads of its own. Raises ConfigError where the port cannot be listened on."""
        try:
            self._endpoint = Endpoint(self._registry, host, port)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port}: cannot listen on {host}:{port} ({error.strerror or error})",
                field="metrics_port",
            ) from error
        log.info("metrics on http://%s:%d/metrics", host, port)

    def close(self) -> None:
        """Stops answering."""
        if self._endpoint is not None:
            self._endpoint.close()


class _Readings(Collector):
    """Asks for the values that are kept elsewhere."""

    def __init__(self, readings: Mapping[Metric, Reading]) -> None:
        self._readings = readings

    def describe(self) -> Iterator[Family]:
        """Nothing is asked before there is somebody to answer."""
        yield from ()

    def collect(self) -> Iterator[Family]:
        """Families in the order in which they were added."""
        for metric, reading in self._readings.items():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            value = reading()
            if isinstance(value, Mapping):
                for label, number in value.items():
                    family.add_metric((label,), number)
            else:
                family.add_metric((), value)
            yield family
