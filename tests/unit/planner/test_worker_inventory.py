"""Test that the planner uses what workers report, and still knows workers that do not answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tandem.core.config import Config, EngineConfig, WorkerConfig
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import HORIZON_STEPS, WorkerLoad
from tandem.planner.worker_inventory import WorkerInventory
from tandem.scaling.worker_state import WorkerState
from tandem.stores.worker_registry import WorkerRecord, WorkerRegistry
from tandem.wire.gen import kv_pb2, worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tandem.wire.peer_auth import PeerAuth
from tandem.wire.worker_codec import encode_load, encode_step_cost

COST = StepCost(0.01, 1e-5, 1e-4, 1e-7, 1e-9)


class Worker(WorkerServicer):
    """Worker double that answers Describe with a given reply."""

    def __init__(self, replies: worker_pb2.DescribeReply) -> None:
        self.replies = replies

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeReply:
        return self.replies

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainReply:
        return worker_pb2.DrainReply(num_left=3)


def reply(**more: int) -> worker_pb2.DescribeReply:
    load = WorkerLoad(num_blocks=64, num_free_blocks=64, num_horizon_tokens=HORIZON_STEPS * 96)
    transport = kv_pb2.TransportPeer(layout=kv_pb2.KVLayout(block_size=16))
    return worker_pb2.DescribeReply(
        load=encode_load(load), step_cost=encode_step_cost(COST), transport=transport, **more
    )


@pytest.fixture
async def look(redis_url: str) -> AsyncIterator[Callable[..., Any]]:
    """Return `look(config, replies...)`, which returns the inventory and what it reads from workers with these replies;
    None stands for a worker that has ended."""
    async with AsyncExitStack() as stack:

        async def look(
            config: Config, *replies: worker_pb2.DescribeReply | None
        ) -> tuple[WorkerInventory, tuple[WorkerState, ...]]:
            registry = WorkerRegistry(redis_url, f"census-{len(replies)}", ttl_s=60.0)
            for number, one in enumerate(replies):
                ref = WorkerRef(WorkerId(f"w{number}"), Incarnation(1), "127.0.0.1:0")
                server = PeerAuth("w").server(ref.incarnation)
                add_WorkerServicer_to_server(Worker(one or worker_pb2.DescribeReply()), server)
                port = PeerAuth("w").listen(server, ref.address)
                ref = WorkerRef(ref.id, ref.incarnation, f"127.0.0.1:{port}")
                await server.start()
                if one is None:
                    await server.stop(0)
                else:
                    stack.push_async_callback(server.stop, 0)
                record = WorkerRecord(
                    worker=ref, pool="mixed", model="m", fingerprint="", layout="", max_model_len=64, bundle_digest=""
                )
                await registry.publish(record)
            census = WorkerInventory(registry, PeerAuth("planner"), config)
            stack.push_async_callback(census.close)
            return census, await census.look()

        yield look


async def test_workers_report_their_capacity(look: Callable[..., Any]) -> None:
    """A worker that does not report its number of seats has as many as the planner's settings have."""
    config = Config(engine=EngineConfig(max_num_seqs=9))
    _, (one, older) = await look(config, reply(max_num_seqs=5), reply())
    for seen, num_seqs in ((one, 5), (older, 9)):
        assert seen.problem == "" and seen.capability is not None
        assert (seen.capability.cost, seen.capability.block_size, seen.capability.num_blocks) == (COST, 16, 64)
        assert (seen.capability.max_num_seqs, seen.capability.max_num_batched_tokens) == (num_seqs, 96)


async def test_an_explicit_horizon_does_not_change_the_step_budget(look: Callable[..., Any]) -> None:
    config = Config(engine=EngineConfig(max_num_batched_tokens=321), worker=WorkerConfig(queue_horizon_ms=50))
    _, (one,) = await look(config, reply())
    assert one.capability is not None and one.capability.max_num_batched_tokens == 321


async def test_a_worker_that_does_not_answer_is_listed_with_the_reason(look: Callable[..., Any]) -> None:
    census, (gone, here, blank) = await look(Config(), None, reply(), worker_pb2.DescribeReply())
    assert "unavailable" in gone.problem and gone.capability is None and gone.role == "mixed"
    assert here.capability is not None and blank.problem == "" and blank.capability is None
    assert await census.drain([gone, here]) == {gone.ref: None, here.ref: 3}


async def test_a_worker_reports_the_hosts_of_its_ranks(look: Callable[..., Any]) -> None:
    wide = reply()
    wide.transport.ranks.extend(kv_pb2.TransportRank(agent="w.1", host=host) for host in ("", "", "10.0.0.2"))
    _, (one, other) = await look(Config(), wide, reply())
    assert (one.hosts, other.hosts) == (("127.0.0.1", "10.0.0.2"), ("127.0.0.1",))
