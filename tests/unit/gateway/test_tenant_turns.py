"""Test the order in which work of several tenants begins, its bounds, and that cancelled work leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import TenantId
from tandem.gateway.serving.tenant_turns import TenantTurn, TenantTurns

A, B, C = map(TenantId, "abc")


def make_queue(capacity: int = 1, per_tenant: int = 1, max_waiting: int = 100) -> TenantTurns:
    return TenantTurns(capacity, per_tenant=per_tenant, max_waiting=max_waiting, what="too much waits", reason="test")


def num_waiting(queue: TenantTurns) -> int:
    return sum(map(len, queue._waiting.values()))


async def start(queue: TenantTurns, tenant: TenantId, begun: list[TenantId], cost: int = 1) -> asyncio.Task[TenantTurn]:
    """Request a turn, and note the tenant when it begins."""

    async def request_turn() -> TenantTurn:
        turn = await queue.begin(tenant, cost)
        begun.append(tenant)
        return turn

    task = asyncio.create_task(request_turn())
    await settle()
    return task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns_whatever_one_of_them_has_queued() -> None:
    queue, begun = make_queue(), list[TenantId]()
    tasks = [await start(queue, tenant, begun) for tenant in (A, A, A, A, B, C, B)]
    for _ in range(len(tasks)):
        (running,) = (task.result() for task in tasks if task.done())
        running.end()
        tasks = [task for task in tasks if not task.done()]
        await settle()
    assert begun == [A, A, B, C, A, B, A]
    assert (queue.used, num_waiting(queue)) == (0, 0)


async def test_a_tenant_leaves_room_for_others() -> None:
    queue, begun = make_queue(capacity=3, per_tenant=2), list[TenantId]()
    for tenant in (A, A, A, B):
        await start(queue, tenant, begun)
    assert begun == [A, A, B] and num_waiting(queue) == 1


async def test_work_that_costs_more_than_a_share_runs_alone() -> None:
    queue, begun = make_queue(capacity=10, per_tenant=6), list[TenantId]()
    large = await start(queue, A, begun, cost=1000)
    await start(queue, A, begun, cost=1)
    await start(queue, B, begun, cost=4)
    assert begun == [A, B]
    large.result().end()
    await settle()
    assert begun == [A, B, A]


async def test_large_work_is_not_overtaken_by_later_work_of_others() -> None:
    queue, begun = make_queue(capacity=10, per_tenant=10), list[TenantId]()
    first = await start(queue, A, begun, cost=5)
    await start(queue, B, begun, cost=8)
    await start(queue, C, begun, cost=1)
    assert begun == [A]
    first.result().end()
    await settle()
    assert begun == [A, B, C]


async def test_too_much_waiting_work_of_one_tenant_is_refused_and_others_wait() -> None:
    queue, begun = make_queue(max_waiting=3), list[TenantId]()
    for _ in range(4):
        await start(queue, A, begun)
    with pytest.raises(TandemError) as refused:
        await queue.begin(A)
    assert (refused.value.kind, refused.value.reason) == (ErrorKind.OVERLOADED, "test")
    assert refused.value.message == "too much waits; retry later" and refused.value.retry_after_s == 1.0
    await start(queue, B, begun)
    assert num_waiting(queue) == 4


async def test_a_caller_that_is_cancelled_leaves_the_queue() -> None:
    queue, begun = make_queue(), list[TenantId]()
    running = await start(queue, A, begun)
    waiting = await start(queue, B, begun)
    last = await start(queue, C, begun)
    waiting.cancel()
    running.result().end()  # before the cancelled task has run
    await settle()
    assert waiting.cancelled() and begun == [A, C]
    last.result().end()
    assert (queue.used, num_waiting(queue)) == (0, 0)


async def test_a_turn_ends_once() -> None:
    queue = make_queue(capacity=2, per_tenant=2)
    with await queue.begin(A):
        turn = await queue.begin(B)
        turn.end()
        turn.end()
        assert queue.used == 1
    assert queue.used == 0


@pytest.mark.parametrize(
    ("kind", "num_begun"), [(ErrorKind.CONTEXT_LENGTH, 0), (ErrorKind.INTERNAL, 1), (None, 1)], ids=str
)
async def test_refused_work_counts_as_running_for_a_while(kind: ErrorKind | None, num_begun: int) -> None:
    queue = TenantTurns(1, per_tenant=1, max_waiting=9, what="", reason="", refused_s=0.01)
    begun: list[TenantId] = []
    with suppress(TandemError), await queue.begin(A):
        waiting = await start(queue, A, begun)
        if kind is not None:
            raise TandemError(kind, "no")
    await settle()
    assert len(begun) == num_begun
    (await waiting).end()
    assert queue.used == 0


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_is_cancelled_no_share_is_exceeded_and_all_else_begins(seed: int) -> None:
    rng = random.Random(seed)
    queue = make_queue(capacity=8, per_tenant=5, max_waiting=10**6)
    held: Counter[TenantId] = Counter()

    async def work(tenant: TenantId, cost: int) -> None:
        with await queue.begin(tenant, cost):
            held[tenant] += min(cost, 5)
            assert max(held.values()) <= 5 and held.total() <= 8
            try:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                held[tenant] -= min(cost, 5)

    tasks = [asyncio.create_task(work(rng.choice((A, B, C)), rng.randrange(1, 9))) for _ in range(300)]
    while any(not task.done() for task in tasks):
        await asyncio.sleep(0)
        waiting = [task for task in tasks if not task.done()]
        if waiting and num_waiting(queue) and rng.random() < 0.3:
            rng.choice(waiting[len(waiting) // 2 :]).cancel()
    for task in tasks:
        if not task.cancelled():
            task.result()
    assert (queue.used, num_waiting(queue)) == (0, 0)
