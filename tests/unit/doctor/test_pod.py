"""What Kubernetes gives a pod."""

from __future__ import annotations

from pathlib import Path

from tandem.doctor.pod import ACCOUNT, PodFacts, judge_pod, read_pod
from tests.unit.doctor.trees import system
from tests.unit.doctor.verdicts import assert_fine, assert_skips

POD = PodFacts("10.0.0.1:443", "serving", True)


def test_it_is_read_of_files_and_variables(tmp_path: Path) -> None:
    files = {f"{ACCOUNT}/namespace": "serving", f"{ACCOUNT}/token": "t"}
    place = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert read_pod(system(tmp_path, files, **place)) == POD


def test_a_pod_that_has_all() -> None:
    finding = judge_pod(POD)
    assert_fine(finding, "pod", "in namespace serving, API server 10.0.0.1:443")


def test_one_without_a_token() -> None:
    """Which is as it should be in all pods but the planner's; `rbac` says what that means there."""
    assert_fine(judge_pod(PodFacts("10.0.0.1:443", "serving", False)), "pod", "no token to ask it")


def test_no_pod(tmp_path: Path) -> None:
    finding = judge_pod(read_pod(system(tmp_path, {})))
    assert_skips(finding, "pod", "KUBERNETES_SERVICE_HOST is unset")
