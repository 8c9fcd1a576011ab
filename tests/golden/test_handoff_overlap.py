"""Test the timing of a handoff: the first token does not wait for KV, and KV moves while the prompt is computed."""

from __future__ import annotations

import pytest

from tandem.core.events import Finished
from tandem.core.request import SamplingParams
from tests.golden.cluster import Cluster, Knobs
from tests.golden.conftest import TinyModels

_PROMPT = [i % 251 for i in range(400)]
_GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def test_first_token_leaves_the_prefill_worker_while_no_kv_has_moved(tiny: TinyModels) -> None:
    reference = tiny("llama", "float64")
    with Cluster([reference.executor(), reference.executor()], Knobs(remote=True)) as cluster:
        cluster.hold = True
        name = cluster.submit(_PROMPT, _GREEDY)
        for _ in range(20):
            cluster.step()
        outcome = cluster.outcomes[name]
        assert outcome.ids == reference.greedy(_PROMPT, 1) and outcome.first_from == "p"
        assert outcome.pulled is None and cluster.consumer.engine.books().num_reading_blocks > 0
        cluster.hold = False
        cluster.run()
        assert outcome.ids == reference.greedy(_PROMPT, 4)


@pytest.mark.parametrize(("num_tokens", "chunk"), [(400, 16), (400, 64), (400, 128), (4096, 512), (4095, 512)])
def test_what_is_left_after_the_last_chunk_is_that_chunk_and_one_block_at_most(
    tiny: TinyModels, num_tokens: int, chunk: int
) -> None:
    reference = tiny("llama-long", "float32")
    executors = [reference.executor(num_blocks=260), reference.executor(num_blocks=260)]
    with Cluster(executors, Knobs(remote=True, chunk=chunk)) as cluster:
        name = cluster.submit([i % 251 for i in range(num_tokens)], _GREEDY)
        cluster.run()
        pulled = cluster.outcomes[name].pulled
    block, num_blocks = executors[0].layout.block_bytes, -(-num_tokens // 16)
    assert pulled is not None and pulled.num_blocks == num_blocks and pulled.num_bytes == num_blocks * block
    assert 0 < pulled.num_exposed_bytes <= (chunk // 16 + 1) * block


def test_only_blocks_that_the_consumer_lacks_are_read(tiny: TinyModels) -> None:
    reference = tiny("llama", "float64")
    with Cluster([reference.executor(), reference.executor()], Knobs(remote=True)) as cluster:
        first = cluster.submit(_PROMPT[:160], _GREEDY)
        cluster.run()
        second = cluster.submit(_PROMPT, _GREEDY)
        cluster.run()
        one, two = cluster.outcomes[first].pulled, cluster.outcomes[second].pulled
    assert one is not None and one.num_blocks == 10
    assert two is not None and two.num_blocks == 15 and two.num_cached_tokens == 160
    end = cluster.outcomes[second].end
    assert isinstance(end, Finished)


def test_cancel_in_the_middle_of_a_transfer_gives_everything_back(tiny: TinyModels) -> None:
    reference = tiny("llama", "float64")
    with Cluster([reference.executor(), reference.executor()], Knobs(remote=True)) as cluster:
        cluster.hold = True
        name = cluster.submit(_PROMPT, _GREEDY)
        for _ in range(3):
            cluster.step()
        cluster.cancel(name)
        consumer = cluster.consumer.engine.books()
        assert consumer.num_reading_blocks > 0 and consumer.num_table_blocks == 0, (
            "only blocks under a read are still held"
        )
        assert cluster.producer.engine.books().num_leased_blocks == 0
        cluster.hold = False
        cluster.run()
        assert cluster.consumer.engine.books().num_free_blocks == cluster.consumer.engine.books().num_blocks
