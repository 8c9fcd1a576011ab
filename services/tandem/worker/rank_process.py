"""Run the process of a rank other than the first: load its part of the model and execute the first rank's commands.

Started as `python -m tandem.worker.rank_process ADDRESS RANK`, with settings in the environment. The process ends when
the first rank ends, when its connection to the first rank breaks, or when its parent process ends. It does not wait for
the running step longer than `END_S`, because that step may wait for ranks that have ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerRef
from tandem.core.settings import build, from_environment
from tandem.engine.rank_messages import (
    Loaded,
    RankCommand,
    RankEvent,
    RankFailed,
    RankReady,
    RankRefused,
    RankRegistered,
    StartJoining,
    StartTransfer,
    StoreEntry,
)
from tandem.engine.transfer_messages import TransportPeer
from tandem.obs.logs.logging_setup import set_up_logging
from tandem.transfer.interface import KVTransfer
from tandem.wire.rank_codec import RANK_COMMANDS, RANK_EVENTS
from tandem.worker.main import prepare_process
from tandem.worker.ranks.rank_channel import RankChannel
from tandem.worker.ranks.rank_listener import connect, remove_socket
from tandem.worker.ranks.remote_transfer import carry_out
from tandem.worker.ranks.shared_settings import shared_settings
from tandem.worker.run_file import RunFile

OpenRankTransfer = Callable[[WorkerRef], tuple[KVTransfer, TransportPeer]]
"""Function that takes a worker and opens the KV transfer of this rank of the worker. Returns the transfer and the
description by which other workers read this rank."""

END_S = 0.5
"""Seconds that the running step has to end after the first rank has ended; the process is killed then, because the step
may wait for the first rank for ever."""
STOP_S = 2.0
"""Seconds that open reads of KV have to end after the first rank has ended. A read by UCX over TCP that is cut off may
abort the process that it reads from."""

_log = logging.getLogger("tandem.rank")


def run(config: Config, address: str, rank: int, has_parent_ended: threading.Event | None = None) -> int:
    """Load this rank's part of the model and execute the first rank's commands until the first rank ends.

    Returns the exit status: 0 at the end of the first rank, 1 when this rank failed or the ranks did not all start.
    `address`: where the first rank listens, the path of a Unix socket or host:port. `rank`: number of this rank, from
    1. `has_parent_ended`: set by the caller when the parent process has ended, so that this process ends too.
    """
    prepare_process()
    set_up_logging(config.telemetry, "tandem-worker", f"{config.worker.id}-rank-{rank}" if config.worker.id else "")
    # Imported after prepare_process, because the model's libraries read the environment on import, and before
    # connecting, because the other ranks wait only for a limited time from then on.
    from tandem.runtime.parallel.shared_store import SharedStore
    from tandem.worker.model.rank_transfer import open_rank_transfer
    from tandem.worker.model.worker_model import load_rank_model, own_files_digest

    has_parent_ended = has_parent_ended or threading.Event()
    try:
        channel = RankChannel(connect(address, config, has_parent_ended), config.worker.step_stall_s)
    except TandemError as error:
        _log.error("rank %d ends: %s", rank, error.message)
        return 1
    threading.Thread(target=_end_with_parent, args=(has_parent_ended, channel), name="tandem-end", daemon=True).start()
    has_ended = threading.Event()
    store = SharedStore()
    store.publish = lambda key, value: _send_event(channel, StoreEntry(key, value))
    inbox = _CommandReader(channel, address, store.receive, has_ended, partial(_make_run_file, config, rank))
    try:
        _send_event(channel, RankReady(rank, shared_settings(config)))
        inbox.start()
        if not inbox.wait_joining():
            return 1
        follower = load_rank_model(config, store, rank)
        inbox.openers.put(partial(open_rank_transfer, config, follower.cache, rank, partial(_send_event, channel)))
        _send_event(channel, Loaded(own_files_digest(config, rank)))
        while (command := inbox.commands.get()) is not None:
            follower.carry_out(command)
        return 0
    except TandemError as error:
        _send_event(channel, RankFailed(error.kind, error.message))
        _log.error("rank %d ends: %s", rank, error.message)
    except Exception as failure:
        _send_event(channel, RankFailed(ErrorKind.INTERNAL, f"{type(failure).__name__}: {failure}"))
        _log.exception("rank %d ends because of a defect", rank)
    finally:
        channel.close()
        has_ended.set()
    return 1


def _end_with_parent(has_parent_ended: threading.Event, channel: RankChannel) -> None:
    has_parent_ended.wait()
    channel.close()


class _CommandReader:
    """Receive the first rank's messages on a thread of its own: put commands for the model into `commands`, pass
    entries of the ranks' store to `on_entry`, and execute the commands for this rank's KV transfer, which a function
    taken from `openers` opens. The run file that `make_run_file` returns exists while the transfer is open.

    When the connection ends, `commands` gets None, and the process is killed unless `has_ended` is set within `END_S`
    seconds.
    """

    def __init__(
        self,
        channel: RankChannel,
        address: str,
        on_entry: Callable[[str, bytes], None],
        has_ended: threading.Event,
        make_run_file: Callable[[WorkerRef], RunFile | None],
    ) -> None:
        self.channel = channel
        self.commands: queue.SimpleQueue[RankCommand | None] = queue.SimpleQueue()
        self.openers: queue.SimpleQueue[OpenRankTransfer] = queue.SimpleQueue()
        self._address = address
        self._on_entry = on_entry
        self._has_ended = has_ended
        self._make_run_file = make_run_file
        self._joining: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._run, name="tandem-line", daemon=True).start()

    def wait_joining(self) -> bool:
        """Wait until all ranks are ready to join the process group, and return True then. Returns False if the
        connection ends before."""
        return self._joining.get()

    def _run(self) -> None:
        try:
            self._read()
        except TandemError as error:
            _log.error("this rank ends: %s", error.message)
            _send_event(self.channel, RankFailed(error.kind, error.message))
        except Exception as failure:
            _log.exception("this rank ends, because the first rank sent an invalid message")
            _send_event(self.channel, RankFailed(ErrorKind.INTERNAL, f"{type(failure).__name__}: {failure}"))
        # The first rank removes the socket too, unless it was killed.
        remove_socket(self._address)
        self._joining.put(False)
        self.commands.put(None)
        if not self._has_ended.wait(END_S):
            os._exit(1)

    def _read(self) -> None:
        transfer: KVTransfer | None = None
        with contextlib.ExitStack() as stack:
            while (message := self.channel.receive()) is not None:
                command = RANK_COMMANDS.decode(message)
                if isinstance(command, RankCommand):
                    self.commands.put(command)
                elif isinstance(command, StartJoining):
                    self._joining.put(True)
                elif isinstance(command, StoreEntry):
                    self._on_entry(command.key, command.value)
                elif isinstance(command, RankRefused):
                    raise TandemError(ErrorKind.INVALID_REQUEST, f"the first rank refuses it: {command.message}")
                elif isinstance(command, StartTransfer):
                    assert transfer is None, "the transfer is opened once"
                    transfer = self._start_transfer(command.worker, stack)
                elif transfer is None:
                    raise ValueError("the transfer is not open")
                else:
                    carry_out(transfer, command)

    def _start_transfer(self, worker: WorkerRef, stack: contextlib.ExitStack) -> KVTransfer:
        """Open the transfer of this rank of `worker`, write the run file, report the transfer to the first rank, and
        return the transfer. The end of `stack` removes the file and stops the transfer."""
        transfer, peer = self.openers.get()(worker)
        stack.callback(transfer.stop, STOP_S)
        if (run_file := self._make_run_file(worker)) is not None:
            run_file.write()
            stack.callback(run_file.remove)
        _send_event(self.channel, RankRegistered(peer))
        return transfer


def _make_run_file(config: Config, rank: int, worker: WorkerRef) -> RunFile | None:
    """Return the run file by which `tandem drain --local` finds `worker` on this machine; None unless `rank` is the
    first of its node's part of the ranks."""
    is_first_of_node = rank % config.engine.ranks_per_node == 0
    return RunFile(Path(config.worker.run_dir), worker) if config.worker.run_dir and is_first_of_node else None


def _send_event(channel: RankChannel, event: RankEvent) -> None:
    """Send an event to the first rank. Errors are ignored: this process ends soon when the first rank has."""
    with contextlib.suppress(OSError):
        channel.send(RANK_EVENTS.encode(event))


def main() -> int:
    has_parent_ended = threading.Event()

    def wait_for_parent() -> None:
        with contextlib.suppress(OSError):
            while os.read(sys.stdin.fileno(), 1):
                pass
        has_parent_ended.set()

    threading.Thread(target=wait_for_parent, name="tandem-parent", daemon=True).start()
    config = build([("environment", from_environment(os.environ))])
    return run(config, sys.argv[1], int(sys.argv[2]), has_parent_ended)


if __name__ == "__main__":
    # os._exit skips the interpreter's shutdown, in which collectives may wait once more for ranks that have ended.
    os._exit(main())
