"""Start servers for a bench, pause them while others are measured, and end them.

Two servers on two cores would disturb each other, and some take minutes to start. So all are started first and each but
the one that is measured is stopped by signal (SIGSTOP), which costs no time when its turn comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import aiohttp
import msgspec

from loadtest.client.endpoint import Endpoint

POLL_S = 0.25
STOP_S = 30.0
LOG_TAIL = 2_000

# A server must not outlive the bench, however that ends, and one that is stopped cannot notice. So a guard stands
# between them: it says the server's process id and, when its input closes, ends the server and all of its session.
_GUARD = """
import os, select, signal, subprocess, sys
log, stop_s, *command = sys.argv[1:]
with open(log, "wb") as output:
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
print(server.pid, flush=True)
while server.poll() is None and not select.select([0], [], [], 0.25)[0]:
    pass
try:
    os.killpg(server.pid, signal.SIGCONT)
    server.terminate()
    server.wait(float(stop_s))
except (ProcessLookupError, subprocess.TimeoutExpired):
    pass
try:
    os.killpg(server.pid, signal.SIGKILL)
except ProcessLookupError:
    pass
server.wait()
"""


class ServerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one server.

    `environment` is added to this process's own. `can_pause`: the server survives a pause of minutes, as a server does
    that exchanges no messages with others. An empty `command` means a server that already runs, in the process group
    `group` (0: unknown).
    """

    name: str
    endpoint: Endpoint
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    start_s: float = 120.0
    can_pause: bool = True
    group: int = 0


class NotStarted(Exception):
    """Raised when a server ended or did not answer in time; the message holds the end of its log."""


class SystemServer:
    """One running server, which can be paused.

    `guard`: process that ends the server with all of its processes; None for a server that the user started, which is
    left running. `pid`: its process group, 0 if unknown; a server with an unknown group is not paused.
    """

    def __init__(self, command: ServerCommand, guard: asyncio.subprocess.Process | None = None, pid: int = 0) -> None:
        self.command = command
        self._guard = guard
        self._pid = pid

    @property
    def name(self) -> str:
        return self.command.name

    @contextlib.contextmanager
    def turn(self) -> Iterator[Endpoint]:
        """Let the server run inside the context, and pause it afterwards; yield its endpoint."""
        self._signal(signal.SIGCONT)
        try:
            yield self.command.endpoint
        finally:
            self.pause()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    async def end(self) -> None:
        """End the server in order, then by force, with all processes that it started."""
        self._signal(signal.SIGCONT)
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            await self._guard.wait()

    @property
    def has_ended(self) -> bool:
        return self._guard is not None and self._guard.returncode is not None

    def _signal(self, number: signal.Signals) -> None:
        if self._pid and self.command.can_pause and not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, number)


@contextlib.asynccontextmanager
async def running_server(command: ServerCommand, directory: Path) -> AsyncIterator[SystemServer]:
    """Start a server, pause it once it has answered its first request, and yield it; end it with the context.

    Its log is in `directory`. Raises NotStarted.
    """
    log = directory / f"{command.name}.log"
    server = await _spawn(command, log) if command.command else SystemServer(command, pid=command.group)
    try:
        await _wait_until_up(server, log)
        server.pause()
        yield server
    finally:
        await server.end()


async def _spawn(command: ServerCommand, log: Path) -> SystemServer:
    guard = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _GUARD, str(log), str(STOP_S), *command.command),
        env={**os.environ, **command.environment},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the bench, which ends its servers in order
    )
    assert guard.stdout is not None
    return SystemServer(command, guard, int(await guard.stdout.readline()))


async def _wait_until_up(server: SystemServer, log: Path) -> None:
    endpoint = server.command.endpoint
    body = {"model": endpoint.model, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}
    async with aiohttp.ClientSession() as session:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(server.command.start_s):
                while not server.has_ended:
                    if await _answers(session, endpoint.url + endpoint.path, body):
                        return
                    await asyncio.sleep(POLL_S)
    raise NotStarted(f"{server.name} did not start:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:] if log.exists() else ""


async def _answers(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> bool:
    try:
        async with session.post(url, json=body) as response:
            await response.read()
            return response.status == 200
    except (aiohttp.ClientError, OSError):
        return False
