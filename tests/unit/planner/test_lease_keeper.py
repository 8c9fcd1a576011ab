"""Test what a planner logs while it cannot read its Lease."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from tandem.core.clock import SystemClock
from tandem.planner.kube_client import KubeApi
from tandem.planner.kube_error import KubeError
from tandem.planner.leader_election import Election
from tandem.planner.lease_keeper import LeaseKeeper


class FailingApi:
    """Fail each read of the Lease with the next of `errors`."""

    def __init__(self, *errors: KubeError) -> None:
        self._errors = list(errors)

    def read_lease(self, name: str) -> Any:
        raise self._errors.pop(0)


def test_a_failure_that_repeats_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    refused, away = KubeError(403, "forbidden"), KubeError(0, "refused")
    api = cast(KubeApi, FailingApi(refused, refused, away, refused))
    failures: list[KubeError] = []
    keeper = LeaseKeeper(Election("p1", 15.0), api, "tandem-planner", SystemClock(), dict, failures.append)
    with caplog.at_level(logging.DEBUG):
        for _ in range(4):
            keeper.look()
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "WARNING", "WARNING"]
    assert failures == [refused, refused, away, refused], "each is counted"
