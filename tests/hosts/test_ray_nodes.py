"""Test a worker whose ranks Ray places on two hosts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.gateway.processes import until
from tests.hosts.test_ray import RayHosts, running_ray

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def ranks_of(ray_hosts: RayHosts) -> list[str]:
    """Return the networks of the processes of ranks other than the first."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (entry / "cmdline").read_bytes().startswith(b"ray::_Rank"):
                # Fails if the process has ended since.
                words = ("ip", "netns", "identify", entry.name)
                found.append(subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip())
        except OSError:
            continue
    ours = {network.within[-1] for network in ray_hosts.network.values()}
    return [name for name in found if name in ours]


def test_two_hosts_share_the_ranks_of_a_worker(tmp_path: Path) -> None:
    pools = {"a": "prefill", "b": "decode", "c": "prefill"}
    with running_ray(tmp_path, prefill={"tensor_parallel": 2, "nnodes": 2}, pools=pools) as ray_hosts:
        hosts = {ray_hosts.network[name].within[-1]: name for name in ("a", "c")}
        (second,) = ranks_of(ray_hosts)
        (first,) = {*hosts} - {second}
        replies = [ray_hosts.complete(salt) for salt in range(1, 5)]
        assert {reply[:2] for reply in replies} == {(200, "remote")}
        ray_hosts.network[hosts[first]].unplug()
        ray_hosts.nodes[hosts[first]].kill()
        alone = [ray_hosts.complete(salt) for salt in range(1, 5)]
        assert [reply[3] for reply in alone] == [reply[3] for reply in replies]
        until(lambda: ranks_of(ray_hosts) == [], "the end of the rank on the other host")
