"""Test deploy/kind/kind.sh with fake tools that record their arguments: it runs the steps that it prints in order,
stops at the first failure and names missing tools. No cluster is made."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.files import DEPLOY, ROOT, read_yaml
from tests.deploy.programs import installed_program

SCRIPT = DEPLOY / "kind" / "kind.sh"
TOOLS = ("docker", "kind", "kubectl", "helm")


def run(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run kind.sh; `path` replaces PATH, so that the script finds only the programs in that folder."""
    variables = {"PATH": str(path or "/usr/bin:/bin"), "HOME": os.environ.get("HOME", "/")} | environment
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=variables, capture_output=True, text=True, check=False, timeout=60
    )


def commands(output: str) -> list[list[str]]:
    return [shlex.split(line[2:]) for line in output.splitlines() if line.startswith("+ ")]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return a folder of fake tools that record their arguments, and fail where these match the pattern in `FAIL`."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("bash", "dirname", "grep", "sed"):
        (directory / name).symlink_to(str(shutil.which(name)))
    for name in TOOLS:
        write(directory / name, f"""echo "{name} $*" >> {tmp_path}/calls; [[ ! "{name} $*" == ${{FAIL:-}} ]]""")
    return directory


def write(program: Path, script: str) -> None:
    program.write_text(f"#!{shutil.which('bash')}\n{script}\n")
    program.chmod(0o755)


def calls(tools: Path) -> list[str]:
    return (tools.parent / "calls").read_text().splitlines()


def test_shellcheck_finds_nothing() -> None:
    others = (".ci/setup", ".ci/system", ".ci/run", "kernels/gpu_session.sh")
    scripts = [str(SCRIPT), *(str(ROOT / name) for name in others)]
    found = subprocess.run(
        [installed_program("shellcheck"), *scripts], capture_output=True, text=True, check=False, timeout=60
    )
    assert (found.returncode, found.stdout) == (0, "")


def test_it_builds_installs_waits_and_tests() -> None:
    done = run("--print", "up")
    assert done.returncode == 0, done.stderr
    steps = commands(done.stdout)
    kinds = [" ".join(word for word in one if word in WORDS) for one in steps]
    assert kinds == [
        "docker build",
        "docker build",
        "kind create cluster",
        "kind load docker-image",
        "helm upgrade",
        "helm upgrade",
        "kubectl wait",
        "kubectl rollout status",
        "helm test",
    ]
    assert all("kind-tandem" in one for one in steps if one[0] in ("helm", "kubectl"))


WORDS = {
    *TOOLS,
    *("build", "create", "cluster", "load", "docker-image", "upgrade", "wait", "rollout", "status", "test"),
}


def test_what_it_names_is_there() -> None:
    steps = commands(run("--print", "up").stdout)
    files = {
        word
        for one in steps
        for word in one
        if word.startswith(("deploy/", "helm/")) and not word.startswith("deployment/")
    }
    assert {"deploy/Dockerfile.gateway", "deploy/Dockerfile.worker", "deploy/kind/cluster.yaml"} < files
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []


def test_the_images_that_it_builds_are_the_chart_s() -> None:
    """Compare with the names and the tag that the chart uses by default."""
    chart, values = (read_yaml(ROOT / "helm" / "tandem" / name) for name in ("Chart.yaml", "values.yaml"))
    steps = commands(run("--print", "up").stdout)
    built = {one[one.index("--tag") + 1] for one in steps if one[:2] == ["docker", "build"]}
    loaded = next(set(one[-2:]) for one in steps if one[:2] == ["kind", "load"])
    expected = {f"{values['image'][part]['repository']}:{chart['appVersion']}" for part in ("gateway", "worker")}
    assert built == loaded == expected


def test_all_that_is_fetched_is_pinned() -> None:
    steps = commands(run("--print", "up").stdout)
    (create,) = [one for one in steps if one[:2] == ["kind", "create"]]
    assert "@sha256:" in create[create.index("--image") + 1]
    (operator,) = [one for one in steps if "kuberay-operator" in one]
    assert operator[operator.index("--version") + 1].count(".") == 2


def test_the_cluster_has_two_workers_in_two_zones() -> None:
    nodes = yaml.safe_load((DEPLOY / "kind" / "cluster.yaml").read_text())["nodes"]
    zones = [node["labels"]["topology.kubernetes.io/zone"] for node in nodes if node["role"] == "worker"]
    assert len(zones) == len(set(zones)) == 2 and len(nodes) == 3


def test_it_runs_what_it_prints(tools: Path) -> None:
    printed = commands(run("--print", "up").stdout)
    done = run("up", path=tools)
    assert done.returncode == 0, done.stderr
    assert commands(done.stdout) == printed
    looks = ("docker info", "kind get", "helm --kube-context kind-tandem get")
    assert [call for call in calls(tools) if not call.startswith(looks)] == [" ".join(one) for one in printed]


def test_an_index_of_torch_is_handed_on() -> None:
    worker = commands(run("--print", "up", TANDEM_TORCH_INDEX="http://index/cpu").stdout)[1]
    assert worker[worker.index("--build-arg") + 1] == "TANDEM_TORCH_INDEX=http://index/cpu"


def test_a_cluster_that_is_there_is_kept(tools: Path) -> None:
    (tools / "kind").write_text(
        f'#!/bin/bash\necho "kind $*" >> "{tools.parent}/calls"\n[ "$1" != get ] || echo tandem\n'
    )
    assert run("up", path=tools).returncode == 0
    assert not any(call.startswith("kind create") for call in calls(tools))


def test_a_failed_step_ends_the_script_with_diagnostics(tools: Path) -> None:
    done = run("up", path=tools, FAIL="kubectl*wait*")
    assert done.returncode != 0 and "It failed" in done.stderr
    called = calls(tools)
    assert "describe rayservice" in called[-2] and "get events" in called[-1]
    assert not any(" test " in call for call in called)


@pytest.mark.parametrize("missing", TOOLS)
def test_a_tool_that_is_missing_is_named_before_anything_is_done(tools: Path, missing: str) -> None:
    (tools / missing).unlink()
    done = run("up", path=tools)
    assert done.returncode == 1 and done.stderr == f"kind.sh needs {missing}, which this machine does not have.\n"
    assert not (tools.parent / "calls").exists()


def test_a_docker_that_does_not_answer_is_named(tools: Path) -> None:
    done = run("up", path=tools, FAIL="docker info")
    assert done.returncode == 1 and "docker, which does not answer" in done.stderr
    assert calls(tools) == ["docker info"]


def test_down_deletes_the_cluster() -> None:
    assert commands(run("--print", "down").stdout) == [["kind", "delete", "cluster", "--name", "tandem"]]


@pytest.mark.parametrize("arguments", [(), ("--print",), ("around",), ("up", "down")])
def test_anything_else_is_refused(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and "kind.sh [--print] up" in done.stderr
