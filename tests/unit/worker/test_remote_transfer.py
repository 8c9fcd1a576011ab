"""Test the two ends of a rank's transfer in another process: no failure in between leaves the leader waiting."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.engine.effects import StartRead
from tandem.engine.transfer_messages import (
    Cancel,
    Event,
    ReadDone,
    ReadFailed,
    SelfTest,
    SelfTestDone,
    SetPolling,
    TransferStopped,
)
from tandem.transfer.multi_rank_transfer import MultiRankTransfer
from tandem.worker.ranks.remote_transfer import RemoteTransfer, carry_out
from tests.unit.transfer.scripted import P
from tests.unit.worker.conftest import RecordingTransfer


class Pair:
    """Connect both ends by direct calls."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.recorder = RecordingTransfer(lambda event: self.remote.received(event))
        self.remote = RemoteTransfer(lambda command: carry_out(self.recorder, command), self.events.append)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_commands_go_to_the_rank_and_events_return(pair: Pair) -> None:
    pair.remote.send(SetPolling(True))
    pair.remote.send(Cancel(3))
    assert pair.recorder.commands == [SetPolling(True), Cancel(3)]
    pair.recorder.on_event(ReadDone(3, 10, 0.5))
    assert pair.events == [ReadDone(3, 10, 0.5)]


def test_after_the_last_event_no_event_arrives_and_no_command_is_accepted(pair: Pair) -> None:
    assert not pair.remote.join(0.0)
    pair.remote.halt()
    pair.remote.halt()
    assert pair.recorder.num_halts == 1
    with pytest.raises(RuntimeError, match="has stopped"):
        pair.remote.send(SelfTest())
    pair.recorder.on_event(SelfTestDone("stopped", 0.0))
    pair.recorder.on_event(TransferStopped(None))
    pair.recorder.on_event(SelfTestDone(None, 0.0))
    pair.remote.lost("too late")
    assert pair.events == [SelfTestDone("stopped", 0.0), TransferStopped(None)]
    assert pair.remote.join(0.0)


def test_a_broken_channel_is_the_end(pair: Pair) -> None:
    pair.remote.lost("killed")
    pair.recorder.on_event(ReadDone(1, 1, 0.0))
    assert pair.events == [TransferStopped("killed")]
    with pytest.raises(RuntimeError, match="has stopped"):
        pair.remote.send(SelfTest())


def test_a_command_after_the_end_is_dropped(pair: Pair) -> None:
    pair.recorder.halt()
    pair.remote.send(SetPolling(True))
    assert pair.recorder.commands == []


def test_a_channel_that_breaks_inside_a_command_is_reported_after_it() -> None:
    """Everything runs in one thread, as where a channel notices its end in `send`."""
    events: list[Event] = []
    own: list[RecordingTransfer] = []

    def open_own(on_event: Callable[[Event], None]) -> RecordingTransfer:
        own.append(RecordingTransfer(on_event))
        return own[0]

    def open_broken(on_event: Callable[[Event], None]) -> RemoteTransfer:
        remote = RemoteTransfer(lambda _command: remote.lost("broken pipe"), on_event)
        return remote

    joined = MultiRankTransfer([open_own, open_broken], events.append)
    joined.start()
    joined.send(SelfTest())
    assert own[0].num_halts > 0, "the others are halted"
    own[0].on_event(SelfTestDone("the transfer thread was stopped", 0.5))
    own[0].on_event(TransferStopped(None))
    assert events == [SelfTestDone("rank 1: broken pipe", 0.5), TransferStopped("rank 1: broken pipe")]
    with pytest.raises(RuntimeError, match="has stopped"):
        joined.send(SelfTest())


def two_recorders(on_event: Callable[[Event], None]) -> tuple[MultiRankTransfer, list[RecordingTransfer]]:
    own: list[RecordingTransfer] = []

    def open_own(on_event: Callable[[Event], None]) -> RecordingTransfer:
        own.append(RecordingTransfer(on_event))
        return own[-1]

    return MultiRankTransfer([open_own, open_own], on_event), own


def test_sending_to_a_stopped_rank_raises_no_error() -> None:
    """The rank has stopped, and its last event is still in transit."""
    events: list[Event] = []
    joined, (first, second) = two_recorders(events.append)
    second.halt()
    joined.send(SelfTest())
    first.on_event(SelfTestDone(None, 0.5))
    assert events == []
    second.on_event(TransferStopped("broke"))
    assert events == [SelfTestDone("rank 1: broke", 0.5)]
    first.on_event(TransferStopped(None))
    assert events[1:] == [TransferStopped("rank 1: broke")]


def test_events_are_delivered_one_at_a_time_even_if_the_listener_causes_more() -> None:
    log: list[str] = []

    def on_event(event: Event) -> None:
        assert isinstance(event, ReadFailed), "nobody is connected"
        log.append(f"begin {event.id}")
        if event.id == 1:
            joined.send(StartRead(2, P.worker, (), (), ()))
        log.append(f"end {event.id}")

    joined, _ = two_recorders(on_event)
    joined.send(StartRead(1, P.worker, (), (), ()))
    assert log == ["begin 1", "end 1", "begin 2", "end 2"]
