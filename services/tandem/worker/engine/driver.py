"""Run the one thread that calls an engine and its executor, step by step.

Everything that changes the engine arrives as a command: a callable that runs between two steps, in order of arrival.
The engine's effects go to the sink, with a snapshot of the worker's load. The thread does no I/O.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from tandem.core.clock import Clock
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import KVFact
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.engine.effects import Effect
from tandem.engine.engine import TICK_S, Engine
from tandem.engine.ports import DeviceLost, Executor, Pipeline, StepObserver
from tandem.sched.state.step_plan import SliceResult, StepPlan, StepResult
from tandem.worker.engine.watchdog import Watchdog

THREAD_NAME = "tandem-engine"
IDLE_S = 0.5
"""Longest wait of an idle engine for a command, in seconds."""
CHECK_S = 5.0
"""Seconds between two invariant checks (`Engine.check`) of an idle engine."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Command = Callable[[Engine, float], list[Effect]]
"""Signature of a command: `command(engine, now)` runs on the engine's thread, returns the effects to carry out, and
must not raise."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Hold the state of the engine between two steps, for other threads to read.

    `load`: the load report that gateways receive. `num_live`: number of choices of jobs that have not ended, plus
    leases that this worker has given to consumers; a drain waits until it is 0. `is_transferring`: whether KV is
    offered to other workers or read from them. `step_cost`: model of step times; None until measured. `num_generated`:
    tokens sampled since the start.
    """

    load: WorkerLoad = WorkerLoad()
    num_live: int = 0
    is_transferring: bool = False
    step_cost: StepCost | None = None
    num_generated: int = 0


class EffectSink(Protocol):
    """Interface of the object that carries out the engine's effects. Its methods are called on the engine's thread and
    must not block or raise."""

    def dispatch(self, effects: Sequence[Effect], snapshot: EngineSnapshot) -> None:
        """Carry out `effects` in the order given. Called when there are effects, or when the engine's snapshot has
        changed. `snapshot`: the engine's state after the changes that caused the effects."""
        ...

    def on_kv_events(self, facts: Sequence[KVFact]) -> None:
        """Receive events of blocks that were cached, offloaded or evicted, oldest first. Called only if the engine
        records such events."""
        ...

    def ended(self, error: str | None) -> None:
        """Receive the notice that the engine has ended; no other method is called after it. `error`: None if
        `EngineDriver.stop` ended the engine. Otherwise it is the reason as text, and the engine's state cannot be
        trusted any more."""
        ...


class _Call(NamedTuple):
    """A command with a waiting caller. `run` may raise TandemError if it has changed nothing."""

    run: Callable[[Engine, float], tuple[Any, list[Effect]]]
    future: Future[Any]


@dataclass(frozen=True, slots=True)
class _LaunchedPlan:
    """A plan that was launched, or whose launch failed with `error`. `began` is when its planning began, in seconds."""

    plan: StepPlan
    began: float
    error: Exception | None


