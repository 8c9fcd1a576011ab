"""What the script of deploy/kind would run, and that it runs that in order, stops at what fails and says what is
missing; with programs that only write down how they were called. No cluster is made."""

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
    """`path` has the only programs that it finds, if it has any."""
    told = {"PATH": str(path or "/usr/bin:/bin"), "HOME": os.environ.get("HOME", "/")} | environment
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=told, capture_output=True, text=True, check=False, timeout=60
    )


def commands(said: str) -> list[list[str]]:
    return [shlex.split(line[2:]) for line in said.splitlines() if line.startswith("+ ")]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Each writes down what it was asked, and fails at what `FAIL` is a pattern of."""
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
    said = run("--print", "up")
    assert said.returncode == 0, said.stderr
    told = commands(said.stdout)
    kinds = [" ".join(word for word in one if word in WORDS) for one in told]
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
    assert all("kind-tandem" in one for one in told if one[0] in ("helm", "kubectl"))


WORDS = {
    *TOOLS,
    *("build", "create", "cluster", "load", "docker-image", "upgrade", "wait", "rollout", "status", "test"),
}


def test_what_it_names_is_there() -> None:
    told = commands(run("--print", "up").stdout)
    files = {
        word
        for one in told
        for word in one
        if word.startswith(("deploy/", "helm/")) and not word.startswith("deployment/")
    }
    assert {"deploy/Dockerfile.gateway", "deploy/Dockerfile.worker", "deploy/kind/cluster.yaml"} < files
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []


def test_the_images_that_it_builds_are_the_chart_s() -> None:
    """By the names and the tag that the chart gives them where nobody says another."""
    chart, values = (read_yaml(ROOT / "helm" / "tandem" / name) for name in ("Chart.yaml", "values.yaml"))
    told = commands(run("--print", "up").stdout)
    built = {one[one.index("--tag") + 1] for one in told if one[:2] == ["docker", "build"]}
    loaded = next(set(one[-2:]) for one in told if one[:2] == ["kind", "load"])
    wanted = {f"{values['image'][part]['repository']}:{chart['appVersion']}" for part in ("gateway", "worker")}
    assert built == loaded == wanted


def test_all_that_is_fetched_is_pinned() -> None:
    told = commands(run("--print", "up").stdout)
    (create,) = [one for one in told if one[:2] == ["kind", "create"]]
    assert "@sha256:" in create[create.index("--image") + 1]
    (operator,) = [one for one in told if "kuberay-operator" in one]
    assert operator[operator.index("--version") + 1].count(".") == 2


def test_the_cluster_has_two_workers_in_two_zones() -> None:
    nodes = yaml.safe_load((DEPLOY / "kind" / "cluster.yaml").read_text())["nodes"]
    zones = [node["labels"]["topology.kubernetes.io/zone"] for node in nodes if node["role"] == "worker"]
    assert len(zones) == len(set(zones)) == 2 and len(nodes) == 3


def test_it_runs_what_it_prints(tools: Path) -> None:
    printed = commands(run("--print", "up").stdout)
    said = run("up", path=tools)
    assert said.returncode == 0, said.stderr
    assert commands(said.stdout) == printed
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


def test_what_fails_ends_it_and_is_told(tools: Path) -> None:
    said = run("up", path=tools, FAIL="kubectl*wait*")
    assert said.returncode != 0 and "It failed" in said.stderr
    asked = calls(tools)
    assert "describe rayservice" in asked[-2] and "get events" in asked[-1]
    assert not any(" test " in call for call in asked)


@pytest.mark.parametrize("missing", TOOLS)
def test_a_tool_that_is_missing_is_named_before_anything_is_done(tools: Path, missing: str) -> None:
    (tools / missing).unlink()
    said = run("up", path=tools)
    assert said.returncode == 1 and said.stderr == f"kind.sh needs {missing}, which this machine does not have.\n"
    assert not (tools.parent / "calls").exists()


def test_a_docker_that_does_not_answer_is_told(tools: Path) -> None:
    said = run("up", path=tools, FAIL="docker info")
    assert said.returncode == 1 and "docker, which does not answer" in said.stderr
    assert calls(tools) == ["docker info"]


def test_down_deletes_the_cluster() -> None:
    assert commands(run("--print", "down").stdout) == [["kind", "delete", "cluster", "--name", "tandem"]]


@pytest.mark.parametrize("arguments", [(), ("--print",), ("around",), ("up", "down")])
def test_anything_else_is_refused(arguments: tuple[str, ...]) -> None:
    said = run(*arguments)
    assert said.returncode == 2 and "kind.sh [--print] up" in said.stderr
