"""A wait that is too long ends, many short ones do not; no test here says how long any of it takes."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from tandem.wire.idle_timeout import IdleTimeout


def block_event_loop() -> None:
    """The whole process, for longer than a wait of the tests that do this may take."""
    time.sleep(0.1)


async def test_a_wait_that_does_not_end_is_ended() -> None:
    with pytest.raises(TimeoutError):
        async with IdleTimeout(0.02) as patience:
            patience.wait()
            await asyncio.Event().wait()


async def test_a_wait_after_others_is_ended_too() -> None:
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


async def test_a_block_that_is_over_leaves_nothing_that_could_cancel() -> None:
    async with IdleTimeout(0.02) as patience:
        patience.wait()
    await asyncio.sleep(0.1)


async def test_what_came_while_this_process_stood_still_did_not_come_late() -> None:
    """Its event loop finds the message and the end of the wait at once."""
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


async def test_who_stood_still_does_not_wait_for_ever() -> None:
    with pytest.raises(TimeoutError):
        async with IdleTimeout(0.05) as patience:
            patience.wait()
            block_event_loop()
            await asyncio.Event().wait()


@pytest.mark.slow
async def test_a_wait_ends_on_a_busy_event_loop_too() -> None:
    """All looks come late where every turn takes long."""

    async def be_busy() -> None:
        for _ in range(30):
            block_event_loop()
            await asyncio.sleep(0)

    busy = asyncio.create_task(be_busy())
    with pytest.raises(TimeoutError):
        async with IdleTimeout(0.25) as patience:
            patience.wait()
            await asyncio.Event().wait()
    assert not busy.done(), "it was waited for until the event loop had time"
    busy.cancel()
