"""Test the engine's thread alone: calls, failures, order, stops, and the pulse that judges its health."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest

from tandem.core.clock import Clock, SystemClock
from tandem.core.config import HandoffConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, JobEvent, Token
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.request import GenerateJob
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.core.worker_load import EngineStats
from tandem.engine.effects import Effect, RenewLeases
from tandem.engine.engine import Engine
from tandem.engine.ports import DeviceLost
from tandem.kv.block_pool import BlockPool
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.schedule_result import StepRecord
from tandem.sched.state.step_plan import StepPlan, StepResult
from tandem.worker.engine.calibrate import calibrate
from tandem.worker.engine.driver import EngineDriver, EngineSnapshot, SerialPipeline
from tandem.worker.engine.watchdog import STALL_FACTOR, Watchdog
from tests.e2e.client import new_request
from tests.unit.transfer.scripted import ManualClock
from tests.unit.worker.conftest import Gate, pace
from tests.unit.worker.fake_model import BLOCK_SIZE, FakeExecutor, continuation

NUM_BLOCKS = 64


class Sink:
    """Record what the driver dispatches, and on which thread."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.snapshots: list[EngineSnapshot] = []
        self.threads: set[str] = set()
        self.ends: list[str | None] = []
        self.has_ended = threading.Event()

    def dispatch(self, effects: Sequence[Effect], snapshot: EngineSnapshot) -> None:
        self.effects.extend(effects)
        self.snapshots.append(snapshot)
        self.threads.add(threading.current_thread().name)

    def ended(self, error: str | None) -> None:
        self.ends.append(error)
        self.has_ended.set()

    def failures(self) -> list[Failed]:
        return [e for e in self.effects if isinstance(e, Failed)]


class Watched(SerialPipeline):
    """Record the numbers of the plans that are launched and collected."""

    def __init__(self, executor: FakeExecutor) -> None:
        super().__init__(executor)
        self.acts: list[tuple[str, int]] = []
        self.before_launch: Callable[[StepPlan], None] = lambda plan: None
        self.before_collect: Callable[[], None] = lambda: None

    def launch(self, plan: StepPlan) -> None:
        self.before_launch(plan)
        self.acts.append(("launch", plan.number))
        super().launch(plan)

    def collect(self) -> StepResult:
        self.before_collect()
        result = super().collect()
        self.acts.append(("collect", result.number))
        return result


class Rig:
    """Own a driver with all that it drives, and keep the records of its steps."""

    def __init__(self, plan_depth: int = 1, clock: Clock | None = None) -> None:
        self.sink = Sink()
        self.executor = FakeExecutor(NUM_BLOCKS)
        self.pipeline = Watched(self.executor)
        self.limits = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=200)
        self.engine = Engine(
            BlockPool(NUM_BLOCKS, BLOCK_SIZE), self.limits, HandoffConfig(), "f00d", plan_depth=plan_depth
        )
        self.records: list[StepRecord] = []
        self.calibrates = False
        self.calibrated: list[str] = []
        self.driver = EngineDriver(
            self.engine, self.pipeline, self.sink, clock or SystemClock(), 30.0, (self,), self.calibrate
        )

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)

    def calibrate(self) -> StepCost | None:
        self.calibrated.append(threading.current_thread().name)
        return calibrate(self.executor, SystemClock(), self.limits) if self.calibrates else None

    def submit(self, max_tokens: int) -> GenerateJob:
        job = GenerateJob(request=new_request("fake", [1, 2, 3], max_tokens), attempt=1)
        self.driver.call(lambda engine, now: (None, engine.submit(job, now))).result(10)
        return job

    def run(self, max_tokens: int) -> GenerateJob:
        """Start the driver, and run one job to its end."""
        self.driver.start()
        job = self.submit(max_tokens)
        self.wait_finished()
        return job

    def tokens(self) -> list[int]:
        return [e.token.id for e in self.sink.effects if isinstance(e, Token)]

    def wait_finished(self) -> None:
        wait_for(lambda: any(isinstance(e, Finished) for e in self.sink.effects))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    assert rig.driver.stop(10)


@pytest.fixture
def deep() -> Iterator[Rig]:
    """Return a rig in which two plans may be open."""
    rig = Rig(plan_depth=2)
    yield rig
    assert rig.driver.stop(10)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(1e-3)


def test_effects_are_dispatched_by_one_thread_before_the_reply(rig: Rig) -> None:
    rig.driver.start()
    seen: list[int] = []
    future = rig.driver.call(lambda engine, now: (7, [Failed(key, ErrorKind.INTERNAL, "")]))
    future.add_done_callback(lambda done: seen.append(len(rig.sink.effects)))
    key = GenerateJob(request=new_request("fake", [1], 1), attempt=1).key
    assert future.result(10) == 7
    assert seen == [1]
    assert rig.sink.threads == {"tandem-engine"}