class SerialPipeline:
    """Implement `engine.ports.Pipeline` by an executor that computes each plan within one call.

    `launch` only queues a plan, and `collect` executes the oldest queued plan and returns its result. A plan that needs
    the tokens of an earlier plan therefore finds them, however many plans are queued.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        return self._executor.execute(self._plans.popleft())

    def __repr__(self) -> str:
        return f"SerialPipeline({self._executor!r}, {len(self._plans)} plans)"


class EngineDriver:
    """Run an engine step by step on a thread of its own, and run the commands of other threads between the steps.

    `start`, `post`, `call`, `fail_device`, `stop` and `stalled` may be called from any thread.
    """

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
        """Create the driver; `start` starts its thread.

        `engine`: plans the steps, and decides how many plans are open at the same time. `pipeline`: executes step
        plans. `sink`: receives the engine's effects. `clock`: gives the times that the engine gets. `stall_s`: seconds
        without progress after which `stalled` may report a problem. `observers`: receive a record of each step.
        `calibrate`: called once on the thread, before the first command; it may run steps on the pipeline's executor.
        """
        self._engine = engine
        self._observers = tuple(observers)
        self._calibrate = calibrate
        self._pipeline = pipeline
        self._running: deque[_LaunchedPlan] = deque()
        self._delivered_at = 0.0
        self._sink = sink
        self._clock = clock
        self._inbox: deque[Command | _Call] = deque()
        self._wake = threading.Condition()
        self._is_open = True
        self._snapshot = EngineSnapshot()
        self._load_key: tuple[object, ...] | None = None
        self._next_tick = 0.0
        self._next_check = 0.0
        self._watchdog = Watchdog(clock, stall_s)
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def __repr__(self) -> str:
        return f"EngineDriver({'alive' if self._thread.is_alive() else 'ended'}, {len(self._inbox)} waiting)"

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Queue a command to run between two steps, and return without waiting. Does nothing when the engine has
        ended."""
        self._put(command)

    def call(self, run: Callable[[Engine, float], tuple[_T, list[Effect]]]) -> Future[_T]:
        """Queue a command to run between two steps, and return a future of the command's value.

        `run(engine, now)` returns the value, and the effects to carry out. The future completes once the sink has
        received the effects. The future fails with a TandemError if `run` raises one, or if the engine ends first; it
        cannot be cancelled.
        """
        future: Future[_T] = Future()
        # Mark the future as running, so that a caller that stops waiting cannot cancel the command half-way.
        future.set_running_or_notify_cancel()
        if not self._put(_Call(run, future)):
            future.set_exception(_ended("has stopped"))
        return future

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the running step, fail the live jobs, and wait up to `timeout_s` seconds until the
        thread has ended. Returns whether it has ended."""
        with self._wake:
            self._is_open = False
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def fail_device(self, reason: str) -> None:
        """End the engine's thread after the running step, because its device has failed, and return without waiting.
        Live jobs fail. `reason`: the failure as text."""

        def end(_engine: Engine, _now: float) -> list[Effect]:
            raise DeviceLost(reason)

        self._put(end)

    def stalled(self) -> str | None:
        """Return None while the engine's loop makes progress. Otherwise return the problem as text: the thread has
        ended, or one iteration of the loop takes too long."""
        if not self._thread.is_alive():
            return "the engine has ended"
        return self._watchdog.stalled()

    # ---- on the driver's thread

    def _run(self) -> None:
        error: str | None = None
        kind = ErrorKind.WORKER_LOST
        try:
            self._warm_up()
            while self._run_once():
                pass
        except DeviceLost as loss:
            _log.error("the engine stops, because its device is lost: %s", loss)
            error = str(loss)
        except Exception as failure:
            _log.exception("the engine stops because of a defect")
            error = f"{type(failure).__name__}: {failure}"
            kind = ErrorKind.INTERNAL
        self._abandon()
        self._close(error, kind)

    def _warm_up(self) -> None:
        """Calibrate the step-time model. If that fails, the model learns from the first steps instead."""
        if self._calibrate is None:
            return
        _log.info("calibrating step times")
        try:
            cost = self._calibrate()
        except DeviceLost:
            raise
        except Exception:
            _log.warning(
                "the calibration of step times failed; predictions are rough until some steps have run", exc_info=True
            )
            return
        if cost is not None:
            self._engine.pacer.model.restart(cost)

    def _run_once(self) -> bool:
        """Run one iteration: commands that have arrived, the engine's deadlines if they are due, and the next plan.
        Returns False when the driver was stopped."""
        self._watchdog.beat()
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
            self._wait_for_work(now)
            return True
        # A mere change of load is dispatched with the step's results, to cross to the event loop only once.
        if effects:
            self._dispatch(effects)
        self._step(plan, now)
        return True

    def _step(self, plan: StepPlan | None, began: float) -> None:
        """Launch `plan`, if there is one, and collect the result of the oldest launched plan unless the engine may
        begin another plan first. `began`: time at which the planning of `plan` began."""
        self._watchdog.step_begins()
        if plan is not None:
            self._launch(plan, began)
        collected = self._collect() if plan is None or not self._engine.may_begin else None
        self._watchdog.step_ends()
        if collected is None:
            return
        done, result = collected
        effects = self._engine.finish(result, self._clock.now())
        key = self._engine.load_key(done.plan)
        self._dispatch(effects, keeps_load=key is not None and key == self._load_key)
        self._load_key = key
        # The time from planning to delivery is what a client sees between two tokens. For overlapping plans it counts
        # from the delivery of the plan before, when the device had nothing else to do.
        now = self._clock.now()
        record = self._engine.pacer.measured(result, now - max(done.began, self._delivered_at))
        self._delivered_at = now
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
            # Hashes may be published for blocks that were never copied: no cached block can be trusted any more.
            raise error
        _log.error("a step failed, and its sequences end with an error: %s", plan, exc_info=error)
        reason = f"the step failed: {type(error).__name__}: {error}"
        return done, StepResult(plan.number, tuple(SliceResult(s.seq, error=reason) for s in plan.slices))

    def _wait_for_work(self, now: float) -> None:
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
        """Run all commands that have arrived, including those that commands post themselves."""
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, _Call):
                self._answer(entry)
            else:
                self._dispatch(entry(self._engine, self._clock.now()))

    def _answer(self, call: _Call) -> None:
        try:
            try:
                value, effects = call.run(self._engine, self._clock.now())
            except TandemError as refusal:
                call.future.set_exception(refusal)
                return
            self._dispatch(effects)
        except Exception:
            call.future.set_exception(_ended("failed"))
            raise
        call.future.set_result(value)

    def _dispatch(self, effects: Sequence[Effect], *, keeps_load: bool = False) -> None:
        engine = self._engine
        facts = engine.take_events()
        if facts:
            self._sink.on_kv_events(facts)
        load = before = self._snapshot.load
        if not keeps_load:
            self._load_key = None
            load = engine.load()
            load = before if load == before else replace(load, number=before.number + 1)
        step_cost = engine.pacer.model.published
        snapshot = EngineSnapshot(load, engine.num_live, engine.is_transferring, step_cost, engine.num_generated)
        if effects or snapshot != self._snapshot:
            self._snapshot = snapshot
            self._sink.dispatch(effects, snapshot)

    def _abandon(self) -> None:
        """Wait until the launched plans have ended, because their memory is about to be freed."""
        try:
            while self._running:
                if self._running.popleft().error is None:
                    self._pipeline.collect()
        except Exception as failure:
            _log.info("a step that was running when the engine stopped has failed: %s", failure)

    def _close(self, error: str | None, kind: ErrorKind) -> None:
        """Fail every waiting call and end every job. Nothing enters the inbox after this method took the lock."""
        with self._wake:
            self._is_open = False
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, _Call):
                entry.future.set_exception(_ended("has stopped"))
        message = "the engine failed" if error is not None else "the worker stopped"
        lost = self._engine.abandon(kind, message, self._clock.now())
        load = _lifetime_counters(self._snapshot.load)
        self._sink.dispatch(lost, EngineSnapshot(load, num_generated=self._engine.num_generated))
        self._sink.ended(error)


def _lifetime_counters(load: WorkerLoad) -> WorkerLoad:
    """Return a load that is draining and empty, with only those counters of `load` that count since the worker's
    start."""
    return WorkerLoad(
        draining=True,
        num_drafted_tokens=load.num_drafted_tokens,
        num_accepted_tokens=load.num_accepted_tokens,
        num_steps_over_target=load.num_steps_over_target,
        num_remote_hit_tokens=load.num_remote_hit_tokens,
        number=load.number + 1,
    )


def _ended(how: str) -> TandemError:
    return TandemError(ErrorKind.WORKER_LOST, f"the worker's engine {how}")
