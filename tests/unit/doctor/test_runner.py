"""Test that every check ends in findings of its own, in the order of the checks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from tandem.core.clock import SystemClock
from tandem.core.errors import ErrorKind, TandemError
from tandem.doctor.finding import Finding, ok
from tandem.doctor.runner import Check, on_thread, run_checks
from tests.unit.doctor.verdicts import assert_fails, assert_fine


async def fine() -> Sequence[Finding]:
    return [ok("fine", "as it should be")]


async def broken() -> Sequence[Finding]:
    raise KeyError("secret")


async def refused() -> Sequence[Finding]:
    raise TandemError(ErrorKind.INTERNAL, "it said no")


async def endless() -> Sequence[Finding]:
    await asyncio.Event().wait()
    return []


async def test_a_check_that_raises_or_hangs_fails_alone() -> None:
    checks = [
        Check("hangs", endless, 0.01),
        Check("a", fine),
        Check("b", broken),
        Check("c", refused),
        Check("d", fine),
    ]
    hangs, first, raised, raises, last = await run_checks(checks, SystemClock())
    assert_fails(hangs.findings[0], "hangs", "not finished within 0.01 s", "`tandem doctor --only hangs`")
    assert_fine(first.findings[0], "fine", "as it should be")
    assert_fails(raised.findings[0], "b", "KeyError: 'secret'", "`tandem doctor --only b --log-level debug`")
    assert_fails(raises.findings[0], "c", "the check itself failed: it said no", "--only c")
    assert [last.check, *last.findings] == ["d", *first.findings]


async def test_a_hanging_thread_does_not_block_the_process() -> None:
    release = threading.Event()

    async def stuck() -> Sequence[Finding]:
        await on_thread(release.wait)
        return []

    (examined,) = await run_checks([Check("disk", stuck, 0.01)], SystemClock())
    assert_fails(examined.findings[0], "disk", "not finished within", "--only disk")
    stuck_threads = [thread for thread in threading.enumerate() if thread.name == "doctor-check"]
    assert stuck_threads and all(thread.daemon for thread in stuck_threads)
    release.set()
    for thread in stuck_threads:
        thread.join(10)
        assert not thread.is_alive()


async def test_checks_that_are_to_be_alone_run_after_the_others() -> None:
    order: list[str] = []

    def named(name: str) -> Check:
        async def examine() -> Sequence[Finding]:
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            order.append(f"{name} ends")
            return [ok(name, "fine")]

        return Check(name, examine, is_alone=name.isupper())

    examined = await run_checks([named("A"), named("b"), named("C"), named("d")], SystemClock())
    assert [each.check for each in examined] == ["b", "d", "A", "C"]
    assert order == ["b begins", "d begins", "b ends", "d ends", "A begins", "A ends", "C begins", "C ends"]


async def test_a_thread_hands_over_what_it_returns_and_raises() -> None:
    assert await on_thread(lambda: 7) == 7

    async def raising() -> Sequence[Finding]:
        return await on_thread(lambda: [ok("x", str(1 // 0))])

    (examined,) = await run_checks([Check("x", raising)], SystemClock())
    assert_fails(examined.findings[0], "x", "ZeroDivisionError", "--only x")
