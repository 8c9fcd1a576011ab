"""Test that each choice has transforms of its own, and that held-back text is emitted before the choice ends."""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.events import Finished, FinishReason, SampledToken
from tandem.core.ids import JobKey, RequestId
from tandem.gateway.output.reasoning_parser import ReasoningParser
from tandem.gateway.output.text_stream import ChoiceEnd, ChoiceText, Delta
from tandem.gateway.output.tool_call_parser import ToolCallParser
from tandem.gateway.output.tool_formats import HERMES
from tandem.gateway.text.text_model import TextModel

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXTS = (f"<think>Hm.</think>So: {CALL}", "Plain <tool_call")
REASONS = (FinishReason.STOP, FinishReason.LENGTH)


def choice_text(model: TextModel, choice: int) -> ChoiceText:
    calls = ToolCallParser(HERMES, {"f"}, lambda: "id", is_eager=False)
    return ChoiceText(choice, model.detokenizer(), [ReasoningParser(is_open=False).split, calls.split], num_echoed=7)


def test_interleaved_choices(make_text: Callable[..., TextModel]) -> None:
    """Choice 0 has reasoning and a call, choice 1 neither; they get a token each in turn."""
    model = make_text()
    ids = [[model.encode(character, add_special_tokens=False).ids[0] for character in text] for text in TEXTS]
    choices = [choice_text(model, choice) for choice in range(2)]
    parts: list[Delta | ChoiceEnd] = []
    for place in range(max(map(len, ids))):
        for choice, tokens in enumerate(ids):
            if place < len(tokens):
                parts.append(choices[choice].push(SampledToken(tokens[place])))
    for choice, reason in enumerate(REASONS):
        parts += choices[choice].finish(Finished(JobKey(RequestId("r"), 1, choice), reason, len(ids[choice]), 0))
    assert not any(choice.is_open for choice in choices)
    deltas = [[part for part in parts if isinstance(part, Delta) and part.choice == choice] for choice in range(2)]
    assert ["".join(delta.text for delta in each) for each in deltas] == ["So:", "Plain <tool_call"]
    assert ["".join(delta.reasoning for delta in each) for each in deltas] == ["Hm.", ""]
    calls = [call for delta in deltas[0] for call in delta.tool_calls]
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"a": 1}')]
    assert [part.reason for part in parts if isinstance(part, ChoiceEnd)] == [
        FinishReason.TOOL_CALLS,
        FinishReason.LENGTH,
    ]
    for each, tokens in zip(deltas, ids, strict=True):
        assert [delta.token.id for delta in each if delta.token is not None] == tokens, "each token once, in order"
        assert [delta.offset for delta in each] == [7 + place for place in range(len(each))]
