"""The packages that are installed against those that Tandem asks for; never imports one of them."""

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
    "gateway": ("grpcio-reflection", "grpcio-health-checking"),
    "worker": ("torch", "ray", "nixl-cu12"),
}
"""Of each part of the installation, "" the one that all have, packages that nothing else brings: where none of them is
installed nobody wanted the part. Ray brings all of an HTTP server."""
_SHOWN = {
    "": ("grpcio", "redis"),
    "gateway": ("uvicorn", "httptools"),
    "worker": ("torch", "ray", "nixl-cu12", "nixl-cu13"),
}


@dataclass(frozen=True, slots=True)
class Versions:
    """`requires` are the requirements of the installed Tandem as its metadata have them, None where it is run from
    files without metadata; `installed` has a version for each package that is there."""

    python: str
    asked_python: str
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
        asked_python=str(own.metadata.json.get("requires_python", "")),
        tandem=own.version,
        requires=requires,
        installed=dict(_installed(names)),
    )


def installed_parts() -> frozenset[str]:
    """Those of which something is there."""
    return frozenset(part for part, marks in PARTS.items() if part and dict(_installed(marks)))


def judge_versions(versions: Versions) -> tuple[Finding, ...]:
    if versions.requires is None:
        fix = "`pip install -e .` in the repository, or `pip install 'tandem[gateway,worker]'`"
        return (warn("packages", "this Tandem is run from files and says not what it needs", fix),)
    return (_python(versions), *(_part(versions, part) for part in PARTS))


def _python(versions: Versions) -> Finding:
    told = f"{versions.python}, Tandem {versions.tandem}"
    if Version(versions.python) in SpecifierSet(versions.asked_python):
        return ok("python", told)
    fix = f"an environment with Python {versions.asked_python}"
    return fail("python", f"{told} asks for {versions.asked_python}", fix)


def _part(versions: Versions, part: str) -> Finding:
    name = f"tandem[{part}]" if part else DISTRIBUTION
    if part and not any(mark in versions.installed for mark in PARTS[part]):
        return skip("packages", f"{name} is not installed: no {part} runs here")
    assert versions.requires is not None
    wanted = [requirement for requirement in map(Requirement, versions.requires) if _is_of(requirement, part)]
    wrong = [told for requirement in wanted if (told := _mismatch(requirement, versions.installed))]
    if wrong:
        fix = f"`pip install '{name}=={versions.tandem}'` in this environment"
        return fail("packages", f"{name}: {'; '.join(wrong)}", fix)
    shown = [f"{one} {versions.installed[one]}" for one in _SHOWN[part] if one in versions.installed]
    return ok("packages", f"{name}: {', '.join(shown)}, all {len(wanted)} as it asks for")


def _is_of(requirement: Requirement, part: str) -> bool:
    """The extra's own: what all parts ask for has no marker or holds without one."""
    if requirement.marker is None:
        return not part
    holds = requirement.marker.evaluate({"extra": part})
    return holds and bool(part) is not requirement.marker.evaluate({"extra": ""})


def _mismatch(requirement: Requirement, installed: Mapping[str, str]) -> str:
    """What is wrong with it; empty where nothing is."""
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
