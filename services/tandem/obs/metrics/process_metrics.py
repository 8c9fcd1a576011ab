"""Export CPU time, memory and open files of this process; nothing where there is no /proc."""

from __future__ import annotations

from functools import partial

from prometheus_client.process_collector import ProcessCollector

from tandem.obs.metrics.instruments import PROCESS_CPU, PROCESS_FILES, PROCESS_MEMORY
from tandem.obs.metrics.metrics import Metrics, Values

_NAMES = {
    PROCESS_CPU: "process_cpu_seconds",
    PROCESS_MEMORY: "process_resident_memory_bytes",
    PROCESS_FILES: "process_open_fds",
}
"""The name of each metric in Prometheus's client library, which reads /proc."""


def watch_process(metrics: Metrics) -> None:
    """Register the CPU time, memory and open files of this process, which are read at each collection."""
    collector = ProcessCollector(registry=None)
    for instrument, name in _NAMES.items():
        metrics.watch(instrument, partial(_read, collector, name))


def _read(collector: ProcessCollector, name: str) -> dict[Values, float]:
    found = [metric.samples[0].value for metric in collector.collect() if metric.name == name]
    return {(): found[0]} if found else {}
