"""Start a rank as a child process: of the first rank, or of the program that runs the ranks of another machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from tandem.core.config import Config, value_of
from tandem.core.settings import settings
from tandem.worker.ranks.rank_group import RankProcess

_EXCLUDED_SETTINGS = frozenset({"redis.url"})
"""Settings that are not passed on, because a rank does not use them and they may contain a password."""


class RankChild:
    """Run rank number `rank` as a child process, which the constructor starts. Implements
    `worker.ranks.rank_group.RankProcess`.

    The child gets the settings by environment variables and logs where the parent logs. It connects to the first rank
    at `address`. Its standard input is a pipe from the parent, and it ends when this pipe is closed.
    """

    def __init__(self, config: Config, address: str, rank: int) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_REDIS__")}
        environment |= {
            setting.env: str(value_of(config, setting.key))
            for setting in settings()
            if setting.key not in _EXCLUDED_SETTINGS
        }
        self._process = subprocess.Popen(
            (sys.executable, "-m", "tandem.worker.rank_process", address, str(rank)),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),  # the parent's stdout carries only its ready line
            start_new_session=True,  # Ctrl-C in the terminal is for the parent, which ends its ranks in order
        )

    def ended(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"its process ended with {code}"

    def end(self) -> None:
        """Close the standard input of the rank's process, which makes the process end. Returns without waiting for
        that."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def stop(self, timeout_s: float) -> None:
        self.end()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RemoteRank:
    """Represent a rank whose process is started by the program on another machine. The loss of such a rank shows only
    by the end of its connection, so `ended` always returns None."""

    def ended(self) -> str | None:
        return None

    def stop(self, timeout_s: float) -> None:
        """Do nothing: the rank ends when its connection does."""


def launch_children(config: Config) -> Callable[[str, int], RankProcess]:
    """Return a function that starts the process of a rank, of the type `worker.ranks.rank_group.Launch`. It starts each
    rank of this machine as a child process. It starts nothing for ranks of other machines, which the programs there
    start."""

    def launch(address: str, rank: int) -> RankProcess:
        return RankChild(config, address, rank) if rank in config.engine.node_ranks else RemoteRank()

    return launch
