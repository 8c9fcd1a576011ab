"""Two processes of this machine, one of which reads the other's memory over NIXL; never judges how.

`python -m tandem.doctor.ucx_trial` is the consumer and starts the producer itself. It prints one line of JSON; what UCX
chose stands in UCX's own log, on standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import subprocess
import sys
import time
from typing import Any, NoReturn

from tandem.core.errors import TandemError
from tandem.transfer.nixl_agent import NixlAgent, open_agent

MODULE = "tandem.doctor.ucx_trial"
NUM_BYTES = 8 << 20
NUM_READS = 5
"""The first one connects; the best of the rest is told."""
_PRODUCER = "producer"
_POLL_S = 0.0005
_CONTENT = 0x5A


def take() -> dict[str, Any]:
    """Seconds of the best read. Raises TandemError, or an error of NIXL's."""
    quiet = {**os.environ, "UCX_LOG_LEVEL": "error", "UCX_PROTO_INFO": "n"}
    command = [sys.executable, "-m", MODULE, _PRODUCER]
    # Leaving the context closes its input, which ends it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=quiet, text=True) as producer:
        assert producer.stdout is not None
        agent, memory = _registered("consumer", 0)
        told = producer.stdout.readline()
        if not told:
            raise RuntimeError("the producer did not start")
        metadata, address = json.loads(told)
        seconds = _read(agent, memory, bytes.fromhex(metadata), address)
        return {"num_bytes": NUM_BYTES, "seconds": seconds}


def _read(agent: NixlAgent, memory: Any, metadata: bytes, address: int) -> float:
    peer = agent.api.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer
    ours = agent.api.prep_xfer_dlist("NIXL_INIT_AGENT", [(ctypes.addressof(memory), NUM_BYTES, 0)], "DRAM")
    theirs = agent.api.prep_xfer_dlist(peer, [(address, NUM_BYTES, 0)], "DRAM")
    read = agent.api.make_prepped_xfer("READ", ours, [0], theirs, [0])
    seconds = [_once(agent, read) for _ in range(NUM_READS)]
    if memory[0] != bytes([_CONTENT]) or memory[NUM_BYTES - 1] != bytes([_CONTENT]):
        raise RuntimeError("what was read is not what was there")
    return min(seconds[1:])


def _once(agent: NixlAgent, read: Any) -> float:
    began = time.perf_counter()
    state = agent.api.transfer(read)
    while state == "PROC":
        time.sleep(_POLL_S / 10)
        state = agent.api.check_xfer_state(read)
    if state != "DONE":
        raise RuntimeError(f"the read ended with {state}")
    return time.perf_counter() - began


def give() -> None:
    """Polled until standard input ends: a read over TCP moves only while its target polls."""
    agent, memory = _registered(_PRODUCER, _CONTENT)
    print(json.dumps([agent.api.get_agent_metadata().hex(), ctypes.addressof(memory)]), flush=True)  # noqa: T201
    while not select.select([sys.stdin], [], [], _POLL_S)[0]:
        agent.api.get_new_notifs()


def _registered(name: str, content: int) -> tuple[NixlAgent, Any]:
    """An agent and its memory, filled, for as long as both are referred to."""
    agent, memory = open_agent(name), ctypes.create_string_buffer(NUM_BYTES)
    ctypes.memset(memory, content, NUM_BYTES)
    agent.api.register_memory([(ctypes.addressof(memory), NUM_BYTES, 0, "")], "DRAM")
    return agent, memory


def _end(code: int) -> NoReturn:
    """Without destructors: those of the library can wait for a peer that has gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:] == [_PRODUCER]:
        give()
        _end(0)
    try:
        said = take()
    except (TandemError, RuntimeError, OSError, ValueError) as error:
        said = {"problem": str(error)}
    print(json.dumps(said), flush=True)  # noqa: T201 - what the doctor reads
    _end(0)
