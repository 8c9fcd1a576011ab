"""Test that calls of each family are found in text however it is cut, and that other text is kept."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

from tandem.gateway.output.partial_json import PartialJsonObject
from tandem.gateway.output.text_stream import ToolCallDelta
from tandem.gateway.output.tool_call_parser import ToolCallParser
from tandem.gateway.output.tool_formats import HERMES, LLAMA3, MISTRAL, MISTRAL_V11, ToolCallFormat, select_tool_format
from tandem.gateway.text.chat_template import ChatTemplate
from tests.effort import scaled

NAMES = ("get_weather", "add", "now")
WEATHER = '{"city": "Köln } ] \\" </tool_call>", "days": [1, {"a": {}}]}'
HERMES_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>'
NOW = ("now", "{}")
FAMILIES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "mistral v11": MISTRAL_V11}


@dataclass
class Parsed:
    text: str
    calls: list[tuple[str, str]]


def parse(
    family: ToolCallFormat, pieces: Iterable[str], *, is_eager: bool = False, max_calls: int | None = None
) -> Parsed:
    """Parse the pieces, and check that each call is announced once, in order, before its arguments."""
    numbers = itertools.count()
    reader = ToolCallParser(family, NAMES, lambda: f"id{next(numbers)}", is_eager=is_eager, max_calls=max_calls)
    text, calls = "", list[list[str]]()
    deltas: list[ToolCallDelta] = []

    def take() -> None:
        taken = reader.take()
        assert len({delta.index for delta in taken}) == len(taken), "two pieces of one call in one message"
        deltas.extend(taken)

    for piece in pieces:
        text += reader.push(piece)
        take()
    text += reader.finish()
    take()
    for delta in deltas:
        if delta.index == len(calls):
            assert delta.id == f"id{delta.index}"
            assert delta.name in NAMES
            calls.append([delta.name, ""])
        else:
            assert (delta.id, delta.name) == ("", "")
            assert delta.index == len(calls) - 1
        calls[delta.index][1] += delta.arguments
    return Parsed(text, [(name, arguments) for name, arguments in calls])


CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", HERMES_CALL, "", [("get_weather", WEATHER)]),
    ("hermes", f"Let me see.\n{HERMES_CALL}", "Let me see.", [("get_weather", WEATHER)]),
    ("hermes", f"{HERMES_CALL}\n{HERMES_CALL}\n", "", [("get_weather", WEATHER)] * 2),
    ("hermes", f"{HERMES_CALL}\nDone.", "\nDone.", [("get_weather", WEATHER)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "parameters": {"a": 1 } }', "", [("add", '{"a": 1 }')]),
    ("hermes", "1 < 2 <tool <tool_cal", "1 < 2 <tool <tool_cal", []),
    ("hermes", HERMES_CALL[:-3], "", [("get_weather", WEATHER)]),
    ("hermes", f"{HERMES_CALL}\nSo 1 <", "\nSo 1 <", [("get_weather", WEATHER)]),
    ("hermes", " \n a  \n", " \n a  \n", []),
    ("hermes", '{"name": "add", "arguments": {}}', '{"name": "add", "arguments": {}}', []),
    ("llama3", f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", [("get_weather", WEATHER)]),
    ("llama3", '\n{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', "", [NOW, NOW]),
    ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', "", [("now", "{}")]),
    ("llama3", 'Well. <|python_tag|>{"name": "now", "parameters": {}}', "Well.", [("now", "{}")]),
    ("llama3", '{"name": "Paris", "population": 2}', '{"name": "Paris", "population": 2}', []),
    ("llama3", 'As JSON: {"name": "now", "parameters": {}}', 'As JSON: {"name": "now", "parameters": {}}', []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}]', "", [("get_weather", WEATHER)]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "a"}, {"name": "now"}]', "", [NOW] * 2),
    ("mistral", 'So [1] [TOOL_CALLS]now{}', "So [1]", [("now", "{}")]),
    ("mistral v11", f"[TOOL_CALLS]add[ARGS]{WEATHER}[TOOL_CALLS]now[ARGS]{{}}", "", [("add", WEATHER), NOW]),
    ("mistral v11", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
]  # fmt: skip
MALFORMED = [
    ("hermes", '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>'),
    ("hermes", " a <tool_call> get_weather() </tool_call>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": 3}</tool_call>'),
    ("hermes", '<tool_call>{"name": add, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {'),
    ("hermes", "<tool_call>"),
    ("llama3", '{"name": "add", "parameters": {"a": }}'),
    ("llama3", '<|python_tag|>brave_search.call(query="x")'),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral v11", "[TOOL_CALLS]nobody[ARGS]{}"),
    ("mistral v11", "[TOOL_CALLS]add[ARGS]{]"),
]


def cuts(text: str, rng: random.Random) -> list[str]:
    """Cut the text everywhere, nowhere, or at random places."""
    chance = rng.choice((0.0, 0.1, 0.5, 1.0))
    places = [0, *(place for place in range(1, len(text)) if rng.random() < chance), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(places)]


@pytest.mark.parametrize(("family", "source", "text", "calls"), CASES, ids=lambda value: str(value)[:40])
def test_calls(family: str, source: str, text: str, calls: list[tuple[str, str]]) -> None:
    rng = random.Random(1)
    for is_eager, _ in itertools.product((False, True), range(40)):
        parsed = parse(FAMILIES[family], cuts(source, rng), is_eager=is_eager)
        assert (parsed.text, parsed.calls) == (text, calls), is_eager
    for _, arguments in calls:
        json.loads(arguments)


@pytest.mark.parametrize(("family", "source"), MALFORMED, ids=lambda value: value[:40])
def test_text_that_is_no_call_is_returned_unchanged(family: str, source: str) -> None:
    rng = random.Random(2)
    for _ in range(40):
        assert parse(FAMILIES[family], cuts(source, rng)) == Parsed(source, [])


@pytest.mark.parametrize(("family", "source"), MALFORMED, ids=lambda value: value[:40])
def test_an_eager_parser_loses_no_text_and_does_not_depend_on_cuts(family: str, source: str) -> None:
    rng = random.Random(3)
    whole = parse(FAMILIES[family], [source], is_eager=True)
    assert whole.calls or whole.text == source
    for _ in range(40):
        assert parse(FAMILIES[family], cuts(source, rng), is_eager=True) == whole


def test_any_text_around_calls(rng: random.Random | None = None) -> None:
    """Random texts made of pieces of marks, JSON and words: cuts make no difference, in any family."""
    rng = rng or random.Random(4)
    pieces = [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "\n", " ", ", ", "; ", "[", "]"),
        *(
            '{"name": "now", "arguments": {}}',
            '{"name": "add", "parameters": {"a": [1, "}"]}}',
            "now",
            "add",
            "{}",
            "}",
        ),
        *("<tool", "{", '"', "\\", "text", "é", "😀"),
    ]
    for _ in range(scaled(600)):
        source = "".join(rng.choices(pieces, k=rng.randrange(1, 12)))
        for family, is_eager in itertools.product(FAMILIES.values(), (False, True)):
            whole = parse(family, [source], is_eager=is_eager)
            assert parse(family, cuts(source, rng), is_eager=is_eager) == whole, source
            assert parse(family, list(source), is_eager=is_eager) == whole, source
            if not is_eager:
                assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)
            if not whole.calls:
                assert whole.text == source


def test_arguments_are_emitted_as_they_arrive() -> None:
    reader = ToolCallParser(HERMES, NAMES, lambda: "id", is_eager=True)
    reader.push('<tool_call>{"name": "add", "arguments": ')
    assert reader.take() == ()
    reader.push('{"a')
    assert reader.take() == (ToolCallDelta(0, '{"a', "id", "add"),)
    reader.push('": 1')
    assert reader.take() == (ToolCallDelta(0, '": 1'),)
    reader.push("}}</tool")
    assert reader.take() == (ToolCallDelta(0, "}"),)
    assert reader.push("_call>\n") + reader.finish() == ""


def test_calls_beyond_max_calls_are_dropped() -> None:
    for is_eager in (False, True):
        parsed = parse(HERMES, [f"{HERMES_CALL}\n{HERMES_CALL}"], is_eager=is_eager, max_calls=1)
        assert parsed == Parsed("", [("get_weather", WEATHER)])


@pytest.mark.parametrize(
    ("parser", "template", "vocabulary", "family"),
    [
        ("auto", "... <tool_call> ...", (), HERMES),
        ("auto", "... [TOOL_CALLS] ...", (), MISTRAL),
        ("auto", "", ("[TOOL_CALLS]",), MISTRAL),
        ("auto", "", ("[TOOL_CALLS]", "[ARGS]"), MISTRAL_V11),
        ("auto", "... <|python_tag|> ...", (), LLAMA3),
        ("auto", "", ("<|python_tag|>",), LLAMA3),
        ("auto", "knows nothing", (), HERMES),
        ("llama3", "... <tool_call> ...", (), LLAMA3),
        ("mistral", "", (), MISTRAL),
        ("none", "... <tool_call> ...", (), None),
    ],
)
def test_the_family_of_a_model(
    parser: str, template: str, vocabulary: Sequence[str], family: ToolCallFormat | None
) -> None:
    source = "{% if tools %}" + template + "{% endif %}"
    assert select_tool_format(parser, ChatTemplate(source, {}), vocabulary.__contains__) is family  # type: ignore[arg-type]
    if parser == "auto":
        assert select_tool_format("auto", ChatTemplate(template, {}), vocabulary.__contains__) is HERMES


def test_an_object_knows_its_own_members() -> None:
    reader = PartialJsonObject()
    for character in '{ "a" : {"b": ["}", 1]} , "c\\"": -2.5e3 }':
        assert not reader.is_complete
        reader.push(character)
    assert reader.is_complete
    assert [(member.key, member.text) for member in reader.members] == [
        ("a", '{"b": ["}", 1]}'),
        ('c\\"', "-2.5e3"),
    ]


@pytest.mark.parametrize("text", ["[", "{]", '{"a" 1', '{"a": 1,}', "{a", '{"a": ]', "x"])
def test_text_that_cannot_be_an_object_fails(text: str) -> None:
    reader = PartialJsonObject()
    for character in text:
        assert not reader.failed
        reader.push(character)
    assert reader.failed
