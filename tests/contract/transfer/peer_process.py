"""A rank's transport in a process of its own, for the contract tests: owns a pool of known content, decides nothing.

Prints its handshake as one line, then serves readers until its standard input ends. The line `close` on standard
input closes the transport while the process lives on; it answers `closed`.
"""

from __future__ import annotations

import argparse
import base64
import os
import pickle
import select
import sys

import numpy as np
import numpy.typing as npt

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.kv.layout import KVGroup, KVLayout
from tandem.transfer.auto_transport import AutoTransport
from tandem.transfer.memory_pool import MemoryPool, agent_name
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.process_vm_transport import ProcessVmTransport
from tandem.transfer.tcp_transport import TcpTransport
from tests.memory_pools import memory_pool

POLL_S = 0.0005 if os.environ.get("UCX_TLS") == "tcp" else 0.003
"""Over TCP every part of a read waits for its target, else only the first contact does."""


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--transport", choices=("local", "nixl", "tcp", "auto"), required=True)
    arguments.add_argument("--worker", required=True)
    arguments.add_argument("--incarnation", type=int, required=True)
    arguments.add_argument("--num-blocks", type=int, required=True)
    arguments.add_argument("--layers", type=int, required=True)
    arguments.add_argument("--heads", type=int, required=True)
    arguments.add_argument("--dtype", required=True)
    arguments.add_argument("--seed", type=int, required=True)
    arguments.add_argument("--rank", type=int, required=True)
    arguments.add_argument("--head-start", type=int, required=True)
    arguments.add_argument("--head-stop", type=int, required=True)
    arguments.add_argument("--device", default="cpu")
    options = arguments.parse_args()
    layout = KVLayout(16, (KVGroup(options.layers, options.heads, 16, options.dtype),))
    words = options.num_blocks * layout.block_bytes // 8
    whole = np.random.default_rng(options.seed).integers(0, 2**63, words, dtype=np.int64)
    heads = slice(options.head_start, options.head_stop)
    content = np.ascontiguousarray(whole.reshape(options.num_blocks, options.heads, -1)[:, heads])
    address, keepalive = place(content, options.device)
    pool = memory_pool(
        address,
        options.num_blocks,
        layout,
        options.device,
        heads=range(options.head_start, options.head_stop),
        keepalive=keepalive,
    )
    worker = WorkerRef(WorkerId(options.worker), Incarnation(options.incarnation), "127.0.0.1:1")
    kinds = {"local": ProcessVmTransport, "nixl": NixlTransport, "tcp": TcpTransport, "auto": open_auto}
    transport = kinds[options.transport](pool, agent_name(worker.id, worker.incarnation, options.rank))
    write_line(base64.b64encode(pickle.dumps(transport.describe(worker))).decode())
    is_open = True
    # A source whose memory is read by its address, or that has threads of its own, needs no polling.
    poll_s = POLL_S if options.transport == "nixl" else None
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


def open_auto(pool: MemoryPool, agent: str) -> AutoTransport:
    return AutoTransport(TcpTransport(pool, agent), None, "", machine=agent, has_rdma=False)


def place(content: npt.NDArray[np.int64], device: str) -> tuple[int, object]:
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
    main()
