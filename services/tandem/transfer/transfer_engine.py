"""Decide which reads the transfer thread posts, polls, checks and reports; `transfer_thread` calls the engine in a
loop.

The engine is the only user of its transport. It owns no thread and does not wait.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tandem.core.clock import Clock
from tandem.core.ids import BlockId, Incarnation, WorkerId
from tandem.engine.effects import StartRead, TearDownPeer
from tandem.engine.transfer_messages import (
    Cancel,
    Command,
    Connected,
    ConnectFailed,
    ConnectPeer,
    Event,
    FailureKind,
    PeerDrained,
    PeerLost,
    ReadDone,
    ReadFailed,
    SelfTest,
    SelfTestDone,
    SetPolling,
    TransferStopped,
    TransportPeer,
)
from tandem.transfer.interface import BlockCopy, PeerError, PostedRead, ReadState, Transport
from tandem.transfer.peer_layout import CopyRefused

MAX_OPEN_PARTS = 2
"""Most open parts of one read: two keep a TCP peer busy between polls, and only two must drain after a cancel."""
LAST_PART_BYTES = 3 << 20
"""Approximate size of the last part, in bytes.

Its digest takes a tenth of a millisecond, as long as the post of another part.
"""


@dataclass(slots=True, eq=False)
class ReadPart:
    """Describe one part of a read: the blocks that are read by one call of `Transport.post_read`.

    `start`, `stop`: if the blocks of the whole read are sorted by their ids at the peer, as in `ReadTask`, this part
    has the blocks at the positions `[start, stop)`. `wrong`: the first block of the part whose digest differs from the
    producer's, as its index in the request (`StartRead`); None when all match or nothing was checked yet. `defect`: the
    exception that the digest function raised, or None.
    """

    start: int
    stop: int
    wrong: int | None = None
    defect: Exception | None = None


@dataclass(slots=True)
class ReadTask:
    """Track the progress of one read of `peer`, which is split into parts. Only the transfer engine changes it.

    `read`: the request. `block_bytes`: bytes that are read of each block. `started`: time of acceptance by the engine's
    clock, in seconds. `waiting`: parts to be posted. `open`: posted parts, by the read that the transport has begun for
    each. `num_checking`: received parts whose digests are being checked. `failure`: kind and reason of the first
    failure; after it no part is posted any more, but open parts and checks are awaited.

    Copies are read in the order of the remote block ids, so that adjacent blocks can be merged. Their order in the
    prompt is another one, because a pool hands out the block that was freed last before the others.
    """

    read: StartRead
    peer: TransportPeer
    block_bytes: int
    started: float
    waiting: deque[ReadPart]
    open: dict[PostedRead, ReadPart] = field(default_factory=dict)
    num_checking: int = 0
    failure: tuple[FailureKind, str] | None = None
    _sequence: Sequence[int] = field(init=False)
    _copies: Sequence[BlockCopy] = field(init=False)

    def __post_init__(self) -> None:
        remote, local = [offered.block for offered in self.read.offered], self.read.local
        self._sequence = sorted(range(len(remote)), key=remote.__getitem__)
        self._copies = [BlockCopy(remote[place], local[place]) for place in self._sequence]

    @property
    def may_post(self) -> bool:
        return bool(self.waiting) and len(self.open) < MAX_OPEN_PARTS

    @property
    def is_over(self) -> bool:
        return not (self.waiting or self.open or self.num_checking)

    def places(self, part: ReadPart) -> Sequence[int]:
        """Return the index in the read request of each copy that `part` has."""
        return self._sequence[part.start : part.stop]

    def copies(self, part: ReadPart) -> Sequence[BlockCopy]:
        return self._copies[part.start : part.stop]

    def fail(self, kind: FailureKind, reason: str) -> None:
        """Record why the read fails, and drop the parts that were not posted yet. If a failure was recorded earlier,
        that one is kept."""
        self.failure = self.failure or (kind, reason)
        self.waiting.clear()

    def report(self, now: float) -> ReadDone | ReadFailed:
        """Return the event that reports the end of the read at the time `now`, by the engine's clock. Called once
        `is_over` is True."""
        if self.failure is None:
            return ReadDone(self.read.read, len(self.read.local) * self.block_bytes, now - self.started)
        kind, reason = self.failure
        return ReadFailed(self.read.read, kind, reason, drained=True)


def split(num_blocks: int, block_bytes: int, max_bytes: int) -> Iterator[ReadPart]:
    """Split a read of `num_blocks` blocks and yield its parts, each of at most `max_bytes` bytes but at least one block
    of `block_bytes` bytes.

    Towards the end each part takes two thirds of the rest, down to LAST_PART_BYTES, because the digest of the last part
    delays the whole read.
    """
    most, last = (max(1, num_bytes // block_bytes) for num_bytes in (max_bytes, LAST_PART_BYTES))
    start = 0
    while start < num_blocks:
        left = num_blocks - start
        num = min(most, left if 2 * left <= 3 * last else max(last, 2 * left // 3))
        yield ReadPart(start, start + num)
        start += num


Digest = Callable[[Sequence[BlockId], Sequence[int]], Sequence[tuple[int, ...]]]
"""Signature of the digest function: `digest(blocks, logical)` returns the digests of `blocks`, ids in the own pool,
where `blocks[i]` holds block number `logical[i]` of the prompt.

