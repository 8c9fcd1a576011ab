"""The Dockerfiles are as hadolint has them, pinned, for a user who is not root, and hold what pods ask of them; whether
they build only an engine of containers can tell."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from tandem.core.settings import from_environment, settings
from tests.deploy.dockerfile import Stage, lineage, read_stages
from tests.deploy.files import DEPLOY, ROOT, read_yaml
from tests.deploy.programs import installed_program

FILES = ("Dockerfile.gateway", "Dockerfile.worker")
EACH = pytest.mark.parametrize("file", FILES)
IMAGES = [("Dockerfile.gateway", ""), ("Dockerfile.worker", "cpu"), ("Dockerfile.worker", "cuda")]
IMAGE = pytest.mark.parametrize(("file", "target"), IMAGES)


def stages(file: str) -> list[Stage]:
    return read_stages(DEPLOY / file)


def instructions(file: str, target: str, word: str) -> list[str]:
    """Return all instructions of a kind that apply to an image, the last one first."""
    return [rest for stage in lineage(stages(file), target) for rest in stage.all(word)[::-1]]


def environment(file: str, target: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in reversed(instructions(file, target, "ENV")) for pair in rest.split())


@EACH
def test_hadolint_finds_nothing(file: str) -> None:
    command = [
        installed_program("hadolint"),
        "--no-color",
        "--config",
        str(ROOT / ".hadolint.yaml"),
        str(DEPLOY / file),
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, ""), found.stdout + found.stderr


def test_each_rule_that_is_ignored_has_its_reason() -> None:
    ignored = read_yaml(ROOT / ".hadolint.yaml")["ignored"]
    text = (ROOT / ".hadolint.yaml").read_text()
    assert all(re.search(rf"  # [^\n]+\n  - {rule}\n", text) for rule in ignored)


@EACH
def test_stages_are_of_one_pinned_image_or_of_each_other(file: str) -> None:
    names = {stage.name for stage in stages(file)}
    images = {stage.source for stage in stages(file)} - names
    assert len(images) == 1 and re.fullmatch(r"python:\d+\.\d+\.\d+-[\w-]+", images.pop())
    assert not any("latest" in rest for stage in stages(file) for _, rest in stage.instructions)


@IMAGE
def test_nobody_is_root(file: str, target: str) -> None:
    assert instructions(file, target, "USER")[0] == "10001:10001"
    own, *_ = lineage(stages(file), target)
    words = [word for word, _ in own.instructions]
    assert "USER" not in words or "RUN" not in words[words.index("USER") :] or own.all("USER")[-1] == "10001:10001"
    assert any("--uid 10001" in rest for rest in instructions(file, target, "RUN"))


@IMAGE
def test_labels_describe_the_image(file: str, target: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    labels = dict(
        re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', " ".join(instructions(file, target, "LABEL")))
    )
    assert labels["version"] == version and labels["licenses"] == "Apache-2.0"
    assert labels["base.name"] == lineage(stages(file), target)[-1].source
    assert {"title", "description", "revision"} <= labels.keys()


@EACH
def test_no_secret_is_an_argument_or_copied(file: str) -> None:
    for stage in stages(file):
        assert stage.all("ADD") == []
        named = " ".join([*stage.all("ARG"), *stage.all("ENV")])
        assert not re.search(r"SECRET|PASSWORD|TOKEN|_KEY\b", named)
        for copied in stage.all("COPY"):
            assert copied.startswith("--from=") or re.fullmatch(r"[\w./ ]+", copied)


@EACH
def test_the_tested_versions_are_installed_and_nothing_else_can_be(file: str) -> None:
    """By every pip, those in which it builds included."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for stage in stages(file):
        for run in stage.all("RUN"):
            if "pip install" not in run:
                continue
            variables = " ".join(rest for one in lineage(stages(file), stage.name) for rest in one.all("ENV"))
            assert "PIP_CONSTRAINT=/src/" in variables and "--no-cache-dir" in run
            assert set(re.findall(r"\w+", "".join(re.findall(r'"\.\[(.*?)\]"', run)))) <= extras.keys()


def test_what_torch_brings_itself_is_not_held_to_the_tested_version() -> None:
    """Triton of a torch for CUDA is another than the one that is interpreted in tests."""
    (torch,) = [stage for stage in stages("Dockerfile.worker") if stage.name == "torch"]
    pattern = re.findall(r"sed '/(\^\w+==)/d' constraints.txt", " ".join(torch.all("RUN")))[0]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line.split("==")[0] for line in lines if re.match(pattern, line)] == ["triton"]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_pod_finds_what_kuberay_runs_in_it(target: str) -> None:
    """Bash, wget, `ray` in a login shell too; and a compiler."""
    runs = " ".join(instructions("Dockerfile.worker", target, "RUN"))
    assert {"g++", "wget"} <= set(runs.split())
    assert "/opt/tandem/bin:" in environment("Dockerfile.worker", target)["PATH"]
    assert re.search(r'echo "PATH=/opt/tandem/bin:\\\$PATH" > /etc/profile\.d/\w+\.sh', runs)
    assert {"ibverbs-providers", "libibverbs1", "librdmacm1"} <= set(runs.split()) or target == "cpu"


def test_an_image_for_gpus_sees_no_device_that_was_not_requested() -> None:
    variables = environment("Dockerfile.worker", "cuda")
    assert variables["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility" and "NVIDIA_VISIBLE_DEVICES" not in variables


@IMAGE
def test_all_that_it_writes_is_under_what_may_be_written(file: str, target: str) -> None:
    variables = environment(file, target)
    known = {setting.env for setting in settings()}
    assert {name for name in variables if name.startswith("TANDEM_")} <= known and from_environment(
        variables
    ) is not None
    written = [value for name, value in variables.items() if re.search(r"CACHE|RUN_DIR", name)]
    assert all(re.match(r"/(tmp|cache)\b", path) for path in written)
    assert len(written) == (4 if file == "Dockerfile.worker" else 0)
