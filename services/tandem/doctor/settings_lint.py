"""Warn about combinations of settings that are valid but probably unintended.

Pure. Combinations that are refused are in `core.config_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from tandem.core.addresses import is_loopback
from tandem.core.config import Config
from tandem.core.settings import DEFAULT_LAYER, Resolved
from tandem.doctor.finding import Finding, ok, wrong


@dataclass(frozen=True, slots=True)
class _Rule:
    """Lint rule. `applies` returns whether the settings match it; `found` and `fix` are the texts of its finding."""

    applies: Callable[[Config], bool]
    found: str
    fix: str
    is_fatal: bool = False


_RULES = (
    _Rule(
        lambda c: c.worker.port == 0 and c.worker.advertise_address.rpartition(":")[2] not in ("", "0"),
        "worker.advertise_address names a port, and worker.port=0 listens at any free one",
        "worker.port with the port that worker.advertise_address leads to",
    ),
    _Rule(
        lambda c: c.gateway.auth == "off" and not is_loopback(c.gateway.host),
        "gateway.auth=off, and others can reach gateway.host: everybody is served",
        "--auth keys --tenants FILE (`tandem key` generates keys)",
    ),
    _Rule(
        lambda c: c.cluster.insecure and not is_loopback(c.worker.host),
        "cluster.insecure, and others can reach worker.host: anybody may submit jobs to it and read its KV",
        "--secret-file FILE for gateways and workers (`openssl rand -hex 32 > FILE`), and no cluster.insecure",
    ),
    _Rule(
        lambda c: c.planner.mode == "act" and not _has_targets(c),
        "planner.mode=act, and slo has no target to hold",
        "slo.ttft_ms and slo.itl_ms, or planner.mode=explain",
        is_fatal=True,
    ),
    _Rule(
        lambda c: c.transfer.require == "rdma" and c.handoff.transport == "local",
        "transfer.require=rdma, and handoff.transport=local never leaves the machine",
        "handoff.transport=nixl",
        is_fatal=True,
    ),
    _Rule(
        lambda c: c.transfer.require == "cuda_ipc" and c.model.device == "cpu",
        "transfer.require=cuda_ipc, and model.device=cpu has no GPU memory to move",
        "transfer.require=shared_memory or any, or model.device=cuda",
        is_fatal=True,
    ),
    _Rule(
        lambda c: c.handoff.lease_s > c.handoff.pull_timeout_s,
        "handoff.lease_s is longer than handoff.pull_timeout_s: blocks are held for consumers that have given up",
        "handoff.lease_s at most handoff.pull_timeout_s",
    ),
    _Rule(
        lambda c: not c.handoff.digests,
        "handoff.digests is off: KV read from memory that was reused meanwhile would not be detected",
        "--kv-digests; off is for measuring only",
    ),
)


def judge_settings(resolved: Resolved) -> tuple[Finding, ...]:
    """Return a finding for each rule that applies; if none does, one with the number of settings that are set."""
    found = tuple(
        wrong("settings", rule.found, rule.fix, is_fatal=rule.is_fatal)
        for rule in _RULES
        if rule.applies(resolved.config)
    )
    num_set = sum(origin != DEFAULT_LAYER for origin in resolved.origins.values())
    layers = sorted({origin for origin in resolved.origins.values() if origin != DEFAULT_LAYER})
    summary = f"{num_set} settings from {', '.join(layers)}" if layers else "all of them the defaults"
    return found or (ok("settings", f"{summary}; `tandem config` prints them"),)


def _has_targets(config: Config) -> bool:
    return any(getattr(config.slo, field.name) > 0 for field in fields(config.slo))
