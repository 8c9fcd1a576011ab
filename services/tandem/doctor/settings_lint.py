"""Warn about combinations of settings that are valid but probably unintended.

Pure. Combinations that are refused are in `core.config_rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

from tandem.core.addresses import is_loopback
from tandem.core.config import Config
from tandem.core.settings import DEFAULT_LAYER, Resolved
from tandem.doctor.finding import Finding, fail, ok, warn


def judge_settings(resolved: Resolved) -> tuple[Finding, ...]:
    """Return a finding for each combination of settings that is valid but probably unintended.

    If there is none, one finding with the number of settings that differ from the defaults, and where they are set."""
    num_set = sum(origin != DEFAULT_LAYER for origin in resolved.origins.values())
    layers = sorted({origin for origin in resolved.origins.values() if origin != DEFAULT_LAYER})
    summary = f"{num_set} settings from {', '.join(layers)}" if layers else "all of them the defaults"
    found = (*_exposed(resolved.config), *_contradictory(resolved.config))
    return found or (ok("settings", f"{summary}; `tandem config` prints them"),)


def _exposed(config: Config) -> Iterator[Finding]:
    gateway, worker = config.gateway, config.worker
    if worker.port == 0 and worker.advertise_address.rpartition(":")[2] not in ("", "0"):
        found = "worker.advertise_address names a port, and worker.port=0 listens at any free one"
        yield warn("settings", found, "worker.port with the port that worker.advertise_address leads to")
    if gateway.auth == "off" and not is_loopback(gateway.host):
        found = "gateway.auth=off, and others can reach gateway.host: everybody is served"
        yield warn("settings", found, "--auth keys --tenants FILE (`tandem key` generates keys)")
    if config.cluster.insecure and not is_loopback(worker.host):
        found = "cluster.insecure, and others can reach worker.host: anybody may submit jobs to it and read its KV"
        fix = "--secret-file FILE for gateways and workers (`openssl rand -hex 32 > FILE`), and no cluster.insecure"
        yield warn("settings", found, fix)


def _contradictory(config: Config) -> Iterator[Finding]:
    handoff, require = config.handoff, config.transfer.require
    if config.planner.mode == "act" and not any(astuple(config.slo)):
        fix = "slo.ttft_ms and slo.itl_ms, or planner.mode=explain"
        yield fail("settings", "planner.mode=act, and slo has no target to hold", fix)
    if require == "rdma" and handoff.transport == "local":
        found = "transfer.require=rdma, and handoff.transport=local never leaves the machine"
        yield fail("settings", found, "handoff.transport=nixl")
    if require == "cuda_ipc" and config.model.device == "cpu":
        found = "transfer.require=cuda_ipc, and model.device=cpu has no GPU memory to move"
        yield fail("settings", found, "transfer.require=shared_memory or any, or model.device=cuda")
    if handoff.lease_s > handoff.pull_timeout_s:
        found = (
            "handoff.lease_s is longer than handoff.pull_timeout_s: blocks are held for consumers that have given up"
        )
        yield warn("settings", found, "handoff.lease_s at most handoff.pull_timeout_s")
    if not handoff.digests:
        found = "handoff.digests is off: KV read from memory that was reused meanwhile would not be detected"
        yield warn("settings", found, "--kv-digests; off is for measuring only")
