"""Test the check of the secret file, and of running without a secret."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tandem.core.config import ClusterConfig, Config, WorkerConfig
from tandem.doctor.secret import judge_secret, read_secret
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns

SECRET = "0123456789abcdef" * 4
WORLD = Config(worker=WorkerConfig(host="0.0.0.0"))


def written(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_file_that_is_fine(tmp_path: Path) -> None:
    finding = judge_secret(read_secret(written(tmp_path / "s", f"{SECRET}\n{SECRET[::-1]}\n")), Config())
    assert_fine(finding, "secret", "holds 2 secrets, mode 0600")
    assert SECRET not in finding.found


def test_unusable_secret_files(tmp_path: Path) -> None:
    short = written(tmp_path / "short", "tiny")
    for path, found in ((short, "less than 32 bytes"), (str(tmp_path / "none"), "cannot read")):
        finding = judge_secret(read_secret(path), Config())
        assert_fails(finding, "secret", found, f"`openssl rand -hex 32 > {path}`")
        assert "`cluster.existingSecret`" in finding.fix and "tiny" not in finding.found


def test_a_world_readable_secret_file(tmp_path: Path) -> None:
    path = written(tmp_path / "s", SECRET, 0o644)
    assert_warns(judge_secret(read_secret(path), Config()), "secret", "mode 0644", f"`chmod 600 {path}`")
    assert_fine(judge_secret(read_secret(written(tmp_path / "g", SECRET, 0o440)), Config()), "secret", "mode 0440")


def test_no_secret_file() -> None:
    assert read_secret("") is None
    assert_skips(judge_secret(None, Config()), "secret", "cluster.secret_file is empty")
    assert_fails(judge_secret(None, WORLD), "secret", "worker.host is 0.0.0.0", "--secret-file secret")
    insecure = replace(WORLD, cluster=ClusterConfig(insecure=True))
    assert_warns(judge_secret(None, insecure), "secret", "anybody who can reach 0.0.0.0", "--secret-file secret")
    assert_skips(judge_secret(None, replace(WORLD, cluster=ClusterConfig(tls_ca_file="ca"))), "secret", "is empty")
