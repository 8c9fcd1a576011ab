"""A certificate authority for tests, made with the openssl program; skips where there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tandem.core.config import ClusterConfig, GatewayConfig
from tandem.wire.channels import TLS_NAME

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """`issue` writes a key and a certificate for `name` to files of that name, over older ones."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the openssl program, which makes certificates for this test, is not installed")
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.ca = directory / "ca.pem"
        self._ca_key = directory / "ca.key"
        out = ("-keyout", str(self._ca_key), "-out", str(self.ca))
        _openssl("req", "-x509", *_KEY, *out, "-subj", "/CN=tandem tests", "-days", "2")

    def issue(self, name: str, dns: str = TLS_NAME) -> ClusterConfig:
        """The settings that use it."""
        key, cert = self._sign(name, f"DNS:{dns}")
        return ClusterConfig(tls_cert_file=str(cert), tls_key_file=str(key), tls_ca_file=str(self.ca))

    def issue_for_gateway(self, name: str, *, requires_client: bool = False) -> GatewayConfig:
        """The settings of a gateway on this machine that uses it. `requires_client`: its clients need a certificate of
        this authority too."""
        key, cert = self._sign(name, "DNS:localhost,IP:127.0.0.1")
        client_ca = str(self.ca) if requires_client else ""
        return GatewayConfig(tls_cert_file=str(cert), tls_key_file=str(key), tls_client_ca_file=client_ca)

    def _sign(self, name: str, alternatives: str) -> tuple[Path, Path]:
        """The files of a new key and its certificate for these subject alternative names."""
        key, cert, request = (self._directory / f"{name}.{kind}" for kind in ("key", "pem", "csr"))
        _openssl("req", *_KEY, "-keyout", str(key), "-out", str(request), "-subj", f"/CN={name}")
        names = self._directory / f"{name}.names"
        names.write_text(f"subjectAltName={alternatives}\n")
        signed_by = ("-CA", str(self.ca), "-CAkey", str(self._ca_key), "-CAcreateserial")
        out = ("-out", str(cert), "-days", "2", "-extfile", str(names))
        _openssl("x509", "-req", "-in", str(request), *signed_by, *out)
        return key, cert


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
