"""Run an engine with its driver and without a model in a process of its own, with or without observers of its steps.

    python -m loadtest.telemetry.telemetry_engine off|on [--core N]

Each line of stdin requests a round, as `{"batch": 8, "seconds": 0.5, "telemetry": true}`: `batch` sequences decode at a
time until the seconds are over. The answer on stdout gives the number of steps and their cost; `{"flush": true}` is
answered when all pending spans have been sent. `off` has no telemetry to turn on, and needs nothing that an older
commit lacks, so that this file can run with the packages of an older commit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.core.clock import Clock, SystemClock
from tandem.core.config import Config
from tandem.core.events import Failed, Finished, KVFact
from tandem.core.ids import RequestId
from tandem.core.request import GenerateJob, Request, SamplingParams
from tandem.engine.effects import Effect
from tandem.engine.factory import build_engine
from tandem.engine.ports import StepObserver
from tandem.kv.layout import KVGroup, KVLayout
from tandem.sched.state.step_plan import StepResult
from tandem.sim.cost.executor import SimExecutor
from tandem.worker.engine.driver import EngineDriver, EngineSnapshot, SerialPipeline

MAX_MODEL_LEN = 2048
NUM_PROMPT_TOKENS = 16
NUM_OUTPUT_TOKENS = 256
NUM_BLOCKS = 16_384
TRACED = 100
"""One request of so many is traced, as by default of helm/tandem/values.yaml."""
LAYOUT = KVLayout(16, (KVGroup(1, 1, 16, "float32"),))


class CountingPipeline(SerialPipeline):
    """Pipeline that counts the collected plans."""

    num_steps = 0

    def collect(self) -> StepResult:
        self.num_steps += 1
        return super().collect()


class Ends:
    """`EffectSink` that keeps the last snapshot and counts ended jobs; all effects are passed to `on_effects` if it is
    set."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.num_ended = 0
        self.snapshot = EngineSnapshot()
        self.on_effects: Callable[[Sequence[Effect]], None] | None = None

    def dispatch(self, effects: Sequence[Effect], snapshot: EngineSnapshot) -> None:
        self.snapshot = snapshot
        if self.on_effects is not None:
            self.on_effects(effects)
        ended = sum(isinstance(each, Finished | Failed) for each in effects)
        if ended:
            with self._changed:
                self.num_ended += ended
                self._changed.notify_all()

    def on_kv_events(self, facts: Sequence[KVFact]) -> None:
        pass

    def ended(self, error: str | None) -> None:
        if error is not None:
            sys.stderr.write(f"the engine ended: {error}\n")
            os._exit(1)

    def wait(self, number: int) -> None:
        """Wait until `number` jobs have ended since the process began."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_ended >= number)


class Look(NamedTuple):
    """Observers of an engine.

    `request` returns the additional fields of a request, by the request's number.
    """

    observers: Sequence[StepObserver] = ()
    on_effects: Callable[[Sequence[Effect]], None] | None = None
    request: Callable[[int], Mapping[str, Any]] = lambda number: {}


class TelemetryBench:
    """Run measured rounds on one engine, one after the other."""

    def __init__(self, clock: Clock) -> None:
        executor = SimExecutor(LAYOUT, NUM_BLOCKS, lambda _: 0.0)
        self.sink = Ends()
        self.pipeline = CountingPipeline(executor)
        self._clock = clock
        self._request = Look().request
        engine = build_engine(Config(), executor, "f", MAX_MODEL_LEN)
        self.driver = EngineDriver(engine, self.pipeline, self.sink, clock, 60.0)
        self._numbers = itertools.count()
        self.driver.start()

    def take(self, look: Look) -> None:
        """Use the observers in `look` from the next round on; no step runs between two rounds."""
        self.driver._observers = tuple(look.observers)
        self.sink.on_effects = look.on_effects
        self._request = look.request

    def round(self, batch: int, seconds: float) -> dict[str, float]:
        began, cpu, steps = self._clock.now(), time.process_time(), self.pipeline.num_steps
        while self._clock.now() - began < seconds:
            self._run([self._job() for _ in range(batch)])
        return {
            "steps": self.pipeline.num_steps - steps,
            "cpu_s": time.process_time() - cpu,
        }

    def _run(self, jobs: Sequence[GenerateJob]) -> None:
        def submit(engine: Any, now: float) -> list[Effect]:
            return [effect for job in jobs for effect in engine.submit(job, now)]

        target = self.sink.num_ended + len(jobs)
        self.driver.post(submit)
        self.sink.wait(target)

    def _job(self) -> GenerateJob:
        number = next(self._numbers)
        prompt = tuple((number * 31 + place) % 1000 for place in range(NUM_PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0)
        identity = RequestId(f"r{number}")
        request = Request(id=identity, model="m", prompt_tokens=prompt, sampling=sampling, **self._request(number))
        return GenerateJob(request=request, attempt=1)


class Watched:
    """Turn a worker's telemetry on and off for the engine of a bench.

    One request in `TRACED` is traced by its gateway. `metrics` is the address of /metrics.
    """

    def __init__(self, bench: TelemetryBench, clock: Clock) -> None:
        from tandem.engine.effects import JobEnded

        telemetry = _telemetry(bench, clock)
        self.metrics = telemetry.open()
        self._bench = bench
        self._spans = telemetry._telemetry._spans

        def on_effects(effects: Sequence[Effect]) -> None:
            for effect in effects:
                if isinstance(effect, JobEnded):
                    telemetry.job_ended(effect.times)

        def request(number: int) -> Mapping[str, Any]:
            return {"traceparent": f"00-{1:032x}-{1:016x}-{number % TRACED == 0:02x}"}

        self._looks = Look(), Look([telemetry.steps], on_effects, request)

    def turn(self, *, on: bool) -> None:
        self._bench.take(self._looks[on])

    def flush(self) -> None:
        """Send the pending spans."""
        if self._spans is not None:
            self._spans._provider.force_flush()


def _telemetry(bench: TelemetryBench, clock: Clock) -> Any:
    from tandem.core.bundle import TokenizerBundle
    from tandem.core.ids import Incarnation, WorkerId, WorkerRef
    from tandem.engine.transfer_messages import TransportPeer
    from tandem.worker.model.worker_info import WorkerInfo
    from tandem.worker.telemetry.gauges import MetricSources, StatsReader
    from tandem.worker.telemetry.worker_telemetry import WorkerTelemetry

    me = WorkerRef(WorkerId("bench"), Incarnation(1), "127.0.0.1:1")
    identity = WorkerInfo(
        me=me,
        pool="mixed",
        model="m",
        fingerprint="f",
        max_model_len=MAX_MODEL_LEN,
        bundle=TokenizerBundle(tokenizer_json=b"{}"),
        bundle_digest="",
        transport=TransportPeer(me, LAYOUT, ()),
        transport_kind="local",
    )
    telemetry = WorkerTelemetry(Config(), identity, clock)
    reader = StatsReader(lambda: bench.driver.call(lambda engine, now: (engine.books(), [])), clock)
    sink = bench.sink
    telemetry.watch(
        MetricSources(
            snapshot=lambda: sink.snapshot,
            books=reader.read,
            is_healthy=lambda: True,
            num_gateways=lambda: 1,
            expert_tokens=dict,
            expert_imbalance=dict,
        )
    )
    return telemetry


def main() -> int:
    parser = argparse.ArgumentParser(prog="loadtest.telemetry.telemetry_engine")
    parser.add_argument("side", choices=("off", "on"))
    parser.add_argument("--core", type=int, help="the only one to run on")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    sys.setswitchinterval(0.001)
    clock = SystemClock()
    bench = TelemetryBench(clock)
    watched = Watched(bench, clock) if args.side == "on" else None
    _print({"metrics": None if watched is None else watched.metrics})
    for fields in _requests():
        if watched is not None and fields.get("flush"):
            watched.flush()
            _print({})
            continue
        if watched is not None:
            watched.turn(on=fields["telemetry"])
        _print(bench.round(fields["batch"], fields["seconds"]))
    return 0


def _requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _print(facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
