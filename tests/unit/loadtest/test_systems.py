"""Servers are started, paused, resumed and ended with all that they started, whatever happens in between."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from loadtest.client.endpoint import Endpoint
from loadtest.processes.systems import NotStarted, ServerCommand, SystemServer, running_server
from tests.ports import free_port

# Answers every request, and has a child that would outlive it.
PROGRAM = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(str(child.pid))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(directory: Path, program: str = PROGRAM) -> ServerCommand:
    port = free_port()
    return ServerCommand(
        name="small",
        endpoint=Endpoint(url=f"http://127.0.0.1:{port}", model="m"),
        command=(sys.executable, "-c", program, str(port), str(directory / "child")),
        start_s=30.0,
    )


def state(pid: int) -> str:
    """The kernel's letter: T is stopped; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


GONE = ("", "Z")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states from /proc")


async def until_state(pid: int, *expected: str) -> None:
    async with asyncio.timeout(20):
        while state(pid) not in expected:
            await asyncio.sleep(0.01)


@needs_proc
async def test_a_server_runs_only_in_its_turn_and_ends_with_its_children(tmp_path: Path) -> None:
    async with running_server(command(tmp_path), tmp_path) as server:
        child = int((tmp_path / "child").read_text())
        await until_state(child, "T")
        with server.turn() as endpoint:
            await until_state(child, "S", "R")
            assert endpoint.model == "m"
        await until_state(child, "T")
    assert server.has_ended
    await until_state(child, *GONE)


BENCH = """
import asyncio, pathlib, sys
from loadtest.processes.systems import running_server
from tests.unit.loadtest.test_systems import command

async def main():
    directory = pathlib.Path(sys.argv[1])
    async with running_server(command(directory), directory):
        print("up", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@needs_proc
@pytest.mark.slow
async def test_a_bench_that_is_killed_leaves_no_stopped_server_behind(tmp_path: Path) -> None:
    bench = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BENCH, str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert bench.stdout is not None
    assert await bench.stdout.readline() == b"up\n"
    child = int((tmp_path / "child").read_text())
    await until_state(child, "T")
    bench.kill()
    await bench.wait()
    await until_state(child, *GONE)


async def test_a_server_that_ends_at_once_is_an_error_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(NotStarted, match="no such model"):
        async with running_server(command(tmp_path, "raise SystemExit('no such model')"), tmp_path):
            pass


async def test_one_that_runs_already_is_neither_paused_nor_ended(tmp_path: Path) -> None:
    async with running_server(command(tmp_path), tmp_path) as server:
        other = SystemServer(ServerCommand(name="other", endpoint=server.command.endpoint))
        with server.turn():
            other.pause()
            await other.end()
            assert not server.has_ended
            assert not other.has_ended
        os.kill(int((tmp_path / "child").read_text()), 0)
