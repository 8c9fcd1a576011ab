"""Read from one source over several TCP connections, each with a thread of its own, to one or several addresses."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec

from tandem.core.addresses import format_host
from tandem.core.errors import TandemError
from tandem.transfer.connection_server import SILENT_S, tune
from tandem.transfer.interface import ReadState
from tandem.transfer.pool_access import PoolAccess
from tandem.transfer.socket_memory import shut
from tandem.transfer.tcp_handshake import NONCE_BYTES, ConnectionSecurity, greet_source, start_tls

if TYPE_CHECKING:
    from tandem.transfer.socket_memory import Spans

_log = logging.getLogger(__name__)
MAX_ADDRESSES = 16
"""Most addresses of one source."""
CONNECT_S = 3.0
"""Longest wait for a TCP connection to one address of a source, and for the next bytes of TLS and handshake."""
_AHEAD_BYTES = 16 << 10
"""Most bytes of requests that are sent before the answer to the first of them is received: these fit in any socket's
buffers, so that the source need not read them while it still sends."""


class SourceAddress(msgspec.Struct, frozen=True, array_like=True):
    """Hold what a reader needs to connect to a source at one of its addresses. `nonce`: the nonce of the source's
    listener there, as hex digits."""

    host: Annotated[str, msgspec.Meta(min_length=1)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    nonce: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * NONCE_BYTES}}}$")]


class SourceAddresses(msgspec.Struct, frozen=True, array_like=True):
    """Hold all addresses of a source, one for each network device over which it serves its blocks."""

    all: Annotated[tuple[SourceAddress, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]


@dataclass(slots=True, eq=False)
class TcpPiece:
    """Hold the part of a read that one connection carries out. `request`: the bytes to send to the source. `spans`: the
    local memory that receives the answer. `state`: set when no thread writes to `spans` any more."""

    request: bytes
    spans: Spans
    state: ReadState = ReadState.PENDING

    @property
    def num_bytes(self) -> int:
        return int(self.spans[:, 1].sum())


def state_of(pieces: Sequence[TcpPiece]) -> ReadState:
    """Return the state of a read that consists of `pieces`: PENDING while one of them is open."""
    states = {piece.state for piece in pieces}
    if ReadState.PENDING in states:
        return ReadState.PENDING
    return ReadState.FAILED if ReadState.FAILED in states else ReadState.DONE


class TcpLink:
    """Read from one source over `num_connections` connections to each of its `addresses`, which open in the background.
    Each piece of a read goes to the connection with the fewest bytes to receive.

    When a connection fails, all end. Only if a connection cannot be opened, its address is left out for the life of
    this link, as long as there is another address. `problem`: why the connections have ended; empty while the link can
    be used. `security`: protection of the connections. `open_access`: opens an access to the local pool for one thread.
    Only one thread may use the link.
    """

    def __init__(
        self,
        addresses: Sequence[SourceAddress],
        num_connections: int,
        security: ConnectionSecurity,
        open_access: Callable[[], AbstractContextManager[PoolAccess]],
    ) -> None:
        self.problem = ""
        self._changed = threading.Condition()
        self._connections = [
            _ReaderConnection(address, security, open_access, self._changed, self._on_end, self.post)
            for _ in range(num_connections)
            for address in addresses
        ]
        self._threads = [connection.thread for connection in self._connections]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # for example where the pod may have no more processes
            self._fail(str(error))

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def wait_open(self, timeout_s: float) -> None:
        """Wait until the first connection is open, the link has failed, or `timeout_s` seconds have passed."""
        with self._changed:
            self._changed.wait_for(lambda: self.problem or any(each.is_open for each in self._connections), timeout_s)

    def post(self, piece: TcpPiece) -> None:
        """Queue a piece on one of the connections that are open, or on any connection while none is open yet. If the
        link has failed, the piece fails immediately."""
        with self._changed:
            if self.problem:
                piece.state = ReadState.FAILED
                return
            usable = [each for each in self._connections if each.is_open] or self._connections
            chosen = min(usable, key=lambda each: each.num_waiting_bytes)
            # Among connections with equally few bytes, the one that was used least recently is next.
            self._connections = [*(each for each in self._connections if each is not chosen), chosen]
            chosen.post(piece)

    def look(self) -> None:
        """Check whether the source has ended one of the connections while nothing is read over it. If so, end the link
        and set `problem`."""
        for connection in self._connections:
            if connection.has_ended():
                self._fail("it has ended the connection")

    def end(self, timeout_s: float) -> bool:
        """End all connections, and wait up to `timeout_s` seconds until no thread writes to the pool any more. Returns
        False when a thread may still write."""
        self._fail("it was disconnected")
        with self._changed:
            return self._changed.wait_for(lambda: not any(each.is_writing for each in self._connections), timeout_s)

    def join(self, timeout_s: float) -> None:
        """Wait until the link's threads have ended, up to `timeout_s` seconds for each."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)

    def _fail(self, problem: str) -> None:
        with self._changed:
            self.problem = self.problem or problem
            for connection in self._connections:
                connection.abort()
            self._changed.notify_all()

    def _on_end(self, connection: _ReaderConnection, problem: str) -> None:
        """Leave out the address of a connection that never opened, if there is another one; otherwise end the link."""
        with self._changed:
            if connection not in self._connections:  # its address was left out
                return
            siblings = [each for each in self._connections if each.address == connection.address]
            others = [each for each in self._connections if each.address != connection.address]
            if self.problem or not others or any(each.is_open for each in siblings):
                self._fail(problem)
                return
            self._connections = others
            for each in siblings:
                each.abort()
        _log.warning("KV is not read from %s, only from the source's other addresses: %s", connection, problem)


