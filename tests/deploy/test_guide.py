"""What the pages say can be done: programs know each command's flags, the chart takes the values, and a switch restarts
what the page says; whether a cluster does it only a cluster can tell."""

from __future__ import annotations

import functools
import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from loadtest.__main__ import _COMMANDS
from tandem.cli.main import _parser
from tandem.cli.subcommands import SUBCOMMANDS
from tandem.core.config import Config
from tandem.core.settings import DEFAULT_LAYER, resolve
from tests.chart.release import CHART, RELEASE, helm, render
from tests.deploy.files import ROOT
from tests.deploy.guide import PAGES, commands, links, own_files, programs

KUBERNETES = ROOT / "docs" / "kubernetes.md"
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
BASE = ("-f", "helm/tandem/ci/rdma-values.yaml", "-f", "my-values.yaml")
SWITCHES = re.findall(r"^\| [^|]+ \| `([\w.]+=[\w.-]+)` \| (workers|gateways)\b", KUBERNETES.read_text(), re.MULTILINE)


@functools.cache
def rendered(*flags: str) -> tuple[dict[str, Any], Config]:
    """The RayService's spec with its Serve document read, and the settings, of values that flags of Helm name."""
    own = own_files(KUBERNETES)
    with TemporaryDirectory() as place:
        for name, text in own.items():
            (Path(place) / name).write_text(text)
        paths = {name: str(Path(place) / name) for name in own}
        found = [paths.get(flag, str(ROOT / flag) if flag.startswith("helm/") else flag) for flag in flags]
        done = helm("template", RELEASE, str(CHART), *found, key_arguments=[own.get(flag, flag) for flag in flags])
    assert done.returncode == 0, done.stderr
    objects = [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one]
    (ray,) = (one["spec"] for one in objects if one["kind"] == "RayService")
    (tree,) = (one["data"]["config.yaml"] for one in objects if "config.yaml" in one.get("data", {}))
    ray["serveConfigV2"] = yaml.load(ray["serveConfigV2"], yaml.CSafeLoader)
    return ray, resolve([(DEFAULT_LAYER, {}), ("config.yaml", yaml.load(tree, yaml.CSafeLoader))]).config


def values_flags(arguments: list[str]) -> tuple[str, ...]:
    return tuple(part for pair in pairwise(arguments) if pair[0] in ("-f", "--set") for part in pair)


@EACH_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, link


@EACH_PAGE
def test_files_that_commands_name_exist(page: Path) -> None:
    for command in commands(page):
        for word in command:
            if command[0] != "kubectl" and re.match(r"(deploy|helm)/", word):
                assert (ROOT / word).exists(), word


@EACH_PAGE
def test_programs_know_the_flags(page: Path) -> None:
    for arguments in programs(page):
        assert arguments[0] in SUBCOMMANDS
        if arguments[1:] not in ([], ["--help"]):
            _parser().parse_args(arguments)


@EACH_PAGE
def test_measurements_exist(page: Path) -> None:
    for name in re.findall(r"python -m loadtest ([a-z-]+)", page.read_text()):
        assert name in _COMMANDS, name
    for module in re.findall(r"python -m (loadtest\.[\w.]*\w)", page.read_text()):
        assert find_spec(module), module


def test_every_program_that_runs_a_cluster_is_documented() -> None:
    documented = {arguments[0] for page in PAGES for arguments in programs(page)}
    assert documented >= {"plan", "fit-cost", "planner", "doctor", "role", "drain", "key"}


@pytest.mark.parametrize("verb", ["install", "upgrade"])
def test_the_chart_takes_what_is_installed(verb: str) -> None:
    found = [
        command
        for page in PAGES
        for command in commands(page)
        if command[:2] == ["helm", verb] and "helm/tandem" in command
    ]
    assert found
    for command in found:
        rendered(*values_flags(command))


@EACH_PAGE
def test_forwarded_ports_are_those_of_a_service(page: Path) -> None:
    services = {one["metadata"]["name"]: one["spec"]["ports"] for one in render(release="tandem").kinds("Service")}
    for command in commands(page):
        if command[0] == "kubectl" and "port-forward" in command:
            (name,) = (word.removeprefix("service/") for word in command if word.startswith("service/"))
            ports = {int(word.rpartition(":")[2]) for word in command if re.fullmatch(r"(\d+:)?\d+", word)}
            assert ports and ports <= {port["port"] for port in services[name]}, command


def test_batch_only_splits_and_cuts_nothing() -> None:
    ray, config = rendered(*BASE, "-f", "batch-values.yaml")
    assert config.gateway.disaggregation == "off"
    for application in ray["serveConfigV2"]["applications"]:
        engine = application["args"]["settings"]["engine"]
        assert not engine["enable_chunked_prefill"] and engine["max_num_batched_tokens"] >= engine["max_model_len"]


def test_switches_are_found() -> None:
    assert {restarts for _, restarts in SWITCHES} == {"workers", "gateways"} and len(SWITCHES) > 8


@pytest.mark.parametrize(("switch", "restarts"), SWITCHES)
def test_a_switch_restarts_the_parts_that_the_page_lists(switch: str, restarts: str) -> None:
    base = (*BASE, "--set", "planner.mode=act,speculative.method=ngram")
    (before, was), (after, now) = rendered(*base), rendered(*base, "--set", switch)
    assert was != now, "it changes no setting"
    assert before["rayClusterConfig"] == after["rayClusterConfig"] or switch == "planner.mode=explain"
    arguments = [[one["args"] for one in ray["serveConfigV2"]["applications"]] for ray in (before, after)]
    assert (arguments[0] != arguments[1]) == (restarts == "workers")
