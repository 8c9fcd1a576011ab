"""Test requirements: each has a tested version in the constraints, and a gateway runs without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
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
