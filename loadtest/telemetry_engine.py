"""An engine with its driver and no model, in a process of its own, with or without those who look at its steps.

    python -m loadtest.telemetry_engine off|on [--core N]

Each line of stdin asks for a round, as `{"batch": 8, "seconds": 0.5}`: as many sequences decode until the time is over.
The answer on stdout says how many steps ran and what they took. `off` needs nothing that an older commit lacks, so that
this file can be run with the packages of one. Compares nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tandem.core.clock import SystemClock
from tandem.core.config import Config
from tandem.core.events import Failed, Finished, KVFact
from tandem.core.ids import RequestId
from tandem.core.request import Generate, Request, SamplingParams
from tandem.engine.compose import compose_engine
from tandem.engine.effects import Effect, Emit
from tandem.kv.layout import KVGroup, KVLayout
from tandem.sched.plan import StepResult
from tandem.sim.executor import SimExecutor
from tandem.worker.driver import EngineDriver, Snapshot
from tandem.worker.in_turn import InTurn

MAX_MODEL_LEN = 2048
NUM_PROMPT_TOKENS = 16
NUM_OUTPUT_TOKENS = 256
NUM_BLOCKS = 16_384
LAYOUT = KVLayout(16, (KVGroup(1, 1, 16, "float32"),))


class CountingPipeline(InTurn):
    """Knows how many plans were collected."""

    num_steps = 0

    def collect(self) -> StepResult:
        self.num_steps += 1
        return super().collect()


class Ends:
    """An `EffectSink` that knows how many jobs have ended, and hands every batch of effects on to `heard`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.num_ended = 0

    def dispatch(self, effects: Sequence[Effect], snapshot: Snapshot) -> None:
        ended = sum(isinstance(each, Emit) and isinstance(each.event, Finished | Failed) for each in effects)
        if ended:
            with self._changed:
                self.num_ended += ended
                self._changed.notify_all()

    def told(self, facts: Sequence[KVFact]) -> None:
        pass

    def ended(self, error: str | None) -> None:
        if error is not None:
            sys.stderr.write(f"the engine ended: {error}\n")
            os._exit(1)

    def wait(self, number: int) -> None:
        """Until so many have ended since the process began."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_ended >= number)


class Bench:
    """One engine; rounds come one after the other."""

    def __init__(self, observers: Sequence[Any] = (), sink: Ends | None = None) -> None:
        executor = SimExecutor(LAYOUT, NUM_BLOCKS, lambda _: 0.0)
        self.engine = compose_engine(Config(), executor, "f", MAX_MODEL_LEN)
        self.sink = sink or Ends()
        self.pipeline = CountingPipeline(executor)
        self._clock = SystemClock()
        self.driver = EngineDriver(self.engine, self.pipeline, self.sink, self._clock, 60.0, observers)
        self._numbers = itertools.count()
        self.driver.start()

    def round(self, batch: int, seconds: float) -> dict[str, float]:
        began, cpu, steps = self._clock.now(), time.process_time(), self.pipeline.num_steps
        while self._clock.now() - began < seconds:
            self._run([self._job() for _ in range(batch)])
        return {
            "steps": self.pipeline.num_steps - steps,
            "wall_s": self._clock.now() - began,
            "cpu_s": time.process_time() - cpu,
        }

    def _run(self, jobs: Sequence[Generate]) -> None:
        def submit(engine: Any, now: float) -> list[Effect]:
            return [effect for job in jobs for effect in engine.submit(job, now)]

        wanted = self.sink.num_ended + len(jobs)
        self.driver.post(submit)
        self.sink.wait(wanted)

    def _job(self) -> Generate:
        number = next(self._numbers)
        prompt = tuple((number * 31 + place) % 1000 for place in range(NUM_PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0)
        return Generate(
            request=Request(id=RequestId(f"r{number}"), model="m", prompt_tokens=prompt, sampling=sampling), attempt=1
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="loadtest.telemetry_engine")
    parser.add_argument("side", choices=("off", "on"))
    parser.add_argument("--core", type=int, help="the only one to run on")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    sys.setswitchinterval(0.001)
    bench = Bench()
    _say({"ready": True})
    for asked in _asked():
        _say(bench.round(**asked))
    return 0


def _asked() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _say(facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
