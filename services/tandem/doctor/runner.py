"""Run checks concurrently, each with a time limit and isolated from the others.

Every check ends in findings: one that raises or exceeds its limit becomes a failure of that check alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from inspect import iscoroutinefunction
from threading import Thread
from typing import Any, TypeVar

from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, fail

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
Result = Finding | Sequence[Finding]


@dataclass(frozen=True, slots=True)
class Check:
    """Describe a check that can be run by its `name`.

    `examine`: runs the check and returns its findings. A coroutine function runs on the event loop; a plain function,
    which may block, runs on a thread of its own. `limit_s`: seconds after which the check counts as failed. `part`: the
    part of Tandem that is checked, gateway or worker, empty if the check concerns both. `others`: names of findings
    that the check returns besides those of its own name. `is_alone`: the check is run when all others have ended,
    because it measures what they would use."""

    name: str
    examine: Callable[[], Result] | Callable[[], Awaitable[Result]]
    limit_s: float = 10.0
    part: str = ""
    others: tuple[str, ...] = ()
    is_alone: bool = False


@dataclass(frozen=True, slots=True)
class Examined:
    """Hold the result of a check that was run: the check's name (`check`), its findings, and its duration in
    seconds."""

    check: str
    findings: tuple[Finding, ...]
    seconds: float


async def run_checks(checks: Sequence[Check], clock: Clock) -> tuple[Examined, ...]:
    """Run the checks concurrently, those that are to be alone one after the other at the end, and return their results.
    `clock` measures their durations.

    A check that raises or exceeds its time limit yields a failure as its finding; nothing is raised."""
    examined = await asyncio.gather(*(_run(check, clock) for check in checks if not check.is_alone))
    return (*examined, *[await _run(check, clock) for check in checks if check.is_alone])


async def on_thread(work: Callable[[], _T]) -> _T:
    """Run `work` on a new thread, await its end, and return its result or raise its exception.

    The thread is a daemon, so that a call that hangs in the kernel does not keep the process from exiting."""
    done: Future[_T] = Future()

    def run() -> None:
        done.set_running_or_notify_cancel()
        try:
            result = work()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    Thread(target=run, name="doctor-check", daemon=True).start()
    return await asyncio.wrap_future(done)


async def _run(check: Check, clock: Clock) -> Examined:
    began = clock.now()
    result: Result
    try:
        async with asyncio.timeout(check.limit_s):
            examine: Any = check.examine
            result = await (examine() if iscoroutinefunction(examine) else on_thread(examine))
    except TimeoutError:
        fix = f"run `tandem doctor --only {check.name}`; if it hangs again, so does a program or server that it queries"
        result = fail(check.name, f"not finished within {check.limit_s:g} s", fix)
    except Exception as error:
        _log.debug("the check %s raised", check.name, exc_info=error)
        reason = error.message if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
        fix = f"run `tandem doctor --only {check.name} --log-level debug` to see where, and report the defect"
        result = fail(check.name, f"the check itself failed: {reason}", fix)
    findings = (result,) if isinstance(result, Finding) else tuple(result)
    return Examined(check.name, findings, clock.now() - began)
