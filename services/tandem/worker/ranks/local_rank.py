"""A rank as a child process of the first one, where nobody else places it; never speaks to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tandem.core.config import Config, value_of
from tandem.core.settings import settings

_ELSEWHERE = frozenset({"redis.url"})
"""Of no use to a rank, and perhaps with a password."""


class RankChild:
    """Told all settings by environment. Its log lines go where the parent's go."""

    def __init__(self, config: Config, directory: Path, rank: int) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_REDIS__")}
        environment |= {one.env: str(value_of(config, one.key)) for one in settings() if one.key not in _ELSEWHERE}
        self._process = subprocess.Popen(
            (sys.executable, "-m", "tandem.worker.rank_process", str(directory), str(rank)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # the parent's says when it is ready, and nothing else
            start_new_session=True,  # Ctrl-C in the terminal is for the parent, which ends its parts in order
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
    """A `worker.rank_group.Launch`."""
    return lambda directory, rank: RankChild(config, directory, rank)
