"""Whole simulated clusters: each request ends once, books balance, and equal seeds give equal runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tandem.core.config import Disaggregation, GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.cost.residuals import always
from tandem.workload.mix import RequestClass, poisson
from tests.simulation.clusters import LAPTOP, cluster, gpu_spec, handing_over, mix, run, slow_spec, traces_of

Workers = Sequence[tuple[WorkerSpec, int]]
SPLIT: Workers = ((slow_spec("prefill"), 1), (slow_spec("decode"), 2))
POOLS: dict[str, Workers] = {
    "one mixed": ((slow_spec(), 1),),
    "three mixed": ((slow_spec(), 3),),
    "split": SPLIT,
    "split and mixed": ((slow_spec("prefill"), 2), (slow_spec("decode"), 1), (slow_spec(), 1)),
    "little room": ((slow_spec("prefill", num_blocks=250), 1), (slow_spec("decode", num_blocks=250), 1)),
}


@pytest.mark.parametrize("name", POOLS)
def test_every_request_ends_well_and_the_books_balance(name: str) -> None:
    one, schedule = cluster(*POOLS[name]), mix(seed=1, count=40, rate=1.0)
    traces = run(one, schedule)
    assert [len(trace.token_times) for trace in traces] == [
        scheduled.request.sampling.max_tokens for scheduled in schedule
    ]
    has_split = any(kind.pool == "prefill" for kind, _ in POOLS[name])
    assert {trace.path for trace in traces} == {"remote" if has_split else "local"}
    assert (one.fabric.num_bytes > 0) == has_split


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    noisy = (
        (slow_spec("prefill", residuals=always(0.9, 1.0, 1.3)), 1),
        (slow_spec("decode", residuals=always(0.9, 1.1)), 1),
    )

    def outcome_of(workload: int, residuals: int) -> tuple[str, list[list[float]]]:
        one = cluster(*noisy, seed=residuals)
        traces = run(one, mix(seed=workload, count=12, rate=1.0))
        return one.digest, [trace.token_times for trace in traces]

    usual = outcome_of(1, 1)
    assert outcome_of(1, 1) == usual
    for other in (outcome_of(2, 1), outcome_of(1, 2)):
        assert other[0] != usual[0] and other[1] != usual[1]


def test_one_request_alone_takes_what_can_be_added_up() -> None:
    (scheduled,) = poisson([RequestClass("one", 1.0, (100, 100), (4, 4))], seed=1, count=1, rate=0.0)
    one = cluster((slow_spec(), 1), latency_s=0.01)
    (trace,) = run(one, [scheduled])
    chunk = LAPTOP.base_s + LAPTOP.chunk_s(0, 100)
    steps = [LAPTOP.base_s + LAPTOP.decode_seq_s + LAPTOP.decode_context_s * (100 + i) for i in (1, 2, 3)]
    assert trace.ttft_s == pytest.approx(0.02 + chunk), "to the worker and back"
    assert trace.gaps_s == pytest.approx(steps)


def test_a_client_that_goes_leaves_nothing_behind() -> None:
    schedule = mix(seed=4, count=40, rate=2.0)
    gone = {scheduled.request.id: scheduled.due_s + 0.05 * i for i, scheduled in enumerate(schedule) if i % 2}
    one = cluster(*SPLIT)
    traces = traces_of(one, schedule, [(time, request) for request, time in gone.items()])
    ended = {trace.id: trace for trace in traces}
    cut = [r for r in gone if not ended[r].is_complete]
    assert len(cut) > 10
    assert {_kind(ended[r]) for r in cut} == {ErrorKind.CANCELLED}
    assert all(ended[r].ended_at == pytest.approx(gone[r]) for r in cut)
    assert all(trace.is_complete for trace in traces if trace.id not in gone)


def test_a_full_queue_refuses_and_an_endless_wait_ends() -> None:
    pair = (slow_spec("prefill", num_blocks=200), 1), (slow_spec("decode", num_blocks=200), 1)
    one = cluster(*pair, gateway=GatewayConfig(max_queued=8, queue_timeout_s=3.0))
    traces = traces_of(one, mix(seed=5, count=80, rate=10.0))
    kinds = [_kind(trace) for trace in traces]
    assert set(kinds) == {None, ErrorKind.OVERLOADED, ErrorKind.NO_WORKER}
    waited = [t.ended_at - t.due_s for t in traces if _kind(t) is ErrorKind.NO_WORKER]
    assert all(3.0 <= seconds < 3.1 for seconds in waited)


@pytest.mark.parametrize(("mode", "kinds"), [("strict", {ErrorKind.KV_LOST, ErrorKind.NO_WORKER}), ("prefer", {None})])
def test_a_link_too_slow_for_its_reads_fails_them_loudly(mode: Disaggregation, kinds: set[ErrorKind | None]) -> None:
    """Reads that outlast every deadline are torn down with their peer; blocks come back all the same. Where a request
    need not be split it is computed in one place then."""
    config = handing_over(pull_timeout_s=0.5, drain_timeout_s=0.5, lease_s=1.0)
    prefill = slow_spec("prefill", bandwidth=1e5, config=config)
    gateway = GatewayConfig(disaggregation=mode)
    one = cluster((prefill, 1), (slow_spec("decode", bandwidth=1e5, config=config), 1), gateway=gateway)
    traces = traces_of(one, mix(seed=6, count=6, rate=1.0))
    assert {_kind(trace) for trace in traces} <= kinds
    assert one.fabric.num_bytes == 0, "no read came to its end"


def test_a_read_longer_than_a_lease_is_renewed() -> None:
    config = handing_over(lease_s=1.0)
    pair = (slow_spec("prefill", bandwidth=2e6, config=config), 1), (slow_spec("decode", config=config), 1)
    traces = run(cluster(*pair), poisson([RequestClass("one", 1.0, (400, 400), (4, 4))], seed=1, count=3, rate=0.0))
    # 25 blocks of 368,640 bytes take 4.6 s alone.
    assert all(trace.gaps_s[0] > 4.0 for trace in traces)


def test_without_any_worker_for_it_a_request_is_refused_in_time() -> None:
    one = cluster((slow_spec("decode"), 1), gateway=GatewayConfig(disaggregation="strict", queue_timeout_s=2.0))
    traces = traces_of(one, mix(seed=7, count=3, rate=0.0))
    assert {_kind(trace) for trace in traces} == {ErrorKind.NO_WORKER}
    assert all(2.0 <= trace.ended_at < 2.2 for trace in traces)


def test_a_burst_does_not_herd_onto_one_worker() -> None:
    """Two steps of prompts beside the longest go to each before any has answered: what is on its way counts."""
    one = cluster((slow_spec(), 3), latency_s=0.1)
    run(one, poisson([RequestClass("one", 1.0, (200, 200), (2, 2))], seed=1, count=18, rate=0.0))
    assert [worker.num_prefill_tokens for worker in one.workers] == [1200] * 3


def test_chunks_shorten_the_worst_wait_of_those_who_decode() -> None:
    def worst_gap(is_chunked: bool) -> float:
        one = cluster((gpu_spec(enable_chunked_prefill=is_chunked, max_num_batched_tokens=512), 1))
        traces = run(one, mix(seed=8, count=60, rate=12.0))
        return max(gap for trace in traces for gap in trace.gaps_s)

    assert worst_gap(is_chunked=True) < 0.5 * worst_gap(is_chunked=False)


def test_a_prefill_pool_keeps_prompts_away_from_those_who_decode() -> None:
    def worst_gap(*workers: tuple[WorkerSpec, int]) -> float:
        # The second token waits for the KV; what a prompt does to a stream shows later.
        traces = run(cluster(*workers), mix(seed=8, count=60, rate=20.0))
        return max(gap for trace in traces for gap in trace.gaps_s[1:])

    assert worst_gap((gpu_spec("prefill"), 1), (gpu_spec("decode"), 1)) < 0.5 * worst_gap((gpu_spec(), 2))


def test_a_saturated_worker_decodes_as_fast_as_its_model_allows() -> None:
    """64 sequences at once: the steps' time is what the model says, and hardly anything is lost between them."""
    group = RequestClass("decode", 1.0, (16, 16), (400, 400))
    one = cluster((slow_spec(), 1), latency_s=1e-3)
    run(one, poisson([group], seed=9, count=64, rate=0.0))
    (worker,) = one.workers
    contexts = 64 * sum(16 + i for i in range(1, 400))
    decode_s = 399 * LAPTOP.base_s + 64 * 399 * LAPTOP.decode_seq_s + LAPTOP.decode_context_s * contexts
    prefill_s = LAPTOP.base_s + 64 * LAPTOP.chunk_s(0, 16)
    assert one.now == pytest.approx(decode_s + prefill_s, rel=0.02)
    assert worker.busy_s / one.now > 0.99
    assert (worker.num_prefill_tokens, worker.num_decode_tokens) == (64 * 16, 64 * 399)


