"""Test the outbox against a gateway that loses messages: whatever is lost, a repeated request closes the gap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import ErrorKind
from tandem.core.events import (
    Cancelled,
    Failed,
    Finished,
    FinishReason,
    JobEvent,
    KVReceived,
    MigrationOffered,
    PromptLogprobs,
    SampledToken,
    Token,
)
from tandem.core.ids import HandoffId, HandoffKey, JobKey, RequestId
from tandem.worker.gateways.outbox import MAX_SCORES, Outbox

KEYS = [JobKey(RequestId(name), 1) for name in "abc"]
NUM_TOKENS = 6


def script(key: JobKey) -> list[JobEvent]:
    """All events of one job in order."""
    pulled = KVReceived(key, 1, 1, 0, 0, 0.0, 0.0, 0.0)
    tokens: list[JobEvent] = [Token(key, i, SampledToken(i)) for i in range(NUM_TOKENS)]
    moving = MigrationOffered(key, HandoffKey(HandoffId(key.request), 1))
    return [tokens[0], pulled, *tokens[1:3], moving, *tokens[3:], Finished(key, FinishReason.LENGTH, NUM_TOKENS, 0)]


class Gateway:
    """Accept tokens in order and report which position each job has reached."""

    def __init__(self) -> None:
        self.tokens: dict[JobKey, list[int]] = {key: [] for key in KEYS}
        self.ended: set[JobKey] = set()

    def receive(self, events: list[JobEvent]) -> None:
        for event in events:
            match event:
                case Token(key, index, token):
                    assert index == len(self.tokens[key]), "a gap or a repeat within one stream"
                    assert key not in self.ended, "a token after the end"
                    self.tokens[key].append(token.id)
                case Finished(key):
                    assert len(self.tokens[key]) == NUM_TOKENS, "an end before all tokens"
                    self.ended.add(key)
                case KVReceived() | MigrationOffered():
                    pass
                case _:
                    raise AssertionError(event)

    def positions(self) -> dict[JobKey, int]:
        return {key: len(tokens) for key, tokens in self.tokens.items() if key not in self.ended}


@given(st.lists(st.one_of(st.integers(0, 2), st.sampled_from(["heard", "lost"])), max_size=80))
def test_no_event_is_lost_or_delivered_twice(actions: list[int | str]) -> None:
    box, gateway = Outbox(keep_s=10.0), Gateway()
    scripts = {key: script(key) for key in KEYS}
    for key in KEYS:
        box.register(key, 0)
    for action in actions:
        if isinstance(action, int):
            if scripts[KEYS[action]]:
                box.push(scripts[KEYS[action]].pop(0))
        elif action == "heard":
            gateway.receive(box.take(0.0))
        else:
            box.take(0.0)
            assert box.resume(gateway.positions()) == [], "a listed job, or one that has ended, is not to be cancelled"
    for key in KEYS:
        for event in scripts[key]:
            if key in box:
                box.push(event)
    assert box.resume(gateway.positions()) == []
    gateway.receive(box.take(0.0))
    assert gateway.ended == set(KEYS)
    assert all(tokens == list(range(NUM_TOKENS)) for tokens in gateway.tokens.values())


def test_an_unlisted_live_job_is_unwanted_and_its_end_is_still_sent() -> None:
    box = Outbox(keep_s=10.0)
    key = KEYS[0]
    box.register(key, 0)
    box.push(Token(key, 0, SampledToken(0)))
    assert box.resume({}) == [key]
    box.push(Cancelled(key))
    assert box.take(0.0) == [Cancelled(key)]


def test_a_listed_job_unknown_to_the_worker_has_failed() -> None:
    box = Outbox(keep_s=10.0)
    box.resume({KEYS[0]: 3})
    (failed,) = box.take(0.0)
    assert isinstance(failed, Failed) and failed.kind is ErrorKind.WORKER_LOST
    assert box.take(0.0) == []


def test_a_position_before_the_attempt_began_cannot_be_served() -> None:
    box = Outbox(keep_s=10.0)
    box.register(KEYS[0], 5)
    assert box.resume({KEYS[0]: 4}) == [KEYS[0]]


def test_ended_jobs_are_forgotten_some_time_after_their_end_was_sent() -> None:
    box = Outbox(keep_s=10.0)
    box.register(KEYS[0], 0)
    box.push(Cancelled(KEYS[0]))
    box.forget(1e6)
    assert KEYS[0] in box, "its end was not told yet"
    box.take(0.0)
    box.forget(9.9)
    assert KEYS[0] in box
    box.forget(10.0)
    assert KEYS[0] not in box


def test_scores_are_sent_first_in_messages_of_bounded_size() -> None:
    """Whatever is lost in transit, all scores are delivered before the first token."""
    box, key, other = Outbox(keep_s=10.0), KEYS[0], KEYS[1]
    size = MAX_SCORES - 1
    chunks = [PromptLogprobs(key, 1 + size * i, (SampledToken(0, -1.0),) * size) for i in range(4)]
    box.register(key, 0)
    box.register(other, 0)
    for event in (*chunks, Token(key, 0, SampledToken(1)), Finished(key, FinishReason.LENGTH, 1, 0)):
        box.push(event)
    box.push(Token(other, 0, SampledToken(2)))

    def take_messages() -> list[list[JobEvent]]:
        messages = [box.take(1.0)]
        while box.has_more:
            messages.append(box.take(1.0))
        return messages

    first, second = take_messages()
    assert first == [*chunks[:2], Token(other, 0, SampledToken(2))]
    assert second == [*chunks[2:], Token(key, 0, SampledToken(1)), Finished(key, FinishReason.LENGTH, 1, 0)]
    assert box.take(1.0) == []
    box.resume({key: 0, other: 1})
    assert [event for message in take_messages() for event in message] == [*chunks[:2], *second]


def test_a_second_offer_is_sent_like_the_first() -> None:
    box = Outbox(keep_s=10.0)
    box.register(KEYS[0], 0)
    for number in (1, 2):
        offer = MigrationOffered(KEYS[0], HandoffKey(HandoffId(f"h{number}"), 1))
        box.push(offer)
        assert box.take(0.0) == [offer] and box.take(0.0) == []
