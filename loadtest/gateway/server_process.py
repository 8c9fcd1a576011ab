"""Start and end the servers of the front end's benchmark, and read their processor time and memory from the kernel."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path


class BenchServer:
    """One server of the front end's benchmark, in a process of its own."""

    def __init__(self, pid: int, url: str) -> None:
        self.url = url
        self._proc = Path(f"/proc/{pid}")

    @classmethod
    async def start(cls, front: str, core: int | None, stack: AsyncExitStack) -> BenchServer:
        """Start the server named `front`, on one core if `core` is given; it ends with the stack."""
        options = [] if core is None else ["--core", str(core)]
        if front == "link":
            _, hello = await _spawn(stack, "loadtest.gateway.fake_worker")
            options += ["--worker", hello["worker"]]
        pid, hello = await _spawn(stack, "loadtest.gateway.server", front, *options)
        return cls(pid, hello["url"])

    def cpu_s(self) -> float:
        """Return the processor seconds of all threads of the server, except those of threads that have ended."""
        times = [(task / "schedstat").read_text().split()[0] for task in (self._proc / "task").iterdir()]
        return sum(map(int, times)) / 1e9

    def pss_bytes(self) -> int:
        return self._field("smaps_rollup", "Pss:")

    def peak_bytes(self) -> int:
        """Return the highest resident size of the server since it began, in bytes."""
        return self._field("status", "VmHWM:")

    def _field(self, file: str, name: str) -> int:
        lines = (self._proc / file).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


async def _spawn(stack: AsyncExitStack, module: str, *arguments: str) -> tuple[int, dict[str, str]]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None

    async def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()

    stack.push_async_callback(end)
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"{module} {' '.join(arguments)} did not start")
    hello: dict[str, str] = json.loads(line)
    return process.pid, hello
