"""Read the memory of another process on this machine over NIXL, for the check `ucx`.

`python -m tandem.doctor.ucx_trial` is the consumer and starts the producer as a subprocess. The consumer prints one
line of JSON; UCX logs the transports that it chose to standard error.
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
"""The first read connects; the fastest of the others is reported."""
_PRODUCER = "producer"
_POLL_S = 0.0005
_CONTENT = 0x5A


def run_consumer() -> dict[str, Any]:
    """Start the producer process, read its memory several times, and return a dictionary with the size of a read in
    bytes (`num_bytes`) and the seconds of the fastest read (`seconds`).

    Raises TandemError if NIXL is missing, RuntimeError if the producer does not start or wrong bytes arrive, or an
    error of NIXL's."""
    quiet = {**os.environ, "UCX_LOG_LEVEL": "error", "UCX_PROTO_INFO": "n"}
    command = [sys.executable, "-m", MODULE, _PRODUCER]
    # Leaving the context closes the producer's input, which ends it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=quiet, text=True) as producer:
        assert producer.stdout is not None
        agent, memory = _registered("consumer", 0)
        line = producer.stdout.readline()
        if not line:
            raise RuntimeError("the producer did not start")
        metadata, address = json.loads(line)
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
        raise RuntimeError("the bytes that were read differ from those in the producer's memory")
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


def run_producer() -> None:
    """Print, as one line of JSON, the NIXL agent's metadata and the address of memory that the consumer may read. Then
    serve reads until standard input ends.

    The producer polls meanwhile, because a read over TCP advances only while the process that is read from polls."""
    agent, memory = _registered(_PRODUCER, _CONTENT)
    print(json.dumps([agent.api.get_agent_metadata().hex(), ctypes.addressof(memory)]), flush=True)  # noqa: T201
    while not select.select([sys.stdin], [], [], _POLL_S)[0]:
        agent.api.get_new_notifs()


def _registered(name: str, content: int) -> tuple[NixlAgent, Any]:
    """Make an agent and register filled memory with it; both must stay referenced while they are used."""
    agent, memory = open_agent(name), ctypes.create_string_buffer(NUM_BYTES)
    ctypes.memset(memory, content, NUM_BYTES)
    agent.api.register_memory([(ctypes.addressof(memory), NUM_BYTES, 0, "")], "DRAM")
    return agent, memory


def _end(code: int) -> NoReturn:
    """Exit without destructors, since the library's may wait for a peer that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:] == [_PRODUCER]:
        run_producer()
        _end(0)
    try:
        result = run_consumer()
    except (TandemError, RuntimeError, OSError, ValueError) as error:
        result = {"problem": str(error)}
    print(json.dumps(result), flush=True)  # noqa: T201 - the doctor reads this line
    _end(0)
