"""Whatever the cluster, the load and the deadlines: every request ends once, all books balance, and the same again is
the same run; never one chosen by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.config import Config, Disaggregation, EngineConfig, GatewayConfig, HandoffConfig, Pool
from tandem.core.events import Finished
from tandem.core.ids import RequestId
from tandem.core.lane import ALL_LANES, Lane
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.cost.residuals import NONE, always
from tandem.workload.mix import RequestClass, poisson
from tests.effort import effort
from tests.simulation.clusters import slow_spec, traces_of

GROUPS = (
    RequestClass("short", 0.7, (1, 60), (1, 40)),
    RequestClass("long", 0.3, (100, 400), (1, 40), lane=Lane.BATCH),
)
NUM_REQUESTS = 25


def specs() -> st.SearchStrategy[WorkerSpec]:
    """Tight in every way: pools that hold one or two prompts, links that move a block in 4 ms or in 4 s."""
    engine = st.builds(
        EngineConfig,
        max_num_batched_tokens=st.sampled_from([64, 512]),
        max_num_seqs=st.sampled_from([2, 32]),
        enable_chunked_prefill=st.booleans(),
    )
    handoff = st.builds(
        HandoffConfig,
        lease_s=st.sampled_from([0.5, 10.0]),
        pull_timeout_s=st.sampled_from([0.5, 30.0]),
        drain_timeout_s=st.sampled_from([0.5, 10.0]),
    )
    base = slow_spec()
    return st.builds(
        lambda engine, handoff, num_blocks, bandwidth, residuals: replace(
            base,
            config=Config(engine=engine, handoff=handoff),
            num_blocks=num_blocks,
            bandwidth=bandwidth,
            residuals=residuals,
        ),
        engine,
        handoff,
        st.sampled_from([30, 60, 2000]),
        st.sampled_from([1e5, 1e8]),
        st.sampled_from([NONE, always(0.5, 1.0, 3.0)]),
    )


def pools() -> st.SearchStrategy[list[Pool]]:
    kinds: st.SearchStrategy[Pool] = st.sampled_from(["prefill", "decode", "mixed"])
    return st.lists(kinds, min_size=1, max_size=4)


def lanes() -> st.SearchStrategy[list[frozenset[Lane]]]:
    """Draw the lanes of each of up to four workers."""
    sets = st.sampled_from([ALL_LANES, ALL_LANES, frozenset({Lane.BATCH}), frozenset({Lane.INTERACTIVE})])
    return st.lists(sets, min_size=4, max_size=4)


def seen(trace: ClientTrace) -> tuple[object, ...]:
    """All that a client sees; errors have no equality of their own."""
    return trace.id, trace.path, repr(trace.outcome), trace.ended_at, list(trace.token_times)


@effort(16)
@given(
    spec=specs(),
    labels=pools(),
    served=lanes(),
    gateway=st.builds(
        GatewayConfig,
        disaggregation=st.sampled_from(["off", "prefer", "strict"]),
        queue_timeout_s=st.sampled_from([1.0, 60.0]),
        progress_timeout_s=st.sampled_from([2.0, 120.0]),
        max_queued=st.sampled_from([3, 1024]),
    ),
    rate=st.sampled_from([0.0, 2.0, 20.0]),
    latency_s=st.sampled_from([0.0, 1e-3, 0.3]),
    closed=st.lists(st.tuples(st.floats(0.0, 8.0), st.integers(0, NUM_REQUESTS - 1)), max_size=6),
    seed=st.integers(0, 5),
    max_run=st.integers(2, 9),
)
def test_every_request_ends_once_and_nothing_is_left(
    spec: WorkerSpec,
    labels: list[Pool],
    served: list[frozenset[Lane]],
    gateway: GatewayConfig,
    rate: float,
    latency_s: float,
    closed: list[tuple[float, int]],
    seed: int,
    max_run: int,
) -> None:

    def run(max_run: int) -> tuple[str, list[ClientTrace]]:
        kinds = zip(labels, served, strict=False)
        workers = tuple((replace(spec, pool=pool, lanes=lanes, max_run=max_run), 1) for pool, lanes in kinds)
        one = SimCluster(ClusterSpec(workers=workers, gateway=gateway, latency_s=latency_s, seed=seed))
        traces = traces_of(one, poisson(GROUPS, seed, NUM_REQUESTS, rate), [(t, RequestId(f"r{n}")) for t, n in closed])
        return one.digest, traces

    digest, traces = run(max_run=64)
    assert [trace.id for trace in traces] == [f"r{n}" for n in range(NUM_REQUESTS)]
    for trace in traces:
        assert trace.outcome is not None, trace.id
        assert len(trace.token_times) <= trace.max_tokens
        assert trace.is_complete or not isinstance(trace.outcome, Finished), "it finished without all its tokens"
    single, alone = run(max_run=1)
    assert [seen(trace) for trace in traces] == [seen(trace) for trace in alone]
    assert run(max_run=max_run)[0] == single == digest


@pytest.mark.parametrize("num_gateways", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_requests_that_need_room_on_each_other_s_workers_do_not_refuse_each_other_for_ever(
    seed: int, num_gateways: int
) -> None:
    """Each of two workers refuses a prompt while a request in the other direction has room reserved there."""
    tight = EngineConfig(max_num_batched_tokens=64, max_num_seqs=2, enable_chunked_prefill=False)
    spec = slow_spec(config=Config(engine=tight), num_blocks=30, bandwidth=1e8)
    gateway = GatewayConfig(disaggregation="strict")
    one = SimCluster(ClusterSpec(workers=((spec, 2),), gateway=gateway, latency_s=0.3, num_gateways=num_gateways))
    traces = traces_of(one, poisson(GROUPS, seed, NUM_REQUESTS, rate=0.0))
    assert all(trace.is_complete for trace in traces), [t.outcome for t in traces if not t.is_complete]


@pytest.mark.parametrize("max_run", [2, 64])
def test_how_far_workers_look_ahead_does_not_show_in_what_routers_know_of_their_steps(max_run: int) -> None:
    config = Config(engine=EngineConfig(max_num_batched_tokens=64, max_num_seqs=2))
    spec = slow_spec(config=config, num_blocks=60, residuals=always(0.5, 1.0, 3.0))

    def run(max_run: int) -> str:
        workers = ((replace(spec, max_run=max_run), 4),)
        one = SimCluster(ClusterSpec(workers=workers, gateway=GatewayConfig(disaggregation="off"), latency_s=0.0))
        traces_of(one, poisson(GROUPS, 0, NUM_REQUESTS, rate=20.0))
        return one.digest

    assert run(max_run) == run(1)


@effort(24)
@given(
    spec=specs(),
    labels=pools(),
    policy=st.sampled_from(["off", "prefer", "strict"]),
    rate=st.sampled_from([0.0, 2.0, 20.0]),
    latency_s=st.sampled_from([0.0, 1e-3, 0.3]),
    seed=st.integers(0, 5),
)
def test_with_time_enough_whatever_can_be_placed_ends_well(
    spec: WorkerSpec, labels: list[Pool], policy: Disaggregation, rate: float, latency_s: float, seed: int
) -> None:
    patient = replace(spec, bandwidth=1e8, config=replace(spec.config, handoff=HandoffConfig()))
    workers = tuple((replace(patient, pool=label), 1) for label in labels)
    one = SimCluster(ClusterSpec(workers=workers, gateway=GatewayConfig(disaggregation=policy), latency_s=latency_s))
    traces = traces_of(one, poisson(GROUPS, seed, NUM_REQUESTS, rate))
    pairs = [(p, d) for p, d in permutations(labels, 2) if p != "decode" and d != "prefill"]
    can_be_placed = policy != "strict" or bool(pairs)
    assert {trace.is_complete for trace in traces} == {can_be_placed}, [t.outcome for t in traces if not t.is_complete]
