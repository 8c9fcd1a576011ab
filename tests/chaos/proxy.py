"""A TCP proxy before one worker whose connections can be cut, by who opened them; never reads what they carry."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Literal

How = Literal["reset", "blackhole"]
"""Connections end at once and new ones too, or all stay open and carry nothing."""
CHUNK = 1 << 16


class _Connection:
    """`pid` is of the process that opened it, 0 for one that nobody knows."""

    def __init__(self, pid: int, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.writers = [writer]
        self.carries = asyncio.Event()
        self.carries.set()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK):
            await self.carries.wait()
            writer.write(chunk)
            await writer.drain()

    def abort(self) -> None:
        self.carries.set()
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """All of it on the loop of `Proxies`; `target` is host and port of the worker."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._connections: set[_Connection] = set()
        self._cut: dict[int, How] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> str:
        self._server = await asyncio.start_server(self._serve, host, 0)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.abort()

    async def count(self, pids: Iterable[int]) -> int:
        """Return how many connections of these processes are open."""
        return sum(connection.pid in set(pids) for connection in self._connections)

    async def cut(self, pids: Iterable[int], how: How) -> int:
        """From now on, for these processes. Returns how many connections were open."""
        self._cut = dict.fromkeys(pids, how)
        struck = [one for one in self._connections if one.pid in self._cut]
        for connection in struck:
            self._strike(connection)
        return len(struck)

    async def heal(self) -> None:
        self._cut = {}
        for connection in self._connections:
            connection.carries.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(_owner(writer.get_extra_info("peername")), writer)
        self._connections.add(connection)
        try:
            self._strike(connection)
            await connection.carries.wait()
            there, onward = await asyncio.open_connection(*self._target)
            connection.writers.append(onward)
            pumps = [
                asyncio.create_task(connection.pump(reader, onward)),
                asyncio.create_task(connection.pump(there, writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            connection.abort()
            await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # the worker is gone, and so its client will hear
        finally:
            connection.abort()
            self._connections.discard(connection)

    def _strike(self, connection: _Connection) -> None:
        match self._cut.get(connection.pid):
            case "reset":
                connection.abort()
            case "blackhole":
                connection.carries.clear()
            case None:
                pass


class Proxies:
    """A thread that runs proxies."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._proxies: list[Proxy] = []

    def before(self, target: tuple[str, int]) -> tuple[Proxy, str]:
        """A proxy, and the address at which it listens."""
        proxy = Proxy(target)
        self._proxies.append(proxy)
        return proxy, self.do(proxy.listen("127.0.0.1")).result()

    def do(self, work: object) -> Future[object]:  # type: ignore[type-arg]
        return asyncio.run_coroutine_threadsafe(work, self._loop)  # type: ignore[arg-type]

    def close(self) -> None:
        for proxy in self._proxies:
            self.do(proxy.close()).result()
        self.do(_settle()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _settle() -> None:
    """Let what was aborted end."""
    mine = asyncio.current_task()
    rest = [task for task in asyncio.all_tasks() if task is not mine]
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _owner(peer: tuple[str, int]) -> int:
    """The process at the other end of a connection within this machine."""
    inode = _inode(*peer[:2])
    for process in Path("/proc").iterdir() if inode else ():
        if process.name.isdigit():
            with suppress(OSError):
                if any(_link(fd) == f"socket:[{inode}]" for fd in (process / "fd").iterdir()):
                    return int(process.name)
    return 0


def _link(fd: Path) -> str:
    """What a file of a process is, empty where the process has closed it meanwhile; its others still count."""
    with suppress(OSError):
        return os.readlink(fd)
    return ""


def _inode(host: str, port: int) -> str | None:
    packed = "".join(f"{int(part):02X}" for part in reversed(host.split(".")))
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(f"{packed}:{port:04X}"):
                return fields[9]
    return None
