"""Conversations that go to another worker at every turn, which reads what the last one has cached of them: the tokens
are transformers', whatever was read, was gone by then, or found no room."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tandem.core.events import Finished
from tandem.core.ids import HandoffId, RequestId
from tandem.core.request import GenerateJob, RemotePrefix, Request, SamplingParams
from tandem.engine.transfer_messages import ConnectPeer
from tests.covering import covering
from tests.golden.cluster import Cluster, Knobs, Outcome, executors_for
from tests.golden.conftest import TinyModels
from tests.golden.models import Reference
from tests.golden.talks import LONGEST, NUM_OUTPUTS, turns_of

_GREEDY = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0)


@dataclass(frozen=True, slots=True)
class _Case:
    """`num_spare`: blocks beside those of the longest conversation; None: room for all of them."""

    knobs: Knobs
    num_spare: int | None = None
    num_host_slots: int = 0

    def __str__(self) -> str:
        return f"{self.knobs}-spare{self.num_spare}-host{self.num_host_slots}"


_PRODUCT = [
    _Case(Knobs(chunk=chunk, block_size=block_size, plan_depth=depth, company=company), num_spare, num_host_slots)
    for chunk, block_size, depth, company, (num_spare, num_host_slots) in itertools.product(
        (16, None), (8, 16), (1, 2), (False, True), ((None, 0), (2, 0), (2, 8), (12, 64))
    )
]


class Consumers(Cluster):
    """Two workers that read from each other."""

    def connect(self) -> None:
        for producer, consumer in (self.nodes, self.nodes[::-1]):
            if consumer is not self.consumer:
                consumer.carrier.accept(ConnectPeer(producer.transport.describe(producer.ref)))

    def prefix_request(self, turn: int, prompt: Sequence[int]) -> RequestId:
        """At the worker whose turn it is, from the one before."""
        node, source = self.nodes[turn % 2], self.nodes[1 - turn % 2]
        name = RequestId(f"r{next(self._ids)}")
        self.outcomes[name] = Outcome()
        num_blocks = max(1, len(prompt) // self.knobs.block_size)
        job = GenerateJob(
            request=Request(id=name, model="m", prompt_tokens=tuple(prompt), sampling=_GREEDY),
            attempt=1,
            prefix=RemotePrefix(handoff=HandoffId(f"loan-{name}"), source=source.ref, num_blocks=num_blocks),
        )
        self.place(node, job)
        return name


def _check(reference: Reference, case: _Case) -> None:
    size = case.knobs.block_size
    longest = -(-LONGEST // size)
    num_blocks = 4 * longest if case.num_spare is None else longest + case.num_spare
    executors = executors_for(reference, case.knobs, num_blocks, num_nodes=2, num_host_slots=case.num_host_slots)
    with Consumers(executors, case.knobs) as cluster:
        cluster.connect()
        for turn, chats in enumerate(turns_of(reference)):
            names = []
            for prompt, _ in chats:
                names.append(cluster.prefix_request(turn, prompt))
                if not case.knobs.company:
                    cluster.run()
            cluster.run()
            for name, (prompt, answer) in zip(names, chats, strict=True):
                outcome = cluster.outcomes[name]
                assert outcome.ids == answer and isinstance(outcome.end, Finished), f"{prompt} at turn {turn}"
                if turn and case.num_spare is None:
                    # All that the last turn computed: its prompt, and its answer but for the last token.
                    num_there = (len(chats[0][0]) - 7 - 1) // size
                    assert outcome.pulled is not None, f"nothing was read at turn {turn}"
                    assert outcome.end.num_cached_tokens >= num_there * size
        assert sum(node.engine.load().num_remote_hit_tokens for node in cluster.nodes) > 0
        for node in cluster.nodes:
            books = node.engine.books()
            assert books.num_free_blocks == books.num_blocks and not books.num_leases and not books.num_pulls


@pytest.mark.parametrize("case", covering(_PRODUCT), ids=str)
def test_float64_tokens_equal_transformers(tiny: TinyModels, case: _Case) -> None:
    _check(tiny("llama", "float64"), case)


def test_a_device_s_digests_are_right_while_steps_overlap(tiny: TinyModels) -> None:
    knobs = Knobs(chunk=16, block_size=8, plan_depth=2, company=True, on_device=True)
    _check(tiny("llama", "float64"), _Case(knobs))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", _PRODUCT, ids=str)
def test_float64_tokens_equal_transformers_over_the_product(tiny: TinyModels, case: _Case) -> None:
    _check(tiny("qwen3", "float64"), case)


def test_over_nixl_compiled_kernels_read_fetched_prefixes(tiny: TinyModels) -> None:
    _check(tiny("llama", "float32"), _Case(Knobs(chunk=16, transport="nixl", company=True)))
