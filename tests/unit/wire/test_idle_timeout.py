"""Test that IdleTimeout ends a wait that is too long, and neither many short waits nor a stalled process."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from tandem.wire.idle_timeout import IdleTimeout


def block_event_loop() -> None:
    """Stall the process for longer than the limit that the tests here set."""
    time.sleep(0.1)


async def test_a_wait_that_is_too_long_times_out() -> None:
    with pytest.raises(TimeoutError):
        async with IdleTimeout(0.02) as patience:
            patience.wait()
            await asyncio.Event().wait()


async def test_a_wait_after_others_times_out_too() -> None:
    num_waits = 0
    with pytest.raises(TimeoutError):
        async with IdleTimeout(0.2) as patience:
            for _ in range(5):
                patience.wait()
                await asyncio.sleep(0)
                num_waits += 1
            patience.rest()
            await asyncio.sleep(0.25)
            patience.wait()
            await asyncio.Event().wait()
    assert num_waits == 5


async def test_waits_may_take_longer_together_than_one_of_them_may() -> None:
    async with IdleTimeout(0.2) as patience:
        for _ in range(30):
            patience.wait()
            await asyncio.sleep(0.01)


async def test_rest_has_no_limit() -> None:
    async with IdleTimeout(0.02) as patience:
        patience.wait()
        patience.rest()
        await asyncio.sleep(0.1)


async def test_a_cancel_from_outside_stays_a_cancel() -> None:
    waits = asyncio.Event()

    async def work() -> None:
        async with IdleTimeout(60) as patience:
            patience.wait()
            waits.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_leaving_the_block_disarms_the_timer() -> None:
    async with IdleTimeout(0.02) as patience:
        patience.wait()
    await asyncio.sleep(0.1)


async def test_a_message_that_arrived_during_a_stall_is_not_late() -> None:
    """The event loop finds the message and the expired timer at the same time."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    with theirs:
        async with IdleTimeout(0.05) as patience:
            for _ in range(3):
                patience.wait()
                theirs.send(b"here\n")
                block_event_loop()
                assert await reader.readline() == b"here\n"
    writer.close()


async def test_a_wait_after_a_stall_times_out() -> None:
    with pytest.raises(TimeoutError):
        async with IdleTimeout(0.05) as patience:
            patience.wait()
            block_event_loop()
            await asyncio.Event().wait()


@pytest.mark.slow
async def test_a_wait_times_out_on_a_busy_event_loop() -> None:
    """Every timer runs late when each iteration of the event loop is slow."""

    async def be_busy() -> None:
        for _ in range(30):
            block_event_loop()
            await asyncio.sleep(0)

    busy = asyncio.create_task(be_busy())
    with pytest.raises(TimeoutError):
        async with IdleTimeout(0.25) as patience:
            patience.wait()
            await asyncio.Event().wait()
    assert not busy.done(), "the limit does not wait for an idle event loop"
    busy.cancel()
