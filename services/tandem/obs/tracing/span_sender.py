"""Sends spans in batches, on a thread of its own; never makes one, and never keeps a request waiting.

OpenTelemetry's name for it is a batching processor. The SDK's own tells nobody how many spans it has left out, and logs
each of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from threading import Event, Thread
from typing import Any, NamedTuple, Protocol, TypeVar

from opentelemetry.sdk.trace.export import SpanExportResult

from tandem.obs.tracing.tracing import EndedSpan

Packed = TypeVar("Packed")
_log = logging.getLogger(__name__)


class Batching(NamedTuple):
    """So many spans wait at most, go at once, and wait for so long; `OTEL_BSP_*` say it."""

    max_waiting: int = 2048
    max_batch: int = 512
    delay_s: float = 5.0


class SpanExporter(Protocol[Packed]):
    """As OpenTelemetry's, but what waits to be sent is `packed` where it ended: there its parts are in the processor's
    caches. Seconds later, on another thread, they have to be fetched, which takes two to three times as long."""

    def packed(self, span: EndedSpan) -> Packed | None:
        """None: it cannot be sent. Must not block."""
        ...

    def export(self, spans: Sequence[Packed]) -> SpanExportResult: ...

    def shutdown(self) -> None: ...


class SpanSender:
    """What comes when too many wait replaces the oldest. `num_dropped`: spans that were left out so, or that a receiver
    did not take."""

    def __init__(self, exporters: Sequence[SpanExporter[Any]], batching: Batching) -> None:
        self._num_replaced = 0
        self._num_refused = 0
        self._exporters = exporters
        self._batching = batching
        self._waiting: deque[list[Any]] = deque(maxlen=batching.max_waiting)  # packed, for each of the exporters
        self._is_due = Event()
        self._is_over = False
        self._is_closed = False
        self._thread = Thread(target=self._run, name="telemetry-spans", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Two threads count, each its own."""
        return self._num_replaced + self._num_refused

    def put(self, span: EndedSpan) -> None:
        """By one thread at a time. What comes after `close` is not sent."""
        waiting, packed = self._waiting, [exporter.packed(span) for exporter in self._exporters]
        if len(waiting) == self._batching.max_waiting:
            self._num_replaced += 1
        waiting.append(packed)
        if len(waiting) >= self._batching.max_batch and not self._is_due.is_set():
            self._is_due.set()

    def close(self, timeout_s: float) -> None:
        """Sends what waits. A receiver that has not taken it by then is left alone: the thread ends with the call that
        it is in."""
        self._is_over = True
        self._is_due.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("telemetry: spans could not be sent in the %.1f s that stopping may take", timeout_s)
        if not self._is_closed:
            self._is_closed = True
            for exporter in self._exporters:
                exporter.shutdown()

    def _run(self) -> None:
        while not self._is_over:
            self._is_due.wait(self._batching.delay_s)
            self._is_due.clear()
            self._send_waiting()
        self._send_waiting()

    def _send_waiting(self) -> None:
        """What comes meanwhile waits for the next time, because each call costs a millisecond, however little it
        carries."""
        num_left = len(self._waiting)
        while num_left > 0 and not self._is_closed:
            batch = [self._waiting.popleft() for _ in range(min(num_left, self._batching.max_batch))]
            num_left -= len(batch)
            for exporter, packed in zip(self._exporters, zip(*batch, strict=True), strict=True):
                self._send(exporter, [each for each in packed if each is not None])

    def _send(self, exporter: SpanExporter[Any], packed: Sequence[Any]) -> None:
        try:
            if not packed or (not self._is_closed and exporter.export(packed) is SpanExportResult.SUCCESS):
                return
        except Exception:
            _log.exception("telemetry: spans could not be sent")
        self._num_refused += len(packed)
