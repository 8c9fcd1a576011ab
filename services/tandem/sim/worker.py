"""One simulated worker: the real engine, and a driver that takes the time of each step from a model; decides nothing.

It does what `worker.driver` does with a thread: what comes in while a step runs waits for its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.core.config import Config
from tandem.core.errors import TandemError
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.load import Load
from tandem.core.request import Job
from tandem.core.step_cost import StepCost
from tandem.engine.compose import compose_engine
from tandem.engine.effects import Effect
from tandem.engine.engine import Engine
from tandem.kv.layout import KVLayout
from tandem.routing.view import Pool
from tandem.sched.plan import StepPlan
from tandem.sim.agenda import Agenda, Event
from tandem.sim.executor import SimExecutor, StepTime
from tandem.sim.residuals import NONE, Residuals
from tandem.sim.roofline import Roofline

TICK_S = 0.05
"""As the real driver's."""
FINGERPRINT = "simulated"
"""All workers serve one model."""

Command = Callable[[Engine, float], Sequence[Effect]]
Answer = Callable[[TandemError | None, Load], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What one kind of worker is. `bandwidth` of its link in bytes per second, each way; `calibration` is what its
    scheduler believes of its steps before it has seen any; `residuals` are factors on `step_time`, drawn by seed;
    `price_per_hour` is of one worker, 0: not set."""

    pool: Pool
    layout: KVLayout
    num_blocks: int
    step_time: StepTime
    bandwidth: float
    config: Config
    calibration: StepCost | None = None
    residuals: Residuals = NONE
    price_per_hour: float = 0.0

    @classmethod
    def of(cls, pool: Pool, roofline: Roofline, config: Config) -> WorkerSpec:
        """As large and as fast as the roofline says, with KV going to other machines."""
        return cls(
            pool=pool,
            layout=roofline.layout(config.engine.block_size),
            num_blocks=roofline.num_blocks(config.engine.block_size),
            step_time=roofline.seconds,
            bandwidth=roofline.degree * roofline.hardware.network_bandwidth * roofline.efficiency.link,
            calibration=roofline.cost(),
            config=config,
            price_per_hour=roofline.degree * roofline.hardware.price_per_hour,
        )


class Outlet(Protocol):
    """Carries out what the engine wants done, and tells the gateway how full it is; `load` is None when it has not
    changed."""

    def dispatch(self, worker: SimWorker, effects: Sequence[Effect], load: Load | None) -> None: ...


class SimWorker:
    """`busy_s` and the counters are of steps that have ended."""

    def __init__(self, agenda: Agenda, spec: WorkerSpec, name: str, outlet: Outlet, seed: int) -> None:
        self.ref = WorkerRef(WorkerId(name), Incarnation(1), name)
        self.spec = spec
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_preempted = 0
        self._executor = SimExecutor(
            spec.layout, spec.num_blocks, spec.step_time, seed=seed, worker=name, residuals=spec.residuals
        )
        max_model_len = spec.config.engine.max_model_len or spec.num_blocks * spec.layout.block_size
        self.engine = compose_engine(spec.config, self._executor, FINGERPRINT, max_model_len)
        if spec.calibration is not None:
            self.engine.pacer.calibrated(spec.calibration)
        self._agenda = agenda
        self._outlet = outlet
        self._inbox: deque[Command] = deque()
        self._is_stepping = False
        self._next_tick = 0.0
        self._wake: Event | None = None
        self._load = self.engine.load()

    def post(self, command: Command) -> None:
        """Run a command between two steps."""
        self._inbox.append(command)
        if not self._is_stepping:
            self._turn()

    def submit(self, job: Job, answer: Answer) -> None:
        """`answer` is called between two steps, with the refusal if there is one."""

        def run(engine: Engine, now: float) -> Sequence[Effect]:
            refusal: TandemError | None = None
            effects: Sequence[Effect] = ()
            try:
                effects = engine.submit(job, now)
            except TandemError as error:
                refusal = error
            answer(refusal, engine.load())
            return effects

        self.post(run)

    @property
    def is_idle(self) -> bool:
        return self.engine.is_idle and not self._is_stepping and not self._inbox

    def __repr__(self) -> str:
        return f"<worker {self.ref.id} {self.spec.pool}, {self.num_steps} steps, {self.engine!r}>"

    # ---- inside

    def _turn(self) -> None:
        """Inbox, deadlines, plan: until a step runs or there is nothing to compute."""
        now = self._agenda.now
        while self._inbox:
            self._dispatch(self._inbox.popleft()(self.engine, now))
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._dispatch(self.engine.tick(now))
        plan, effects = self.engine.begin(now)
        if plan is None:
            self._dispatch(effects)
            self._rest()
        else:
            if effects:
                self._dispatch(effects)
            self._step(plan)

    def _step(self, plan: StepPlan) -> None:
        self._is_stepping = True
        seconds = self._executor.seconds(plan)
        self._agenda.after(
            seconds, f"{self.ref.id} ends step {plan.number} of {plan.num_tokens}", lambda: self._finish(plan, seconds)
        )

    def _finish(self, plan: StepPlan, seconds: float) -> None:
        self._is_stepping = False
        result = self._executor.execute(plan)
        self._dispatch(self.engine.finish(result, self._agenda.now))
        record = self.engine.pacer.measured(result, seconds)
        self.busy_s += seconds
        self.num_steps += 1
        self.num_prefill_tokens += record.features.num_prefill_tokens
        self.num_decode_tokens += record.features.num_decode_seqs
        self.num_preempted += record.num_preempted
        self._turn()

    def _rest(self) -> None:
        """An idle engine needs no tick; one that waits for others has deadlines."""
        if self._wake is None and not self.engine.is_idle:
            self._wake = self._agenda.at(self._next_tick, f"{self.ref.id} looks", self._look)

    def _look(self) -> None:
        self._wake = None
        if not self._is_stepping:
            self._turn()

    def _dispatch(self, effects: Sequence[Effect]) -> None:
        # Nobody indexes prefixes by these facts yet; taken and dropped, so that they do not pile up.
        self.engine.take_facts()
        load = self.engine.load()
        has_changed = load != self._load
        if effects or has_changed:
            self._load = load
            self._outlet.dispatch(self, effects, load if has_changed else None)
