"""Check which transports UCX can use on this machine and which it chooses, from its log of a real read.

UCX logs a table of the transports and devices that it has found, and for each kind of operation a table of the
transports that it uses by size (UCX_PROTO_INFO). KV is moved by "remote memory read". `ucx_trial` makes the read.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tandem.core.config import TransferConfig
from tandem.doctor.finding import Finding, fail, ok, skip, warn, wrong
from tandem.doctor.system import System
from tandem.doctor.ucx_trial import MODULE

LIMIT_S = 30.0
_LOGGED = {"UCX_LOG_LEVEL": "debug", "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": "stderr"}
_PREFIX = re.compile(r"^\[[^\]]*\] \[[^\]]*\]\s*")
_LANE = re.compile(r"[a-z][a-z0-9_]*/[^\s,]+")
_ENABLED = re.compile(r"\+ (\S+)")

_LINK_TYPES = {
    "shared_memory": ("cma", "knem", "xpmem", "posix", "sysv", "mm", "sm", "shm", "self"),
    "rdma": ("rc", "dc", "ud", "gga", "ib", "srd"),
    "cuda_ipc": ("cuda_ipc",),
    "tcp": ("tcp",),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """Hold the result of a test of UCX, in which one process reads the memory of another process on this machine
    through NIXL and UCX.

    `problem`: why nothing was read, else empty. `version`: version of UCX. `num_bytes`, `seconds`: size and duration of
    the read. `available`: names of the transports that this machine has. `chosen`: transports that the read used, such
    as "cma/memory". `missing`: names in UCX_TLS that this machine does not have."""

    problem: str = ""
    version: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    available: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def link_types(self) -> frozenset[str]:
        return frozenset(link_type_of(lane.partition("/")[0]) for lane in self.chosen)


def link_type_of(transport: str) -> str:
    """Return the link type of a UCX transport such as "rc": rdma, cuda_ipc, shared_memory, tcp or unknown."""
    for link_type, names in _LINK_TYPES.items():
        if transport in names or (link_type == "rdma" and transport.partition("_")[0] in names):
            return link_type
    return "unknown"


def read_trial(system: System) -> Trial:
    """Test UCX on this machine: start a program that reads the memory of another process through NIXL and UCX
    (`ucx_trial`), and return what the read showed. If the program fails, the result has the reason in `problem`.

    Blocks for a second or two, at most `LIMIT_S` seconds."""
    ran = system.run([sys.executable, "-m", MODULE], LIMIT_S - 5, **_LOGGED)
    if ran.code:
        return Trial(problem=_last_line(ran.err) or f"exit code {ran.code}")
    return parse_trial(ran.out, ran.err)


def parse_trial(output: str, log: str) -> Trial:
    """Build the result of a test of UCX. `output`: output of the test program, which ends with a line of JSON. `log`:
    the log that UCX has written meanwhile."""
    lines = [_PREFIX.sub("", line) for line in log.splitlines()]
    result = json.loads(output.strip().splitlines()[-1])
    found = re.search(r"UCX\s+INFO\s+Version (\S+)", log)
    return Trial(
        problem=result.get("problem", ""),
        version=found[1] if found else "",
        num_bytes=result.get("num_bytes", 0),
        seconds=result.get("seconds", 0.0),
        available=tuple(_available(lines)),
        chosen=_chosen(lines),
        missing=tuple(dict.fromkeys(re.findall(r"transport '([^']+)' is not available", log))),
    )


def check_ucx(system: System, transfer: TransferConfig) -> tuple[Finding, ...]:
    """Return findings on a test of UCX on this machine. Skipped if `transfer.backend` needs no UCX."""
    if transfer.backend in ("local", "tcp"):
        return (skip("ucx", f"transfer.backend is {transfer.backend}, which needs no UCX"),)
    return judge_trial(read_trial(system), transfer, system.environ.get("UCX_TLS", ""))


def judge_trial(trial: Trial, transfer: TransferConfig, ucx_tls: str) -> tuple[Finding, ...]:
    """Return findings on a test of UCX: whether the test read succeeded, by which transports, and whether this machine
    meets `transfer.require`.

    `trial`: result of the test. `ucx_tls`: value of the environment variable UCX_TLS, empty if unset."""
    if trial.problem:
        required = () if transfer.backend == "nixl" else tuple(_required(trial, transfer, ucx_tls))
        return (_stuck(trial, transfer, ucx_tls), *required)
    return (_chose(trial, ucx_tls), *_missing(trial, ucx_tls), *_required(trial, transfer, ucx_tls))


def _stuck(trial: Trial, transfer: TransferConfig, ucx_tls: str) -> Finding:
    because = f" ({_missing_names(trial, ucx_tls)})" if trial.missing else ""
    fix = (
        "run `pip install 'tandem[worker]'` if NIXL is missing; unset UCX_TLS and UCX_NET_DEVICES, or name what is "
        f"there ({', '.join(trial.available) or 'tcp,sm,self'}); set transfer.backend=tcp where TCP is fast enough"
    )
    found = f"NIXL moves nothing between two processes: {trial.problem}{because}"
    if transfer.backend == "auto":
        return warn("ucx", f"{found}; KV moves over TCP, also within this machine", fix)
    return fail("ucx", found, fix)


def _chose(trial: Trial, ucx_tls: str) -> Finding:
    speed = trial.num_bytes / trial.seconds / 1e9 if trial.seconds else 0.0
    lanes = ", ".join(trial.chosen) or "nothing that its log names"
    moved = f"UCX {trial.version} reads memory of this machine by {lanes}, {speed:.1f} GB/s"
    if ucx_tls or "tcp" not in trial.link_types:
        available = ", ".join(trial.available)
        return ok("ucx", f"{moved} (available: {available})" + (f"; UCX_TLS={ucx_tls}" if ucx_tls else ""))
    return warn(
        "ucx",
        f"{moved}, because it may not read another process's memory: handoffs on one machine are slow",
        "let processes of one user read each other: `sysctl kernel.yama.ptrace_scope=0`, or a seccomp profile that "
        "allows process_vm_readv (docker: --cap-add=SYS_PTRACE)",
    )


def _missing(trial: Trial, ucx_tls: str) -> Iterator[Finding]:
    if trial.missing:
        fix = f"set UCX_TLS to what there is: {', '.join(trial.available)}; for RDMA in a pod set `pools.<name>.rdma`"
        yield warn("ucx", _missing_names(trial, ucx_tls), fix)


def _missing_names(trial: Trial, ucx_tls: str) -> str:
    return f"UCX_TLS={ucx_tls} names {', '.join(trial.missing)}, which this machine does not have"


def _required(trial: Trial, transfer: TransferConfig, ucx_tls: str) -> Iterator[Finding]:
    """Report whether this machine meets `transfer.require`.

    Links between machines are checked only by measuring a pair of workers. The trial reads no GPU memory, so for
    cuda_ipc it shows only that UCX has the transport.
    """
    require = transfer.require
    if require == "any":
        return
    has_it = any(link_type_of(name) == require for name in trial.available)
    is_fine = trial.link_types == {require} if require == "shared_memory" else has_it
    if is_fine:
        yield ok("ucx", f"transfer.require={require}: {'chosen' if require == 'shared_memory' else 'available'}")
        return
    fixes = {
        "rdma": "correct what the checks `rdma` and `memlock` report, and set no UCX_TLS without rc or dc",
        "cuda_ipc": "use GPUs of one pod (`colocate: true`); set no UCX_TLS without cuda_copy and cuda_ipc",
        "shared_memory": "set no UCX_TLS without sm, and allow process_vm_readv between processes of one user",
    }
    tls = f" with UCX_TLS={ucx_tls}" if ucx_tls else ""
    found = f"transfer.require={require}, and UCX has {', '.join(trial.available)}{tls}"
    yield wrong(
        "ucx", found, f"{fixes[require]}; or set transfer.require=any", is_fatal=transfer.on_slow_link == "refuse"
    )


def _available(lines: Sequence[str]) -> Iterator[str]:
    """Yield the enabled transports (marked `+`) of the table, which has one row for each."""
    for cells in next(_tables(lines, "Available Transports and Devices"), ()):
        if len(cells) == 4 and (enabled := _ENABLED.fullmatch(cells[2])):
            yield enabled[1]


def _chosen(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the transports for the largest reads from the peer: the last row of the last table of reads."""
    rows = (cells for table in _tables(lines, "remote memory read by ucp_get") for cells in table)
    lanes = [found for cells in rows if len(cells) == 3 and (found := _LANE.findall(cells[2]))]
    return tuple(lanes[-1]) if lanes else ()


def _tables(lines: Sequence[str], title: str) -> Iterator[list[list[str]]]:
    """Yield the cells of the rows below each line with this title, down to the end of the table or its legend."""
    for start in (i for i, line in enumerate(lines, 1) if title in line):
        rows = takewhile(lambda line: line.startswith(("|", "+-")) and "Legend" not in line, lines[start:])
        yield [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _PREFIX.match(line)]
    return lines[-1] if lines else ""
