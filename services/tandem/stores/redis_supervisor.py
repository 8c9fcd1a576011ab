"""A small program between an embedded server and the process that wants it; never outlives either.

Run by path, without site packages: `supervise.py SOCKET LOG COMMAND...`. Standard input is a pipe whose other end the
owner holds: it ends when the owner closes it or dies in whatever way. The death signal of Linux is bound to the
*thread* that forked, which is why the owner does not use it itself; this program has one thread, so that here it
covers the supervisor's own violent end. Writes `ready` to standard output when the server answers, or else the end of
its log, and removes the directory of the socket at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
_TAIL_BYTES = 500
_TERM_S = 3.0
"""After this long without an end the server is killed; it has nothing to save."""


def main(socket_path: str, log_path: str, command: list[str]) -> int:
    try:
        return _supervise(socket_path, log_path, command)
    except OSError as error:
        _tell(str(error).encode())
        return 1
    finally:
        shutil.rmtree(Path(socket_path).parent, ignore_errors=True)


def _supervise(socket_path: str, log_path: str, command: list[str]) -> int:
    wake = _wake_on_signals()
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent())
    if _comes_up(server, socket_path, wake):
        _tell(b"ready\n")
        select.select([0, wake], [], [])
    else:
        _tell(_tail(log_path))
    return _stop(server)


def _tell(words: bytes) -> None:
    """To the owner, who may have gone in the meantime; then its end of the other pipe is closed too."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, words)


def _comes_up(server: subprocess.Popen[bytes], socket_path: str, wake: int) -> bool:
    """Wait until the server answers; False when it has ended or nobody wants it any more."""
    while not _answers(socket_path):
        if server.poll() is not None or select.select([0, wake], [], [], _POLL_S)[0]:
            return False
    return True


def _wake_on_signals() -> int:
    """A descriptor that becomes readable when the server ends or somebody wants us to."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return reader


def _die_with_parent() -> Callable[[], None] | None:
    """Runs in the forked server before its program starts. Only Linux has it; elsewhere the pipe has to do."""
    if not sys.platform.startswith("linux"):
        return None
    supervisor = os.getpid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)

    return arm


def _answers(socket_path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.settimeout(_TERM_S)
        client.connect(socket_path)
        client.sendall(b"PING\r\n")
        return client.recv(16).startswith(b"+PONG")
    return False


def _tail(log_path: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(log_path).read_bytes()[-_TAIL_BYTES:]
    return b""


def _stop(server: subprocess.Popen[bytes]) -> int:
    server.terminate()
    try:
        return server.wait(_TERM_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
