"""Run the real engine of one simulated worker under the virtual clock, with the step times of a model.

As in `worker.engine.driver`, which uses a thread, commands that arrive during a step wait for its end.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from tandem.core.config import Config, Pool, SloConfig
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import TandemError
from tandem.core.events import TokenRun
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.lane import ALL_LANES, Lane
from tandem.core.request import Job
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.core.worker_load import WorkerLoad
from tandem.engine.effects import Effect
from tandem.engine.engine import TICK_S, Engine
from tandem.engine.factory import build_engine
from tandem.kv.layout import KVLayout
from tandem.sched.budget.step_time_model import features
from tandem.sched.phases.decode_run import DecodeRun
from tandem.sched.state.step_plan import StepPlan
from tandem.sim.cost.executor import SimExecutor, StepTime
from tandem.sim.cost.residuals import NONE, Residuals
from tandem.sim.cost.roofline import Roofline
from tandem.sim.kernel.event_queue import Actor, SimEvent, SimEventQueue

LEAST_REACH = 4
"""The fewest steps that a worker tries to compute ahead. It tries twice as many as were used last time if that is
more."""
FINGERPRINT = "simulated"
"""Fingerprint of the one model that all workers serve."""

FILE_BANDWIDTH = 3e9
"""Bytes per second of one NVMe disk of a server, or of a file system over a network of 25 Gbit/s."""

Command = Callable[[Engine, float], Sequence[Effect]]
Answer = Callable[[TandemError | None, WorkerLoad], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Properties of one kind of simulated worker.

    - `pool`: the pool that its workers belong to; `layout`, `num_blocks`: the layout and the number of its KV blocks.
    - `step_time`: function from the features of a step to its seconds.
    - `bandwidth`: bytes per second of its link to other workers, in each direction.
    - `config`: the settings of the worker, among them the size of its host memory.
    - `calibration`: the step cost that its scheduler assumes before it has measured any step.
    - `residuals`: random factors on `step_time`, picked by seed.
    - `price_per_hour`: price of one worker; 0 when it is not set.
    - `host_bandwidth`: bytes per second between the worker's memory and its host's memory.
    - `file_bandwidth`: bytes per second of reads, and of writes, of engine.file_cache_path.
    - `lanes`: the lanes whose requests are placed on it.
    - `max_run`: the most steps to compute ahead of the clock, which does not change the result; 1: each step is planned
      by itself.
    """

    pool: Pool
    layout: KVLayout
    num_blocks: int
    step_time: StepTime
    bandwidth: float
    config: Config
    calibration: StepCost | None = None
    residuals: Residuals = NONE
    price_per_hour: float = 0.0
    host_bandwidth: float = math.inf
    file_bandwidth: float = FILE_BANDWIDTH
    lanes: frozenset[Lane] = ALL_LANES
    max_run: int = 64

    @classmethod
    def of(cls, pool: Pool, roofline: Roofline, config: Config) -> WorkerSpec:
        """Return the spec of a worker whose size and speed are those of a roofline.

        Its `bandwidth` is that of its accelerators' network, because it exchanges KV with other machines.
        """
        block_size = with_device_defaults(config).engine.block_size
        return cls(
            pool=pool,
            layout=roofline.layout(block_size),
            num_blocks=roofline.num_blocks(block_size),
            step_time=roofline.timer(),
            bandwidth=roofline.degree * roofline.hardware.network_bandwidth * roofline.efficiency.link,
            calibration=roofline.cost(),
            config=config,
            price_per_hour=roofline.degree * roofline.hardware.price_per_hour,
            host_bandwidth=roofline.degree * roofline.hardware.host_bandwidth * roofline.efficiency.link,
        )


