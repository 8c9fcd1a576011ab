"""A rank's transport in a process of its own, for the contract tests: owns a pool of known content, decides nothing.

Its argument is what `serve` takes, pickled, in base64. Prints its handshake as one line, then serves readers until its
standard input ends. The line `close` on standard input closes the transport while the process lives on; it answers
`closed`.
"""

from __future__ import annotations

import base64
import os
import pickle
import select
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tandem.core.ids import WorkerRef
from tandem.kv.layout import KVLayout
from tandem.transfer.auto_transport import AutoTransport
from tandem.transfer.interface import Transport
from tandem.transfer.memory_pool import MemoryPool, agent_name
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.process_vm_transport import ProcessVmTransport
from tandem.transfer.tcp_transport import TcpTransport
from tests.memory_pools import memory_pool

Bytes = npt.NDArray[np.uint8]
NUM_BLOCKS = 256
POLL_S = 0.0005 if os.environ.get("UCX_TLS") == "tcp" else 0.003
"""Over TCP every part of a read waits for its target, else only the first contact does."""


def open_auto(pool: MemoryPool, agent: str) -> Transport:
    """Return a transport that chooses TCP for each peer, as for a worker on another machine."""
    return AutoTransport(TcpTransport(pool, agent), None, "", machine=agent, has_rdma=False)


TRANSPORTS: dict[str, Callable[[MemoryPool, str], Transport]] = {
    "local": ProcessVmTransport,
    "nixl": NixlTransport,
    "tcp": TcpTransport,
    "auto": open_auto,
}


def known_content(seed: int, layout: KVLayout) -> Bytes:
    """What the ranks of a worker hold together: uint8 [NUM_BLOCKS, block_bytes]."""
    words = NUM_BLOCKS * layout.block_bytes // 8
    content = np.random.default_rng(seed).integers(0, 2**63, words, dtype=np.int64)
    return content.view(np.uint8).reshape(NUM_BLOCKS, -1)


def serve(kind: str, worker: WorkerRef, seed: int, layout: KVLayout, rank: int, num_ranks: int, device: str) -> None:
    share = layout.group.heads // num_ranks
    heads = range(rank * share, (rank + 1) * share)
    whole = known_content(seed, layout).reshape(NUM_BLOCKS, layout.group.heads, -1)
    address, keepalive = place(np.ascontiguousarray(whole[:, heads.start : heads.stop]), device)
    pool = memory_pool(address, NUM_BLOCKS, layout, device, heads=heads, keepalive=keepalive)
    transport = TRANSPORTS[kind](pool, agent_name(worker.id, worker.incarnation, rank))
    write_line(base64.b64encode(pickle.dumps(transport.describe(worker))).decode())
    is_open = True
    # A source whose memory is read by its address, or that has threads of its own, needs no polling.
    poll_s = POLL_S if kind == "nixl" else None
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], poll_s)
        if readable:
            line = sys.stdin.readline()
            if not line:
                return
            transport.close()
            is_open = False
            write_line("closed")
        if is_open:
            transport.progress()


def place(content: Bytes, device: str) -> tuple[int, object]:
    """Where the content is, in the memory of a device, and what keeps it there."""
    if device == "cpu":
        return content.ctypes.data, content
    import torch

    tensor = torch.from_numpy(content).to(device)
    torch.cuda.synchronize()
    return tensor.data_ptr(), tensor


def write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(*pickle.loads(base64.b64decode(sys.argv[1])))