def test_steps_that_are_alike_are_one_event_and_the_run_is_the_same() -> None:
    def outcome_of(max_run: int) -> tuple[str, list[list[float]], int]:
        kinds = (slow_spec("prefill", max_run=max_run), 1), (slow_spec("decode", max_run=max_run), 2)
        one = cluster(*kinds)
        traces = run(one, poisson([RequestClass("one", 1.0, (100, 300), (100, 200))], seed=2, count=12, rate=0.5))
        return one.digest, [list(trace.token_times) for trace in traces], one.num_events

    single, many = outcome_of(max_run=1), outcome_of(max_run=64)
    assert many[:2] == single[:2]
    assert many[2] < 0.25 * single[2]


def test_check_reports_what_is_still_open() -> None:
    one = cluster((slow_spec(), 1))
    one._gateways[0].open(mix(seed=1, count=1, rate=0.0)[0], lambda trace: None)
    one._agenda.run(until=0.1)
    with pytest.raises(AssertionError, match="1 requests have no end"):
        one.check()


def test_a_second_end_is_an_error() -> None:
    (scheduled,) = mix(seed=1, count=1, rate=0.0)
    trace = ClientTrace(scheduled)
    trace.end(TandemError(ErrorKind.CANCELLED, "gone"), 1.0)
    with pytest.raises(RuntimeError, match="ended twice"):
        trace.end(TandemError(ErrorKind.CANCELLED, "gone"), 2.0)


def _kind(trace: ClientTrace) -> ErrorKind | None:
    assert trace.outcome is not None, trace.id
    return None if isinstance(trace.outcome, Finished) else trace.outcome.kind
