"""Test the check of the advertised address, with a rule in place of the workers' own."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tandem.core.config import WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.doctor import own_addresses as module
from tandem.doctor.finding import Finding
from tandem.doctor.own_addresses import check_advertised
from tandem.worker.addresses import advertised_address
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_warns

ANYWHERE = "0.0.0.0"


def rule(worker: WorkerConfig, environ: Mapping[str, str]) -> str:
    return advertised_address(worker, worker.port, environ, lambda host: "127.0.0.1")


def judged(host: str, address: str = "", **variables: str) -> Finding:
    return check_advertised(WorkerConfig(host=host, advertise_address=address), variables, rule)


def test_an_address_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fine(judged("127.0.0.1"), "advertise-address", "advertised at 127.0.0.1, which is on this machine")
    assert_fine(
        judged("127.0.0.1", "127.0.0.1:9"), "advertise-address", "advertised at 127.0.0.1:9, which is on this machine"
    )
    monkeypatch.setattr(module, "_is_local", lambda address: address == "10.0.0.1")
    assert_fine(judged(ANYWHERE, "10.0.0.1:9"), "advertise-address", "which is on this machine")


def test_an_address_of_a_proxy() -> None:
    assert_fine(
        judged(ANYWHERE, "192.0.2.1:9"),
        "advertise-address",
        "192.0.2.1:9 (192.0.2.1), which must forward to this machine",
    )


def test_a_pod_advertises_its_own_address() -> None:
    assert_fine(judged(ANYWHERE, POD_IP="192.0.2.7"), "advertise-address", "advertised at 192.0.2.7 ")
    assert_fine(judged(ANYWHERE, "192.0.2.1:9", POD_IP="192.0.2.7"), "advertise-address", "at 192.0.2.1:9")


def test_a_name_that_cannot_be_resolved() -> None:
    finding = judged(ANYWHERE, "no.such.host.invalid:9")
    assert_fails(finding, "advertise-address", "cannot be resolved", "the other machines' DNS")


def test_a_loopback_for_others() -> None:
    """A warning even if the machine has no other address."""
    for address in ("127.0.0.1:9", ""):
        assert_warns(
            judged(ANYWHERE, address), "advertise-address", "other machines would reach themselves", "`hostname -I`"
        )


def test_no_address_at_all() -> None:
    def lost(worker: WorkerConfig, environ: Mapping[str, str]) -> str:
        raise TandemError(ErrorKind.INVALID_REQUEST, "this machine has no way out")

    finding = check_advertised(WorkerConfig(host=ANYWHERE), {}, lost)
    assert_fails(finding, "advertise-address", "no way out", "POD_IP by the downward API")
