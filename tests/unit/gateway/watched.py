"""Run completions and collect their records, spans and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
from opentelemetry.sdk.trace import ReadableSpan

from tandem.core.clock import Clock
from tandem.core.request import Job
from tandem.gateway.context.interfaces import RequestDispatcher
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.openai.output_spec import OutputSpecFactory
from tandem.gateway.openai.request_schema import CompletionBody
from tandem.gateway.serving.completions import CompletionService
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.telemetry.request_record import RequestRecord
from tandem.gateway.telemetry.request_recorder import RequestRecorder
from tandem.obs.metrics.metrics import MetricFamily, Metrics
from tandem.orchestration.phase_ledger import LedgerPhase
from tests.unit.gateway.rig import Rig, is_probe
from tests.unit.gateway.scripted_worker import ScriptedWorker, until
from tests.unit.obs.traced import Traced

CLIENT_TRACE = "ab" * 16
TRACEPARENT = f"00-{CLIENT_TRACE}-{'cd' * 8}-01"


class Records:
    """Keep the request records that an observer receives."""

    def __init__(self) -> None:
        self.taken: list[RequestRecord] = []

    def answered(self, record: RequestRecord) -> None:
        self.taken.append(record)


class Watched:
    """Own the telemetry of completions that are traced from the client on."""

    def __init__(self, clock: Clock, dispatch: RequestDispatcher, encoders: ThreadPoolExecutor) -> None:
        self.clock = clock
        self.metrics = Metrics()
        self.records = Records()
        self._traced = Traced()
        self.recorder = RequestRecorder(clock, RequestMetrics(self.metrics), self._traced.tracer, [self.records])
        self.answers = CompletionService(dispatch, encoders, self.recorder, OutputSpecFactory())

    def complete(self, **body: Any) -> asyncio.Task[None]:
        """Start a completion and read its answer to the end."""
        return asyncio.create_task(self._read(body))

    async def _read(self, body: dict[str, Any]) -> None:
        given = msgspec.convert({"model": "tiny", "prompt": "a", "max_tokens": 3, **body}, CompletionBody)
        caller = RequestContext(request_id="mine", received_at=self.clock.now(), traceparent=TRACEPARENT)
        async with await self.answers.complete(given, caller) as answer:
            async for _ in answer.parts():
                pass

    async def record(self, answer_task: asyncio.Task[None]) -> RequestRecord:
        """Return the only record, once its answer has ended with or without an error."""
        await asyncio.wait({answer_task})
        (record,) = self.records.taken
        return record

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._traced.spans()

    def ended_spans(self) -> dict[str, ReadableSpan]:
        return self._traced.by_name()

    def family(self, name: str) -> MetricFamily:
        return next(family for family in self.metrics.collect() if family.instrument.name == name)


@contextmanager
def watched(rig: Rig) -> Iterator[Watched]:
    with ThreadPoolExecutor(1) as encoders:
        yield Watched(rig.clock, rig.dispatch, encoders)


async def job_at(worker: ScriptedWorker, count: int = 1) -> Job:
    """Return the `count`-th of a worker's jobs, once the worker has it."""
    jobs: list[Job] = await until(lambda: [job for job in worker.jobs if not is_probe(job)][count - 1 :])
    return jobs[0]


async def phase_of(rig: Rig, phase: LedgerPhase) -> None:
    """Wait until the only request is in this phase."""
    await until(lambda: [active.ledger.phase for active in rig.dispatch.director.requests()] == [phase])
