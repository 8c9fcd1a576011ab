"""Test between which decode workers sequences should move, and which of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import Incarnation, JobKey, RequestId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.rebalance import MovableSequence, Rebalancing
from tandem.routing.worker_view import Pair, WorkerView

NO_TARGETS: Mapping[Lane, float] = {}
COST = StepCost(4e-3, 1e-5, 1e-4, 1e-8, 0.0)
RULES = Rebalancing(NO_TARGETS, 0.1, LinkBandwidth())


def view(name: str, num_running: int, num_held: int | None = None, num_blocks: int = 1000) -> WorkerView:
    """Return a decode worker with sequences of ten blocks each, unless `num_held` blocks are given."""
    num_free = num_blocks - (10 * num_running if num_held is None else num_held)
    seqs = (num_running, 0, 0)
    load = WorkerLoad(num_running=num_running, num_blocks=num_blocks, num_free_blocks=num_free, lane_seqs=seqs)
    ref = WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1")
    return WorkerView(ref, "decode", "m", "f", load, step_cost=COST, block_size=16, block_bytes=1 << 16)


def pairs(
    *views: WorkerView,
    targets_s: Mapping[Lane, float] = NO_TARGETS,
    min_gain: float = 0.1,
    excluded: Set[Pair] = frozenset(),
) -> list[tuple[str, str]]:
    """Return for each slow worker, slowest first, its name and that of the worker to which a sequence should move."""
    rules = Rebalancing(targets_s, min_gain, LinkBandwidth())
    moves = [rules.plan(one, [sequence("r")], frozenset(), excluded) for one in rules.slow_workers(views, excluded)]
    return [(move.source.id, move.target.id) for move in moves if move is not None]


def sequence(name: str, num_context: int = 160, num_left: int = 1000, lane: Lane = Lane.INTERACTIVE) -> MovableSequence:
    return MovableSequence(JobKey(RequestId(name), 1), lane, num_context, num_left)


def test_a_sequence_should_move_from_the_slowest_worker_to_the_fastest() -> None:
    assert pairs(view("a", 12), view("b", 64), view("c", 4)) == [("b", "c"), ("a", "c")]
    assert pairs(view("a", 64), view("b", 60), view("c", 4), view("d", 2)) == [("a", "d"), ("b", "d")]


def test_workers_of_similar_speed_keep_their_sequences() -> None:
    assert pairs(view("a", 20), view("b", 18)) == []
    assert pairs(view("a", 20), view("b", 18), min_gain=0.01) == [("a", "b")]
    assert pairs(view("a", 20), view("b", 19), min_gain=0.01) == [], "after the move it would be the slower one"


def test_sequences_that_were_sent_to_a_worker_count_there() -> None:
    assert pairs(view("a", 64), replace(view("b", 4), num_inflight=60)) == []


def test_long_contexts_slow_a_worker_down() -> None:
    slow = replace(COST, decode_context_s=1e-6)
    views = [replace(view("a", 10, 900), step_cost=slow), replace(view("b", 10, 10), step_cost=slow)]
    assert pairs(*views) == [("a", "b")]


@pytest.mark.parametrize(
    ("changes"), [{"fingerprint": "other"}, {"model": "other"}, {"pool": "prefill"}, {"block_size": 0}]
)
def test_sequences_move_only_to_decode_workers_of_the_same_model_build(changes: dict[str, object]) -> None:
    assert pairs(view("a", 64), replace(view("b", 1), **changes)) == []  # type: ignore[arg-type]


def test_an_excluded_pair_is_not_used_in_this_direction() -> None:
    a, b, c = view("a", 64), view("b", 2), view("c", 4)
    assert pairs(a, b, c, excluded={(a.ref, b.ref)}) == [("a", "c")]
    assert pairs(a, b, excluded={(a.ref, b.ref)}) == [] and pairs(a, b, excluded={(b.ref, a.ref)}) == [("a", "b")]


def test_a_target_without_room_or_that_is_busy_leaves_its_place_to_the_next() -> None:
    full, other = view("b", 2, num_held=1000), view("c", 4)
    assert pairs(view("a", 64), full, other) == [("a", "c")]
    assert planned(sequence("r"), others=(view("b", 2), other), busy={view("b", 2).ref}) == ("r", "c")


def test_a_worker_of_unknown_speed_counts_as_fast_as_the_source_and_is_no_source() -> None:
    assert pairs(view("a", 64), replace(view("b", 0), step_cost=COST.scaled(9.0))) == [("a", "b")]
    assert pairs(view("a", 64), replace(view("b", 1), step_cost=COST.scaled(9.0))) == []
    unknown = replace(view("b", 2), step_cost=None)
    assert pairs(view("a", 64), unknown) == [("a", "b")]
    assert pairs(view("a", 2), replace(view("b", 64), step_cost=None)) == []
    assert pairs(replace(view("a", 64), step_cost=None), unknown) == []


def test_a_single_sequence_stays_where_it_is() -> None:
    slow = replace(view("a", 1), step_cost=COST.scaled(9.0))
    assert pairs(slow, view("b", 0)) == []


def test_with_an_itl_target_only_a_worker_that_exceeds_it_is_a_source() -> None:
    a, b = view("a", 30), view("b", 1)  # 7 ms and 4 ms
    assert pairs(a, b, targets_s={Lane.INTERACTIVE: 8e-3}) == []
    assert pairs(a, b, targets_s={Lane.INTERACTIVE: 6e-3}) == [("a", "b")]
    assert pairs(a, b, targets_s={Lane.BATCH: 8e-3}) == [("a", "b")], "no lane that the worker decodes has a target"


@given(
    nums=st.lists(st.integers(0, 60), min_size=2, max_size=6),
    min_gain=st.floats(0.01, 0.5),
    factors=st.lists(st.floats(0.2, 5.0), min_size=6, max_size=6),
)
def test_a_moved_sequence_does_not_move_back(nums: list[int], min_gain: float, factors: list[float]) -> None:
    """Sequences of equal length move one at a time as long as any should, and no pair of workers exchanges them."""
    rules = Rebalancing(NO_TARGETS, min_gain, LinkBandwidth())
    seen: set[tuple[str, str]] = set()
    nums = list(nums)
    for _ in range(sum(nums) + 1):
        views = [
            replace(view(f"w{i}", num, num_blocks=10_000), step_cost=COST.scaled(factor))
            for i, (num, factor) in enumerate(zip(nums, factors, strict=False))
        ]
        slow = rules.slow_workers(views)
        if not slow:
            return
        move = rules.plan(slow[0], [sequence("r")], frozenset(), frozenset())
        assert move is not None
        before_ms, after_ms = map(float, re.findall(r"([\d.]+) ms", move.why))
        assert after_ms <= before_ms
        source, target = move.source.id, move.target.id
        assert (target, source) not in seen or nums[int(target[1:])] == 0, "only an idle worker's speed is not known"
        seen.add((source, target))
        nums[int(source[1:])] -= 1
        nums[int(target[1:])] += 1
    raise AssertionError("sequences move for ever")


def planned(
    *sequences: MovableSequence, others: Sequence[WorkerView] = (), busy: Set[WorkerRef] = frozenset()
) -> tuple[str, str] | None:
    """Return the sequence of a slow worker that moves, and the worker to which it moves."""
    slow, *_ = RULES.slow_workers([view("a", 64), *(others or [view("b", 2)])])
    move = RULES.plan(slow, sequences, busy, frozenset())
    return None if move is None else (move.key.request, move.target.id)


def chosen(*sequences: MovableSequence, target: WorkerView | None = None) -> str | None:
    found = planned(*sequences, others=() if target is None else (target,))
    return None if found is None else found[0]


def test_the_least_urgent_lane_moves_first_and_in_it_the_shortest_context() -> None:
    urgent = sequence("urgent", 10)
    long, short = sequence("long", 900, lane=Lane.BATCH), sequence("short", 90, lane=Lane.BATCH)
    assert chosen(urgent, long, short) == "short"
    assert chosen(urgent, long) == "long"
    assert chosen(urgent) == "urgent"
    assert chosen() is None


def test_sequences_move_only_to_workers_of_their_lane() -> None:
    batch_only = replace(view("b", 2), lanes=frozenset({Lane.BATCH}))
    assert pairs(view("a", 64), batch_only, view("c", 4)) == [("a", "c")], "the worker decodes interactive sequences"
    both = replace(view("a", 64), load=replace(view("a", 64).load, lane_seqs=(60, 0, 4)))
    (slow,) = RULES.slow_workers([both, batch_only])
    assert RULES.plan(slow, [sequence("urgent")], frozenset(), frozenset()) is None
    assert RULES.plan(slow, [sequence("r", lane=Lane.BATCH)], frozenset(), frozenset()) is not None


def test_workers_that_cannot_take_a_sequence_do_not_hide_those_that_can() -> None:
    others = [replace(view(f"b{i}", 0), lanes=frozenset({Lane.BATCH})) for i in range(9)]
    assert pairs(view("a", 64), *others, view("c", 4)) == [("a", "c")]
    unlinked = {(view("a", 64).ref, one.ref) for one in others}
    idle = [view(f"b{i}", 0) for i in range(9)]
    assert pairs(view("a", 64), *idle, view("c", 4), excluded=unlinked) == [("a", "c")]
    slow = [replace(view(f"s{i}", 2), step_cost=COST.scaled(9.0)) for i in range(9)]
    assert pairs(view("a", 64), *slow, view("c", 4)) == [(f"s{i}", "c") for i in range(9)] + [("a", "c")]


def test_a_sequence_that_ends_soon_does_not_move() -> None:
    assert chosen(sequence("r", num_left=19)) is None
    assert chosen(sequence("r", num_left=40)) == "r"


def test_a_copy_that_takes_long_is_not_worth_its_cost() -> None:
    (slow,) = RULES.slow_workers([replace(view("a", 64), block_bytes=1 << 34), view("b", 2)])
    assert RULES.plan(slow, [sequence("r", 160, 1000)], frozenset(), frozenset()) is None
    assert RULES.plan(slow, [sequence("r", 160, 100_000)], frozenset(), frozenset()) is not None


def test_the_target_must_have_room_for_the_context_and_some_output() -> None:
    tight = view("b", 2, num_held=980)
    assert chosen(sequence("r", num_context=160), target=tight) is None
    assert chosen(sequence("r", num_context=64), target=tight) == "r", "it plans for 256 more tokens"
    assert chosen(sequence("r", num_context=64), target=replace(tight, num_inflight=1)) is None


def resumed(*targets: WorkerView, targets_s: Mapping[Lane, float] = NO_TARGETS, num_context: int = 160) -> str | None:
    """Return the worker at which a batch sequence goes on that worker "a" has preempted."""
    rules = Rebalancing(targets_s, 0.1, LinkBandwidth())
    one = sequence("r", num_context, lane=Lane.BATCH)
    views = [replace(each, max_num_seqs=4) for each in targets]
    move = rules.plan_resume(view("a", 64), one, filter(rules.has_free_seat, views))
    return None if move is None else move.target.id


def test_a_preempted_sequence_goes_to_the_least_loaded_worker_with_a_seat_and_room() -> None:
    assert resumed(view("b", 3), view("c", 2), view("d", 4)) == "c"
    assert resumed(view("b", 4)) is None and resumed(view("b", 3, num_held=990)) is None


def test_a_preempted_sequence_does_not_lengthen_the_itl_of_others_beyond_their_target() -> None:
    # With one more sequence the step takes 4.3 ms on b and 4.4 ms on c.
    b, c = view("b", 2), view("c", 3)
    assert resumed(c, targets_s={Lane.INTERACTIVE: 4.35e-3}) is None
    assert resumed(b, c, targets_s={Lane.INTERACTIVE: 4.35e-3}) == "b"
    assert resumed(c, targets_s={Lane.BATCH: 4.35e-3}) == "c", "it decodes nothing of that lane"
    assert resumed(replace(c, step_cost=None), targets_s={Lane.INTERACTIVE: 1e-9}) == "c", "its speed is not known"


def test_a_preempted_sequence_does_not_go_where_prompts_wait() -> None:
    load = replace(view("b", 1).load, num_horizon_tokens=64, lane_tokens=(500, 500, 500), lane_longest=(100, 100, 100))
    assert resumed(replace(view("b", 1), load=load)) is None
