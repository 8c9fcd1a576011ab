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

    If there is no such combination, return one finding with the number of settings that differ from the defaults, and
    the sources that set them."""
    num_set = sum(origin != DEFAULT_LAYER for origin in resolved.origins.values())
    layers = sorted({origin for origin in resolved.origins.values() if origin != DEFAULT_LAYER})
    summary = f"{num_set} settings from {', '.join(layers)}" if layers else "all of them the defaults"
    found = (*_exposed(resolved.config), *_contradictory(resolved.config))
    return found or (ok("settings", f"{summary}; `tandem config` prints them"),)


def _exposed(config: Config) -> Iterator[Finding]:
    gateway, worker = config.gateway, config.worker
    if worker.port == 0 and worker.advertise_address.rpartition(":")[2] not in ("", "0"):
        found = "worker.advertise_address names a port, and worker.port=0 listens at any free one: calls would fail"
        yield warn("settings", found, "set worker.port to the port that worker.advertise_address leads to")
    if gateway.auth == "off" and not is_loopback(gateway.host):
        found = f"gateway.auth=off, and others can reach gateway.host={gateway.host}: everybody is served"
        yield warn("settings", found, "set --auth keys --tenants FILE (`tandem key` generates keys)")
    if gateway.auth == "off" and is_loopback(gateway.host) and "*" in gateway.host_patterns:
        found = "gateway.auth=off and gateway.allowed_hosts=*: a web page that resolves to 127.0.0.1 could read answers"
        yield warn("settings", found, "name the hosts in gateway.allowed_hosts, or leave it empty")
    if config.cluster.insecure and not is_loopback(worker.host):
        found = f"cluster.insecure, and others can reach worker.host={worker.host}: anybody may submit jobs and read KV"
        fix = "set --secret-file FILE for gateways and workers (`openssl rand -hex 32 > FILE`), and no cluster.insecure"
        yield warn("settings", found, fix)


def _contradictory(config: Config) -> Iterator[Finding]:
    handoff, require = config.handoff, config.transfer.require
    if config.planner.mode == "act" and not any(astuple(config.slo)):
        fix = "set slo.ttft_ms and slo.itl_ms, or planner.mode=explain"
        yield fail("settings", "planner.mode=act, and slo has no target for which to count workers", fix)
    planner = config.planner
    if planner.mode == "act" and 0 in (planner.min_prefill, planner.min_decode) and not config.gateway.wake_timeout_s:
        found = (
            "planner.min_prefill or planner.min_decode is 0, and gateway.wake_timeout_s is 0: requests for empty pools "
            "wait for gateway.no_worker_wait_s only, and gateways without workers are not ready"
        )
        fix = "set gateway.wake_timeout_s to more seconds than a worker takes to start, or the minimums to 1"
        yield warn("settings", found, fix)
    backend = config.transfer.backend
    if require == "rdma" and backend == "local":
        found = "transfer.require=rdma, and transfer.backend=local never leaves the machine: no link can meet it"
        yield fail("settings", found, "set transfer.backend=auto")
    if require != "any" and backend == "tcp":
        found = f"transfer.require={require}, and transfer.backend=tcp uses TCP alone: no link can meet it"
        yield fail("settings", found, "set transfer.backend=auto, or transfer.require=any")
    if require == "cuda_ipc" and config.model.device == "cpu":
        found = "transfer.require=cuda_ipc, and model.device=cpu has no GPU memory to move"
        yield fail("settings", found, "set transfer.require=shared_memory or any, or model.device=cuda")
    if handoff.lease_s > handoff.pull_timeout_s:
        found = (
            f"handoff.lease_s is longer ({handoff.lease_s:g} s) than handoff.pull_timeout_s "
            f"({handoff.pull_timeout_s:g} s): blocks are held for consumers that have given up"
        )
        yield warn("settings", found, "set handoff.lease_s to at most handoff.pull_timeout_s")
    if not handoff.digests:
        found = "handoff.digests is off: wrong KV, read from memory that was reused meanwhile, would be used"
        yield warn("settings", found, "set --kv-digests; off is for measuring only")