@dataclass(eq=False, slots=True)
class Lookahead:
    """Decode steps of one worker that were computed ahead of the clock; they are valid if the worker receives no
    command before they end.

    `run`: the engine's forecast of a series of decode steps of the same sequences; the predicted steps are the first of
    it. `ends`: virtual time at which each step ends. `seconds`: duration of each step. `num_free`: free blocks after
    each step. `num_before`: steps of the same series that the engine has applied already.
    """

    run: DecodeRun
    ends: list[float]
    seconds: list[float]
    num_free: list[int]
    num_before: int = 0

    def cut(self, num_steps: int) -> None:
        """Keep only the first `num_steps` steps."""
        for values in (self.ends, self.seconds, self.num_free):
            del values[num_steps:]

    def rest(self, run: DecodeRun, num_done: int) -> Lookahead:
        """Return a lookahead with the predicted steps that remain after the engine has applied the first `num_done`
        steps.

        `run`: a new forecast of the engine, made after it applied these steps. It replaces the old one, because a
        forecast must begin with the engine's next step."""
        num_before = self.num_before + num_done
        return Lookahead(run, self.ends[num_done:], self.seconds[num_done:], self.num_free[num_done:], num_before)


@dataclass(frozen=True, slots=True)
class StepRun:
    """Report of a worker about consecutive steps, which ended at the virtual times `ends`.

    `tokens`: for each sequence, the tokens that these steps sampled, one in each step. `load`: the worker's load, which
    differs between the steps only in the free blocks. `num_free`: free blocks after each step.
    """

    ends: Sequence[float]
    tokens: Sequence[TokenRun]
    load: WorkerLoad
    num_free: Sequence[int]

    def split(self, num_steps: int) -> tuple[StepRun, StepRun]:
        """Return two reports: one of the first `num_steps` steps, one of the remaining steps."""
        return self._part(0, num_steps), self._part(num_steps, len(self.ends))

    def _part(self, first: int, stop: int) -> StepRun:
        tokens = [TokenRun(t.key, t.first_index + first, t.ids[first:stop]) for t in self.tokens]
        return StepRun(self.ends[first:stop], tokens, self.load, self.num_free[first:stop])


class Outlet(Protocol):
    """Interface to which a worker passes its engine's effects, to be carried out, and its load, to be reported to the
    gateways; `load` is None when it has not changed."""

    def dispatch(self, worker: SimWorker, effects: Sequence[Effect], load: WorkerLoad | None) -> None: ...

    def stream(self, worker: SimWorker, steps: StepRun) -> None:
        """Report steps that were computed ahead of the clock and have ended, at the virtual times `steps.ends`."""
        ...


