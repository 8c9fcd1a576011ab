"""What a client adds around whatever is asked: a cancel that comes with the answer is not lost, and a cluster of which
no node answers is told like a server that does not. Who was not there to hear an answer does not call it late."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from redis.asyncio import RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tandem.stores.redis_client import Client, connect
from tandem.stores.redis_health import RedisHealth
from tests.ports import free_port


@pytest.mark.parametrize("error", [None, RedisConnectionError("lost"), NoScriptError("unknown")], ids=repr)
@pytest.mark.parametrize("url", ["redis://nowhere:1", "redis+cluster://nowhere:1"])
async def test_a_cancel_that_comes_with_the_answer_ends_the_task(url: str, error: Exception | None) -> None:
    """`asyncio.wait_for` of Python 3.11, in which the library writes, gives the result and forgets the cancel; what
    comes of the command after that may be a failure."""
    client = connect(url)
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ask_for_ever() -> None:
        while True:
            with contextlib.suppress(RedisError):
                async with client.command_scope("XREAD"):
                    await asyncio.wait_for(answer, 10.0)
                    if error is not None:
                        raise error
            await asyncio.sleep(0)

    task = asyncio.create_task(ask_for_ever())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answer.set_result(None)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5.0)
    task.cancel()
    await client.aclose()
    assert done == {task} and task.cancelled()


async def test_a_connection_that_another_s_failure_closed_is_a_failure_of_redis() -> None:
    """The library's write then finds no writer, and says so by an AttributeError."""
    client = connect("redis+cluster://nowhere:1", health=RedisHealth())
    with pytest.raises(RedisConnectionError, match="writelines"):
        async with client.command_scope("EVALSHA"):
            None.writelines  # type: ignore[attr-defined]  # noqa: B018
    await client.aclose()
    assert client.health.num_errors.total() == 1


async def test_a_task_that_was_cancelled_before_may_still_ask() -> None:
    """As in a `finally`, where a publisher withdraws its snapshot."""
    client = connect("redis://nowhere:1")
    asked: list[str] = []

    async def ask_at_the_end() -> None:
        try:
            await asyncio.sleep(10.0)
        finally:
            async with client.command_scope("DEL"):
                await asyncio.sleep(0)
            asked.append("DEL")

    task = asyncio.create_task(ask_at_the_end())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await client.aclose()
    assert asked == ["DEL"] and task.cancelled()


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_who_is_not_there_is_told_alike(scheme: str) -> None:
    """Of a whole cluster the library says it by an exception that is none of Redis' errors."""
    health = RedisHealth()
    client = connect(f"{scheme}://127.0.0.1:{free_port()}", health=health)
    with pytest.raises(RedisConnectionError):
        await client.ping()
    await client.aclose()
    assert health.problem is not None and "111" in health.problem


ANSWER_S = 0.1


def stand_still() -> None:
    time.sleep(2 * ANSWER_S)


async def answer_to_absent(client: Client, takes_s: float) -> object:
    """An answer that takes so long (0: for ever) to a process that stands still for longer than it may take."""
    await client.ping()
    asked = asyncio.create_task(client.execute_command("BLPOP", "nobody writes this", str(takes_s)))
    await asyncio.sleep(ANSWER_S / 10)
    stand_still()
    return await asked


async def test_an_answer_that_came_while_this_process_stood_still_is_an_answer(redis_url: str) -> None:
    client = connect(redis_url, ANSWER_S, health=RedisHealth())
    assert await answer_to_absent(client, ANSWER_S / 2) is None
    assert client.health.is_up and client.health.num_errors.total() == 0
    await client.aclose()


@pytest.mark.slow
async def test_who_is_silent_is_told_on_a_busy_event_loop_too(redis_url: str) -> None:
    """All looks come late where every turn takes long."""
    client = connect(redis_url, ANSWER_S, health=RedisHealth())

    async def be_busy() -> None:
        for _ in range(10):
            stand_still()
            await asyncio.sleep(0)

    asked = asyncio.create_task(client.execute_command("BLPOP", "nobody writes this", "0"))
    await asyncio.sleep(ANSWER_S / 10)
    busy = asyncio.create_task(be_busy())
    with pytest.raises(RedisTimeoutError):
        await asked
    assert not busy.done(), "it was waited for until the event loop had time"
    busy.cancel()
    await client.aclose()


async def test_who_is_silent_is_told_by_who_stood_still_too(redis_url: str) -> None:
    """The time that was lost is given back, not more."""
    client = connect(redis_url, ANSWER_S, health=RedisHealth())
    with pytest.raises(RedisTimeoutError, match=r"no answer within 0\.1 s"):
        await answer_to_absent(client, 0)
    assert not client.health.is_up
    await client.aclose()


async def test_nodes_of_a_cluster_have_the_usual_port_where_none_is_named() -> None:
    client = connect("redis+cluster://one,two,three:7000")
    assert isinstance(client, RedisCluster)
    assert set(client.nodes_manager.startup_nodes) == {"one:6379", "two:6379", "three:7000"}
    await client.aclose()
