"""Test the sample of cert-manager's Certificate: Secret, Service and names are those of the chart. No cluster takes it
here."""

from __future__ import annotations

from typing import Any

import yaml

from tests.chart.release import render
from tests.deploy.files import DEPLOY

SAMPLE = (DEPLOY / "kubernetes" / "gateway-certificate.yaml").read_text()


def one(kind: str, name: str) -> dict[str, Any]:
    found = [each for each in yaml.safe_load_all(SAMPLE) if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    (each,) = found
    return each


def test_the_certificate_is_the_one_that_the_chart_expects() -> None:
    values: dict[str, Any] = {"gateway": {"tls": {"existingSecret": "tandem-gateway-tls"}}}
    values |= {"fullnameOverride": "tandem", "monitoring": {"serviceMonitor": {"enabled": True}}}
    chart, certificate = render(values), one("Certificate", "tandem-gateway")["spec"]
    assert certificate["secretName"] == values["gateway"]["tls"]["existingSecret"]
    (endpoint,) = chart.one("gateway-servicemonitor")["spec"]["endpoints"]
    name = endpoint["tlsConfig"]["serverName"].replace(".inference.", ".tandem.")
    assert (
        name in certificate["dnsNames"] and chart.one("gateway-service")["metadata"]["name"] in certificate["dnsNames"]
    )
    issuer = one("Issuer", certificate["issuerRef"]["name"])
    assert issuer["spec"]["ca"]["secretName"] == one("Certificate", "tandem-ca")["spec"]["secretName"]
    policy = one("BackendTLSPolicy", "tandem-gateway")["spec"]
    assert policy["targetRefs"] == [
        {"group": "", "kind": "Service", "name": chart.one("gateway-service")["metadata"]["name"]}
    ]
    assert policy["validation"]["hostname"] == name
