"""Test the check of authentication settings with the programs' own checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.cli.gateway_checks import require_auth_if_public
from tandem.core.settings import Resolved, resolve
from tandem.doctor.auth import judge_guard, judge_tenants, read_auth_problem
from tandem.worker.addresses import require_worker_auth
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips

EXAMPLE = Path(__file__).resolve().parents[3] / "docs/tenants.yaml"


def settings(**values: Any) -> Resolved:
    return resolve([("test", {key.replace("__", "."): value for key, value in values.items()})])


def tenants(resolved: Resolved) -> Any:
    return judge_tenants(read_auth_problem(require_auth_if_public, resolved), resolved)


def test_a_valid_tenants_file() -> None:
    assert_fine(tenants(settings(gateway__auth="keys", gateway__tenants=str(EXAMPLE))), "tenants", "is valid")
    assert_fine(tenants(settings(gateway__auth="off")), "tenants", "gateway.auth is off")


def test_what_keeps_a_gateway_from_starting(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("tenants: {acme: {keys: [nonsense]}}")
    for resolved, found in (
        (settings(gateway__auth="keys"), "name the file of tenants"),
        (settings(gateway__tenants=str(tmp_path / "none.yaml")), "cannot read"),
        (settings(gateway__tenants=str(tmp_path / "bad.yaml")), "acme"),
    ):
        finding = tenants(resolved)
        assert_fails(finding, "tenants", found, "`tandem key` generates a key")
        assert "`tenants.existingSecret`" in finding.fix


def test_the_default_is_for_serve() -> None:
    assert_skips(tenants(settings()), "tenants", "no tenants file is set")


def test_a_worker_that_accepts_unauthenticated_calls() -> None:
    def guard(resolved: Resolved) -> Any:
        return judge_guard(read_auth_problem(lambda resolved: require_worker_auth(resolved.config) and None, resolved))

    assert_fine(guard(settings()), "guard", "only from its own cluster")
    assert_fails(guard(settings(worker__host="0.0.0.0")), "guard", "others can reach", "--secret-file FILE")
