"""Test the check of UCX with recorded logs, and with a real read on this machine."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Literal

import pytest

from tandem.core.config import TransferConfig
from tandem.doctor.finding import Finding
from tandem.doctor.system import Ran, System
from tandem.doctor.ucx import Trial, check_ucx, judge_trial, link_type_of, parse_trial, read_trial
from tests.unit.doctor.ucx_logs import log
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns, verdicts

OUTPUT = json.dumps({"num_bytes": 8_000_000, "seconds": 0.001})
HOST = ("tcp", "sysv", "cma")
CARD = (*HOST, "rc_mlx5")
CMA = Trial("", "1.23.0", 8_000_000, 0.001, HOST, ("cma/memory",))
TCP = replace(CMA, chosen=("tcp/lo", "tcp/eth0"))
Require = Literal["any", "rdma", "cuda_ipc", "shared_memory"]


def judged(
    trial: Trial, require: Require = "any", ucx_tls: str = "", on_slow_link: Literal["refuse", "warn"] = "refuse"
) -> list[Finding]:
    transfer = TransferConfig(backend="nixl", require=require, on_slow_link=on_slow_link)
    return list(judge_trial(trial, transfer, ucx_tls))


def test_logs_are_read() -> None:
    """Of several tables the one of reads from the peer counts, and of its rows that of the largest sizes."""
    assert parse_trial(f"noise\n{OUTPUT}\n", log("zero-copy   | cma/memory")) == CMA
    assert parse_trial(OUTPUT, log("software emulation | 52% on tcp/lo and 48% on tcp/eth0")) == TCP
    card = parse_trial(OUTPUT, log("zero-copy   | rc_mlx5/mlx5_0:1", has_card=True))
    assert (card.available, card.chosen, card.link_types) == (CARD, ("rc_mlx5/mlx5_0:1",), {"rdma"})


def test_missing_transports_are_read() -> None:
    line = "ucp_context.c:1508 UCX  WARN  transport '{}' is not available, please use one or more of: cma, tcp\n"
    found = parse_trial(OUTPUT, log("x | tcp/lo", extra=line.format("rc") + line.format("dc") + line.format("rc")))
    assert found.missing == ("rc", "dc")


def test_an_empty_log() -> None:
    assert parse_trial(OUTPUT, "") == Trial("", "", 8_000_000, 0.001)


@pytest.mark.parametrize(
    ("transport", "link_type"),
    [
        ("cma", "shared_memory"),
        ("posix", "shared_memory"),
        ("rc_mlx5", "rdma"),
        ("dc_mlx5", "rdma"),
        ("ud_verbs", "rdma"),
        ("cuda_ipc", "cuda_ipc"),
        ("tcp", "tcp"),
        ("cuda_copy", "unknown"),
        ("rocm_ipc", "unknown"),
    ],
)
def test_link_types(transport: str, link_type: str) -> None:
    assert link_type_of(transport) == link_type


def test_a_read_through_the_kernel() -> None:
    (finding,) = judged(CMA)
    assert_fine(
        finding, "ucx", "UCX 1.23.0 reads memory of this machine by cma/memory, 8.0 GB/s (available: tcp, sysv, cma)"
    )


def test_tcp_within_a_machine_is_a_warning_unless_ucx_tls_is_set() -> None:
    (finding,) = judged(TCP)
    assert_warns(finding, "ucx", "tcp/lo, tcp/eth0", "kernel.yama.ptrace_scope=0")
    (finding,) = judged(TCP, ucx_tls="tcp")
    assert_fine(finding, "ucx", "UCX_TLS=tcp")


def test_ucx_tls_with_missing_transports() -> None:
    _, finding = judged(replace(TCP, missing=("rc",)), ucx_tls="rc,tcp")
    assert_warns(
        finding,
        "ucx",
        "UCX_TLS=rc,tcp names rc, which this machine does not have",
        "set UCX_TLS to what there is: tcp, sysv",
    )


@pytest.mark.parametrize("require", ["rdma", "cuda_ipc"])
def test_what_is_required_must_be_there(require: Require) -> None:
    name = {"rdma": "rc_mlx5", "cuda_ipc": "cuda_ipc"}[require]
    assert verdicts(judged(replace(CMA, available=(*HOST, name)), require)) == [("ucx", "ok"), ("ucx", "ok")]
    _, finding = judged(CMA, require, ucx_tls="tcp,sm")
    fix = {"rdma": "no UCX_TLS without rc or dc", "cuda_ipc": "`colocate: true`"}[require]
    assert_fails(finding, "ucx", f"transfer.require={require}, and UCX has tcp, sysv, cma with UCX_TLS=tcp,sm", fix)
    _, finding = judged(CMA, require, on_slow_link="warn")
    assert_warns(finding, "ucx", f"transfer.require={require}", "transfer.require=any")


def test_shared_memory_must_be_chosen() -> None:
    assert verdicts(judged(CMA, "shared_memory")) == [("ucx", "ok"), ("ucx", "ok")]
    _, finding = judged(TCP, "shared_memory", ucx_tls="tcp")
    assert_fails(finding, "ucx", "transfer.require=shared_memory", "process_vm_readv")


def test_nothing_moves() -> None:
    (finding,) = judged(Trial(problem="NIXL cannot start: NIXL_ERR_BACKEND", available=HOST))
    assert_fails(finding, "ucx", "NIXL_ERR_BACKEND", "there (tcp, sysv, cma)")
    assert "`pip install 'tandem[worker]'`" in finding.fix
    (finding,) = judged(Trial(problem="NIXL_ERR_BACKEND", missing=("rc", "dc")), ucx_tls="rc,dc")
    assert_fails(finding, "ucx", "UCX_TLS=rc,dc names rc, dc, which this machine does not have", "there (tcp,sm,self)")


def test_a_trial_that_dies_or_hangs() -> None:
    crash = read_trial(System(runner=lambda *_: Ran(1, "", "[1.0] [vm:1:0] UCX DEBUG\nModuleNotFoundError: no nixl\n")))
    assert crash.problem == "ModuleNotFoundError: no nixl"
    assert read_trial(System(runner=lambda *_: Ran(-11, "", ""))).problem == "exit code -11"


def test_the_local_transport_needs_none() -> None:
    (finding,) = check_ucx(System(), TransferConfig(backend="local"))
    assert_skips(finding, "ucx", "transfer.backend is local")
    (finding,) = check_ucx(System(), TransferConfig(backend="tcp"))
    assert_skips(finding, "ucx", "transfer.backend is tcp")


def test_workers_that_choose_do_without_ucx() -> None:
    (finding,) = judge_trial(Trial("no module"), TransferConfig(backend="auto"), "")
    assert_warns(finding, "ucx", "KV moves over TCP", "transfer.backend=tcp")


@pytest.mark.slow
def test_a_real_read_uses_the_transport_of_ucx_tls() -> None:
    """Run the installed library with two processes and parse its log."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    trial = read_trial(System(environ={**bare, "UCX_TLS": "tcp"}))
    assert (trial.problem, trial.link_types, trial.num_bytes) == ("", {"tcp"}, 8 << 20)
    assert "tcp" in trial.available and trial.seconds > 0 and trial.version
    broken = read_trial(System(environ={**bare, "UCX_TLS": "rc"}))
    assert "NIXL_ERR_BACKEND" in broken.problem and broken.missing == ("rc",)
