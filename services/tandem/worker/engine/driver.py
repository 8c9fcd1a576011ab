"""The one thread that calls an engine and its executor, step by step; decides nothing and never does I/O.

Whatever concerns the engine comes as a command: a callable that is run between two steps, in order of arrival. What
the engine wants done goes to the sink, together with a snapshot of how full the worker is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from tandem.core.clock import Clock
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import KVFact
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.engine.effects import Effect
from tandem.engine.engine import Engine
from tandem.engine.ports import DeviceLost, Pipeline, StepObserver
from tandem.sched.state.step_plan import SliceResult, StepPlan, StepResult
from tandem.worker.engine.watchdog import Watchdog

THREAD_NAME = "tandem-engine"
TICK_S = 0.05
"""The longest time between two looks at the engine's deadlines while anything is open."""
IDLE_S = 0.5
CHECK_S = 5.0
"""How often an idle engine re-adds its books."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Command = Callable[[Engine, float], list[Effect]]
"""`command(engine, now)`: runs on the engine's thread. It must not raise."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine between two steps. `is_transferring`: KV is offered or being read. `step_cost`: None until measured.
    `num_generated`: tokens drawn since the start."""

    load: WorkerLoad = WorkerLoad()
    num_live: int = 0
    is_transferring: bool = False
    step_cost: StepCost | None = None
    num_generated: int = 0


class EffectSink(Protocol):
    """Carries effects out. Called on the engine's thread; must not block and must not raise."""

    def dispatch(self, effects: Sequence[Effect], snapshot: EngineSnapshot) -> None:
        """Carry the effects out in order. Called when there are some, or when the snapshot has changed."""
        ...

    def on_kv_events(self, facts: Sequence[KVFact]) -> None:
        """What became of cached blocks, in order; only of an engine that records it."""
        ...

    def ended(self, error: str | None) -> None:
        """The last call. `error` is None after an ordered stop; otherwise the engine cannot be trusted any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    """A command whose outcome somebody waits for. `run` may raise TandemError, having changed nothing."""

    run: Callable[[Engine, float], list[Effect]]
    fail: Callable[[TandemError], None]
    settle: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _LaunchedPlan:
    """A plan that was launched, or one whose launch failed with `error`. `began`: when it was begun to be made."""

    plan: StepPlan
    began: float
    error: Exception | None


class EngineDriver:
    """`post`, `call` and `stop` may be called from any thread; all else happens on the driver's own."""

    def __init__(
        self,
        engine: Engine,
        pipeline: Pipeline,
        sink: EffectSink,
        clock: Clock,
        stall_s: float,
        observers: Sequence[StepObserver] = (),
        calibrate: Callable[[], StepCost | None] | None = None,
    ) -> None:
        """`calibrate` is called once, before the first command; it may run steps on the pipeline's executor. The
        engine keeps as many plans open as it was made for."""
        self._engine = engine
        self._observers = tuple(observers)
        self._calibrate = calibrate
        self._pipeline = pipeline
        self._running: deque[_LaunchedPlan] = deque()
        self._handed_out = 0.0
        self._sink = sink
        self._clock = clock
        self._inbox: deque[Command | _Call] = deque()
        self._wake = threading.Condition()
        self._is_open = True
        self._snapshot = EngineSnapshot()
        self._next_tick = 0.0
        self._next_check = 0.0
        self._pulse = Watchdog(clock, stall_s)
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def __repr__(self) -> str:
        return f"EngineDriver({'alive' if self._thread.is_alive() else 'ended'}, {len(self._inbox)} waiting)"

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run a command; nothing happens when the engine has ended."""
        self._put(command)

    def call(self, run: Callable[[Engine, float], tuple[_T, list[Effect]]]) -> Future[_T]:
        """Run a command and yield its value, once its effects are with the sink.

        The future raises TandemError when the command does, or when the engine ends before it.
        """
        future: Future[_T] = Future()
        # Running from the start: a caller that stops waiting must not take the command back half-way.
        future.set_running_or_notify_cancel()
        values: list[_T] = []

        def apply(engine: Engine, now: float) -> list[Effect]:
            value, effects = run(engine, now)
            values.append(value)
            return effects

        if not self._put(_Call(apply, future.set_exception, lambda: future.set_result(values[0]))):
            future.set_exception(_ended("has stopped"))
        return future

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the step that is running; jobs still live fail. False when it has not ended in time."""
        with self._wake:
            self._is_open = False
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def fail_device(self, reason: str) -> None:
        """End the thread after the step that is running, if that ends: what it computes with is gone."""

        def end(_engine: Engine, _now: float) -> list[Effect]:
            raise DeviceLost(reason)

        self._put(end)

    def stalled(self) -> str | None:
        """None while the loop makes progress, else what is wrong."""
        if not self._thread.is_alive():
            return "the engine has ended"
        return self._pulse.stalled()

    # ---- on the driver's thread

    def _run(self) -> None:
        error: str | None = None
        kind = ErrorKind.WORKER_LOST
        try:
            self._warm_up()
            while self._turn():
                pass
        except DeviceLost as loss:
            _log.error("the engine ends: %s", loss)
            error = str(loss)
        except Exception as failure:
            _log.exception("the engine failed")
            error, kind = f"{type(failure).__name__}: {failure}", ErrorKind.INTERNAL
        self._abandon()
        self._close(error, kind)

    def _warm_up(self) -> None:
        """A worker that cannot be calibrated learns from its work."""
        if self._calibrate is None:
            return
        try:
            cost = self._calibrate()
        except DeviceLost:
            raise
        except Exception:
            _log.exception("the calibration failed")
            return
        if cost is not None:
            self._engine.pacer.calibrated(cost)

    def _turn(self) -> bool:
        """One look at the inbox, the clock and the plan. False when the driver was stopped."""
        self._pulse.beat()
        self._take_inbox()
        if not self._is_open:
            return False
        now = self._clock.now()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._dispatch(self._engine.tick(now))
        plan, effects = self._engine.begin(now)
        if plan is None and not self._running:
            self._dispatch(effects)
            self._rest(now)
            return True
        # What a plan changes in the load alone is told with what a step yields: one crossing for both.
        if effects:
            self._dispatch(effects)
        self._step(plan, now)
        return True

    def _step(self, plan: StepPlan | None, began: float) -> None:
        """Launch a plan, and collect the oldest one that runs unless there may be one to plan behind it."""
        self._pulse.step_begins()
        if plan is not None:
            self._launch(plan, began)
        collected = self._collect() if plan is None or not self._engine.may_begin else None
        self._pulse.step_ends()
        if collected is None:
            return
        done, result = collected
        self._dispatch(self._engine.finish(result, self._clock.now()))
        # From planning to handing out, what a client sees between two tokens; of plans that overlap, from the moment in
        # which the device had nothing else to do.
        now = self._clock.now()
        record = self._engine.pacer.measured(result, now - max(done.began, self._handed_out))
        self._handed_out = now
        for observer in self._observers if done.plan.slices else ():
            observer.observe(record)

    def _launch(self, plan: StepPlan, began: float) -> None:
        error: Exception | None = None
        try:
            self._pipeline.launch(plan)
        except DeviceLost:
            raise
        except Exception as failure:
            error = failure
        self._running.append(_LaunchedPlan(plan, began, error))

    def _collect(self) -> tuple[_LaunchedPlan, StepResult]:
        done = self._running.popleft()
        plan, error = done.plan, done.error
        try:
            if error is None:
                return done, self._pipeline.collect()
        except DeviceLost:
            raise
        except Exception as failure:
            error = failure
        if plan.num_host_copies:
            # Names may stand on what was never copied: nothing that is cached can be trusted any more.
            raise error
        _log.error("%s failed", plan, exc_info=error)
        reason = f"the step failed: {type(error).__name__}: {error}"
        return done, StepResult(plan.number, tuple(SliceResult(s.seq, error=reason) for s in plan.slices))

    def _rest(self, now: float) -> None:
        if self._engine.is_idle and now >= self._next_check:
            self._next_check = now + CHECK_S
            self._engine.check()
        with self._wake:
            if not self._inbox and self._is_open:
                self._wake.wait(IDLE_S if self._engine.is_idle else max(0.0, self._next_tick - self._clock.now()))

    def _put(self, entry: Command | _Call) -> bool:
        with self._wake:
            if not self._is_open:
                return False
            self._inbox.append(entry)
            self._wake.notify()
            return True

    def _take_inbox(self) -> None:
        """Run what has come so far; what commands themselves post is run too."""
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, _Call):
                self._answer(entry)
            else:
                self._dispatch(entry(self._engine, self._clock.now()))

    def _answer(self, call: _Call) -> None:
        try:
            effects = call.run(self._engine, self._clock.now())
        except TandemError as refusal:
            call.fail(refusal)
            return
        except Exception:
            call.fail(_ended("failed"))
            raise
        try:
            self._dispatch(effects)
        except Exception:
            call.fail(_ended("failed"))
            raise
        call.settle()

    def _dispatch(self, effects: Sequence[Effect]) -> None:
        engine = self._engine
        facts = engine.take_events()
        if facts:
            self._sink.on_kv_events(facts)
        load, before = engine.load(), self._snapshot.load
        load = before if load == before else replace(load, number=before.number + 1)
        step_cost = engine.pacer.model.published
        snapshot = EngineSnapshot(load, engine.num_live, engine.is_transferring, step_cost, engine.num_generated)
        if effects or snapshot != self._snapshot:
            self._snapshot = snapshot
            self._sink.dispatch(effects, snapshot)

    def _abandon(self) -> None:
        """Wait for what runs: nothing may compute in memory that its owner is about to free."""
        try:
            while self._running:
                if self._running.popleft().error is None:
                    self._pipeline.collect()
        except Exception as failure:
            _log.warning("a step that was given up failed: %s", failure)

    def _close(self, error: str | None, kind: ErrorKind) -> None:
        """Nothing enters the inbox after this took the lock, so every call is answered and every job ends."""
        with self._wake:
            self._is_open = False
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, _Call):
                entry.fail(_ended("has stopped"))
        message = "the engine failed" if error is not None else "the worker stopped"
        lost = self._engine.abandon(kind, message, self._clock.now())
        load = _lifetime_counters(self._snapshot.load)
        self._sink.dispatch(lost, EngineSnapshot(load, num_generated=self._engine.num_generated))
        self._sink.ended(error)


def _lifetime_counters(load: WorkerLoad) -> WorkerLoad:
    """Nothing is left but what was counted since the start."""
    return WorkerLoad(
        draining=True,
        num_drafted_tokens=load.num_drafted_tokens,
        num_accepted_tokens=load.num_accepted_tokens,
        num_steps_over_target=load.num_steps_over_target,
        num_remote_hit_tokens=load.num_remote_hit_tokens,
        number=load.number + 1,
    )


def _ended(how: str) -> TandemError:
    return TandemError(ErrorKind.WORKER_LOST, f"the engine {how}")
