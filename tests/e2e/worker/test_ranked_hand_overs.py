"""Test hand-offs between a worker of two ranks and one of one rank: the tokens of one worker, and clean ends when a
rank dies in the middle of a transfer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tandem.core.errors import ErrorKind
from tandem.core.events import Failed, Finished
from tandem.core.ids import JobKey
from tandem.core.request import Request
from tests.e2e.client import Client, hand_over, settled
from tests.e2e.cluster import WorkerProcess
from tests.e2e.gateway.test_ranks import follower_of
from tests.e2e.worker.conftest import Start
from tests.e2e.worker.test_two_workers import fresh_request, half_computed, in_one_place

# `make test` has the hand-offs of ranks in tests/golden, and their processes in e2e/gateway/test_ranks.py.
pytestmark = pytest.mark.nightly


@pytest.fixture(params=["local", "nixl", "tcp"])
def pair(request: pytest.FixtureRequest, start: Start) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """Start a worker of one rank, and one of two."""
    kind = request.param
    patient = ("--lease-s", "5", "--pull-timeout-s", "10")  # two ranks and a test share two cores with other tests
    one = start(f"one-{kind}", "mixed", kind, *patient)
    workers = one, start(f"two-{kind}", "mixed", kind, "--tensor-parallel", "2", *patient)
    for worker in workers:
        worker.wait_ready()
    yield workers
    for worker in workers:
        worker.stop()


async def handed_over(producer: Client, consumer: Client, num_prompt: int) -> tuple[Request, JobKey]:
    """Hand over a request until it finishes, and return it. Like a gateway this tries again where a rank does not open
    its connection in time, because three ranks and other tests share two cores."""
    for _ in range(3):
        request = fresh_request(num_prompt, 16)
        key, _ = await hand_over(producer, consumer, request)
        end = await consumer.end_of(key)
        if isinstance(end, Finished):
            break
        assert isinstance(end, Failed) and "the other side closed the connection" in end.message, end
    assert isinstance(end, Finished), end
    return request, key


async def test_tokens_are_the_same_in_both_directions(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    one, two = pair
    async with Client(one.ref) as single, Client(two.ref) as ranked:
        for producer, consumer in ((ranked, single), (single, ranked)):
            for num_prompt in (3, 100, 700):
                request, key = await handed_over(producer, consumer, num_prompt)
                pulled = consumer.pulled(key)
                assert pulled is not None and pulled.num_blocks == -(-num_prompt // 16)
                assert consumer.tokens(key) == await in_one_place(single, request)
            await settled(producer, consumer)
        key, _ = await hand_over(ranked, single, fresh_request(3000, 8))
        await half_computed(ranked)
        os.kill(follower_of(two), signal.SIGKILL)
        await single.failure(key, ErrorKind.KV_LOST)
        await single.settled()
    assert two.wait() == 1 and one.stop() == 0
