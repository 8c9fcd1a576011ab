"""Test the check of authentication settings with the programs' own checks, and of the secret file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.cli.gateway_checks import require_auth_if_public
from tandem.core.config import ClusterConfig, Config, WorkerConfig
from tandem.core.settings import Resolved, resolve
from tandem.doctor.auth import check_guard, check_secret, check_tenants
from tandem.worker.addresses import require_worker_auth
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns

EXAMPLE = Path(__file__).resolve().parents[3] / "docs/tenants.yaml"
SECRET = "0123456789abcdef" * 4
WORLD = Config(worker=WorkerConfig(host="0.0.0.0"))


def settings(**values: Any) -> Resolved:
    return resolve([("test", {key.replace("__", "."): value for key, value in values.items()})])


def tenants(resolved: Resolved) -> Any:
    return check_tenants(require_auth_if_public, resolved)


def test_a_valid_tenants_file() -> None:
    assert_fine(tenants(settings(gateway__auth="keys", gateway__tenants=str(EXAMPLE))), "tenants", "is valid")
    assert_fine(tenants(settings(gateway__auth="off")), "tenants", "gateway.auth is off")


def test_what_keeps_a_gateway_from_starting(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("tenants: {acme: {keys: [nonsense]}}")
    for resolved, found, fix in (
        (settings(gateway__auth="keys"), "--tenants", "set --tenants FILE"),
        (settings(gateway__tenants=str(EXAMPLE), gateway__auth="off"), "add --auth keys", "set --tenants FILE"),
        (settings(gateway__tenants=str(tmp_path / "none.yaml")), "cannot read", "create or correct that file"),
        (settings(gateway__tenants=str(tmp_path / "bad.yaml")), "acme", "create or correct that file"),
    ):
        finding = tenants(resolved)
        assert_fails(finding, "tenants", found, fix)
        assert "`tandem key` generates a key" in finding.fix and "`tenants.existingSecret`" in finding.fix


def test_the_default_is_for_serve() -> None:
    assert_skips(tenants(settings()), "tenants", "no tenants file is set")


def test_a_worker_that_accepts_unauthenticated_calls() -> None:
    def guard(resolved: Resolved) -> Any:
        return check_guard(lambda resolved: require_worker_auth(resolved.config) and None, resolved)

    assert_fine(guard(settings()), "guard", "only from its own cluster")
    assert_fails(guard(settings(worker__host="0.0.0.0")), "guard", "worker.host 0.0.0.0", "--secret-file FILE")


def written(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def with_secret(path: str) -> Config:
    return Config(cluster=ClusterConfig(secret_file=path))


def test_a_file_that_is_fine(tmp_path: Path) -> None:
    finding = check_secret(with_secret(written(tmp_path / "s", f"{SECRET}\n{SECRET[::-1]}\n")))
    assert_fine(finding, "secret", "holds 2 secrets, mode 0600")
    assert SECRET not in finding.found


def test_unusable_secret_files(tmp_path: Path) -> None:
    short = written(tmp_path / "short", "tiny")
    for path, found in ((short, "less than 32 bytes"), (str(tmp_path / "none"), "cannot read")):
        finding = check_secret(with_secret(path))
        assert_fails(finding, "secret", found, f"`openssl rand -hex 32 > {path}`")
        assert "`cluster.existingSecret`" in finding.fix and "tiny" not in finding.found


def test_a_world_readable_secret_file(tmp_path: Path) -> None:
    path = written(tmp_path / "s", SECRET, 0o644)
    assert_warns(check_secret(with_secret(path)), "secret", "mode 0644", f"`chmod 600 {path}`")
    assert_fine(check_secret(with_secret(written(tmp_path / "g", SECRET, 0o440))), "secret", "mode 0440")


def test_no_secret_file() -> None:
    assert_skips(check_secret(Config()), "secret", "cluster.secret_file is empty")
    assert_fails(check_secret(WORLD), "secret", "worker.host is 0.0.0.0", "--secret-file secret")
    insecure = replace(WORLD, cluster=ClusterConfig(insecure=True))
    assert_warns(check_secret(insecure), "secret", "anybody who can reach 0.0.0.0", "--secret-file secret")
    assert_skips(check_secret(replace(WORLD, cluster=ClusterConfig(tls_ca_file="ca"))), "secret", "is empty")
