"""What the read desk orders: only what can be checked, where checks are asked for."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tandem.core.ids import BlockId, HandoffId, HandoffKey
from tandem.engine.effects import Effect, Unfollow
from tandem.engine.orders import Command, Connected, FailureKind, ReadFailed, ReadOrder
from tandem.kv.handoff import BlockDigest
from tandem.kv.pull_outcome import StartRead
from tandem.transfer.verbs import Verbs
from tandem.worker.reads import ReadDesk
from tests.unit.transfer.scripted import P


class Noting(Verbs):
    """A mover that only notes what it is asked."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def start(self) -> None:
        """Nothing runs."""

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def halt(self) -> None:
        """Nothing runs."""

    def join(self, timeout_s: float) -> bool:
        return True


class Engine:
    """Notes which reads were said to have failed, and why. `follows`: what an engine wants done then."""

    def __init__(self, *follows: Effect) -> None:
        self.failed: list[tuple[int, str]] = []
        self.follows = list(follows)
        self.done: list[Effect] = []

    def post(self, command: Any) -> None:
        self.done += command(self, 0.0)

    def read_failed(self, id: int, reason: str, *, drained: bool, now: float) -> list[Any]:
        assert drained
        self.failed.append((id, reason))
        return self.follows


def desk(engine: Engine, mover: Noting, *, digests: bool) -> ReadDesk:
    desk = ReadDesk(engine.post, lambda peer: None, lambda error: None, lambda error: None, digests=digests)
    desk.attach(mover)
    desk.on_event(Connected(P))
    return desk


@pytest.mark.parametrize("heads", [(), (1, 2)])
def test_a_block_without_one_digest_for_each_head_is_read_unchecked_or_not_at_all(heads: tuple[int, ...]) -> None:
    read = StartRead(
        7, P.worker, 0, (BlockDigest(BlockId(1), (9,)), BlockDigest(BlockId(2), heads)), (BlockId(3), BlockId(4))
    )
    engine, mover = Engine(), Noting()
    desk(engine, mover, digests=True).start_read(read)
    ((id, reason),) = engine.failed
    assert (id, mover.commands) == (7, [])
    assert "one for each of 1 KV heads" in reason
    desk(engine, mover, digests=False).start_read(read)
    (order,) = mover.commands
    assert isinstance(order, ReadOrder)
    assert order.digests is None


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_read_that_failed_is_a_worry_only_where_somebody_waited_for_it(
    is_awaited: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tandem.worker.reads")
    follows = [Unfollow(P.worker, HandoffKey(HandoffId("h"), 1))] if is_awaited else []
    engine = Engine(*follows)
    reading = desk(engine, Noting(), digests=True)
    reading.start_read(StartRead(7, P.worker, 0, (BlockDigest(BlockId(1), (9,)),), (BlockId(3),)))
    reading.on_event(ReadFailed(7, FailureKind.DIGEST, "block 3 is another", True))
    assert engine.failed == [(7, "block 3 is another")] and engine.done == follows
    ((_, level, text),) = caplog.record_tuples
    assert level == (logging.WARNING if is_awaited else logging.INFO)
    assert text == "read 7 failed (digest): block 3 is another"
