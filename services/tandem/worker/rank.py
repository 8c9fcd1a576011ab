"""The program of a rank that follows the first one of its worker; decides nothing and serves nobody.

`python -m tandem.worker.rank DIRECTORY RANK`, with settings in the environment. It lives as long as the first rank
holds its socket: the thread that reads it ends the process at once, also from the middle of a step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import build, from_environment
from tandem.engine.ranks import Joining, Loaded, MoverBytes, RankCommand, RankEvent, RankFailed
from tandem.wire.convert_rank import decode_command, encode_event
from tandem.worker.main import prepare_process
from tandem.worker.rank_line import RankLine, connect

if TYPE_CHECKING:
    from tandem.runtime.parallel.follower import Follower

_log = logging.getLogger("tandem.rank")


class MoverPort(Protocol):
    """This rank's transfer agent, behind the bytes that the first rank sends it."""

    def handle(self, command: bytes) -> None:
        """Must not block: the step thread's commands wait behind it."""
        ...


Send = Callable[[bytes], None]
"""To the first rank, from any thread."""
OpenMover = Callable[[Config, "Follower", Send], MoverPort]
"""`open(config, follower, send)`: `send` takes what the agent has to say."""


class _NoMover:
    """Of a rank whose KV does not move."""

    def handle(self, command: bytes) -> None:
        raise ValueError("this rank has no transfer agent")


def no_mover(_config: Config, _follower: Follower, _send: Send) -> MoverPort:
    return _NoMover()


def run(config: Config, directory: Path, rank: int, open_mover: OpenMover = no_mover) -> int:
    """Follow until the first rank ends, which ends this process. Returns 1 when this rank failed."""
    prepare_process()
    # Only now: importing the model's libraries reads the environment. Before the others are met, who wait no longer for
    # this rank than they must.
    from tandem.worker.rank_model import load_rank_model

    try:
        line = connect(directory, config.worker.step_stall_s)
    except OSError as error:
        _log.error("rank %d finds nobody to follow: %s", rank, error)
        return 1
    try:
        _follow(line, directory, rank, lambda: load_rank_model(config, directory, rank), partial(open_mover, config))
    except TandemError as error:
        _say(line, RankFailed(error.kind, error.message))
        _log.error("%s", error.message)
    except Exception as failure:
        _say(line, RankFailed(ErrorKind.INTERNAL, f"{type(failure).__name__}: {failure}"))
        _log.exception("rank %d failed", rank)
    return 1


def _follow(
    line: RankLine,
    directory: Path,
    rank: int,
    load: Callable[[], Follower],
    open_mover: Callable[[Follower, Send], MoverPort],
) -> None:
    """Until it raises."""
    _say(line, Joining(rank))
    commands: queue.SimpleQueue[RankCommand] = queue.SimpleQueue()
    movers: queue.SimpleQueue[MoverPort] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(directory, line, commands, movers), name="tandem-line", daemon=True)
    reader.start()
    follower = load()
    movers.put(open_mover(follower, lambda data: _say(line, MoverBytes(data))))
    _say(line, Loaded(follower.cache.num_blocks))
    while True:
        follower.carry_out(commands.get())


def _read(
    directory: Path,
    line: RankLine,
    commands: queue.SimpleQueue[RankCommand],
    movers: queue.SimpleQueue[MoverPort],
) -> None:
    """On a thread of its own. What follows the last message is the end of this process."""
    status, mover = 0, None
    try:
        while (message := line.receive()) is not None:
            command = decode_command(message)
            if not isinstance(command, MoverBytes):
                commands.put(command)
                continue
            mover = mover or movers.get()
            mover.handle(command.data)
    except Exception as failure:
        _log.exception("the first rank is not understood")
        _say(line, RankFailed(ErrorKind.INTERNAL, f"{type(failure).__name__}: {failure}"))
        status = 1
    # The first rank does this too, unless it was killed.
    shutil.rmtree(directory, ignore_errors=True)
    # Not by an exception: the main thread may be in an exchange that nobody else takes part in any more.
    os._exit(status)


def _say(line: RankLine, event: RankEvent) -> None:
    """Nothing happens when nobody listens any more: this process is about to end then."""
    with contextlib.suppress(OSError):
        line.send(encode_event(event))


def main() -> int:
    return run(build([("environment", from_environment(os.environ))]), Path(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
