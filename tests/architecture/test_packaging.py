"""Test requirements: each has a tested version, the product imports no others, and a gateway runs without torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[Requirement]] = {
    extra: [Requirement(text) for text in texts] for extra, texts in PROJECT["optional-dependencies"].items()
}
BASE = [Requirement(text) for text in PROJECT["dependencies"]]


def constraints() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = [line.split("==") for line in lines]
    return {canonicalize_name(name): Version(version) for name, version in pinned}


# The tested machines have no CUDA 13: its version is in the extra itself.
@pytest.mark.parametrize("requirement", [r for e, rs in EXTRAS.items() if e != "cuda" for r in rs] + BASE, ids=str)
def test_every_requirement_has_a_tested_version_that_it_allows(requirement: Requirement) -> None:
    assert constraints()[canonicalize_name(requirement.name)] in requirement.specifier


def test_no_requirement_is_the_package_that_installs_every_cuda_version() -> None:
    names = {canonicalize_name(r.name) for requirements in [BASE, *EXTRAS.values()] for r in requirements}
    assert "nixl" not in names | constraints().keys()


@pytest.mark.slow
def test_the_gateway_runs_without_torch_and_ray() -> None:
    heavy = ("torch", "ray", "numpy", "safetensors", "gguf", "nixl_cu12", "transformers")
    code = f"import sys, tandem.gateway.main; print(*[m for m in {heavy} if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "services")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


SERVES = ("gateway", "worker")
PRODUCT = [*(ROOT / "services" / "tandem").rglob("*.py"), *(ROOT / "kernels" / "tandem_kernels").rglob("*.py")]
NOT_FOR_SERVING = {
    "services/tandem/planner/kube_client.py": "kubernetes",
    "services/tandem/sim/planner/plan_chart.py": "sim",
    "services/tandem/sim/report/chart.py": "sim",
}
"""The files that need an extra beyond `SERVES`; the commands that use them name it where it is not installed."""
BROUGHT_BY_TORCH = "triton"
"""Torch for CUDA requires it; without CUDA nothing imports it but tests."""


def required(extras: Iterable[str]) -> set[str]:
    """Return the packages that pip installs on this machine for Tandem with some extras, from installed metadata."""
    found: set[str] = set()
    todo = [*BASE, *(requirement for extra in extras for requirement in EXTRAS[extra])]
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        for extra in one.extras or {""}:
            if (one.marker is None or one.marker.evaluate({"extra": ""})) and (key := f"{name}[{extra}]") not in found:
                found |= {key, name}
                for further in map(Requirement, metadata.requires(name) or []):
                    if further.marker is None or further.marker.evaluate({"extra": extra}):
                        further.marker = None
                        todo.append(further)
    return found


def imported(file: Path) -> set[str]:
    """Return the top-level names that a file imports from outside the standard library and Tandem."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"tandem", "tandem_kernels", BROUGHT_BY_TORCH}


@pytest.mark.slow
def test_the_product_imports_only_what_its_extras_bring_and_serving_no_test_tool() -> None:
    """`make serve` installs `tandem[gateway,worker]` alone."""
    packages = metadata.packages_distributions()
    serving = required(SERVES)
    assert {"torch", "numpy", "starlette"} <= serving and not {"pytest", "transformers", "kubernetes"} & serving
    missing = {}
    for file in PRODUCT:
        name = file.relative_to(ROOT).as_posix()
        installed = required({*SERVES, NOT_FOR_SERVING[name]}) if name in NOT_FOR_SERVING else serving
        lacks = {each for each in imported(file) if not installed & set(map(canonicalize_name, packages.get(each, [])))}
        if lacks:
            missing[name] = lacks
    assert not missing
