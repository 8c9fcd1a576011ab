"""Run a cluster of whole engines in which running choices migrate from a draining worker to the next.

Its gateway is what a gateway must do at least: it answers an offer with a `ResumeJob` at the next node, places what was
given back or lost again, and tells a client each token once, whoever says it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.events import (
    Cancelled,
    Failed,
    Finished,
    JobEvent,
    KVReceived,
    MigrationOffered,
    PromptLogprobs,
    SampledToken,
    Token,
)
from tandem.core.ids import HandoffKey, JobKey, RequestId
from tandem.core.request import GenerateJob, Job, Request, ResumeJob, SamplingParams
from tandem.engine.transfer_messages import ConnectPeer
from tandem.runtime.model_loader import AnyExecutor
from tests.golden.cluster import Cluster, Knobs, Node

Name = tuple[RequestId, int]
"""A choice of a request."""


@dataclass(slots=True)
class Story:
    """What a client sees of one choice, which attempts of it are open where, and how it got on."""

    request: Request
    tokens: list[SampledToken] = field(default_factory=list)
    end: Finished | None = None
    open: dict[int, Node] = field(default_factory=dict)
    attempt: int = 1
    num_moved: int = 0
    num_recomputed: int = 0

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class MigratingCluster(Cluster):
    """Requests begin at the first node. `offers` are those that nobody has answered."""

    def __init__(self, executors: Sequence[AnyExecutor], knobs: Knobs, answers: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(executors, knobs, answers)
        self.stories: dict[Name, Story] = {}
        self.offers: list[tuple[Node, JobKey, HandoffKey]] = []
        for consumer in self.nodes:
            for producer in self.nodes:
                if producer is not consumer and (producer, consumer) != (self.producer, self.consumer):
                    consumer.carrier.accept(ConnectPeer(producer.transport.describe(producer.ref)))

    def begin(self, prompt: Sequence[int], sampling: SamplingParams, num_choices: int = 1) -> list[Story]:
        """A story for each choice."""
        name = RequestId(f"m{len(self.stories)}")
        request = Request(
            id=name, model="m", prompt_tokens=tuple(prompt), sampling=sampling, num_choices=num_choices
        )  # fmt: skip
        for choice in range(num_choices):
            self.stories[name, choice] = Story(request)
        self.place(self.nodes[0], GenerateJob(request=request, attempt=1, num_choices=num_choices))
        return [self.stories[name, choice] for choice in range(num_choices)]

    def start_drain(self, node: Node) -> None:
        self._carry_out(node, node.engine.start_drain(self.clock.now()))

    def answer(self) -> None:
        """Place a Resume for every offer of a choice that is still open where it was offered."""
        offers, self.offers = self.offers, []
        for node, key, offer in offers:
            story = self.stories[key.request, key.choice]
            if story.end is None and story.open.get(key.attempt) is node and max(story.open) == key.attempt:
                story.attempt += 1
                resume = ResumeJob(
                    request=story.request,
                    attempt=story.attempt,
                    choice=key.choice,
                    output_tokens=tuple(story.ids),
                    handoff=offer.handoff,
                    offer_attempt=offer.attempt,
                    source=node.ref,
                )
                self.place(self._next(node), resume)

    def abandon(self, story: Story) -> None:
        """Cancel the newest attempt of a choice, as if its worker had lost it, while an older one goes on."""
        if len(story.open) > 1:
            attempt = max(story.open)
            node = story.open.pop(attempt)
            choice = next(name[1] for name, one in self.stories.items() if one is story)
            self._carry_out(node, node.engine.cancel(JobKey(story.request.id, attempt, choice), self.clock.now()))

    def step(self) -> bool:
        moved = super().step()
        self.answer()
        return moved

    def place(self, node: Node, job: Job) -> None:
        for key in job.keys:
            self.stories[key.request, key.choice].open[key.attempt] = node
        super().place(node, job)

    def _next(self, node: Node) -> Node:
        return self.nodes[(self.nodes.index(node) + 1) % len(self.nodes)]

    def _take(self, node: Node, event: JobEvent) -> None:
        story = self.stories[event.key.request, event.key.choice]
        match event:
            case Token(_, index, token):
                assert index <= len(story.tokens), f"{event.key}: tokens before {index} are missing"
                if index < len(story.tokens):
                    assert story.tokens[index] == token, "two workers disagree about a token"
                else:
                    story.tokens.append(token)
            case MigrationOffered(key, offer):
                self.offers.append((node, key, offer))
            case KVReceived(key):
                assert story.open.get(key.attempt) is node
                story.num_moved += 1
            case PromptLogprobs():
                pass
            case Finished() | Failed() | Cancelled():
                self._take_end(node, story, event)

    def _take_end(self, node: Node, story: Story, event: Finished | Failed | Cancelled) -> None:
        key = event.key
        is_known = story.open.pop(key.attempt, None) is node
        assert is_known or isinstance(event, Cancelled), f"{key} ended twice"
        if isinstance(event, Finished) and event.reason is not None:
            assert story.end is None, "two ends"
            story.end = event
            for attempt, other in list(story.open.items()):
                del story.open[attempt]
                self._carry_out(other, other.engine.cancel(key._replace(attempt=attempt), self.clock.now()))
        elif isinstance(event, Failed) and not story.open:
            story.attempt += 1
            story.num_recomputed += 1
            again = GenerateJob(
                request=story.request, attempt=story.attempt, choice=key.choice, output_tokens=tuple(story.ids)
            )
            self.place(self._next(node), again)
