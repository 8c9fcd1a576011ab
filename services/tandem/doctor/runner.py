"""Runs checks, each within its time and apart from the others; never knows what one looks at.

Whatever a check does, it ends in findings: one that raises or does not end is a failure of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import TypeVar

from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, fail

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Check:
    """`examine` looks and judges; it is given `limit_s` seconds."""

    name: str
    examine: Callable[[], Awaitable[Sequence[Finding]]]
    limit_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Examined:
    check: str
    findings: tuple[Finding, ...]
    seconds: float


async def run_checks(checks: Sequence[Check], clock: Clock) -> tuple[Examined, ...]:
    """Side by side; the results in the order of `checks`."""
    return tuple(await asyncio.gather(*(_run(check, clock) for check in checks)))


async def on_thread(work: Callable[[], _T]) -> _T:
    """What `work` returns or raises. The thread is a daemon: a file system that hangs keeps nobody from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: Exception | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]  # without an error it is what `work` returned
        else:
            done.set_exception(error)

    def run() -> None:
        try:
            result, error = work(), None
        except Exception as raised:
            result, error = None, raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    Thread(target=run, name="doctor-check", daemon=True).start()
    return await done


async def _run(check: Check, clock: Clock) -> Examined:
    began = clock.now()
    try:
        async with asyncio.timeout(check.limit_s):
            findings = tuple(await check.examine())
    except TimeoutError:
        findings = (_overdue(check),)
    except Exception as error:
        findings = (_broken(check, error),)
    return Examined(check.name, findings, clock.now() - began)


def _overdue(check: Check) -> Finding:
    return fail(
        check.name,
        f"no end within {check.limit_s:g} s",
        f"something that it asks hangs: `tandem doctor --only {check.name}` tries it alone",
    )


def _broken(check: Check, error: Exception) -> Finding:
    _log.debug("the check %s raised", check.name, exc_info=error)
    told = error.message if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
    return fail(
        check.name,
        f"it could not be looked at: {told}",
        f"`tandem doctor --only {check.name} --log-level debug` says where; if nothing is wrong here, report it",
    )
