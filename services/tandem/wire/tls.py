"""Read the TLS files of a cluster's programs and make gRPC credentials from them (mutual TLS).

Both sides present a certificate that the cluster's CA has signed. Pods have changing addresses, so addresses are not
checked: a server's certificate must have `channels.TLS_NAME` among its DNS names; a client may have any certificate of
that CA.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import NamedTuple

import grpc

from tandem.core.config import ClusterConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.wire.secret_file import Signature, signature

_log = logging.getLogger(__name__)


class Pems(NamedTuple):
    """Content of the three TLS files in PEM format.

    These are this program's private key, its certificate, and the certificate of the cluster's CA.
    """

    key: bytes
    cert: bytes
    ca: bytes


class TlsFiles:
    """Hold the content of the TLS files, and make gRPC credentials from it; usable from any thread.

    The files are checked for changes whenever a channel is opened or a connection accepted. Files that cannot be used
    are logged, and the previous content stays in force.
    """

    def __init__(self, config: ClusterConfig) -> None:
        """Read the files that `config` names. Raises TandemError(INVALID_REQUEST) where one is missing or cannot be
        used.
        """
        for name in ("tls_cert_file", "tls_key_file", "tls_ca_file"):
            if not getattr(config, name):
                message = f"cluster.{name} is empty: TLS needs all three tls files, so set all or none"
                raise TandemError(ErrorKind.INVALID_REQUEST, message, param=f"cluster.{name}")
        self._key, self._cert = Path(config.tls_key_file), Path(config.tls_cert_file)
        self._ca = Path(config.tls_ca_file)
        self._seen = self._signature()
        self._pems = self._read()
        self._served = self._pems

    def current(self) -> Pems:
        """Return the content of the files, read again if they have changed."""
        seen = self._signature()
        if seen != self._seen:
            self._seen = seen  # taken before reading, so that a change during the read is seen by the next check
            try:
                self._pems = self._read()
            except TandemError as error:
                _log.error("the TLS files are unusable, and the previous certificate stays in force: %s", error.message)
            else:
                _log.info("the TLS certificate was read again from %s", self._cert)
        return self._pems

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return a client's credentials for one channel; the channel uses the present certificate until it is
        closed."""
        pems = self.current()
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return a server's credentials, which require a client certificate and use the current files for each new
        connection.

        Open connections are not affected when the files change.
        """
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._served),
            self._changed,  # type: ignore[arg-type]  # the stubs don't know that None is allowed
            require_client_authentication=True,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new configuration, None if nothing has changed. gRPC calls this on its thread at each
        handshake."""
        pems = self.current()
        if pems == self._served:
            return None
        self._served = pems
        return _configuration(pems)

    def _signature(self) -> Signature:
        return signature(self._key, self._cert, self._ca)

    def _read(self) -> Pems:
        """Read all three files after checking that key and certificate match.

        gRPC itself would report a mismatch only at a handshake and without the reason.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(self._ca)
        except OSError as error:  # SSLError is an OSError
            raise _refuse("tls_ca_file", self._ca, error) from None
        try:
            context.load_cert_chain(self._cert, self._key)
            return Pems(self._key.read_bytes(), self._cert.read_bytes(), self._ca.read_bytes())
        except OSError as error:
            raise _refuse("tls_cert_file", f"{self._cert} with key {self._key}", error) from None


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)


def _refuse(name: str, path: object, error: OSError) -> TandemError:
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return TandemError(
        ErrorKind.INVALID_REQUEST, f"cluster.{name}: cannot use {path}: {reason}", param=f"cluster.{name}"
    )
