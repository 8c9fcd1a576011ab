"""The two ends of a rank's mover in another process: nothing that goes wrong on the way leaves the leader waiting."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.engine.transfer_messages import (
    Cancel,
    Command,
    Event,
    PeerLost,
    ReadDone,
    SelfTest,
    SelfTestDone,
    SetPolling,
    TransferStopped,
)
from tandem.transfer.multi_rank_transfer import MultiRankTransfer
from tandem.worker.ranks.remote_transfer import RemoteTransfer, TransferServer
from tests.unit.transfer.scripted import P


class Recorder:
    """A rank's mover that only notes what it is asked."""

    def __init__(self, hear: Callable[[Event], None]) -> None:
        self.hear = hear
        self.commands: list[Command] = []
        self.num_halts = 0

    def start(self) -> None:
        """Nothing runs."""

    def send(self, command: Command) -> None:
        if self.num_halts:
            raise RuntimeError("halted")
        self.commands.append(command)

    def halt(self) -> None:
        self.num_halts += 1

    def join(self, timeout_s: float) -> bool:
        return self.num_halts > 0


class Pair:
    """Both ends, joined by calls."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.service = TransferServer(self._open, lambda data: self.remote.received(data))
        self.remote = RemoteTransfer(self.service.handle, self.events.append)

    def _open(self, hear: Callable[[Event], None]) -> Recorder:
        self.recorder = Recorder(hear)
        return self.recorder


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_commands_go_one_way_and_events_the_other(pair: Pair) -> None:
    pair.remote.send(SetPolling(True))
    pair.remote.send(Cancel(3))
    assert pair.recorder.commands == [SetPolling(True), Cancel(3)]
    pair.recorder.hear(ReadDone(3, 10, 0.5))
    assert pair.events == [ReadDone(3, 10, 0.5)]


def test_after_the_last_event_nothing_is_heard_and_nothing_may_be_asked(pair: Pair) -> None:
    assert not pair.remote.join(0.0)
    pair.remote.halt()
    pair.remote.halt()
    assert pair.recorder.num_halts == 1
    with pytest.raises(RuntimeError, match="has stopped"):
        pair.remote.send(SelfTest())
    pair.recorder.hear(SelfTestDone("stopped", 0.0))
    pair.recorder.hear(TransferStopped(None))
    pair.recorder.hear(SelfTestDone(None, 0.0))
    pair.remote.lost("too late")
    assert pair.events == [SelfTestDone("stopped", 0.0), TransferStopped(None)]
    assert pair.remote.join(0.0)


def test_a_broken_channel_is_the_end(pair: Pair) -> None:
    pair.remote.lost("killed")
    pair.recorder.hear(ReadDone(1, 1, 0.0))
    assert pair.events == [TransferStopped("killed")]
    with pytest.raises(RuntimeError, match="has stopped"):
        pair.remote.send(SelfTest())


@pytest.mark.parametrize("data", [b"\xff", b""])
def test_what_is_not_understood_ends_both(pair: Pair, data: bytes) -> None:
    pair.service.handle(data)
    assert pair.recorder.num_halts == 1
    pair.service.handle(b"\xff")
    pair.remote.received(data)
    (event,) = pair.events
    assert isinstance(event, TransferStopped)
    assert event.error is not None
    assert "invalid message" in event.error


def test_a_command_that_comes_too_late_is_dropped(pair: Pair) -> None:
    pair.recorder.halt()
    pair.remote.send(SetPolling(True))
    assert pair.recorder.commands == []


def test_a_channel_that_breaks_inside_a_command_is_heard_of_after_it() -> None:
    """All in one thread, as where a channel notices its end in `send`."""
    events: list[Event] = []
    own: list[Recorder] = []

    def open_own(hear: Callable[[Event], None]) -> Recorder:
        own.append(Recorder(hear))
        return own[0]

    def open_broken(hear: Callable[[Event], None]) -> RemoteTransfer:
        remote = RemoteTransfer(lambda data: remote.lost("broken pipe"), hear)
        return remote

    joined = MultiRankTransfer([open_own, open_broken], events.append)
    joined.start()
    joined.self_test()
    assert own[0].num_halts > 0, "the others are halted"
    own[0].hear(SelfTestDone("the transfer thread was stopped", 0.5))
    own[0].hear(TransferStopped(None))
    assert events == [SelfTestDone("rank 1: broken pipe", 0.5), TransferStopped("rank 1: broken pipe")]
    with pytest.raises(RuntimeError, match="has stopped"):
        joined.self_test()


def two_recorders(on_event: Callable[[Event], None]) -> tuple[MultiRankTransfer, list[Recorder]]:
    own: list[Recorder] = []

    def open_own(hear: Callable[[Event], None]) -> Recorder:
        own.append(Recorder(hear))
        return own[-1]

    return MultiRankTransfer([open_own, open_own], on_event), own


def test_a_rank_that_takes_no_more_commands_is_not_the_askers_trouble() -> None:
    """It has stopped, and its last word is on the way."""
    events: list[Event] = []
    joined, (first, second) = two_recorders(events.append)
    second.halt()
    joined.self_test()
    first.hear(SelfTestDone(None, 0.5))
    assert events == []
    second.hear(TransferStopped("broke"))
    assert events == [SelfTestDone("rank 1: broke", 0.5)]
    first.hear(TransferStopped(None))
    assert events[1:] == [TransferStopped("rank 1: broke")]


def test_events_come_one_at_a_time_even_where_the_listener_asks_for_more() -> None:
    told: list[str] = []

    def on_event(event: Event) -> None:
        assert isinstance(event, PeerLost)
        told.append(f"begin {event.reason}")
        if event.reason == "first":
            joined.teardown(P, "second")
        told.append(f"end {event.reason}")

    joined, _ = two_recorders(on_event)
    joined.teardown(P, "first")
    assert told == ["begin first", "end first", "begin second", "end second"]
