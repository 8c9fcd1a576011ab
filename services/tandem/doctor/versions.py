"""Compare the installed packages with Tandem's requirements, without importing them."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tandem.doctor.finding import Finding, fail, ok, skip, warn

DISTRIBUTION = "tandem"
PARTS: Mapping[str, tuple[str, ...]] = {
    "": (),
    "gateway": ("grpcio-health-checking",),
    "worker": ("torch", "ray", "nixl-cu12"),
}
"""For each part of the installation ("" is common to all): packages that only this part installs. If none of them is
installed, the part was not chosen. The gateway's HTTP server and grpcio-reflection are not listed, since Ray installs
them too."""
_SHOWN = {
    "": ("grpcio", "redis"),
    "gateway": ("uvicorn", "httptools"),
    "worker": ("torch", "ray", "nixl-cu12", "nixl-cu13"),
}


@dataclass(frozen=True, slots=True)
class Versions:
    """Hold the installed versions, and those that Tandem requires.

    `python`, `tandem`: running versions. `required_python`: specifier of the Python versions that Tandem supports.
    `requires`: requirements in the metadata of the installed Tandem, None if it runs from files without metadata.
    `installed`: version of each installed package by name."""

    python: str
    required_python: str
    tandem: str
    requires: tuple[str, ...] | None
    installed: Mapping[str, str]


def read_versions() -> Versions:
    try:
        own = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return Versions(platform.python_version(), "", "", None, {})
    requires = tuple(own.requires or ())
    names = [Requirement(text).name for text in requires] + [name for shown in _SHOWN.values() for name in shown]
    return Versions(
        python=platform.python_version(),
        required_python=str(own.metadata.json.get("requires_python", "")),
        tandem=own.version,
        requires=requires,
        installed=dict(_installed(names)),
    )


def installed_parts() -> frozenset[str]:
    """Return which parts of Tandem are installed: "gateway", "worker" or both. A part counts as installed if one of the
    packages that only this part needs is installed."""
    return frozenset(part for part, marks in PARTS.items() if part and dict(_installed(marks)))


def judge_versions(versions: Versions) -> tuple[Finding, ...]:
    if versions.requires is None:
        fix = "run `pip install -e .` in the repository, or `pip install 'tandem[gateway,worker]'`"
        return (
            warn("packages", "Tandem runs from files without package metadata, so its requirements are unknown", fix),
        )
    return (_python(versions), *(_part(versions, part) for part in PARTS))


def _python(versions: Versions) -> Finding:
    summary = f"{versions.python}, Tandem {versions.tandem}"
    if Version(versions.python) in SpecifierSet(versions.required_python):
        return ok("python", summary)
    fix = f"make an environment with Python {versions.required_python}"
    return fail("python", f"{summary} requires {versions.required_python}", fix)


def _part(versions: Versions, part: str) -> Finding:
    name = f"tandem[{part}]" if part else DISTRIBUTION
    if part and not any(mark in versions.installed for mark in PARTS[part]):
        return skip("packages", f"{name} is not installed: no {part} runs here")
    assert versions.requires is not None
    requirements = [requirement for requirement in map(Requirement, versions.requires) if _is_of(requirement, part)]
    wrong = [text for requirement in requirements if (text := _mismatch(requirement, versions.installed))]
    if wrong:
        fix = f"run `pip install '{name}=={versions.tandem}'` in this environment"
        return fail("packages", f"{name}: {'; '.join(wrong)}", fix)
    shown = [f"{package} {versions.installed[package]}" for package in _SHOWN[part] if package in versions.installed]
    return ok("packages", f"{name}: {', '.join(shown)}, all {len(requirements)} as required")


def _is_of(requirement: Requirement, part: str) -> bool:
    """Check whether a requirement belongs to the extra `part` alone ("": to no extra).

    A requirement that is common to all parts has no marker, or a marker that holds without an extra.
    """
    if requirement.marker is None:
        return not part
    holds = requirement.marker.evaluate({"extra": part})
    return holds and bool(part) is not requirement.marker.evaluate({"extra": ""})


def _mismatch(requirement: Requirement, installed: Mapping[str, str]) -> str:
    """Return how the installed package violates a requirement; empty if it does not."""
    found = installed.get(requirement.name)
    if found is None:
        return f"{requirement.name} is missing"
    if not requirement.specifier.contains(found, prereleases=True):
        return f"{requirement.name} {found} is not {requirement.specifier}"
    return ""


def _installed(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in dict.fromkeys(names):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
