"""Test the handshake check with certificates of a CA that the test makes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.core.config import ClusterConfig, GatewayConfig
from tandem.doctor.tls import check_gateway_tls, check_tls
from tests.certificates import Authority
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def test_files_that_belong_together(authority: Authority) -> None:
    files = authority.issue("w0")
    assert_fine(check_tls(files, time.time() - 98 * 86_400), "tls", "100 days left")
    assert_warns(check_tls(files, time.time()), "tls", "2 days left", "DNS:tandem-cluster")


def test_files_that_do_not_match(authority: Authority, tmp_path: Path) -> None:
    good, stranger = authority.issue("w1"), Authority(tmp_path / "other").issue("w1")
    cases: dict[str, ClusterConfig] = {
        "unable to get local issuer certificate": replace(good, tls_ca_file=stranger.tls_ca_file),
        "KEY_VALUES_MISMATCH": replace(good, tls_key_file=stranger.tls_key_file),
        "Hostname mismatch": authority.issue("w2", dns="localhost"),
        "No such file": replace(good, tls_cert_file=str(tmp_path / "none")),
        "cluster.tls_key_file is empty": replace(good, tls_key_file=""),
    }
    for found, cluster in cases.items():
        assert_fails(check_tls(cluster, 0.0), "tls", found, "a certificate of the cluster's CA")


def test_a_gateway_s_certificate(authority: Authority) -> None:
    files = authority.issue_for_gateway("g0")
    then = time.time() - 98 * 86_400
    assert_fine(
        check_gateway_tls(files, then), "gateway-tls", "for localhost, 127.0.0.1, clients need none, 100 days left"
    )
    both = authority.issue_for_gateway("g1", requires_client=True)
    assert_fine(check_gateway_tls(both, then), "gateway-tls", "clients need one too")
    assert_warns(
        check_gateway_tls(files, time.time()), "gateway-tls", "2 days left: then clients refuse it", "read the"
    )
    mixed = replace(files, tls_key_file=both.tls_key_file)
    assert_fails(check_gateway_tls(mixed, then), "gateway-tls", "KEY_VALUES_MISMATCH", "a certificate for servers")
    lone = GatewayConfig(tls_cert_file=files.tls_cert_file)
    assert_fails(check_gateway_tls(lone, then), "gateway-tls", "gateway.tls_key_file is empty", "and its key")
    assert_skips(check_gateway_tls(GatewayConfig(), then), "gateway-tls", "gateway.tls_cert_file is empty")


def test_without_tls() -> None:
    assert_skips(check_tls(ClusterConfig(), 0.0), "tls", "cluster.tls_cert_file is empty")
