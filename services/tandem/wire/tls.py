"""TLS between the programs of a cluster: its three files, and gRPC credentials made of them; never opens a port.

Both sides show a certificate of the cluster's CA. Pods have changing addresses, so these are not checked: a server's
certificate has `channels.TLS_NAME` among its DNS names, and of a client any certificate of that CA will do.
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
    """The content of the three files."""

    key: bytes
    cert: bytes
    ca: bytes


class TlsFiles:
    """PEM files, looked at for each channel that is opened and each connection that is accepted. Files that cannot be
    used leave what was read before. On any thread."""

    def __init__(self, config: ClusterConfig) -> None:
        """Raises TandemError(INVALID_REQUEST) for files that are missing or cannot be used."""
        for name in ("tls_cert_file", "tls_key_file", "tls_ca_file"):
            if not getattr(config, name):
                message = f"cluster.{name} is empty: TLS takes a certificate, its key and a CA"
                raise TandemError(ErrorKind.INVALID_REQUEST, message, param=f"cluster.{name}")
        self._key, self._cert = Path(config.tls_key_file), Path(config.tls_cert_file)
        self._ca = Path(config.tls_ca_file)
        self._seen = self._signature()
        self._pems = self._served = self._read()

    def __repr__(self) -> str:
        return f"<TLS of {self._cert}>"

    def current(self) -> Pems:
        """What a connection is made with that begins now."""
        seen = self._signature()
        if seen != self._seen:
            self._seen = seen  # of before they were read: what is written meanwhile is seen at the next look
            try:
                self._pems = self._read()
            except TandemError as error:
                _log.error("the TLS files are not taken, the last ones go on to hold: %s", error.message)
            else:
                _log.info("%s was read again", self._cert)
        return self._pems

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one channel: it keeps them for as long as it is open."""
        pems = self.current()
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of the files as they are at each handshake: running connections stay as they are."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._served),
            self._changed,  # type: ignore[arg-type]  # the stubs don't know that None is allowed
            require_client_authentication=True,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called on a thread of gRPC at each handshake; None where nothing is new."""
        pems = self.current()
        if pems == self._served:
            return None
        self._served = pems
        return _configuration(pems)

    def _signature(self) -> Signature:
        return signature(self._key, self._cert, self._ca)

    def _read(self) -> Pems:
        """All three, after a look whether they belong together: gRPC would tell it at a handshake, and not why."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(self._ca)
        except OSError as error:  # SSLError is one
            raise _refuse("tls_ca_file", self._ca, error) from None
        try:
            context.load_cert_chain(self._cert, self._key)
            return Pems(self._key.read_bytes(), self._cert.read_bytes(), self._ca.read_bytes())
        except OSError as error:
            raise _refuse("tls_cert_file", self._cert, error) from None


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)


def _refuse(name: str, path: Path, error: OSError) -> TandemError:
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return TandemError(
        ErrorKind.INVALID_REQUEST, f"cluster.{name}: {path} and its key: {reason}", param=f"cluster.{name}"
    )
