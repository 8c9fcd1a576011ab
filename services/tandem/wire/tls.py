"""Read the TLS files of a program and make gRPC credentials and SSL contexts from them.

Two places use them. Between the programs of a cluster both sides present a certificate that the cluster's CA has
signed. Pods have changing addresses, so addresses are not checked: a server's certificate must have
`channels.TLS_NAME` among its DNS names; a client may have any certificate of that CA. At a gateway's listeners clients
check the gateway's certificate as they check that of any server, and need one of their own only where the gateway has
a CA for them.
"""

from __future__ import annotations

import logging
import socket
import ssl
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import grpc

from tandem.core.config import ClusterConfig, GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.wire.channels import TLS_NAME
from tandem.wire.secret_file import Signature, signature

_log = logging.getLogger(__name__)


class Pems(NamedTuple):
    """Hold the content of the TLS files in PEM format.

    `key`: this program's private key. `cert`: its certificate, with those of intermediate CAs. `ca`: certificates of
    the CA against which the other side's certificate is checked; empty where the other side needs no certificate.
    """

    key: bytes
    cert: bytes
    ca: bytes


class _Contexts(NamedTuple):
    """SSL contexts that were made from one content of the files. `listener`: for servers of asyncio. `peer_server`,
    `peer_client`: for the two sides of a connection between programs of a cluster; None where the other side needs no
    certificate."""

    listener: ssl.SSLContext
    peer_server: ssl.SSLContext | None = None
    peer_client: ssl.SSLContext | None = None


class TlsFile(NamedTuple):
    """Hold the path of a TLS file, and the name of the setting that names the file (`section.name`)."""

    setting: str
    path: Path


