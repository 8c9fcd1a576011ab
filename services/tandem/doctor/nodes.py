"""Check whether the machines of one worker can reach its first one."""

from __future__ import annotations

import socket

from tandem.core.addresses import is_loopback
from tandem.core.config import Config
from tandem.doctor.finding import Finding, fail, ok, skip, warn


def check_nodes(config: Config) -> Finding:
    """Return a finding on whether the ranks of a worker that spans engine.nnodes machines can find each other, as far
    as this machine's settings and name resolution show it. Resolves engine.master_addr, which may block."""
    engine = config.engine
    if engine.nnodes == 1:
        return skip("nodes", "all ranks of a worker are on its machine: engine.nnodes is 1")
    ranks = f"{engine.ranks_per_node} of the {engine.tensor_parallel} ranks are on each of {engine.nnodes} machines"
    where = f"{engine.master_addr}:{engine.master_port}"
    if is_loopback(config.worker.host):
        fix = "set worker.host to this machine's address in their private network"
        return warn("nodes", f"{ranks}, and worker.host is a loopback address, which the others do not reach", fix)
    if not engine.master_addr:
        return ok("nodes", f"{ranks}; the first machine accepts the others at port {engine.master_port}")
    try:
        found = socket.getaddrinfo(engine.master_addr, engine.master_port, type=socket.SOCK_STREAM)
    except OSError as error:
        fix = "set engine.master_addr to a name that DNS knows on all machines, or to an IP address of the first one"
        return fail("nodes", f"{ranks}, and {engine.master_addr} cannot be resolved: {error}", fix)
    if engine.node_rank and is_loopback(str(found[0][4][0])):
        fix = "set engine.master_addr to the address of the first machine in the private network"
        return warn("nodes", f"{ranks}, and {where} is this machine itself, which is not the first one", fix)
    return ok("nodes", f"{ranks}; the first machine accepts the others at {where}")
