"""Test the check of a pod's environment."""

from __future__ import annotations

from pathlib import Path

from tandem.doctor.kubernetes import ACCOUNT, PodFacts, judge_pod, read_pod
from tests.unit.doctor.trees import system
from tests.unit.doctor.verdicts import assert_fine, assert_skips

POD = PodFacts("10.0.0.1:443", "serving", True)


def test_the_pod_is_read_from_files_and_variables(tmp_path: Path) -> None:
    files = {f"{ACCOUNT}/namespace": "serving", f"{ACCOUNT}/token": "t"}
    place = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert read_pod(system(tmp_path, files, **place)) == POD


def test_without_a_token_the_namespace_is_read_from_the_environment(tmp_path: Path) -> None:
    place = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_NAMESPACE": "serving"}
    assert read_pod(system(tmp_path, {}, **place)) == PodFacts("10.0.0.1:443", "serving", False)


def test_a_pod_with_a_token() -> None:
    finding = judge_pod(POD)
    assert_fine(finding, "pod", "in namespace serving, API server 10.0.0.1:443")


def test_one_without_a_token() -> None:
    """Fine in all pods except the planner's, where `rbac` reports it."""
    assert_fine(judge_pod(PodFacts("10.0.0.1:443", "serving", False)), "pod", "without a token for it")


def test_no_pod(tmp_path: Path) -> None:
    finding = judge_pod(read_pod(system(tmp_path, {})))
    assert_skips(finding, "pod", "KUBERNETES_SERVICE_HOST is unset")