The result has one tuple per block, with one 64-bit number per KV head of the pool.
"""


Check = tuple[ReadTask, ReadPart]
"""A received part whose digests are to be compared with those that the producer computed."""


class DigestChecks:
    """Check the digests of received parts of reads, on the transfer thread or on a helper thread.

    `digest`: computes the digests of local blocks. `heads`: range of the model's KV heads that the local pool holds;
    only the producer's digests of these heads are compared. `num_open`: checks whose result `take` has not returned
    yet. All methods but `help` are called on the transfer thread; each check is done once.
    """

    def __init__(self, digest: Digest, heads: range) -> None:
        self._digest = digest
        self._heads = slice(heads.start, heads.stop)
        self._waiting: queue.SimpleQueue[Check | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Check] = queue.SimpleQueue()
        self.num_open = 0

    @property
    def may_work(self) -> bool:
        return not self._waiting.empty()

    def share(self, check: Check) -> None:
        """Queue a check for the helper thread (`help`) or a later call of `work`."""
        self.num_open += 1
        self._waiting.put(check)

    def do(self, check: Check) -> None:
        """Do a check on the calling thread and keep its result for `take`. For a small check this may be faster than
        waking the helper."""
        self.num_open += 1
        self._do(check)

    def work(self) -> None:
        """Do the oldest queued check on the calling thread; do nothing when none is queued."""
        try:
            check = self._waiting.get_nowait()
        except queue.Empty:
            return
        if check is not None:
            self._do(check)

    def help(self, on_done: Callable[[], None]) -> None:
        """Do queued checks until `close` is called, as the body of the helper thread; call `on_done` after each
        check."""
        while (check := self._waiting.get()) is not None:
            self._do(check)
            on_done()

    def close(self) -> None:
        """Let the helper thread end: its body, `help`, returns once it has checked the digests of all parts that were
        queued before this call. Returns without waiting for that."""
        self._waiting.put(None)

    def take(self) -> list[Check]:
        """Return the checks that were done since the last call. The result of a check is in `wrong` of its part.

        If the digest function has raised an exception, raises that exception.
        """
        done: list[Check] = []
        while not self._done.empty():
            check = self._done.get()
            self.num_open -= 1
            _, part = check
            if part.defect is not None:
                raise part.defect
            done.append(check)
        return done

    def _do(self, check: Check) -> None:
        task, part = check
        try:
            if task.failure is None:
                part.wrong = self._find_wrong(task, part)
        except Exception as defect:
            # Raised again by `take` on the transfer thread, which fails with it.
            part.defect = defect
        self._done.put(check)

    def _find_wrong(self, task: ReadTask, part: ReadPart) -> int | None:
        places, read = task.places(part), task.read
        positions = [read.positions[place] for place in places]
        digests_here = self._digest([read.local[place] for place in places], positions)
        for place, digest_here in zip(places, digests_here, strict=True):
            if digest_here != read.offered[place].heads[self._heads]:
                return place
        return None


Life = tuple[WorkerId, Incarnation]


class TransferEngine:
    """Carry out the commands of one rank: connect peers, read their blocks part by part, check digests, and report the
    result of each read exactly once, whatever its peer does.

    The owner passes commands to `accept`, calls `turn` in a loop, and forwards the events that `turn` returns. One call
    of `turn` posts at most one part of a read and checks at most one, because either may take as long as a copy of the
    part's bytes, during which peers that read from this worker are not answered. While there is something to read, it
    leaves the checks to a helper thread, the body of which is `checks.help`. `max_post_bytes`: most bytes of one part.
    """

    def __init__(self, transport: Transport, digest: Digest, clock: Clock, max_post_bytes: int) -> None:
        self.checks = DigestChecks(digest, transport.pool.heads)
        self._transport = transport
        self._clock = clock
        self._max_post_bytes = max_post_bytes
        self._peers: dict[Life, TransportPeer] = {}
        self._lingering: dict[Life, TransportPeer] = {}
        self._tasks: dict[int, ReadTask] = {}
        self._post_queue: deque[int] = deque()
        self._arrived: deque[Check] = deque()
        # The read and the start of the self-test that is running.
        self._test: tuple[PostedRead, float] | None = None
        self._leases_open = False
        self._events: list[Event] = []

    def __repr__(self) -> str:
        open_parts = sum(len(task.open) for task in self._tasks.values())
        return (
            f"TransferEngine({len(self._tasks)} requests, {open_parts} parts open, "
            f"{len(self._peers)} peers, {len(self._lingering)} lingering)"
        )

    @property
    def is_busy(self) -> bool:
        """Return whether a read or self-test is open, or a peer may read from this worker. While it is True, the owner
        must call `turn` often."""
        return self._leases_open or bool(self._tasks) or self._test is not None

    @property
    def has_ready_work(self) -> bool:
        """Return whether the next call of `turn` can post a part of a read or check one without waiting."""
        may_check = bool(self._arrived) or self.checks.may_work
        return may_check or any(task.may_post for task in self._tasks.values())

    @property
    def is_drained(self) -> bool:
        """Return whether nothing is in progress: no part of a read is posted, no check is open, and no read of a
        disconnected peer may go on."""
        is_checking = bool(self._arrived) or self.checks.num_open > 0
        return not (self._lingering or is_checking or any(task.open for task in self._tasks.values()))

    def accept(self, command: Command) -> None:
        match command:
            case StartRead():
                self._accept_read(command)
            case ConnectPeer(peer):
                self._connect(peer)
            case Cancel(id):
                if id in self._tasks:
                    self._tasks[id].fail(FailureKind.CANCELLED, "cancelled")
            case TearDownPeer(source, reason):
                if (known := self._peers.get((source.id, source.incarnation))) is not None:
                    self._disconnect_peer(known, FailureKind.TEARDOWN, reason)
            case SelfTest():
                self._start_self_test()
            case SetPolling(busy):
                self._leases_open = busy

    def turn(self) -> list[Event]:
        """Do one round of work without waiting for a read to end, and return the events since the last call, in order.

        A round posts at most one part of a read, polls the open parts, and checks at most one received part.
        """
        if self._tasks or self._arrived or self.checks.num_open:
            self._check_arrived()
            self._post_next()
            self._poll_open()
            self._report_finished()
        self._poll_self_test()
        self._prove_lingering()
        self._transport.progress()
        return self._take_events()

    def cancel_all(self, reason: str) -> None:
        """Fail all read requests with `reason`, so that no further part is posted.

        The caller must then call `turn`, which polls the open parts, until `is_drained` is True.
        """
        for task in self._tasks.values():
            task.fail(FailureKind.STOPPED, reason)

    def close(self, error: str | None = None) -> list[Event]:
        """Close the transport and return the remaining events: the end of every open request, and last TransferStopped
        with `error`. If the transport cannot be closed, its exception is not raised, but reported as the error unless
        `error` is given."""
        try:
            self._transport.close()
            drained = True
        except Exception as failure:
            # Every request must be reported, whatever the exception.
            drained = False
            error = error or str(failure)
        reason = error or "the transfer thread was stopped"
        for task in self._tasks.values():
            safe = drained or not task.open
            self._events.append(ReadFailed(task.read.read, FailureKind.STOPPED, reason, safe))
        self._tasks.clear()
        if self._test is not None:
            self._end_self_test(reason)
        if drained:
            self._events.extend(PeerDrained(peer) for peer in self._lingering.values())
            self._lingering.clear()
        self._peers.clear()
        self._events.append(TransferStopped(error))
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Reads

    def _accept_read(self, command: StartRead) -> None:
        """Start a task for a read. A second command with the id of an open read is a duplicate, and is ignored."""
        if command.read in self._tasks:
            return
        peer = self._peers.get((command.source.id, command.source.incarnation))
        if peer is None:
            reason = f"{command.source} is not connected"
            self._events.append(ReadFailed(command.read, FailureKind.REFUSED, reason, drained=True))
            return
        block_bytes = self._transport.pool.region.block_bytes
        parts = deque(split(len(command.local), block_bytes, self._max_post_bytes))
        self._tasks[command.read] = ReadTask(command, peer, block_bytes, self._clock.now(), parts)
        self._post_queue.append(command.read)

    def _post_next(self) -> None:
        """Post one part of the request whose last post is the longest ago."""
        for _ in range(len(self._post_queue)):
            id = self._post_queue.popleft()
            task = self._tasks.get(id)
            if task is None or not task.waiting:
                continue
            self._post_queue.append(id)
            if task.may_post:
                self._post(task, task.waiting.popleft())
                return

    def _post(self, task: ReadTask, part: ReadPart) -> None:
        peer = task.peer
        try:
            posted = self._transport.post_read(peer, task.copies(part))
        except CopyRefused as error:
            task.fail(FailureKind.REFUSED, str(error))
        except PeerError as error:
            # Some transfers of this part may be open; `disconnect` returns whether all have ended.
            self._disconnect_peer(peer, FailureKind.PEER, str(error), failed_post=task.read.read)
        else:
            task.open[posted] = part

    def _poll_open(self) -> None:
        for id, task in list(self._tasks.items()):
            for posted, part in list(task.open.items()):
                if id in self._tasks:
                    self._poll(task, posted, part)

    def _poll(self, task: ReadTask, posted: PostedRead, part: ReadPart) -> None:
        peer = task.peer
        try:
            state = posted.poll()
        except PeerError as error:
            self._disconnect_peer(peer, FailureKind.PEER, str(error))
            return
        if state is ReadState.PENDING:
            return
        del task.open[posted]
        if state is ReadState.FAILED:
            self._disconnect_peer(peer, FailureKind.PEER, f"{peer.worker} is gone: a read of it failed")
        elif task.failure is None and task.read.is_checked:
            task.num_checking += 1
            self._arrived.append((task, part))

    def _check_arrived(self) -> None:
        """Queue received parts for a check, or do one check here, and fail requests with a wrong digest.

        Called just before a post: the woken helper needs the interpreter lock, which the post releases.
        """
        if any(task.open or task.may_post for task in self._tasks.values()):
            while self._arrived:
                self.checks.share(self._arrived.popleft())
        elif self._arrived:
            self.checks.do(self._arrived.popleft())
        else:
            self.checks.work()
        for task, part in self.checks.take():
            task.num_checking -= 1
            if part.wrong is not None:
                block, index = task.read.offered[part.wrong].block, task.read.positions[part.wrong]
                reason = f"block {block} of {task.peer.worker} (prompt block {index}) has a different digest"
                task.fail(FailureKind.DIGEST, reason)

    def _report_finished(self) -> None:
        for id, task in list(self._tasks.items()):
            if task.is_over:
                del self._tasks[id]
                self._events.append(task.report(self._clock.now()))

    # Peers

    def _connect(self, peer: TransportPeer) -> None:
        if self._peers.get(peer.life) == peer:
            self._events.append(Connected(peer))
            return
        others = [other for other in self._peers.values() if other.worker.id == peer.worker.id]
        # Only while it is connected: the clock of the peer's host may have been set back between two of them.
        if any(peer.worker.incarnation < other.worker.incarnation for other in others):
            self._events.append(ConnectFailed(peer, f"{peer.worker} has a newer incarnation"))
            return
        for other in others:
            self._disconnect_peer(other, FailureKind.PEER, f"{other.worker} reconnects")
        try:
            self._transport.connect(peer)
        except PeerError as error:
            self._events.append(ConnectFailed(peer, str(error)))
        else:
            self._peers[peer.life] = peer
            self._events.append(Connected(peer))

    def _disconnect_peer(
        self, peer: TransportPeer, kind: FailureKind, reason: str, failed_post: int | None = None
    ) -> None:
        """Disconnect a peer and report all its requests.

        `failed_post`: id of the request whose post failed, which may have left an open transfer that nothing can poll.
        """
        del self._peers[peer.life]
        proven = self._transport.disconnect(peer)
        for id, task in list(self._tasks.items()):
            if task.peer.life == peer.life:
                del self._tasks[id]
                task.fail(kind, reason)
                safe = proven or not (task.open or id == failed_post)
                first_kind, first_reason = task.failure or (kind, reason)
                self._events.append(ReadFailed(id, first_kind, first_reason, safe))
        if not proven:
            self._lingering[peer.life] = peer
        self._events.append(PeerLost(peer, proven, reason))

    def _prove_lingering(self) -> None:
        for life, peer in list(self._lingering.items()):
            if self._transport.disconnect(peer):
                del self._lingering[life]
                self._events.append(PeerDrained(peer))

    # Self-test

    def _start_self_test(self) -> None:
        """Start a self-test, unless one is running; its result then answers both commands."""
        if self._test is not None:
            return
        started = self._clock.now()
        try:
            self._test = (self._transport.post_self_test(), started)
        except PeerError as error:
            self._events.append(SelfTestDone(str(error), self._clock.now() - started))

    def _poll_self_test(self) -> None:
        if self._test is None:
            return
        try:
            state = self._test[0].poll()
        except PeerError as error:
            self._end_self_test(str(error))
            return
        if state is not ReadState.PENDING:
            self._end_self_test(None if state is ReadState.DONE else "the bytes did not arrive intact")

    def _end_self_test(self, error: str | None) -> None:
        assert self._test is not None
        self._events.append(SelfTestDone(error, self._clock.now() - self._test[1]))
        self._test = None
