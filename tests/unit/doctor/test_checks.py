"""Test the list of checks, and which checks are skipped for which installation."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Set
from pathlib import Path

import pytest

from tandem.core.clock import SystemClock
from tandem.core.config import Config, WorkerConfig
from tandem.core.settings import Resolved, resolve
from tandem.doctor.checks import Dependencies, Options, list_checks
from tandem.doctor.finding import Severity
from tandem.doctor.runner import Check, run_checks
from tests.unit.doctor.cluster import Listed
from tests.unit.doctor.trees import system
from tests.unit.doctor.verdicts import assert_skips

ROOM = Path(__file__).resolve().parents[3] / "services/tandem/doctor"


def fine(resolved: Resolved) -> None:
    return


def address(worker: WorkerConfig, environ: Mapping[str, str]) -> str:
    return "127.0.0.1:0"


def members(config: Config) -> Listed:
    raise AssertionError("nobody names a Redis")


DEPENDENCIES = Dependencies(members, fine, fine, address)  # type: ignore[arg-type]


def checkup(tmp_path: Path, parts: Set[str]) -> list[Check]:
    here = system(tmp_path, {})
    settings = resolve([("test", {"gateway.port": 0, "model.device": "cuda"})])
    return list_checks(settings, here, DEPENDENCIES, Options(), parts, SystemClock())


async def test_checks_of_parts_that_are_not_installed_are_skipped(tmp_path: Path) -> None:
    """Run all checks on a machine without a GPU, an RDMA card, a compiler or shared memory."""
    found = {}
    for parts in ({"gateway"}, {"worker"}):
        examined = await run_checks([c for c in checkup(tmp_path, parts) if c.name != "ucx"], SystemClock())
        found[parts.pop()] = {f.check: f for one in examined for f in one.findings}
    for name in ("cpu", "gpu", "rdma", "memlock", "shared-memory", "model", "advertise-address", "nodes", "guard"):
        assert found["gateway"][name].found == "tandem[worker] is not installed: none runs here"
        assert "not installed: none runs" not in found["worker"][name].found
    for name in ("open-files", "tenants"):
        assert found["worker"][name].found == "tandem[gateway] is not installed: none runs here"
        assert "not installed: none runs" not in found["gateway"][name].found
    assert "ports" in found["worker"] and "ports" not in found["gateway"], "only a worker listens at any free port"
    assert [f.check for f in found["gateway"].values() if f.verdict is Severity.FAIL] == []
    assert {"gpu", "shared-memory"} <= {f.check for f in found["worker"].values() if f.verdict is Severity.FAIL}


async def test_without_a_list_of_workers_no_link_is_measured(tmp_path: Path) -> None:
    checks = list_checks(resolve([]), system(tmp_path, {}), DEPENDENCIES, Options(pairs="few"), set(), SystemClock())
    (examined,) = await run_checks([check for check in checks if check.is_alone], SystemClock())
    assert_skips(examined.findings[0], "pairs", "redis.url is not set")


def test_each_name_in_a_report_belongs_to_one_check(tmp_path: Path) -> None:
    """`--only` accepts all of them."""
    source = "".join(path.read_text() for path in ROOM.glob("*.py"))
    written = re.findall(r'\b(?:ok|warn|fail|skip|wrong)\(\s*"([a-z-]+)"', source)
    names = [name for check in checkup(tmp_path, {"gateway", "worker"}) for name in (check.name, *check.others)]
    assert len(names) == len(set(names)) and set(written) - {"pairs"} == set(names)


@pytest.mark.slow
def test_the_doctor_runs_without_the_packages_of_workers_and_gateways() -> None:
    """Hide the packages that only one of the two parts installs."""
    code = """
import sys
for name in ("torch", "ray", "numpy", "nixl_cu12", "safetensors", "gguf", "tokenizers", "jinja2",
             "httptools", "starlette", "uvicorn", "uvloop", "llguidance", "httpx", "kubernetes", "grpc_health",
             "grpc_reflection"):
    sys.modules[name] = None
from tandem.cli import main
import tandem.doctor.versions as versions
versions.installed_parts = lambda: frozenset()
sys.exit(main(["doctor", "--json", "--redis-url", "unix:///nowhere/redis.sock", "--only",
               "settings,cpu,gpu,rdma,memlock,ucx,model,ports,tenants,secret,tls,workers,gateway,clock,pod,rbac"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
