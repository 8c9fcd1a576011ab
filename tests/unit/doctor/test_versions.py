"""Test the comparison of installed packages with requirements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.doctor.versions import Versions, installed_parts, judge_versions, read_versions
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns

FULL = Versions(
    python="3.11.7",
    required_python=">=3.11",
    tandem="0.1.0",
    requires=(
        "grpcio<2,>=1.85.1",
        "redis<9,>=8",
        'grpcio-health-checking>=1.85; extra == "gateway"',
        'grpcio-reflection>=1.85; extra == "gateway"',
        'uvicorn>=0.54; extra == "gateway"',
        'uvloop>=0.23; sys_platform != "win32" and extra == "gateway"',
        'ray[serve]==2.60.*; extra == "worker"',
        'torch==2.13.0; extra == "worker"',
        'ruff==0.17.5; extra == "dev"',
        'pywin32; sys_platform == "win32" and extra == "worker"',
    ),
    installed={
        "grpcio": "1.85.1",
        "redis": "8.1.0",
        "uvicorn": "0.54",
        "grpcio-health-checking": "1.85.1",
        "grpcio-reflection": "1.85.1",
        "uvloop": "0.23",
        "ray": "2.60.1",
        "torch": "2.13.0",
    },
)


def test_all_as_it_should_be() -> None:
    python, base, gateway, worker = judge_versions(FULL)
    assert_fine(python, "python", "3.11.7, Tandem 0.1.0")
    assert_fine(base, "packages", "tandem: grpcio 1.85.1, redis 8.1.0, all 2 as required")
    assert_fine(gateway, "packages", "tandem[gateway]: uvicorn 0.54, all 4")
    assert_fine(worker, "packages", "tandem[worker]: torch 2.13.0, ray 2.60.1, all 2")


def test_this_installation_s_own_metadata_are_read() -> None:
    found = read_versions()
    assert found.requires and any(text.startswith("grpcio") for text in found.requires)
    assert found.installed["grpcio"] and found.required_python.startswith(">=3")


def test_an_old_python() -> None:
    finding, *_ = judge_versions(replace(FULL, python="3.10.4"))
    assert_fails(finding, "python", "3.10.4, Tandem 0.1.0 requires >=3.11", "an environment with Python >=3.11")


@pytest.mark.parametrize(
    ("name", "version", "found"), [("torch", "2.12.1", "torch 2.12.1 is not ==2.13.0"), ("ray", "", "ray is missing")]
)
def test_a_package_that_violates_its_requirement(name: str, version: str, found: str) -> None:
    installed = {**FULL.installed, name: version}
    *_, finding = judge_versions(replace(FULL, installed={n: v for n, v in installed.items() if v}))
    assert_fails(finding, "packages", found, "`pip install 'tandem[worker]==0.1.0'`")


def test_a_part_that_is_not_installed() -> None:
    installed = {name: version for name, version in FULL.installed.items() if name not in ("ray", "torch")}
    *_, finding = judge_versions(replace(FULL, installed=installed))
    assert_skips(finding, "packages", "tandem[worker] is not installed: no worker runs here")


def test_servers_that_ray_brings_are_no_gateway() -> None:
    installed = {name: version for name, version in FULL.installed.items() if name != "grpcio-health-checking"}
    *_, gateway, _ = judge_versions(replace(FULL, installed=installed))
    assert_skips(gateway, "packages", "tandem[gateway] is not installed")


def test_a_marker_of_all_parts_belongs_to_no_part() -> None:
    requires = (*(FULL.requires or ()), 'tomli>=2; python_version >= "3"')
    _, base, gateway, worker = judge_versions(replace(FULL, requires=requires))
    assert_fails(base, "packages", "tandem: tomli is missing", "`pip install 'tandem==0.1.0'`")
    assert [f.verdict.value for f in (gateway, worker)] == ["ok", "ok"]


def test_here_all_parts_are_installed() -> None:
    assert installed_parts() == {"gateway", "worker"}


def test_files_without_metadata() -> None:
    (finding,) = judge_versions(replace(FULL, requires=None))
    assert_warns(finding, "packages", "runs from files", "`pip install -e .`")