def test_a_refusal_reaches_its_caller_and_nobody_else(rig: Rig) -> None:
    rig.driver.start()
    with pytest.raises(TandemError) as refused:
        rig.submit(10_000)
    assert refused.value.kind is ErrorKind.CONTEXT_LENGTH
    assert rig.driver.stalled() is None


def test_commands_received_during_a_step_run_right_after_it(rig: Rig) -> None:
    gate = Gate(rig.executor)
    rig.driver.start()
    job = rig.submit(100)
    assert gate.entered.wait(10)
    future = rig.driver.call(lambda engine, now: (None, engine.cancel(job.key, now)))
    gate.open()
    future.result(10)
    assert len(rig.tokens()) == 1, "the step that was running is the last"


@pytest.mark.parametrize("when", ["in a step", "between steps", "while it is calibrated"])
def test_jobs_of_a_lost_device_end_as_worker_lost(when: str, rig: Rig) -> None:
    """A step that fails with its device does not fail its jobs."""

    def fail(plan: StepPlan) -> None:
        raise DeviceLost("rank 1 is gone")

    rig.calibrates = when == "while it is calibrated"
    if when != "between steps":
        rig.executor.before_step = fail
    rig.driver.start()
    if when == "in a step":
        rig.submit(5)
    elif when == "between steps":
        # Fail in the first step: a blocked thread could miss the rest of the job.
        rig.executor.before_step = lambda plan: rig.driver.fail_device("rank 1 is gone")
        rig.submit(150)
    assert rig.sink.has_ended.wait(10)
    assert rig.sink.ends == ["rank 1 is gone"]
    assert [failed.kind for failed in rig.sink.failures()] == [ErrorKind.WORKER_LOST] * (not rig.calibrates)
    assert rig.driver.stalled() == "the engine has ended"


@pytest.mark.parametrize("copies", [False, True])
def test_a_failed_step_ends_the_engine_where_it_copied_between_memories(copies: bool, rig: Rig) -> None:
    """Cached block names refer to data that was not copied then; a step that only computes fails its own jobs."""

    def fail(plan: StepPlan) -> None:
        if copies:
            object.__setattr__(plan, "spills", ((0, 0),))
        raise RuntimeError("out of memory")

    rig.executor.before_step = fail
    rig.driver.start()
    rig.submit(5)
    if copies:
        assert rig.sink.has_ended.wait(10)
        assert rig.sink.ends == ["RuntimeError: out of memory"]
    else:
        wait_for(lambda: bool(rig.sink.failures()))
        rig.executor.before_step = lambda plan: None
        done = rig.submit(2)
        wait_for(lambda: any(isinstance(e, JobEvent) and e.key == done.key for e in rig.sink.effects))
        assert rig.sink.ends == []
    assert [failure.kind for failure in rig.sink.failures()][:1] == [ErrorKind.INTERNAL]


def test_stop_fails_live_jobs_and_answers_waiting_calls(rig: Rig) -> None:
    pace(rig.executor)
    rig.driver.start()
    job = rig.submit(190)
    assert rig.driver.stop(10)
    assert [(f.key, f.kind) for f in rig.sink.failures()] == [(job.key, ErrorKind.WORKER_LOST)]
    assert rig.sink.ends == [None]
    with pytest.raises(TandemError):
        rig.driver.call(lambda engine, now: (None, [])).result(10)
    rig.driver.post(lambda engine, now: [])
    assert rig.driver.stalled() == "the engine has ended"


