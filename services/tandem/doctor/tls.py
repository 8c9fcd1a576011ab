"""Check the three TLS files of `cluster` by a handshake in memory, as two programs would make it.

A handshake finds problems that no single file shows: a key of another certificate, a CA that did not sign it, a missing
name, a certificate that has expired or is not valid for clients.
"""

from __future__ import annotations

import ssl

from tandem.core.config import ClusterConfig
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, fail, ok, skip, warn
from tandem.wire.channels import TLS_NAME
from tandem.wire.tls import TlsFiles

SOON_S = 14 * 86_400.0
_ROUNDS = 8
"""Maximum number of exchanges of messages; TLS 1.3 needs three."""


def check_tls(cluster: ClusterConfig, now: float) -> Finding:
    """Return a finding on the TLS files of `cluster`, from a handshake in memory between two programs with these files.

    It is a failure if the handshake fails, and a warning if the certificate expires within `SOON_S` of `now`, in
    seconds since the epoch. Skipped without TLS."""
    if not cluster.has_tls:
        return skip("tls", "cluster.tls_cert_file is empty: gateways and workers communicate without TLS")
    renew = (
        f"install a certificate of the cluster's CA for DNS:{TLS_NAME}, for servers and clients (cert-manager: usages)"
    )
    fix = f"{renew}, its key in tls_key_file and that CA in tls_ca_file"
    try:
        TlsFiles.of_cluster(cluster)
        left_s = _ends_at(cluster) - now
    except TandemError as error:
        return fail("tls", error.message, fix)
    except ssl.SSLCertVerificationError as error:
        return fail("tls", f"{cluster.tls_cert_file}: {error.verify_message}", fix)
    except ssl.SSLError as error:
        return fail("tls", f"{cluster.tls_cert_file}: {error.reason or error}", fix)
    summary = f"certificate, key and CA belong together, {TLS_NAME} is its name, {left_s / 86_400:.0f} days left"
    if left_s < SOON_S:
        return warn("tls", f"{summary}: then calls fail", f"{renew}; the files are read again when they change")
    return ok("tls", summary)


def _ends_at(cluster: ClusterConfig) -> float:
    """Return the certificate's expiry after a mutual handshake, in seconds since the epoch. Raises ssl.SSLError."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.load_cert_chain(cluster.tls_cert_file, cluster.tls_key_file)
        context.load_verify_locations(cluster.tls_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server, server_hostname=TLS_NAME)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_ROUNDS):
        is_done = [_advanced(side) for side in (client_side, server_side)]
        if all(is_done):
            break
    found = client_side.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(found["notAfter"])))


def _advanced(side: ssl.SSLObject) -> bool:
    """Advance one side's handshake; returns whether it is complete."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