class TlsFiles:
    """Hold the content of the TLS files, and make credentials and contexts from it; usable from any thread.

    The files are checked for changes whenever a channel is opened or a connection accepted. Files that cannot be used
    are logged once, and the previous content stays in force.
    """

    def __init__(self, cert: TlsFile, key: TlsFile, ca: TlsFile | None) -> None:
        """Read the files. Raises TandemError(INVALID_REQUEST) where one is missing or cannot be used.

        `ca`: the CA of the other side's certificate; None where the other side needs no certificate."""
        self._cert, self._key, self._ca = cert, key, ca
        self._paths = [file.path for file in (key, cert, ca) if file is not None]
        self._lock = Lock()
        self._problem: str | None = None
        self._seen = self._signature()
        self._pems, self._contexts = self._read()
        self._served = self._pems

    @classmethod
    def of_cluster(cls, config: ClusterConfig) -> TlsFiles:
        """Read the TLS files that `config` names for the calls between the cluster's programs. Raises
        TandemError(INVALID_REQUEST) where certificate, key or CA is not set, or where a file is missing or cannot be
        used."""
        rule = "TLS between programs needs all three tls files, so set all or none; the gateway's clients see "
        rule += "gateway.tls_cert_file"
        return cls(
            _required("cluster.tls_cert_file", config.tls_cert_file, rule),
            _required("cluster.tls_key_file", config.tls_key_file, rule),
            _required("cluster.tls_ca_file", config.tls_ca_file, rule),
        )

    @classmethod
    def of_gateway(cls, config: GatewayConfig) -> TlsFiles:
        """Read the TLS files that `config` names for the gateway's listeners. Raises TandemError(INVALID_REQUEST) where
        certificate or key is not set, or where a file is missing or cannot be used."""
        rule, ca = "TLS needs a certificate and its key", config.tls_client_ca_file
        return cls(
            _required("gateway.tls_cert_file", config.tls_cert_file, rule),
            _required("gateway.tls_key_file", config.tls_key_file, rule),
            TlsFile("gateway.tls_client_ca_file", Path(ca)) if ca else None,
        )

    @property
    def requires_client(self) -> bool:
        """Return whether the other side of a connection to this program must present a certificate."""
        return self._ca is not None

    def current(self) -> Pems:
        """Return the content of the files, after reading them again if they have changed."""
        return self._look()[0]

    def problem(self) -> str | None:
        """Return why the files cannot be used as they are now, as text; None if they can be used. While they cannot,
        the content that was read before stays in force."""
        self._look()
        return self._problem

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return a client's credentials for one new channel. The channel uses the certificate that the files hold now
        until it is closed."""
        pems = self.current()
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return a gRPC server's credentials, which use the current files for each new connection. If there is a CA for
        clients, they refuse a client without a certificate of that CA.

        Open connections are not affected when the files change.
        """
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._served),
            self._changed,  # type: ignore[arg-type]  # the stubs don't know that None is allowed
            require_client_authentication=self.requires_client,
        )

    def server_context(self) -> ssl.SSLContext:
        """Return a context for a server of asyncio or uvloop, which uses the current files for each new connection.

        Open connections are not affected when the files change. Where there is a CA for clients, a client certificate
        that this CA did not sign ends the handshake. A client may present no certificate; the server then decides what
        the client may do.
        """
        return _CurrentContext(self)

    def context(self) -> ssl.SSLContext:
        """Return the SSL context that is made from the current files, for one new connection."""
        return self._look()[1].listener

    def wrap(self, connection: socket.socket, *, is_server: bool) -> ssl.SSLSocket:
        """Wrap a connection to another program of the cluster for TLS by the current files, and return the TLS socket.
        `is_server`: this side has accepted the connection. The caller must call `do_handshake` of the result, which
        raises OSError where the other side has no certificate of the cluster."""
        contexts = self._look()[1]
        context = contexts.peer_server if is_server else contexts.peer_client
        assert context is not None, "files of a cluster have a CA"
        name = None if is_server else TLS_NAME
        return context.wrap_socket(
            connection, server_side=is_server, server_hostname=name, do_handshake_on_connect=False
        )

    def _look(self) -> tuple[Pems, _Contexts]:
        """Return the content and its contexts, read again if the files have changed."""
        with self._lock:  # gRPC accepts connections on threads of its own
            seen = self._signature()
            if seen != self._seen:
                self._seen = seen  # taken before reading, so that a change during the read is seen by the next check
                try:
                    self._pems, self._contexts = self._read()
                except TandemError as error:
                    state = "the TLS files are unusable, and the previous certificate stays in force"
                    self._problem = f"{state}: {error.message}"
                    _log.error("%s", self._problem)
                else:
                    self._problem = None
                    _log.info("the TLS certificate was read again from %s", self._cert.path)
            return self._pems, self._contexts

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new configuration, None if nothing has changed. gRPC calls this on its thread at each
        handshake."""
        pems = self.current()
        if pems == self._served:
            return None
        self._served = pems
        return _configuration(pems)

    def _signature(self) -> Signature:
        return signature(*self._paths)

    def _read(self) -> tuple[Pems, _Contexts]:
        """Read the files after checking that key and certificate match.

        gRPC itself would report a mismatch only at a handshake and without the reason.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        cert, key, ca = self._cert.path, self._key.path, b""
        if self._ca is not None:
            try:
                context.load_verify_locations(self._ca.path)
                ca = self._ca.path.read_bytes()
            except OSError as error:  # SSLError is an OSError
                raise _refuse(self._ca.setting, self._ca.path, error) from None
            context.verify_mode = ssl.CERT_OPTIONAL
        try:
            context.load_cert_chain(cert, key, password="")  # without a password OpenSSL would ask the terminal for it
            pems = Pems(key.read_bytes(), cert.read_bytes(), ca)
            if self._ca is None:
                return pems, _Contexts(context)
            return pems, _Contexts(context, *(self._peer_context(is_server) for is_server in (True, False)))
        except OSError as error:
            raise _refuse(self._cert.setting, f"{cert} with key {key}", error) from None

    def _peer_context(self, is_server: bool) -> ssl.SSLContext:
        """Return a context in which both sides present a certificate of the CA, for the present files."""
        assert self._ca is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self._ca.path)
        context.load_cert_chain(self._cert.path, self._key.path, password="")
        return context


class _CurrentContext(ssl.SSLContext):
    """Begin each connection with the current context of `files`. Event loops call only `wrap_bio` of a server's
    context."""

    _files: TlsFiles

    def __new__(cls, files: TlsFiles) -> _CurrentContext:
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made._files = files
        return made

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self._files.context().wrap_bio(*arguments, **options)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca or None)


def _required(setting: str, path: str, rule: str) -> TlsFile:
    """Return the file of a setting. Raises TandemError(INVALID_REQUEST) with the rule if it is not set."""
    if not path:
        raise TandemError(ErrorKind.INVALID_REQUEST, f"{setting} is empty: {rule}", param=setting)
    return TlsFile(setting, Path(path))


def _refuse(setting: str, path: object, error: OSError) -> TandemError:
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return TandemError(ErrorKind.INVALID_REQUEST, f"{setting}: cannot use {path}: {reason}", param=setting)
