"""Test what `redis_client` adds to the library's clients: deadlines without stalls, lossless cancels, uniform
errors."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from redis.asyncio import RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError

from tandem.core.errors import TandemError
from tandem.stores.redis_client import RedisClient, RedisHealth, StoreUnavailable
from tests.ports import free_port


@pytest.mark.parametrize("error", [None, RedisConnectionError("lost"), NoScriptError("unknown")], ids=repr)
@pytest.mark.parametrize("url", ["redis://nowhere:1", "redis+cluster://nowhere:1"])
async def test_a_cancel_that_arrives_with_the_reply_ends_the_task(url: str, error: Exception | None) -> None:
    """`asyncio.wait_for` of Python 3.11, in which the library writes, returns the result and drops the cancel; the
    command may still fail after that."""
    client = RedisClient(url)
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def send_for_ever() -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                async with client.command_scope("XREAD"):
                    await asyncio.wait_for(answer, 10.0)
                    if error is not None:
                        raise error
            await asyncio.sleep(0)

    task = asyncio.create_task(send_for_ever())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answer.set_result(None)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5.0)
    task.cancel()
    await client.aclose()
    assert done == {task} and task.cancelled()


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
@pytest.mark.parametrize("option", ["colour=red", "db=first", "protocol=3", "decode_responses=true"])
def test_a_url_with_an_option_that_no_store_can_use_is_refused_at_once(scheme: str, option: str) -> None:
    """With an unknown one each command raised TypeError; with the last two, replies are no bytes or no pairs."""
    with pytest.raises(TandemError, match=r"redis\.url") as refused:
        RedisClient(f"{scheme}://nowhere:1?{option}")
    assert refused.value.param == "redis.url"


async def test_tls_options_of_a_url_without_tls_are_refused_and_others_are_not() -> None:
    with pytest.raises(TandemError, match="ssl_ca_certs"):
        RedisClient("redis://nowhere:1?ssl_ca_certs=ca.pem")
    with pytest.raises(TandemError, match="CERT_NOTHING"):
        RedisClient("rediss://nowhere:1?ssl_cert_reqs=CERT_NOTHING")
    for url in ("rediss://nowhere:1?ssl_ca_certs=ca.pem", "unix:///nowhere?db=1", "redis://nowhere:1/2?protocol=2"):
        await RedisClient(url).aclose()


async def test_a_connection_closed_by_another_command_s_failure_is_a_redis_error() -> None:
    """The library's write then finds no writer and raises AttributeError."""
    client = RedisClient("redis+cluster://nowhere:1", health=RedisHealth())
    with pytest.raises(StoreUnavailable, match=r"ConnectionError: .*writelines"):
        async with client.command_scope("EVALSHA"):
            None.writelines  # type: ignore[attr-defined]  # noqa: B018
    await client.aclose()
    assert client.health.num_errors.total() == 1


async def test_a_cancelled_task_may_still_send_commands() -> None:
    """A publisher withdraws its snapshot in a `finally` after a cancel."""
    client = RedisClient("redis://nowhere:1")
    sent: list[str] = []

    async def send_in_finally() -> None:
        try:
            await asyncio.sleep(10.0)
        finally:
            async with client.command_scope("DEL"):
                await asyncio.sleep(0)
            sent.append("DEL")

    task = asyncio.create_task(send_in_finally())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await client.aclose()
    assert sent == ["DEL"] and task.cancelled()


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_an_absent_server_raises_the_same_error_for_both_clients(scheme: str) -> None:
    """For an absent cluster the library raises an exception that is not a RedisError."""
    health = RedisHealth()
    client = RedisClient(f"{scheme}://127.0.0.1:{free_port()}", health=health)
    with pytest.raises(StoreUnavailable, match="ConnectionError"):
        await client.execute("PING")
    await client.aclose()
    assert health.problem is not None and "111" in health.problem


ANSWER_S = 0.1


def block_event_loop() -> None:
    time.sleep(2 * ANSWER_S)


async def reply_during_stall(client: RedisClient, takes_s: float) -> object:
    """Send a command that takes `takes_s` seconds (0: for ever), and block this process beyond its deadline."""
    await client.execute("PING")
    reply = asyncio.create_task(client.execute("BLPOP", "nobody writes this", str(takes_s)))
    await asyncio.sleep(ANSWER_S / 10)
    block_event_loop()
    return await reply


async def test_a_reply_that_arrived_during_a_stall_is_not_a_timeout(redis_url: str) -> None:
    client = RedisClient(redis_url, ANSWER_S, health=RedisHealth())
    assert await reply_during_stall(client, ANSWER_S / 2) is None
    assert client.health.is_up and client.health.num_errors.total() == 0
    await client.aclose()


@pytest.mark.slow
async def test_a_silent_server_times_out_on_a_busy_event_loop(redis_url: str) -> None:
    """Every timer runs late when each iteration of the event loop is slow."""
    client = RedisClient(redis_url, ANSWER_S, health=RedisHealth())

    async def be_busy() -> None:
        for _ in range(10):
            block_event_loop()
            await asyncio.sleep(0)

    reply = asyncio.create_task(client.execute("BLPOP", "nobody writes this", "0"))
    await asyncio.sleep(ANSWER_S / 10)
    busy = asyncio.create_task(be_busy())
    with pytest.raises(StoreUnavailable, match="TimeoutError"):
        await reply
    assert not busy.done(), "the deadline does not wait for an idle event loop"
    busy.cancel()
    await client.aclose()


async def test_a_silent_server_times_out_after_a_stall(redis_url: str) -> None:
    """The deadline moves by a short grace, not by more."""
    client = RedisClient(redis_url, ANSWER_S, health=RedisHealth())
    with pytest.raises(StoreUnavailable, match=r"TimeoutError: no answer within 0\.1 s"):
        await reply_during_stall(client, 0)
    assert not client.health.is_up
    await client.aclose()


async def test_nodes_of_a_cluster_have_the_usual_port_where_none_is_named() -> None:
    client = RedisClient("redis+cluster://one,two,three:7000")
    assert isinstance(client.redis, RedisCluster)
    assert set(client.redis.nodes_manager.startup_nodes) == {"one:6379", "two:6379", "three:7000"}
    await client.aclose()
