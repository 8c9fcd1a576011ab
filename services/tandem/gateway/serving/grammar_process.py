"""Own the process in which a gateway compiles grammars that clients wrote."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import MAX_COMPILE_S
from tandem.gateway.output.grammar_compiler import HEADER, MAX_MEMORY_BYTES, NOTATIONS

MAX_SILENCE_S = 60.0
"""Seconds without an answer after which the process is killed. A compilation is limited to far less processor time, so
this happens only where the process gets no processor."""
_MODULE = "tandem.gateway.output.grammar_compiler"
_ATTEMPTS = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Report whether a grammar compiles (`is_good`). `text`: the reason where it does not compile; the grammar in Lark
    where it was given in GBNF and compiles; otherwise empty."""

    is_good: bool
    text: str = ""


_AT_SIGNAL: Mapping[int, Verdict] = {
    signal.SIGPROF: Verdict(False, f"that takes more than {MAX_COMPILE_S:g} s of processor time"),
    signal.SIGABRT: Verdict(False, f"that takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"),
    signal.SIGSEGV: Verdict(False, "its rules, terms or references are nested too deeply"),
}
"""Verdicts on the grammar whose compilation the kernel has ended, by signal."""


class GrammarProcess:
    """Run `output.grammar_compiler` as a child process, which starts with the first grammar, and again with the next
    grammar after it has ended. The process ends with `stop`, and with the thread of the event loop that started it.

    Only one grammar may be passed at a time. All calls must be on one event loop."""

    def __init__(self) -> None:
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id; None while no process runs."""
        return None if self._child is None else self._child.process.pid

    async def compile(self, notation: str, source: str) -> Verdict:
        """Compile a grammar in the process, and return the verdict. `notation`: one of NOTATIONS.

        A grammar whose compilation exceeds a limit (processor time, memory, stack) ends the process. The verdict is
        then that the grammar does not compile, but only where it was the first of this process; otherwise it is tried
        once more in a new process. Raises OVERLOADED where the process cannot be started, ends in both attempts without
        a verdict, or does not answer within MAX_SILENCE_S seconds."""
        for _ in range(_ATTEMPTS):
            is_new = self._child is None
            child = self._child = self._child or await _start()
            try:
                async with asyncio.timeout(MAX_SILENCE_S):
                    return await child.compile(notation, source)
            except TimeoutError:
                await self.stop()
                raise _lost(f"has not answered for {MAX_SILENCE_S:g} s") from None
            except (asyncio.IncompleteReadError, ConnectionError):
                exit_code = await self.stop()
            verdict = _AT_SIGNAL.get(-exit_code)
            if verdict is not None and is_new:
                _log.info("a grammar ended the process that compiled it: %s", verdict.text)
                return verdict
            _log.warning("the process that compiles grammars ended with %d and is started again", exit_code)
        raise _lost(f"has ended {_ATTEMPTS} times")

    async def stop(self) -> int:
        """Kill the process and wait for its end; return its exit code, or minus the signal that ended it. Does nothing
        and returns 0 while no process runs."""
        child, self._child = self._child, None
        return 0 if child is None else await child.end()


class _Child:
    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    async def compile(self, notation: str, source: str) -> Verdict:
        request = source.encode()
        self._writer.write(HEADER.pack(NOTATIONS.index(notation), len(request)) + request)
        is_good, num_bytes = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return Verdict(bool(is_good), (await self._reader.readexactly(num_bytes)).decode())

    async def end(self) -> int:
        self.process.kill()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        return await asyncio.to_thread(self.process.wait)


async def _start() -> _Child:
    ours, process = _spawn()
    try:
        return _Child(process, *await asyncio.open_unix_connection(sock=ours))
    except BaseException:
        process.kill()
        process.wait()
        raise


def _spawn() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process, in a few milliseconds, and return this end of its socket. It must be started by the thread of
    the event loop, because it ends with the thread that has started it."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return ours, subprocess.Popen(
                (sys.executable, "-P", "-m", _MODULE, str(os.getpid())),
                env=_environment(),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,  # Ctrl-C in the terminal must reach only the gateway
            )
        except OSError as error:
            ours.close()
            raise _lost(f"cannot be started: {error}") from error


def _environment() -> dict[str, str]:
    """Return the environment of the process: without settings, which may be secret, and with one malloc arena instead
    of one per thread, each of which reserves 64 MiB of the address space."""
    passed = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return passed | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MALLOC_ARENA_MAX": "1"}


def _lost(what: str) -> TandemError:
    message = f"the process that compiles grammars at this gateway {what}; retry later"
    return TandemError(ErrorKind.OVERLOADED, message, retry_after_s=1.0, reason="grammars")
