"""Run checks concurrently, each with a time limit and isolated from the others.

Every check ends in findings: one that raises or exceeds its limit becomes a failure of that check alone.
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
    """Named check. `examine` runs it and returns its findings; `limit_s`: time limit in seconds."""

    name: str
    examine: Callable[[], Awaitable[Sequence[Finding]]]
    limit_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Examined:
    """Findings of a check, and its duration in seconds."""

    check: str
    findings: tuple[Finding, ...]
    seconds: float


async def run_checks(checks: Sequence[Check], clock: Clock) -> tuple[Examined, ...]:
    """Run the checks concurrently; returns the results in the order of `checks`."""
    return tuple(await asyncio.gather(*(_run(check, clock) for check in checks)))


async def on_thread(work: Callable[[], _T]) -> _T:
    """Run `work` on a new thread and return or raise what it does.

    The thread is a daemon, so that a hanging file system does not keep the process from exiting.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: Exception | None) -> None:
        if done.done():  # the caller does not wait any more
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
        f"not finished within {check.limit_s:g} s",
        f"a program or server that it queries hangs: `tandem doctor --only {check.name}` runs it alone",
    )


def _broken(check: Check, error: Exception) -> Finding:
    _log.debug("the check %s raised", check.name, exc_info=error)
    reason = error.message if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
    return fail(
        check.name,
        f"the check itself failed: {reason}",
        f"`tandem doctor --only {check.name} --log-level debug` shows where; if this machine is fine, report a bug",
    )
