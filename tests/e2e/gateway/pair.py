"""Run a prefill and a decode worker on a tiny model behind two gateways for most tests of real processes."""

from __future__ import annotations

from dataclasses import dataclass

from tests.e2e.gateway.http import Answer, completion, send
from tests.e2e.gateway.processes import Cluster, Gateway, Worker, until

NUM_SEQS = 8
SETTINGS = (
    # Capacity for all prompts of a session's tests: some count what their prompts leave in the cache.
    *("--served-model-name", "tiny,org/alias", "--transfer-backend", "local", "--kv-cache-memory", "128MiB"),
    # Small steps: a long prompt is in the middle of its prefill for a second.
    *("--max-num-batched-tokens", "64", "--max-num-seqs", str(NUM_SEQS)),
    *("--worker-timeout-s", "3", "--lease-s", "3", "--gateway-grace-s", "3", "--worker-drain-s", "10"),
)


@dataclass(slots=True)
class Pair:
    """Own a prefill and a decode worker behind two gateways: one that disaggregates requests and one that does not."""

    cluster: Cluster
    prefill: Worker
    decode: Worker
    gateway: Gateway
    whole: Gateway

    def wait_idle(self) -> None:
        """Wait until no block, lease, pull or sequence is held anywhere."""
        for worker in (self.prefill, self.decode):
            until(worker.is_idle, f"an idle {worker.name}: {worker.books()}")

    def complete(self, length: int, salt: int, max_tokens: int = 8, *, split: bool = True) -> Answer:
        gateway = self.gateway if split else self.whole
        return send(gateway.url, completion(length, salt, max_tokens))

    def is_pulling(self) -> bool:
        """Return whether KV moves to the decode worker."""
        books = self.decode.books()
        return books.num_pulls > 0 and books.num_free_blocks < books.num_blocks

    def wait_serving(self) -> None:
        """Wait until a request uses both workers, or the decode worker alone."""
        self.gateway.wait_serving()
        until(lambda: self.complete(4, 0).path == "remote", "a request that is split")
        self.whole.wait_serving()
        # Before its handshake with the decode worker this gateway uses the prefill worker alone.
        until(
            lambda: self.complete(40, 9, split=False) and self.decode.books().num_cached_blocks > 1, "one that is not"
        )


def start_pair(running: Cluster) -> Pair:
    prefill, decode = running.worker("p", "prefill"), running.worker("d", "decode")
    gateway, whole = running.gateway("gateway"), running.gateway("whole", "--disaggregation", "off")
    for program in running.programs:
        program.wait_ready()
    pair = Pair(running, prefill, decode, gateway, whole)
    pair.wait_serving()
    return pair
