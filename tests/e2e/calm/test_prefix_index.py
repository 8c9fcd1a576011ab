"""Gateways learn through Redis what real workers hold: each alike, whenever it starts, and as the workers say."""

from __future__ import annotations

from tests.e2e.gateway.pair import Pair
from tests.e2e.gateway.processes import until

BLOCK_TOKENS = 16


def test_gateways_know_what_workers_hold_and_prompts_are_found_there(calm: Pair) -> None:
    """How many blocks workers hold in all is no test here: of one name they may hold several copies."""
    predicted, stale = "tandem_prefix_predicted_tokens_total", "tandem_prefix_stale_hit_tokens_total"
    before = calm.gateway.metrics()

    def is_predicted_whole() -> bool:
        """Ask again: its blocks reach the index one after the other."""
        nonlocal before
        before = calm.gateway.metrics()
        calm.complete(5 * BLOCK_TOKENS + 1, 7001, 1)
        return calm.gateway.metrics()[predicted] == before[predicted] + 5 * BLOCK_TOKENS

    until(is_predicted_whole, "all blocks of a prompt in the gateway's index")
    assert before["tandem_prefix_index_reachable"] == 1 and before["tandem_prefix_index_size_bytes"] > 0
    assert calm.gateway.metrics()[stale] == before[stale]
    late = calm.cluster.gateway("late")
    late.wait_serving()

    def is_alike() -> bool:
        here, there = late.metrics(), calm.gateway.metrics()
        names = ("tandem_prefix_index_workers", "tandem_prefix_index_blocks")
        return here[names[0]] == 2 and all(here[name] == there[name] for name in names)

    until(is_alike, "all blocks at a gateway that started late")
