"""The two ends of a rank's mover in another process: nothing that goes wrong on the way leaves the leader waiting."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.engine.orders import Cancel, Command, Event, MoverStopped, ReadDone, SelfTest, SelfTestDone, SetBusy
from tandem.transfer.joined import JoinedMover
from tandem.worker.remote_mover import MoverService, RemoteMover


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
        self.service = MoverService(self._open, lambda data: self.remote.received(data))
        self.remote = RemoteMover(self.service.handle, self.events.append)

    def _open(self, hear: Callable[[Event], None]) -> Recorder:
        self.recorder = Recorder(hear)
        return self.recorder


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_commands_go_one_way_and_events_the_other(pair: Pair) -> None:
    pair.remote.send(SetBusy(True))
    pair.remote.send(Cancel(3))
    assert pair.recorder.commands == [SetBusy(True), Cancel(3)]
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
    pair.recorder.hear(MoverStopped(None))
    pair.recorder.hear(SelfTestDone(None, 0.0))
    pair.remote.lost("too late")
    assert pair.events == [SelfTestDone("stopped", 0.0), MoverStopped(None)]
    assert pair.remote.join(0.0)


def test_a_broken_channel_is_the_end(pair: Pair) -> None:
    pair.remote.lost("killed")
    pair.recorder.hear(ReadDone(1, 1, 0.0))
    assert pair.events == [MoverStopped("killed")]
    with pytest.raises(RuntimeError, match="has stopped"):
        pair.remote.send(SelfTest())


@pytest.mark.parametrize("data", [b"\xff", b""])
def test_what_is_not_understood_ends_both(pair: Pair, data: bytes) -> None:
    pair.service.handle(data)
    assert pair.recorder.num_halts == 1
    pair.service.handle(b"\xff")
    pair.remote.received(data)
    (event,) = pair.events
    assert isinstance(event, MoverStopped)
    assert event.error is not None
    assert "not understood" in event.error


def test_a_command_that_comes_too_late_is_dropped(pair: Pair) -> None:
    pair.recorder.halt()
    pair.remote.send(SetBusy(True))
    assert pair.recorder.commands == []


def test_a_channel_that_breaks_inside_a_command_is_heard_of_after_it() -> None:
    """All in one thread, as where a channel notices its end in `send`."""
    events: list[Event] = []
    own: list[Recorder] = []

    def open_own(hear: Callable[[Event], None]) -> Recorder:
        own.append(Recorder(hear))
        return own[0]

    def open_broken(hear: Callable[[Event], None]) -> RemoteMover:
        remote = RemoteMover(lambda data: remote.lost("broken pipe"), hear)
        return remote

    joined = JoinedMover([open_own, open_broken], events.append)
    joined.start()
    joined.self_test()
    assert own[0].num_halts > 0, "the others are halted"
    own[0].hear(SelfTestDone("the transfer thread was stopped", 0.5))
    own[0].hear(MoverStopped(None))
    assert events == [SelfTestDone("rank 1: broken pipe", 0.5), MoverStopped("rank 1: broken pipe")]
    with pytest.raises(RuntimeError, match="has stopped"):
        joined.self_test()