@pytest.mark.parametrize("how", ["post", "call", "effects"])
def test_a_defect_in_a_command_ends_the_engine(rig: Rig, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect may also be in the dispatch of its effects. Every waiting caller gets the error."""
    pace(rig.executor)
    rig.driver.start()
    job = rig.submit(190)
    broken, dispatch_effects = RenewLeases(WorkerRef(WorkerId("w"), Incarnation(1), "w:1"), ()), rig.sink.dispatch

    def explode(*_: object) -> list[Effect]:
        raise KeyError("planted")

    def dispatch(effects: Sequence[Effect], snapshot: EngineSnapshot) -> None:
        if broken in effects:
            explode()
        dispatch_effects(effects, snapshot)

    monkeypatch.setattr(rig.sink, "dispatch", dispatch)
    if how == "post":
        rig.driver.post(explode)
    elif how == "effects":
        with pytest.raises(TandemError):
            rig.driver.call(lambda engine, now: (None, [broken])).result(10)
    else:
        with pytest.raises(TandemError):
            rig.driver.call(lambda engine, now: (None, explode())).result(10)
    assert rig.sink.has_ended.wait(10)
    assert "planted" in (rig.sink.ends[0] or "")
    assert [(f.key, f.kind) for f in rig.sink.failures()] == [(job.key, ErrorKind.INTERNAL)]


def test_an_idle_engine_checks_its_invariants(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = threading.Event()
    monkeypatch.setattr(rig.engine, "check", checked.set)
    rig.driver.start()
    assert checked.wait(10)


def test_the_pulse_scales_with_the_longest_recent_step() -> None:
    clock = ManualClock()
    pulse = Watchdog(clock, stall_s=30.0)
    clock.time = 30.0
    assert pulse.stalled() is None
    clock.time = 30.1
    assert "loop" in (pulse.stalled() or "")
    pulse.step_begins()
    clock.time += 5.0
    pulse.step_ends()
    pulse.step_begins()
    clock.time += 5.0 * STALL_FACTOR
    assert pulse.stalled() is None
    clock.time += 0.1
    assert "a step" in (pulse.stalled() or "")
    pulse.step_ends()
    assert pulse.stalled() is None


def test_every_step_is_observed_and_the_step_cost_is_reported(rig: Rig) -> None:
    rig.calibrates = True
    pace(rig.executor, 0.002)
    rig.run(40)
    rig.driver.call(lambda engine, now: (None, [])).result(10)
    assert [r.number for r in rig.records] == list(range(40))
    assert all(r.measured_s >= 0.002 and not r.has_failed for r in rig.records)
    assert rig.records[-1].features.num_decode_seqs == 1
    assert rig.sink.snapshots[0].step_cost is not None, "told from the first snapshot on"
    assert rig.calibrated == ["tandem-engine"]


def test_reports_of_the_load_are_numbered(rig: Rig) -> None:
    """The last report is numbered too."""
    rig.run(3)
    assert rig.driver.stop(10)
    loads = [snapshot.load for snapshot in rig.sink.snapshots]
    for before, after in pairwise(loads):
        assert after.number == before.number + (after != before)
    assert loads[-1].number > loads[0].number and loads[-1].draining


def test_a_calibration_leaves_no_trace(rig: Rig) -> None:
    rig.calibrates = True
    rig.driver.start()
    books = rig.driver.call(lambda engine, now: (engine.books(), [])).result(10)
    assert books.num_free_blocks == books.num_blocks and books.num_cached_blocks == books.num_sequences == 0
    job = rig.submit(30)
    rig.wait_finished()
    assert rig.tokens() == continuation(job.request.prompt_tokens, 30)


def test_a_calibration_samples_where_a_decode_would() -> None:
    """Sampling takes time too, so the measured cost of decoding includes it; prompt chunks sample no token."""
    executor = FakeExecutor(64)
    kinds: set[tuple[bool, bool]] = set()
    executor.before_step = lambda plan: kinds.update((s.num_tokens == 1, s.sampling is not None) for s in plan.slices)
    calibrate(executor, SystemClock(), SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256))
    assert kinds == {(True, True), (False, False)}


def test_the_clock_is_looked_at_now_and_then(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines and leases are checked every `TICK_S`, not in every step."""
    monkeypatch.setattr("tandem.worker.engine.driver.TICK_S", 3600.0)
    ticks: list[float] = []
    tick = rig.engine.tick
    monkeypatch.setattr(rig.engine, "tick", lambda now: ticks.append(now) or tick(now))
    rig.run(20)
    assert len(ticks) == 1


def test_a_worker_that_cannot_be_calibrated_learns_from_its_work(rig: Rig) -> None:
    rig.calibrates = True

    def explode(plan: object) -> None:
        rig.executor.before_step = lambda plan: None
        raise RuntimeError("planted")

    rig.executor.before_step = explode
    rig.run(40)
    rig.driver.call(lambda engine, now: (None, [])).result(10)
    assert rig.sink.snapshots[0].step_cost is None
    assert rig.sink.snapshots[-1].step_cost is not None


def test_a_calibration_ends_in_time_and_uses_nothing_that_is_not_there() -> None:
    """With a model of a minute per step one step is enough, and a pool of one block with limits of one token still
    yields a cost.
    """
    clock, executor = ManualClock(), FakeExecutor(1)
    numbers: list[int] = []

    def slow(plan: StepPlan) -> None:
        clock.time += 60.0
        numbers.append(plan.number)

    executor.before_step = slow
    cost = calibrate(executor, clock, SchedulerLimits(max_num_batched_tokens=1, max_num_seqs=1, max_model_len=1))
    assert cost is not None and cost.predict(StepFeatures(0, 1, 1, 0)) == pytest.approx(60.0, rel=0.1)
    assert numbers == [-1, -2], "plans of the engine begin at 0"


def test_compile_time_of_first_steps_is_not_in_the_step_cost() -> None:
    """The first step of each kind compiles for five seconds; later ones take 1 ms and 10 us for each token."""
    clock, executor = ManualClock(), FakeExecutor(64)
    kinds: dict[bool, int] = {}

    def step(plan: StepPlan) -> None:
        num_tokens = sum(piece.num_tokens for piece in plan.slices)
        is_first = kinds.setdefault(num_tokens > 32, plan.number) == plan.number
        clock.time += 1e-3 + 1e-5 * num_tokens + 5.0 * is_first

    executor.before_step = step
    cost = calibrate(executor, clock, SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256))
    assert len(kinds) == 2 and cost is not None, "the longer chunks were not given up"
    assert cost.predict(StepFeatures(512, 0, 0, 0)) == pytest.approx(6.12e-3, rel=0.3)


