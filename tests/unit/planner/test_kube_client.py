"""Test that the Kubernetes client prints nothing in a pod, where each line of the log must be JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
from kubernetes.config import incluster_config, kube_config

from tandem.planner.kube_client import connect


def test_in_a_pod_nothing_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "missing"))
    for name in ("SERVICE_TOKEN_FILENAME", "SERVICE_CERT_FILENAME"):
        (tmp_path / name).write_text("content")
        monkeypatch.setattr(incluster_config, name, str(tmp_path / name))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    connect("serving", "p", 1.0).close()
    assert capfd.readouterr() == ("", "")
