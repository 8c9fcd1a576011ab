"""Run one machine's ranks of a worker that spans several machines: `tandem worker` with engine.node_rank above 0."""

from __future__ import annotations

import logging
import signal
import threading

from tandem.core.addresses import format_host
from tandem.core.config import Config
from tandem.worker.ranks.local_rank import RankChild

END_S = 5.0
"""Seconds for a rank to stop its reads of KV and end; it is killed after that."""
POLL_S = 0.1

_log = logging.getLogger("tandem.node")


def run_node(config: Config) -> int:
    """Run this machine's ranks for one incarnation of the worker, until a signal arrives or one of them ends. The
    worker's first rank is on the machine of engine.master_addr.

    Returns the exit status: 0 after SIGTERM or SIGINT, and 1 when a rank has ended. All ranks end when the worker ends.
    The supervisor of this program should then start it again, so that it waits for the worker's next incarnation.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    engine = config.engine
    address = f"{format_host(engine.master_addr)}:{engine.master_port}"
    _log.info("ranks %d to %d connect to the first rank at %s", engine.node_ranks[0], engine.node_ranks[-1], address)
    ranks = {rank: RankChild(config, address, rank) for rank in engine.node_ranks}
    try:
        while not stop.wait(POLL_S):
            for rank, process in ranks.items():
                if (reason := process.ended()) is not None:
                    _log.error("the ranks of this machine end, because rank %d has: %s", rank, reason)
                    return 1
        return 0
    finally:
        for process in ranks.values():
            process.end()
        for process in ranks.values():
            process.stop(END_S)
