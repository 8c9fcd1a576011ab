"""Test that an answer that was preempted on one worker continues on another one as soon as that has room."""

from __future__ import annotations

import pytest

from tandem.core.config import Config, EngineConfig, GatewayConfig
from tandem.core.lane import Lane
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tests.simulation.clusters import cluster, run, scheduled, slow_spec

NUM_PROMPT = 800


def answers(rebalance: str, pool: str) -> tuple[SimCluster, list[ClientTrace]]:
    """Let two batch answers take the only seats of two workers, and then a long interactive one preempt one of them."""
    config = Config(engine=EngineConfig(max_num_seqs=1, block_size=16))
    workers = [(slow_spec("mixed", config=config), 2)]
    if pool == "decode":
        workers = [(slow_spec("prefill", config=config), 1), (slow_spec("decode", config=config), 2)]
    one = cluster(*workers, gateway=GatewayConfig(rebalance=rebalance))  # type: ignore[arg-type]
    sent = [(0.0, Lane.BATCH, 200), (0.1, Lane.BATCH, 200), (5.0, Lane.INTERACTIVE, 2000)]
    schedule = [
        scheduled(number, due_s, (number,) * NUM_PROMPT, num_tokens, lane=lane)
        for number, (due_s, lane, num_tokens) in enumerate(sent)
    ]
    return one, run(one, schedule)


@pytest.mark.parametrize("pool", ["mixed", "decode"])
def test_it_continues_with_its_kv_where_another_answer_has_ended(pool: str) -> None:
    waited, (*others, urgent) = answers("off", pool)
    assert max(trace.ended_at for trace in others) > urgent.ended_at
    moved, (*others, urgent) = answers("on", pool)
    first, second = sorted(others, key=lambda trace: trace.ended_at)
    assert first.ended_at < second.ended_at < first.ended_at + 8.0 < urgent.ended_at
    assert second.path.endswith(";retries=1")
    computed = [sum(worker.num_prefill_tokens for worker in one.workers) for one in (waited, moved)]
    assert computed[1] <= computed[0], "its KV was handed over"
