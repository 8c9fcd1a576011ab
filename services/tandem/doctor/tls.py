"""Check TLS files by a handshake in memory: the files of `cluster` by a handshake between two programs, and those of
`gateway` by a handshake with a client that trusts the gateway's certificate.

A handshake finds problems that no single file shows: a key of another certificate, a CA that did not sign it, a missing
name, a certificate that has expired or is not valid for clients.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

from tandem.core.config import ClusterConfig, GatewayConfig
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, fail, ok, skip, warn
from tandem.wire.channels import TLS_NAME
from tandem.wire.tls import TlsFiles

SOON_S = 14 * 86_400.0
_ROUNDS = 8
"""Number of exchanges of messages; TLS 1.3 needs three."""


def check_tls(cluster: ClusterConfig, now: float) -> Finding:
    """Return a finding on the TLS files of `cluster`, from a handshake in memory between two programs with these files.

    The finding is a failure if the handshake fails, and a warning if the certificate expires less than `SOON_S` seconds
    after `now` (seconds since the epoch). Skipped without TLS."""
    if not cluster.has_tls:
        return skip("tls", "cluster.tls_cert_file is empty: gateways and workers communicate without TLS")
    renew = (
        f"install a certificate of the cluster's CA for DNS:{TLS_NAME}, for servers and clients (cert-manager: usages)"
    )
    fix = f"{renew}, its key in tls_key_file and that CA in tls_ca_file"
    try:
        TlsFiles.of_cluster(cluster)
        left_s = _ends_at(_certificate_between_programs(cluster)) - now
    except TandemError as error:
        return fail("tls", error.message, fix)
    except ssl.SSLError as error:
        return fail("tls", f"{cluster.tls_cert_file}: {tls_reason(error)}", fix)
    summary = f"certificate, key and CA belong together, {TLS_NAME} is its name, {left_s / 86_400:.0f} days left"
    if left_s < SOON_S:
        return warn("tls", f"{summary}: then calls fail", f"{renew}; the files are read again when they change")
    return ok("tls", summary)


def check_gateway_tls(gateway: GatewayConfig, now: float) -> Finding:
    """Return a finding on the TLS files of the gateway's listeners, from a handshake in memory with a client that
    trusts the gateway's certificate itself. Which CA the real clients trust is not known here.

    The finding is a failure if the handshake fails, and a warning if the certificate expires less than `SOON_S` seconds
    after `now` (seconds since the epoch). Skipped without TLS."""
    if not gateway.has_tls:
        return skip("gateway-tls", "gateway.tls_cert_file is empty: clients reach the gateway without TLS")
    fix = "install a certificate for servers and its key; gateways read the files again when they change"
    try:
        server = TlsFiles.of_gateway(gateway).context()
        server.verify_mode = ssl.CERT_NONE
        found = _shaken_hands(server, trusting(gateway.tls_cert_file), None)
        left_s = _ends_at(found) - now
    except TandemError as error:
        return fail("gateway-tls", error.message, fix)
    except ssl.SSLError as error:
        return fail("gateway-tls", f"{gateway.tls_cert_file}: {tls_reason(error)}", fix)
    names = ", ".join(value for _, value in found.get("subjectAltName", ())) or "no name"
    clients = "clients need one too" if gateway.tls_client_ca_file else "clients need none"
    summary = f"certificate for {names}, {clients}, {left_s / 86_400:.0f} days left"
    if left_s < SOON_S:
        return warn("gateway-tls", f"{summary}: then clients refuse it", fix)
    return ok("gateway-tls", summary)


def http_connection(
    host: str, port: int | None, timeout_s: float, context: ssl.SSLContext | None
) -> closing[http.client.HTTPConnection]:
    """Return a context manager that yields an HTTP connection, which is opened by its first request, over TLS where a
    `context` is given. No proxy is used."""
    if context is None:
        return closing(http.client.HTTPConnection(host, port, timeout=timeout_s))
    return closing(http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context))


def trusting(cert_file: str) -> ssl.SSLContext:
    """Return a client's SSL context that accepts a server whose certificate is in `cert_file`, whatever its name and
    its CA. Raises OSError for a file that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cert_file)
    return context


def _certificate_between_programs(cluster: ClusterConfig) -> Mapping[str, Any]:
    """Return the certificate after a mutual handshake of two programs. Raises ssl.SSLError."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.load_cert_chain(cluster.tls_cert_file, cluster.tls_key_file)
        context.load_verify_locations(cluster.tls_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return _shaken_hands(server, client, TLS_NAME)


def _shaken_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> Mapping[str, Any]:
    """Return the server's certificate after a handshake in memory, in which the client asks for the server `name`.
    Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server, server_hostname=name)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_ROUNDS):
        for side in (client_side, server_side):
            with suppress(ssl.SSLWantReadError):  # the other side's turn; a handshake that is over stays so
                side.do_handshake()
    return client_side.getpeercert() or {}


def _ends_at(certificate: Mapping[str, Any]) -> float:
    """Return a certificate's expiry in seconds since the epoch."""
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))


def tls_reason(error: ssl.SSLError) -> str:
    """Return why a TLS handshake failed, in OpenSSL's words."""
    return str(getattr(error, "verify_message", "") or error.reason or error)