@dataclass(slots=True, eq=False)
class _ReaderConnection:
    """Send the requests of posted pieces over one connection of a link, and receive the answers, on a thread.

    `is_open`: the handshake has succeeded. `is_writing`: the thread may write to the pool. `num_waiting_bytes`: bytes
    of the pieces that have not ended. `changed`: guards these; it is notified when one of the first two changes.
    `on_end`: called with this connection and the reason when it has ended. `post_again`: called after that with each
    piece that it has not received."""

    address: SourceAddress
    security: ConnectionSecurity
    open_access: Callable[[], AbstractContextManager[PoolAccess]]
    changed: threading.Condition
    on_end: Callable[[_ReaderConnection, str], None]
    post_again: Callable[[TcpPiece], None]
    is_open: bool = False
    is_writing: bool = False
    num_waiting_bytes: int = 0
    thread: threading.Thread = field(init=False)
    _pieces: queue.SimpleQueue[TcpPiece | None] = field(init=False, default_factory=queue.SimpleQueue)
    _socket: socket.socket | None = field(init=False, default=None)
    _is_aborted: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="tandem-kv-receive", daemon=True)

    def __str__(self) -> str:
        return f"{format_host(self.address.host)}:{self.address.port}"

    def post(self, piece: TcpPiece) -> None:
        """Queue a piece; the caller holds `changed`, and has not aborted this connection."""
        self.num_waiting_bytes += piece.num_bytes
        self._pieces.put(piece)

    def has_ended(self) -> bool:
        """Return whether the source has ended this connection while nothing is read."""
        with self.changed:
            if not self.is_open or self.num_waiting_bytes or self._socket is None:
                return False
            try:
                # TLS may have sent messages of its own, so that bytes say nothing.
                return not socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True

    def abort(self) -> None:
        """Make the thread end; the caller holds `changed`."""
        self._is_aborted = True
        self._pieces.put(None)
        if self._socket is not None:
            shut(self._socket)

    def _run(self) -> None:
        batch: list[TcpPiece] = []
        problem = "its thread has ended"  # a defect is reported by the thread's exception hook
        try:
            with self.open_access() as access, self._connected() as connection:
                while self._take(batch):
                    connection.sendall(b"".join(piece.request for piece in batch))
                    while batch:
                        self._receive(connection, access, batch[0])
                        self._end(batch.pop(0))
        except OSError as error:
            problem = error.strerror or str(error)
        except TandemError as error:
            problem = error.message
        finally:
            self.on_end(self, problem)  # from now on nothing is posted here
            with suppress(queue.Empty):
                while True:
                    if (piece := self._pieces.get_nowait()) is not None:
                        batch.append(piece)
            for piece in batch:
                self.post_again(piece)

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """Connect, and yield the connection until the end of the block. Raises OSError where that fails."""
        connection = socket.create_connection((self.address.host, self.address.port), CONNECT_S)
        try:
            tune(connection, SILENT_S)
            connection = self.security.connect(connection)
            with self.changed:
                self._socket = connection
                if self._is_aborted:
                    raise ConnectionAbortedError("it was disconnected")
            start_tls(connection)
            greet_source(connection, bytes.fromhex(self.address.nonce), self.security.secrets())
            connection.settimeout(None)
            with self.changed:
                self.is_open = True
                self.changed.notify_all()
            yield connection
        finally:
            with self.changed:  # not while `abort` uses it
                self._socket = None
                connection.close()

    def _take(self, batch: list[TcpPiece]) -> bool:
        """Wait for a piece, and put it and those behind it into `batch`, at most _AHEAD_BYTES of requests. Returns
        False at the end."""
        piece = self._pieces.get()
        num_bytes = 0
        while piece is not None:
            batch.append(piece)
            num_bytes += len(piece.request)
            if num_bytes >= _AHEAD_BYTES:
                return True
            try:
                piece = self._pieces.get_nowait()
            except queue.Empty:
                return True
        return False

    def _receive(self, connection: socket.socket, access: PoolAccess, piece: TcpPiece) -> None:
        with self.changed:
            if self._is_aborted:
                raise ConnectionAbortedError("it was disconnected")
            self.is_writing = True
        try:
            access.receive(connection, piece.spans)
        finally:
            with self.changed:
                self.is_writing = False
                self.changed.notify_all()

    def _end(self, piece: TcpPiece) -> None:
        with self.changed:
            self.num_waiting_bytes -= piece.num_bytes
        piece.state = ReadState.DONE
