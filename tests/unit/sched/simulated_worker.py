"""Run a scheduler on a simulated machine whose step times are a given function; time is virtual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tandem.core.events import SampledToken
from tandem.core.ids import JobKey, RequestId
from tandem.core.lane import Lane
from tandem.core.request import GenerateJob, Request, SamplingParams
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.kv.block_pool import BlockPool
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.schedule_result import StepRecord
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets
from tandem.sched.state.step_plan import SliceResult, StepResult

TRUTH = StepCost(20e-3, 1.3e-3, 0.8e-3, 0.9e-6, 0.6e-6)
"""About the development machine with the small model."""


@dataclass
class Trace:
    """Times of one request as its client sees them. `num_steps` counts steps from its arrival to its first token."""

    num_prompt: int
    arrived_at: float
    arrived_step: int
    token_times: list[float] = field(default_factory=list)
    num_steps: int = 0

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrived_at


class SimulatedWorker:
    """`truth` gives the seconds of a step; `noise` multiplies them by a normal number around one."""

    def __init__(
        self,
        truth: Callable[[StepFeatures], float] = TRUTH.predict,
        *,
        targets: LatencyTargets = NO_TARGETS,
        prior: StepCost | None = TRUTH,
        budget: int = 512,
        noise: float = 0.0,
    ) -> None:
        limits = SchedulerLimits(max_num_batched_tokens=budget, max_num_seqs=64, max_model_len=100_000, targets=targets)
        self.scheduler = Scheduler(BlockPool(6000, 16), limits, "model")
        if prior is not None:
            self.scheduler.pacer.model.restart(prior)
        self.truth = truth
        self.now = 0.0
        self.num_steps = 0
        self.records: list[StepRecord] = []
        self.traces: dict[JobKey, Trace] = {}
        self._noise = noise
        self._random = Random(0)

    def add_request(self, num_prompt: int, max_tokens: int = 1, lane: Lane = Lane.INTERACTIVE, text: int = 0) -> Trace:
        """Add a request; prompts with equal `text` share a prefix."""
        number = len(self.traces)
        request = Request(
            id=RequestId(f"r{number}"),
            model="m",
            prompt_tokens=(text or 1000 + number,) * num_prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            lane=lane,
        )
        job = GenerateJob(request=request, attempt=1)
        self.scheduler.add(job, self.now)
        trace = self.traces[job.key] = Trace(num_prompt, self.now, self.num_steps)
        return trace

    def step(self) -> StepRecord | None:
        """Run one step; return None when there is nothing to do."""
        plan = self.scheduler.plan(self.now).step
        if plan is None:
            return None
        results = tuple(SliceResult(s.seq, (SampledToken(0),) if s.sampling else ()) for s in plan.slices)
        result = StepResult(plan.number, results)
        progress = self.scheduler.commit(result)
        opened, _ = self.scheduler.pacer._open[plan.number]
        seconds = self.truth(opened.features) * max(0.3, self._random.gauss(1, self._noise))
        self.now += seconds
        self.num_steps += 1
        record = self.scheduler.pacer.measured(result, seconds)
        self.records.append(record)
        for one in progress:
            self._write_down(one.key, len(one.tokens))
        return record

    def _write_down(self, key: JobKey, num_tokens: int) -> None:
        trace = self.traces[key]
        if num_tokens and not trace.token_times:
            trace.num_steps = self.num_steps - trace.arrived_step
        trace.token_times += [self.now] * num_tokens

    def run(self, num_steps: int = 100_000) -> list[StepRecord]:
        """Run until so many steps have run or every request has ended; return the records of these steps."""
        first = len(self.records)
        for _ in range(num_steps):
            if self.step() is None:
                break
        else:
            assert num_steps < 100_000, f"no end: {self.scheduler!r}"
        return self.records[first:]

    def decoding(self, num_seqs: int, num_prompt: int = 64, max_tokens: int = 100_000 // 200) -> list[Trace]:
        """Add `num_seqs` requests and run until all of them decode."""
        traces = [self.add_request(num_prompt, max_tokens) for _ in range(num_seqs)]
        while not all(trace.token_times for trace in traces):
            self.step()
        return traces