def test_the_next_plan_is_launched_while_one_runs(deep: Rig) -> None:
    job = deep.run(6)
    assert deep.driver.stop(10)
    assert deep.tokens() == continuation(job.request.prompt_tokens, 6)
    launched = [act for act in deep.pipeline.acts if act[0] == "launch"]
    assert deep.pipeline.acts[:5] == [("launch", 0), ("launch", 1), ("collect", 0), ("launch", 2), ("collect", 1)]
    assert [number for _, number in launched] == list(range(6)), "nothing was computed beyond the end"
    assert deep.pipeline.acts[-1] == ("collect", 5)


def test_with_one_plan_open_each_is_collected_before_the_next_is_made(rig: Rig) -> None:
    rig.run(4)
    assert rig.pipeline.acts == [(act, number) for number in range(4) for act in ("launch", "collect")]


def test_a_job_cancelled_between_launch_and_collect_samples_no_more_and_leaves_nothing(deep: Rig) -> None:
    jobs: list[GenerateJob] = []

    def cancel() -> None:
        if jobs and len(deep.pipeline.acts) > 6:
            deep.driver.post(lambda engine, now: engine.cancel(jobs[0].key, now))

    deep.pipeline.before_collect = cancel
    pace(deep.executor)
    deep.driver.start()
    jobs.append(deep.submit(190))
    wait_for(lambda: any(isinstance(e, Cancelled) for e in deep.sink.effects))
    wait_for(lambda: deep.engine.num_live == 0 and not deep.driver.call(_books).result(10).num_sequences)
    books = deep.driver.call(_books).result(10)
    assert books.num_free_blocks == NUM_BLOCKS
    ends = [i for i, e in enumerate(deep.sink.effects) if isinstance(e, Cancelled)]
    assert ends[0] == len(deep.sink.effects) - 1, "no token after the end"


def _books(engine: Engine, now: float) -> tuple[EngineStats, list[Effect]]:
    engine.check()
    return engine.books(), []


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_failed_step_also_fails_the_plan_chained_to_it(deep: Rig, where: str) -> None:
    """The chained plan was made from a token that the failed step did not sample."""

    def fail(plan: StepPlan) -> None:
        if plan.number == 3:
            raise RuntimeError("planted")

    if where == "launch":
        deep.pipeline.before_launch = fail
    else:
        deep.executor.before_step = fail
    deep.driver.start()
    broken = deep.submit(50)
    wait_for(lambda: bool(deep.sink.failures()))
    assert "planted" in deep.sink.failures()[0].message
    assert deep.tokens() == continuation(broken.request.prompt_tokens, 3)
    deep.submit(2)
    deep.wait_finished()
    books = deep.driver.call(_books).result(10)
    assert books.num_free_blocks == NUM_BLOCKS and deep.sink.ends == []
    assert [failure.key for failure in deep.sink.failures()] == [broken.key]


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_lost_device_ends_the_engine(deep: Rig, where: str) -> None:
    def lose(*_: object) -> None:
        if len(deep.pipeline.acts) > 4:
            raise DeviceLost("an illegal address")

    setattr(deep.pipeline, f"before_{where}", lose)
    deep.driver.start()
    job = deep.submit(50)
    assert deep.sink.has_ended.wait(10)
    assert deep.sink.ends == ["an illegal address"]
    assert [failure.key for failure in deep.sink.failures()] == [job.key]


def test_a_stop_waits_for_launched_plans(deep: Rig) -> None:
    pace(deep.executor)
    deep.driver.start()
    deep.submit(190)
    wait_for(lambda: len(deep.pipeline.acts) > 6)
    assert deep.driver.stop(10)
    numbers = {act: [n for name, n in deep.pipeline.acts if name == act] for act in ("launch", "collect")}
    assert numbers["launch"] == numbers["collect"]


def test_steps_that_overlap_are_timed_from_the_end_of_the_one_before() -> None:
    """The step times add up to the elapsed time, not to twice that."""
    clock = ManualClock()
    rig = Rig(plan_depth=2, clock=clock)

    def compute() -> None:
        clock.time += 0.5

    rig.pipeline.before_collect = compute
    rig.run(10)
    assert rig.driver.stop(10)
    assert [record.measured_s for record in rig.records] == [0.5] * 10