class SimWorker:
    """Run one incarnation of a simulated worker: its engine, its queue of commands, and its current step or steps.

    `busy_s` and the counters count steps that have ended. `step_cost`: the published step cost, updated at the end of
    each step with prompt tokens, so that it does not depend on how far the worker computed ahead. `num_loaded_blocks`:
    KV blocks that came back from host memory.

    Where the engine's next steps are all alike (`Engine.run`), they are computed ahead of the clock. They are applied
    to the engine when the last of them ends, or earlier: when `settle` is called, and, if a command arrives, at the end
    of the step that is running then.
    """

    def __init__(
        self, agenda: SimEventQueue, spec: WorkerSpec, name: str, outlet: Outlet, seed: int, party: Actor, life: int = 1
    ) -> None:
        self.ref = WorkerRef(WorkerId(name), Incarnation(life), name)
        self.spec = spec
        self.party = party
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_loaded_blocks = 0
        block_bytes = spec.layout.block_bytes
        self._executor = SimExecutor(
            spec.layout,
            spec.num_blocks,
            spec.step_time,
            seed=seed,
            worker=name,
            residuals=spec.residuals,
            num_host_slots=with_device_defaults(spec.config).engine.host_cache_memory // block_bytes,
            host_copy_s=block_bytes / spec.host_bandwidth,
        )
        max_model_len = spec.config.engine.max_model_len or spec.num_blocks * spec.layout.block_size
        self.engine = build_engine(spec.config, self._executor, FINGERPRINT, max_model_len, records_facts=True)
        if spec.calibration is not None:
            self.engine.pacer.model.restart(spec.calibration)
        self.step_cost = self.engine.pacer.model.published
        self._agenda = agenda
        self._outlet = outlet
        self._inbox: deque[Command] = deque()
        self._is_stepping = False
        self._ahead: Lookahead | None = None
        self._reach = LEAST_REACH
        self._end: SimEvent | None = None
        self._num_looks = 0
        self._wake: SimEvent | None = None
        self._wakes_at = math.inf
        self._load = self.engine.load()

    def post(self, command: Command) -> None:
        """Run a command now if the worker computes nothing, otherwise at the end of its current step."""
        self._inbox.append(command)
        if self._ahead is not None:
            self._end_after_step(self._ahead)
        elif not self._is_stepping:
            self._turn()

    def submit(self, job: Job, answer: Answer) -> None:
        """Submit a job to the engine, between two steps; then call `answer` with the error or None, and the worker's
        load."""

        def run(engine: Engine, now: float) -> Sequence[Effect]:
            try:
                effects = engine.submit(job, now)
            except TandemError as error:
                answer(error, engine.load())
                return ()
            answer(None, engine.load())
            return effects

        self.post(run)

    def settle(self) -> None:
        """Apply to the engine all steps that were computed ahead of the clock and have ended by now."""
        ahead = self._ahead
        num_ended = 0 if ahead is None else bisect_right(ahead.ends, self._agenda.now)
        if ahead is None or num_ended == 0:
            return
        self._take_in(ahead, num_ended)
        run = self.engine.run(len(ahead.ends) - num_ended)
        assert run is not None, f"{self!r} was to go on"
        self._ahead = ahead.rest(run, num_ended)

    def num_free_seen(self, delay_s: float) -> int | None:
        """Return how many blocks were free after the latest step that was computed ahead and ended at least `delay_s`
        seconds ago; None when there is no such step."""
        ends = () if self._ahead is None else self._ahead.ends
        agenda, party = self._agenda, self.party
        num_seen = bisect_left(ends, True, key=lambda end: not agenda.has_passed(end + delay_s, party))
        return None if self._ahead is None or num_seen == 0 else self._ahead.num_free[num_seen - 1]

    @property
    def is_idle(self) -> bool:
        return self.engine.is_idle and not self._is_stepping and self._ahead is None and not self._inbox

    def __repr__(self) -> str:
        return f"<worker {self.ref.id} {self.spec.pool}, {self.num_steps} steps, {self.engine!r}>"

    # ---- inside

    def _turn(self) -> None:
        """Handle the inbox and the deadlines, then begin the next step or run; rest when there is nothing to
        compute."""
        now = self._agenda.now
        while self._inbox:
            self._dispatch(self._inbox.popleft()(self.engine, now))
        if now >= self._next_look():
            self._num_looks = max(self._num_looks + 1, math.floor(now / TICK_S) + 1)
            self._dispatch(self.engine.tick(now))
        run = self.engine.run(min(self.spec.max_run, self._reach)) if self.spec.max_run > 1 else None
        if run is not None:
            self._look_ahead(run)
            return
        plan, effects = self.engine.begin(now)
        if plan is None:
            self._dispatch(effects)
            self._rest()
        else:
            if effects:
                self._dispatch(effects)
            self._step(plan)

    # ---- one step

    def _step(self, plan: StepPlan) -> None:
        self._is_stepping = True
        self.num_loaded_blocks += len(plan.fills)
        step = features(plan.slices)
        seconds = self._executor.seconds(plan)
        end = partial(self._finish, plan, step, seconds)
        self._agenda.at(self._agenda.now + seconds, "", end, by=self.party, is_end=True)

    def _finish(self, plan: StepPlan, step: StepFeatures, seconds: float) -> None:
        self._is_stepping = False
        result = self._executor.execute(plan)
        now = self._agenda.now
        self._dispatch(self.engine.finish(result, now))
        self.party.log.step(now, plan.number, plan.num_tokens, self._load.num_free_blocks)
        if self._is_paced:
            self.engine.pacer.measured(result, seconds)
        if step.num_prefill_tokens:
            self.step_cost = self.engine.pacer.model.published
        self._count(step, seconds)
        self._turn()

    def _count(self, step: StepFeatures, seconds: float) -> None:
        self.busy_s += seconds
        self.num_steps += 1
        self.num_prefill_tokens += step.num_prefill_tokens
        self.num_decode_tokens += step.num_decode_seqs

    # ---- steps ahead

    def _look_ahead(self, run: DecodeRun) -> None:
        """Compute the steps of a run ahead, up to the step at whose end the engine's deadlines are due."""
        ahead, now, look_at = Lookahead(run, [], [], []), self._agenda.now, self._next_look()
        num_free, grown_at, num_grown = self._load.num_free_blocks, run.grown_at, 0
        for i in range(run.num_steps):
            seconds = self._executor.step_seconds(run.number + i, run.features(i))
            now += seconds
            while num_grown < len(grown_at) and grown_at[num_grown] <= i:
                num_grown += 1
            ahead.ends.append(now)
            ahead.seconds.append(seconds)
            ahead.num_free.append(num_free - num_grown)
            if now >= look_at:
                break
        self._ahead = ahead
        self._end = self._agenda.at(now, "", self._end_run, by=self.party, is_end=True)

    def _end_after_step(self, ahead: Lookahead) -> None:
        """Cut the lookahead after the running step, because a command has arrived and waits for its end."""
        num_steps = bisect_right(ahead.ends, self._agenda.now) + 1
        if num_steps < len(ahead.ends):
            self._agenda.cancel(self._end)
            ahead.cut(num_steps)
            self._end = self._agenda.at(ahead.ends[-1], "", self._end_run, by=self.party, is_end=True)

    def _end_run(self) -> None:
        assert self._ahead is not None
        # Steps that were cut off do not count.
        self._reach = max(LEAST_REACH, 2 * (self._ahead.num_before + len(self._ahead.ends)))
        self._take_in(self._ahead, len(self._ahead.ends))
        self._ahead = None
        self._end = None
        self._turn()

    def _take_in(self, ahead: Lookahead, num_steps: int) -> None:
        run = ahead.run
        tokens = self.engine.finish_run(run, self._executor.sample_run(run, num_steps))
        for i in range(num_steps):
            step = run.features(i)
            self._count(step, ahead.seconds[i])
            self.party.log.step(ahead.ends[i], run.number + i, len(run.seqs), ahead.num_free[i])
            if self._is_paced:
                self.engine.pacer.model.observe(step, ahead.seconds[i])
        if ahead.num_free[num_steps - 1] != self._load.num_free_blocks:
            self._load = replace(self._load, num_free_blocks=ahead.num_free[num_steps - 1])
        steps = StepRun(ahead.ends[:num_steps], tokens, self._load, ahead.num_free[:num_steps])
        self._outlet.stream(self, steps)

    # ---- deadlines

    def _next_look(self) -> float:
        """Return when the engine's deadlines are looked at next: the first multiple of `TICK_S` at which one is due."""
        due = self.engine.next_deadline()
        if due == math.inf:
            return math.inf
        return TICK_S * max(math.ceil(max(0.0, due) / TICK_S), self._num_looks)

    def _rest(self) -> None:
        """Schedule the next look at the engine's deadlines. An idle engine has no deadline; one that waits for other
        workers has."""
        look_at = math.inf if self.engine.is_idle else self._next_look()
        if look_at == self._wakes_at:
            return
        self._agenda.cancel(self._wake)
        self._wake, self._wakes_at = None, look_at
        if look_at < math.inf:
            self._wake = self._agenda.at(max(look_at, self._agenda.now), "", self._look, by=self.party)

    def _look(self) -> None:
        self._wake, self._wakes_at = None, math.inf
        if not self._is_stepping and self._ahead is None:
            self._turn()

    @property
    def _is_paced(self) -> bool:
        """Whether the pacer learns from measured steps. Without latency targets a step's duration does not change later
        steps, and routers use the calibration."""
        return self.spec.config.slo != SloConfig()

    def _dispatch(self, effects: Sequence[Effect]) -> None:
        load = self.engine.load()
        has_changed = load != self._load
        if effects or has_changed:
            self._load = load
            self._outlet.dispatch(self, effects, load if has_changed else None)
