"""Gateways learn through Redis what real workers hold: each alike, whenever it starts, and as the workers say."""

from __future__ import annotations

import httpx

from tests.e2e.gateway.conftest import Pair
from tests.e2e.gateway.processes import PATIENCE_S, Gateway, until

BLOCK_TOKENS = 16


def metrics(gateway: Gateway) -> dict[str, float]:
    text = httpx.get(f"{gateway.url}/metrics", timeout=PATIENCE_S, trust_env=False).text
    rows = (line.split() for line in text.splitlines() if line.startswith("tandem_prefix"))
    return {name: float(value) for name, value in rows}


def num_held(pair: Pair) -> int:
    """Blocks that can be found on the two workers."""
    return sum(worker.books().num_cached_blocks for worker in (pair.prefill, pair.decode))


def test_gateways_know_what_workers_hold_and_prompts_are_found_there(calm: Pair) -> None:
    calm.ask(5 * BLOCK_TOKENS + 1, 7001, 1)
    calm.wait_idle()

    def knows(gateway: Gateway) -> bool:
        told = metrics(gateway)
        return told["tandem_prefix_index_workers"] == 2 and told["tandem_prefix_index_blocks"] == num_held(calm)

    until(lambda: knows(calm.gateway), f"all blocks at the gateway: {metrics(calm.gateway)}")
    before = metrics(calm.gateway)
    assert before["tandem_prefix_index_reachable"] == 1 and before["tandem_prefix_index_bytes"] > 0
    calm.ask(5 * BLOCK_TOKENS + 1, 7001, 1)
    after = metrics(calm.gateway)
    predicted = "tandem_prefix_predicted_tokens_total"
    assert after[predicted] == before[predicted] + 5 * BLOCK_TOKENS
    assert after["tandem_prefix_missed_tokens_total"] == before["tandem_prefix_missed_tokens_total"]
    late = calm.cluster.gateway("late")
    late.wait_ready()
    until(lambda: knows(late), "all blocks at a gateway that started late")
