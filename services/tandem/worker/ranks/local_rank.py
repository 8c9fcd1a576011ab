"""Start a rank as a child process of the first rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tandem.core.config import Config, value_of
from tandem.core.settings import settings

_EXCLUDED_SETTINGS = frozenset({"redis.url"})
"""Settings that are not passed on, because a rank does not use them and they may contain a password."""


class RankChild:
    """Child process of rank number `rank`, started by the constructor.

    The child gets all settings by environment variables and logs where the parent logs; `directory` has the first
    rank's socket.
    """

    def __init__(self, config: Config, directory: Path, rank: int) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_REDIS__")}
        environment |= {
            setting.env: str(value_of(config, setting.key))
            for setting in settings()
            if setting.key not in _EXCLUDED_SETTINGS
        }
        self._process = subprocess.Popen(
            (sys.executable, "-m", "tandem.worker.rank_process", str(directory), str(rank)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # the parent's stdout carries only its ready line
            start_new_session=True,  # Ctrl-C in the terminal is for the parent, which ends its ranks in order
        )

    def ended(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"its process ended with {code}"

    def stop(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def launch_children(config: Config) -> Callable[[Path, int], RankChild]:
    """Return a `worker.ranks.rank_group.Launch` that starts each rank as a child process of this one."""
    return lambda directory, rank: RankChild(config, directory, rank)
