"""Render the chart with Helm and parse it, once for all tests of a process; outputs are cached between runs."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml

from tests.chart.kept import ProgramOutput, run_cached

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "tandem"
CI = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
RELEASE, NAMESPACE = "rel", "inference"

Object = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """`by_template`: the objects of each template that made any, in the order of its text."""

    by_template: Mapping[str, list[Object]]

    @property
    def objects(self) -> list[Object]:
        return [one for made in self.by_template.values() for one in made]

    def one(self, template: str) -> Object:
        (found,) = self.by_template[template]
        return found

    def has(self, template: str) -> bool:
        return template in self.by_template

    def kinds(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    @property
    def config(self) -> dict[str, Any]:
        return yaml.load(self.one("configmap")["data"]["config.yaml"], yaml.CSafeLoader)

    @property
    def ray(self) -> Object:
        return self.one("rayservice")["spec"]

    @property
    def serve(self) -> dict[str, Any]:
        return yaml.load(self.ray["serveConfigV2"], yaml.CSafeLoader)

    @property
    def applications(self) -> dict[str, Any]:
        """Return the Serve applications by pool."""
        return {one["args"]["pool"]: one for one in self.serve["applications"]}

    @property
    def groups(self) -> dict[str, Any]:
        """Return the worker groups by name."""
        return {one["groupName"]: one for one in self.ray["rayClusterConfig"]["workerGroupSpecs"]}


def helm_program() -> str:
    """Return the path of the helm beside this Python, or on PATH."""
    beside = Path(sys.executable).parent / "helm"
    program = str(beside) if beside.exists() else shutil.which("helm")
    assert program, "helm is in the extra dev"
    return program


def helm(*arguments: str, values: str = "", key_arguments: Sequence[str] | None = None) -> ProgramOutput:
    """Run helm on the chart. `key_arguments` replaces the arguments in the cache key where these name temporary
    files."""
    command = [helm_program(), *arguments]
    return run_cached(command, reads=[CHART], values=values, key_arguments=key_arguments)


@functools.cache
def ci(name: str, release: str = RELEASE) -> Rendered:
    """Render the chart with one of the value files in ci/."""
    return _rendered(CI[name].read_text(), release)


def render(values: Mapping[str, Any] | None = None, release: str = RELEASE) -> Rendered:
    return _rendered(json.dumps(values or {}), release)


@functools.cache
def _rendered(values: str, release: str) -> Rendered:
    done = helm("template", release, str(CHART), "--namespace", NAMESPACE, "-f", "-", values=values)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Object]] = {}
    for document in done.stdout.split("\n---\n"):
        value = yaml.load(document, yaml.CSafeLoader)
        if value is not None:
            source = document.removeprefix("---\n").splitlines()[0].removeprefix("# Source: tandem/templates/")
            found.setdefault(source.removesuffix(".yaml"), []).append(value)
    return Rendered(found)


def refusal(values: Mapping[str, Any]) -> str:
    """Return Helm's error message for values that it refuses."""
    done = helm("template", RELEASE, str(CHART), "-f", "-", values=json.dumps(values))
    assert done.returncode != 0, "these values are taken"
    return done.stderr


def notes(values: Mapping[str, Any] | None = None) -> str:
    """Return the rendered NOTES.txt. Helm prints notes only with a cluster, so a copy of the chart has them in an
    object."""
    flags = ("--namespace", NAMESPACE, "--show-only", "templates/notes.yaml", "-f", "-")
    given = json.dumps(values or {})
    done = helm(
        "template", RELEASE, str(_chart_with_notes()), *flags, values=given, key_arguments=[*NOTES.values(), *flags]
    )
    assert done.returncode == 0, done.stderr
    return str(yaml.safe_load(done.stdout)["text"])


NOTES = {
    "_notes.tpl": '{{- define "notes" -}}\n' + (CHART / "templates" / "NOTES.txt").read_text() + "{{ end }}\n",
    "notes.yaml": 'kind: Notes\ntext: {{ include "notes" . | quote }}\n',
}


@functools.cache
def _chart_with_notes() -> Path:
    place = mkdtemp(prefix="tandem-notes-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    copy = shutil.copytree(CHART, Path(place) / "tandem")
    for name, text in NOTES.items():
        (copy / "templates" / name).write_text(text)
    return copy


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yield each pod template with the name of its owner."""
    for one in objects:
        name = f"{one['kind']}/{one['metadata']['name']}"
        if one["kind"] == "RayService":
            cluster = one["spec"]["rayClusterConfig"]
            yield f"{name}/head", cluster["headGroupSpec"]["template"]
            yield from ((f"{name}/{group['groupName']}", group["template"]) for group in cluster["workerGroupSpecs"])
        elif one["kind"] == "Pod":
            yield name, one
        elif "template" in one.get("spec", {}):
            yield name, one["spec"]["template"]


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]


def env(container: Object) -> dict[str, Any]:
    """Return a container's environment: each variable's value, or its `valueFrom`."""
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container.get("env", [])}


def gateway(rendered: Rendered) -> Object:
    """Return the spec of the gateway pods."""
    return rendered.one("gateway-deployment")["spec"]["template"]["spec"]
