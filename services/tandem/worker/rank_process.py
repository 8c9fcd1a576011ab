"""The program of a rank that follows the first one of its worker; decides nothing and serves nobody.

`python -m tandem.worker.rank_process DIRECTORY RANK`, with settings in the environment. It lives as long as the first
rank holds its socket. A step that does not end by then, because it waits for ranks that are gone, ends with the
process.
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
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import build, from_environment
from tandem.engine.rank_messages import (
    Loaded,
    MoverBytes,
    OpenMover,
    RankCommand,
    RankEvent,
    RankFailed,
    RankReady,
    RankRegistered,
)
from tandem.obs.logs.logging_setup import set_up_logging
from tandem.wire.rank_codec import decode_command, encode_event
from tandem.worker.main import prepare_process
from tandem.worker.ranks.rank_channel import RankChannel, connect

if TYPE_CHECKING:
    from tandem.runtime.ranks.follower import Follower
    from tandem.worker.model.rank_transfer import RankTransferAgent

END_S = 0.5
"""For a step to end after the first rank is gone; it may wait for that one for ever."""

_log = logging.getLogger("tandem.rank")


Send = Callable[[bytes], None]
"""To the first rank, from any thread."""


def run(config: Config, directory: Path, rank: int) -> int:
    """Follow until the first rank ends. Returns 1 when this rank failed."""
    prepare_process()
    set_up_logging(config.telemetry, "tandem-worker", f"{config.worker.id}-rank-{rank}" if config.worker.id else "")
    # Only now: importing the model's libraries reads the environment. Before the others are met, who wait no longer for
    # this rank than they must.
    from tandem.worker.model.rank_model import load_rank_model
    from tandem.worker.model.rank_transfer import RankTransferAgent

    try:
        line = connect(directory, config.worker.step_stall_s)
    except OSError as error:
        _log.error("rank %d finds nobody to follow: %s", rank, error)
        return 1
    has_ended = threading.Event()
    try:
        _follow(
            _CommandReader(line, directory, has_ended),
            rank,
            lambda: load_rank_model(config, directory, rank),
            lambda follower, send: RankTransferAgent(config.handoff.transport, follower.cache, rank, send),
        )
        return 0
    except TandemError as error:
        _say(line, RankFailed(error.kind, error.message))
        _log.error("%s", error.message)
    except Exception as failure:
        _say(line, RankFailed(ErrorKind.INTERNAL, f"{type(failure).__name__}: {failure}"))
        _log.exception("rank %d failed", rank)
    finally:
        line.close()
        has_ended.set()
    return 1


class _CommandReader:
    """What the first rank sends, sorted by who is to have it, on a thread of its own. After the last of it the process
    has `END_S` until `has_ended`."""

    def __init__(self, line: RankChannel, directory: Path, has_ended: threading.Event) -> None:
        self.line = line
        self.commands: queue.SimpleQueue[RankCommand | None] = queue.SimpleQueue()
        self.agents: queue.SimpleQueue[RankTransferAgent] = queue.SimpleQueue()
        self._directory = directory
        self._has_ended = has_ended

    def start(self) -> None:
        threading.Thread(target=self._run, name="tandem-line", daemon=True).start()

    def _run(self) -> None:
        try:
            self._read()
        except TandemError as error:
            _log.error("%s", error.message)
            _say(self.line, RankFailed(error.kind, error.message))
        except Exception as failure:
            _log.exception("the first rank is not understood")
            _say(self.line, RankFailed(ErrorKind.INTERNAL, f"{type(failure).__name__}: {failure}"))
        # The first rank does this too, unless it was killed.
        shutil.rmtree(self._directory, ignore_errors=True)
        self.commands.put(None)
        if not self._has_ended.wait(END_S):
            os._exit(1)

    def _read(self) -> None:
        agent: RankTransferAgent | None = None
        try:
            while (message := self.line.receive()) is not None:
                command = decode_command(message)
                if not isinstance(command, MoverBytes | OpenMover):
                    self.commands.put(command)
                    continue
                agent = agent or self.agents.get()
                if isinstance(command, OpenMover):
                    _say(self.line, RankRegistered(agent.open(command.worker)))
                else:
                    agent.handle(command.data)
        finally:
            if agent is not None:
                agent.close()


def _follow(
    inbox: _CommandReader,
    rank: int,
    load: Callable[[], Follower],
    make_agent: Callable[[Follower, Send], RankTransferAgent],
) -> None:
    """Until the first rank is gone, or something is raised."""
    line = inbox.line
    _say(line, RankReady(rank))
    inbox.start()
    follower = load()
    inbox.agents.put(make_agent(follower, lambda data: _say(line, MoverBytes(data))))
    _say(line, Loaded(follower.cache.num_blocks))
    while (command := inbox.commands.get()) is not None:
        follower.carry_out(command)


def _say(line: RankChannel, event: RankEvent) -> None:
    """Nothing happens when nobody listens any more: this process is about to end then."""
    with contextlib.suppress(OSError):
        line.send(encode_event(event))


def main() -> int:
    return run(build([("environment", from_environment(os.environ))]), Path(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    # Past the interpreter's own end: what exchanges with ranks that are gone may wait for them once more there.
    os._exit(main())
