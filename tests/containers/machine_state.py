"""What programs can leave on a machine, as lines that two moments can be compared by.

python -m tests.containers.machine_state    print the lines
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

_PROGRAMS = ("dockerd", "containerd", "containerd-shim", "docker-proxy", "slirp4netns", "debootstrap")
"""Names of processes, of which Linux keeps 15 characters."""
_FORWARDING = ("/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding")


def machine_state() -> list[str]:
    """Return the machine's network interfaces, firewall rules, forwarding, mounts, control groups, and the processes of
    container engines, sorted."""
    return sorted([*_interfaces(), *_rules(), *_forwarding(), *_mounts(), *_control_groups(), *_processes()])


def _interfaces() -> list[str]:
    lines = _output("ip", "-o", "link").splitlines()
    return [f"interface {line.split(':')[1].strip()}" for line in lines]


def _rules() -> list[str]:
    lines = [*_output("iptables-save").splitlines(), *_output("ip6tables-save").splitlines()]
    return [f"rule {line}" for line in lines if line.startswith("-A")]


def _forwarding() -> list[str]:
    return [f"{path}={Path(path).read_text().strip()}" for path in _FORWARDING if Path(path).exists()]


def _mounts() -> list[str]:
    return [f"mount {line.split()[1]}" for line in Path("/proc/self/mounts").read_text().splitlines()]


def _control_groups() -> list[str]:
    found = {path for depth in ("*", "*/*") for path in Path("/sys/fs/cgroup").glob(depth) if path.is_dir()}
    return [f"control group {path}" for path in found]


def _processes() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            name = path.read_text().strip()
        except OSError:  # it has ended
            continue
        if name in _PROGRAMS:
            found.append(f"process {name}")
    return found


def _output(*command: str) -> str:
    if shutil.which(command[0], path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    sys.stdout.write("\n".join([*machine_state(), ""]))
