"""Test how the request director moves running sequences to other decode workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Finished, FinishReason, KVReceived, MigrationOffered, Preempted, Token
from tandem.core.ids import HandoffId, HandoffKey, Incarnation, JobKey, RequestId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import ResumeJob
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.orchestration.commands import (
    CancelJob,
    Command,
    EndRequest,
    MoveOutcome,
    OfferMigration,
    ReleaseLease,
    ReportMove,
    SubmitJob,
)
from tandem.orchestration.rebalancer import (
    FIRST_BACKOFF_S,
    HOLD_S,
    MAX_EXAMINED,
    MOVE_TIMEOUT_S,
    PAUSE_S,
    PERIOD_S,
    STUCK_S,
    Rebalancer,
)
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.rebalance import MovableSequence, Rebalancing
from tandem.routing.worker_view import WorkerView
from tests.unit.orchestration.decoding_requests import A, B, C, DecodingRequests, outcomes
from tests.unit.orchestration.known_workers import BookedWorkers

ON = GatewayConfig(rebalance="on")
RULES = Rebalancing({}, ON.rebalance_min_gain, LinkBandwidth())


def view(ref: WorkerRef, num_running: int) -> WorkerView:
    load = WorkerLoad(num_running=num_running, num_blocks=1000, num_free_blocks=1000 - 10 * num_running)
    cost = StepCost(1e-3, 1e-5, 1e-3, 0.0, 0.0)
    return WorkerView(ref, "mixed", "m", "f", load, step_cost=cost, block_size=16, block_bytes=1 << 16)


class Setting(DecodingRequests):
    """Some requests that worker A decodes, while B has nothing to do."""

    def __init__(self, config: GatewayConfig = ON, num_requests: int = 3, num_choices: int = 1) -> None:
        super().__init__(view(A, 0), config)
        self.num_offers = 0
        self.keys = [
            self.start(number, num_prompt=10 + number, num_output=3, max_tokens=500, num_choices=num_choices)
            for number in range(num_requests)
        ]
        self.workers.views[A] = view(A, 6)
        self.workers.add(view(B, 0))

    def first_move(self, within_s: float = 2 * HOLD_S) -> JobKey:
        """Let time pass until the first sequence is to move, and return its key."""
        (order,) = self.wait(within_s)
        assert isinstance(order, OfferMigration) and order.worker == A
        return order.keys[0]

    def offer(self, key: JobKey, number: int = 1, *, is_requested: bool = True) -> list[Command]:
        offer = MigrationOffered(key, HandoffKey(HandoffId(f"move{number}"), key.attempt), is_requested)
        return self.director.on_worker_events(A, [offer], self.now)

    def begin_move(self, within_s: float = 2 * HOLD_S) -> SubmitJob:
        """Let the first sequence be offered, and return the job that takes it over."""
        self.num_offers += 1
        (submit,) = self.offer(self.first_move(within_s), self.num_offers)
        assert isinstance(submit, SubmitJob) and isinstance(submit.job, ResumeJob)
        assert submit.worker == B and submit.job.source == A and submit.job.offer_attempt == 1
        return submit

    def accepted_move(self) -> SubmitJob:
        """Let the first sequence be offered, and B accept the job that takes it over."""
        submit = self.begin_move()
        self.director.on_submit_result(B, submit.job.key, None, self.now)
        return submit


def rebalancer_of(workers: BookedWorkers) -> Rebalancer:
    return Rebalancer(workers.candidates(), RULES, ON.rebalance_max_moves)


def test_a_sequence_moves_and_goes_on_at_the_other_worker() -> None:
    setting = Setting()
    key = setting.first_move()
    assert key == setting.keys[0], "the one with the shortest context"
    (submit,) = setting.offer(key)
    assert isinstance(submit, SubmitJob)
    taken = submit.job.key
    assert submit.job.output_tokens == (0, 1, 2), "the tokens that the client has"
    setting.director.on_submit_result(B, taken, None, setting.now)
    delivered = setting.tokens(A, key, 3, 5)
    assert [each.index for each in delivered if isinstance(each, Token)] == [3, 4], "it goes on meanwhile"
    setting.director.on_worker_events(B, [KVReceived(taken, 1, 64, 0, 64, 0.1, 0.1, 0.1)], setting.now)
    assert outcomes(setting.tick()) == [MoveOutcome.MOVED]
    end = setting.tokens(B, taken, 4, 500) + setting.director.on_worker_events(
        B, [Finished(taken, FinishReason.LENGTH, 500, 0)], setting.now
    )
    assert [each.index for each in end if isinstance(each, Token)] == list(range(5, 500))
    assert isinstance(end[-1], EndRequest) and isinstance(end[-1].outcome, Finished)


def test_nothing_moves_before_the_imbalance_has_lasted() -> None:
    setting = Setting()
    assert not setting.wait(0.9 * HOLD_S)
    setting.workers.views[A] = view(A, 1)
    assert not setting.tick()
    setting.workers.views[A] = view(A, 6)
    assert not setting.wait(0.9 * HOLD_S), "it begins anew"
    assert [type(each) for each in setting.wait(HOLD_S)] == [OfferMigration]


def test_two_workers_move_one_sequence_at_a_time() -> None:
    setting = Setting()
    submit = setting.begin_move()
    assert not setting.wait(0.5)
    setting.director.on_submit_result(B, submit.job.key, None, setting.now)
    assert not setting.wait(0.5)
    setting.director.on_worker_events(B, [KVReceived(submit.job.key, 1, 64, 0, 64, 0.1, 0.1, 0.1)], setting.now)
    moved, *orders = setting.tick()
    assert outcomes([moved]) == [MoveOutcome.MOVED]
    (order,) = orders or setting.wait(0.5)
    assert isinstance(order, OfferMigration) and order.keys == (setting.keys[1],)


def test_explain_reports_and_moves_nothing() -> None:
    setting = Setting(replace(ON, rebalance="explain"))
    seen = [each for _ in range(30) for each in setting.tick()]
    assert outcomes(seen) == [MoveOutcome.ADVISED] * len(seen) and 2 <= len(seen) <= 3, "once per HOLD_S"
    assert not [each for _ in range(30) for each in Setting(GatewayConfig()).tick()], "it is off"


@pytest.mark.parametrize("kind", [ErrorKind.OVERLOADED, ErrorKind.WORKER_LOST, ErrorKind.KV_LOST])
def test_a_target_that_refuses_leaves_the_sequence_where_it_is(kind: ErrorKind) -> None:
    setting = Setting()
    submit = setting.begin_move()
    commands = setting.director.on_submit_result(B, submit.job.key, TandemError(kind, "no"), setting.now)
    (release,) = [each for each in commands if isinstance(each, ReleaseLease)]
    assert release.worker == A and release.key.handoff == "move1"
    assert not [each for each in commands if isinstance(each, SubmitJob)]
    assert outcomes(setting.tick()) == [MoveOutcome.WITHDRAWN]
    assert [each.index for each in setting.tokens(A, setting.keys[0], 3, 6) if isinstance(each, Token)] == [3, 4, 5]
    assert not setting.wait(0.9 * FIRST_BACKOFF_S), "the pair rests"
    assert [type(each) for each in setting.wait(FIRST_BACKOFF_S)] == [OfferMigration]


def test_a_target_that_is_lost_during_the_copy_leaves_the_sequence_where_it_is() -> None:
    setting = Setting()
    setting.accepted_move()
    setting.workers.remove(B)
    commands = setting.director.on_worker_lost(B, "it died", setting.now)
    assert [type(each) for each in commands] == [ReleaseLease]
    assert outcomes(setting.tick()) == [MoveOutcome.WITHDRAWN]
    assert setting.tokens(A, setting.keys[0], 3, 4)


def test_a_lost_source_is_a_failed_attempt_and_the_target_gives_up() -> None:
    setting = Setting()
    submit = setting.accepted_move()
    setting.workers.remove(A)
    commands = setting.director.on_worker_lost(A, "it died", setting.now)
    assert CancelJob(B, (submit.job.key,)) in commands
    again = [each for each in commands if isinstance(each, SubmitJob) and each.job.request.id == submit.job.request.id]
    assert [each.worker for each in again] == [B]
    assert outcomes(setting.tick()) == [MoveOutcome.ENDED], "it is computed there"


def test_a_client_that_leaves_ends_the_move() -> None:
    setting = Setting()
    submit = setting.accepted_move()
    commands = setting.director.cancel(submit.job.request.id, setting.now)
    assert {each.worker for each in commands if isinstance(each, CancelJob)} == {A, B}
    assert MoveOutcome.ENDED in outcomes(setting.tick())


def test_a_failing_worker_gets_no_sequence() -> None:
    setting = Setting()
    for failing, has_moved in (({B}, False), (set[WorkerRef](), True)):
        rebalancer = rebalancer_of(setting.workers)
        ticks = (number * PERIOD_S for number in range(20))
        states = [one.state for one in setting.director.requests()]
        assert any(rebalancer.plan(states, failing, now) for now in ticks) is has_moved


def test_another_sequence_moves_when_the_worker_does_not_offer_the_first() -> None:
    setting = Setting()
    key = setting.first_move()
    assert not setting.wait(0.9 * MOVE_TIMEOUT_S)
    assert outcomes(setting.wait(MOVE_TIMEOUT_S)) == [MoveOutcome.WITHDRAWN]
    assert [type(each) for each in setting.offer(key)] == [ReleaseLease], "it comes too late"
    (order,) = setting.wait(FIRST_BACKOFF_S + 2 * HOLD_S)
    assert isinstance(order, OfferMigration) and order.keys == (key,)
    assert [type(each) for each in setting.offer(key, 2)] == [SubmitJob]


def test_an_offer_that_was_withdrawn_is_refused_when_it_is_repeated() -> None:
    """A worker repeats its last offer when its Watch stream was opened again."""
    setting = Setting()
    submit = setting.begin_move()
    setting.director.on_submit_result(B, submit.job.key, TandemError(ErrorKind.OVERLOADED, "no"), setting.now)
    (release,) = setting.offer(setting.keys[0])
    assert isinstance(release, ReleaseLease) and release.key.handoff == "move1"
    assert setting.tokens(A, setting.keys[0], 3, 4)


@pytest.mark.parametrize("ending", [Finished, Cancelled])
def test_a_target_that_is_lost_after_the_source_has_ended_is_a_failed_attempt(ending: type) -> None:
    """The source ends when the target has read all, and the target dies before it reports that."""
    setting = Setting()
    setting.accepted_move()
    key = setting.keys[0]
    event = Finished(key, None, 3, 0) if ending is Finished else Cancelled(key)
    setting.director.on_worker_events(A, [event], setting.now)
    setting.workers.remove(B)
    commands = setting.director.on_worker_lost(B, "it died", setting.now)
    for _ in range(20):
        commands += setting.tick(10.0)
    again = [each for each in commands if isinstance(each, SubmitJob) and each.job.request.id == key.request]
    assert again and again[-1].worker == A and again[-1].job.output_tokens == (0, 1, 2)


def test_a_draining_source_looks_for_other_targets_after_a_refusal() -> None:
    setting = Setting()
    submit = setting.begin_move()
    setting.workers.add(view(C, 0))
    setting.workers.remove(B)
    setting.workers.add(view(B, 6))
    overloaded = TandemError(ErrorKind.OVERLOADED, "no")
    setting.director.on_submit_result(B, submit.job.key, overloaded, setting.now)
    setting.workers.remove(A)  # it takes no new work
    (again,) = setting.offer(setting.keys[0], 2, is_requested=False)
    assert isinstance(again, SubmitJob) and again.worker == C


def test_a_sequence_moves_at_most_so_often_and_choices_of_one_job_do_not_move() -> None:
    shared = Setting(num_choices=2, num_requests=1)
    assert not [each for _ in range(30) for each in shared.tick()]
    for max_moves, moved_again in ((1, False), (2, True)):
        setting = Setting(replace(ON, rebalance_max_moves=max_moves), num_requests=1)
        submit = setting.accepted_move()
        setting.director.on_worker_events(B, [KVReceived(submit.job.key, 1, 64, 0, 64, 0.1, 0.1, 0.1)], setting.now)
        setting.director.on_worker_events(A, [Cancelled(setting.keys[0])], setting.now)
        setting.tokens(B, submit.job.key, 3, 5)
        setting.workers.views[A], setting.workers.views[B] = view(A, 0), view(B, 6)
        commands = [each for _ in range(30) for each in setting.tick()]
        assert outcomes(commands) == [MoveOutcome.MOVED]
        assert any(isinstance(each, OfferMigration) for each in commands) is moved_again


def changed_role(config: GatewayConfig = ON, num_running: int = 0) -> Setting:
    """Return three requests that A decodes, though its role is to compute prompts now, while B runs `num_running`."""
    setting = Setting(config)
    setting.workers.views[A] = replace(view(A, 6), pool="prefill")
    setting.workers.views[B] = replace(view(B, num_running), max_num_seqs=4)
    return setting


def test_sequences_leave_a_worker_whose_role_has_become_prefill() -> None:
    setting = changed_role()
    (order,) = setting.wait(HOLD_S)
    for number, key in enumerate(setting.keys, 1):
        assert isinstance(order, OfferMigration) and order.keys == (key,), "one after the other"
        (submit,) = setting.offer(key, number)
        assert isinstance(submit, SubmitJob) and submit.worker == B
        setting.director.on_submit_result(B, submit.job.key, None, setting.now)
        setting.director.on_worker_events(B, [KVReceived(submit.job.key, 1, 64, 0, 64, 0.1, 0.1, 0.1)], setting.now)
        report, *orders = setting.wait(HOLD_S)
        assert outcomes([report]) == [MoveOutcome.MOVED]
        order = orders[0] if orders else None
    assert order is None and setting.wait(2 * HOLD_S) == []


def test_nothing_leaves_for_a_worker_without_a_free_seat_or_that_has_failed() -> None:
    setting = changed_role(num_running=4)
    assert setting.wait(2 * HOLD_S) == []
    setting = changed_role()
    setting.workers.remove(B)
    setting.director.on_worker_lost(B, "it died", setting.now)
    assert setting.wait(2 * HOLD_S) == []


def test_what_is_about_to_end_does_not_leave() -> None:
    setting = changed_role()
    for key in setting.keys:
        setting.tokens(A, key, 3, 490)
    assert setting.wait(2 * HOLD_S) == [], "two steps for the move are more than a tenth of the ten that are left"


def test_explain_reports_which_sequence_would_leave() -> None:
    setting = changed_role(GatewayConfig(rebalance="explain"))
    (report,) = setting.wait(HOLD_S)
    assert isinstance(report, ReportMove) and report.outcome is MoveOutcome.ADVISED
    assert report.move.reason == "prompts_only" and "prompts only" in report.move.why


def test_after_a_refusal_another_sequence_leaves_for_another_worker() -> None:
    setting = changed_role()
    (submit,) = setting.offer(setting.first_move())
    assert isinstance(submit, SubmitJob)
    setting.director.on_submit_result(B, submit.job.key, TandemError(ErrorKind.OVERLOADED, "no room"), setting.now)
    assert outcomes(setting.wait(HOLD_S)) == [MoveOutcome.WITHDRAWN]
    assert setting.wait(5 * HOLD_S) == [], "the pair rests"
    setting.workers.add(replace(view(C, 3), max_num_seqs=4))
    assert setting.first_move() == setting.keys[1], "the one with the next context"


def test_the_most_urgent_sequences_of_all_prefill_workers_leave_first() -> None:
    sources = [WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1") for name in ("p0", "p1", "p2")]
    workers = BookedWorkers([*(replace(view(ref, 6), pool="prefill") for ref in sources), view(B, 0)])
    workers.views[B] = replace(view(B, 0), max_num_seqs=100)
    rebalancer = rebalancer_of(workers)
    requests: list[Any] = [RunningRequest(number, ref) for number, ref in enumerate(sources)]
    requests[1].lane = Lane.STANDARD
    requests[2].lane = Lane.BATCH
    found = []
    for tick in range(100):
        now = tick * PERIOD_S
        moves = rebalancer.plan_leaves(requests, set(), now)
        found += [move.source for move in moves]
        rebalancer.ended({}, now)
        requests = [one for one in requests if one.worker not in found]
    assert found == sources


def test_sequences_of_a_model_without_decode_workers_keep_no_others_from_leaving() -> None:
    stuck, leaving = (WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1") for name in ("stuck", "leaving"))
    workers = BookedWorkers([replace(view(leaving, 6), pool="prefill")])
    workers.add(replace(view(stuck, 6), pool="prefill", model="other"))
    workers.add(replace(view(B, 0), max_num_seqs=4))
    rebalancer = rebalancer_of(workers)
    requests: list[Any] = [RunningRequest(number, stuck) for number in range(MAX_EXAMINED)]
    requests.append(RunningRequest(MAX_EXAMINED, leaving))
    requests[-1].lane = Lane.BATCH
    (move,) = rebalancer.plan_leaves(requests, set(), 0.0)
    assert move.source == leaving and move.target == B


def test_a_preempted_sequence_is_no_leaving_one() -> None:
    setting = changed_role()
    for key in setting.keys:
        setting.director.on_worker_events(A, [Preempted(key, 3)], setting.now)
    found = setting.wait(HOLD_S)
    assert setting.now >= PAUSE_S and isinstance(found[0], OfferMigration)
    setting.offer(setting.keys[0])


class RunningRequest:
    """The state of a request of which one sequence runs on `worker`; its move ends at once."""

    def __init__(self, number: int, worker: WorkerRef) -> None:
        self.key = JobKey(RequestId(f"r{number}"), 1)
        self.worker = worker
        self.lane = Lane.INTERACTIVE
        self.num_retries = 0

    @property
    def attempts(self) -> Any:
        return self

    def of(self, choice: int) -> None:
        return None

    def workers(self) -> tuple[WorkerRef, ...]:
        return (self.worker,)

    def movable(self, worker: WorkerRef) -> list[MovableSequence]:
        return [MovableSequence(self.key, self.lane, 16, 1000)] if worker == self.worker else []


def test_of_several_slow_workers_each_moves_sequences_to_the_only_idle_one() -> None:
    """Their loads change all the time, so that each of them is the slowest now and then."""
    crowded = [WorkerRef(WorkerId(f"c{number}"), Incarnation(1), f"c{number}:1") for number in range(4)]
    workers = BookedWorkers([view(ref, 6) for ref in (*crowded, B)])
    workers.views[B] = view(B, 0)
    rebalancer = rebalancer_of(workers)
    requests: list[Any] = [RunningRequest(number, ref) for ref in crowded for number in range(6)]
    sources: list[WorkerRef] = []
    for tick in range(60):
        for number, ref in enumerate(crowded):
            workers.views[ref] = view(ref, 6 + (tick + number) % 3)
        rebalancer.ended({}, tick * PERIOD_S)
        sources += [move.source for move in rebalancer.plan(requests, set(), tick * PERIOD_S)]
    assert set(sources) == set(crowded) and len(sources) > 20


def test_a_move_that_does_not_end_blocks_its_workers_only_for_a_time() -> None:
    setting = Setting()
    setting.workers.add(view(C, 3))
    setting.accepted_move()
    assert not setting.wait(0.9 * STUCK_S)
    (order,) = setting.wait(STUCK_S)
    assert isinstance(order, OfferMigration) and order.keys == (setting.keys[1],)
    (other,) = setting.offer(order.keys[0])
    assert isinstance(other, SubmitJob) and other.worker == C, "the pair itself is not used"


def test_backoff_grows_only_while_moves_fail_again_soon() -> None:
    """Whether a pair rests is seen by the time until the next move between its workers."""
    setting = Setting(replace(ON, progress_timeout_s=1e6))
    rests: list[float] = []
    for pause_s in (0.0, 0.0, 0.0, 100.0, 0.0):
        setting.tick(pause_s)
        begun, submit = setting.now, setting.begin_move(within_s=400.0)
        rests.append(setting.now - begun)
        refusal = TandemError(ErrorKind.OVERLOADED, "no")
        setting.director.on_submit_result(B, submit.job.key, refusal, setting.now)
        assert outcomes(setting.tick()) == [MoveOutcome.WITHDRAWN]
    none, first, doubled, _, again = rests
    assert none < 2 * HOLD_S < FIRST_BACKOFF_S < first < 1.5 * first < doubled and again < 1.5 * first


def test_gateways_move_in_turn_what_they_share() -> None:
    """Ten gateways, of which each has a tenth of the sequences of a worker, do not all begin at the same time."""
    workers = BookedWorkers([view(A, 10), view(B, 0)])
    begun: list[float] = []
    for gateway in range(10):
        rebalancer = rebalancer_of(workers)
        ticks = (number * PERIOD_S for number in range(100))
        requests: list[Any] = [RunningRequest(gateway, A)]
        begun.append(next(now for now in ticks if rebalancer.plan(requests, set(), now)))
    assert len(set(begun)) > 4 and min(begun) >= HOLD_S and max(begun) <= HOLD_S + 12 * PERIOD_S
