"""Write a worker's steps to a file on a separate thread, without delaying the engine.

A full disk must not end a worker: the first failed write is logged and no more steps are written after it, so that the
log has no gap and no torn line.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from pathlib import Path

from tandem.core.clock import wall_ns
from tandem.core.errors import ErrorKind, TandemError
from tandem.engine.step_log import LoggedStep, StepLogHead, encode_head, encode_step
from tandem.sched.state.schedule_result import StepRecord

FLUSH_S = 0.5
"""Seconds between two writes."""
MAX_WAITING = 100_000
"""Steps that may wait to be written; older ones are dropped when the disk blocks for longer."""

_log = logging.getLogger(__name__)


class StepWriter:
    """Write a record of each step to a file, as a `StepObserver` of the engine.

    `observe` is called on the engine's thread and does not wait for the disk. The other methods are called by the
    owner, on any other thread.
    """

    def __init__(self, directory: Path, head: StepLogHead) -> None:
        """Create the file `directory/WORKER.jsonl` and start the writing thread. WORKER is `head.worker`, which differs
        for each incarnation, so each incarnation has a file of its own. Raises TandemError when the file cannot be
        created."""
        self.path = directory / f"{head.worker}.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.path.write_text(encode_head(head) + "\n")
        except OSError as error:
            raise TandemError(
                ErrorKind.INVALID_REQUEST,
                f"worker.step_log: cannot write {self.path}: {error.strerror}",
                param="worker.step_log",
            ) from error
        self._waiting: deque[LoggedStep] = deque(maxlen=MAX_WAITING)
        self._has_stopped = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="tandem-step-log", daemon=True)
        self._thread.start()

    def observe(self, record: StepRecord) -> None:
        if not self._has_failed:
            self._waiting.append(LoggedStep(wall_ns() / 1e9, record))

    def close(self, timeout_s: float) -> bool:
        """Write the waiting records, end the writing thread, and wait up to `timeout_s` seconds for that. A second call
        writes nothing.

        Returns False when the disk has not accepted the records in that time.
        """
        self._has_stopped.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._has_stopped.wait(FLUSH_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        lines: list[str] = []
        while self._waiting:
            lines.append(encode_step(self._waiting.popleft()) + "\n")
        if not lines or self._has_failed:
            return
        try:
            with self.path.open("a") as file:
                file.writelines(lines)
        except OSError as error:
            self._has_failed = True
            _log.error("the step log %s cannot be written, and no more steps are logged: %s", self.path, error)
