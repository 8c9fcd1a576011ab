"""Test grammar masks against a plain walk of the grammar, ends, failures, and that cached state changes no mask."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer

from tandem.core.bundle import TokenizerBundle
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import MAX_ENUM_VALUES, MAX_OPTIONAL_IN_LARK, MAX_OPTIONAL_PROPERTIES, Grammar
from tandem.core.ids import SeqId
from tandem.gateway.output.response_format import StructuredOutputs, requested_structured_output
from tandem.gateway.output.tool_grammar import answer_grammar
from tandem.runtime import grammar_engine as module
from tandem.runtime.grammar_engine import LlguidanceMasks
from tests.tokenizer import train_tokenizer

END, OTHER_END = 1, 2
WIDER = 64
"""Logits may be wider than the tokenizer."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer()


@pytest.fixture
def masks(tokenizer: Tokenizer) -> LlguidanceMasks:
    return LlguidanceMasks(bundle(tokenizer, [END, OTHER_END]), tokenizer.get_vocab_size() + WIDER)


def bundle(tokenizer: Tokenizer, ends: Sequence[int]) -> TokenizerBundle:
    special = json.dumps({"eos_token_ids": list(ends)})
    return TokenizerBundle(tokenizer_json=tokenizer.to_str().encode(), special_tokens_json=special)


def follow(
    masks: LlguidanceMasks, grammar: Grammar, output: Sequence[int], stops: Sequence[int] = (END,), seq: int = 0
) -> set[int]:
    allowed = masks.allowed(SeqId(seq), grammar, output, frozenset(stops))
    return set(allowed.nonzero().flatten().tolist())


def texts(tokenizer: Tokenizer, tokens: set[int]) -> set[str]:
    return {tokenizer.decode([token], skip_special_tokens=False) for token in tokens}


def test_only_tokens_that_the_grammar_allows_next(masks: LlguidanceMasks, tokenizer: Tokenizer) -> None:
    grammar = Grammar("regex", "Paris|Berlin!")
    assert texts(tokenizer, follow(masks, grammar, [])) <= {"Paris"[:i] for i in range(1, 6)} | {
        "Berlin!"[:i] for i in range(1, 8)
    }
    paris = tokenizer.encode("Paris", add_special_tokens=False).ids
    assert follow(masks, grammar, paris) == {END}
    berlin = tokenizer.encode("Berlin", add_special_tokens=False).ids
    assert texts(tokenizer, follow(masks, grammar, berlin)) == {"!"}


def test_as_many_choices_as_a_body_may_have(masks: LlguidanceMasks, tokenizer: Tokenizer) -> None:
    choices = [f"choice {number}" for number in range(MAX_ENUM_VALUES)]
    output = requested_structured_output(None, StructuredOutputs(choice=choices), {})
    assert output is not None
    tokens = tokenizer.encode(choices[-1], add_special_tokens=False).ids
    for length, token in enumerate(tokens):
        assert token in follow(masks, output.grammar, tokens[:length])
    assert follow(masks, output.grammar, tokens) == {END}


@pytest.mark.parametrize("may_reason", [False, True])
def test_as_many_properties_that_are_not_required_as_a_body_may_have(
    masks: LlguidanceMasks, tokenizer: Tokenizer, may_reason: bool
) -> None:
    num = MAX_OPTIONAL_IN_LARK if may_reason else MAX_OPTIONAL_PROPERTIES
    schema = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(num)}}
    form = Grammar("json_schema", json.dumps(schema))
    grammar = answer_grammar(form, None, special=lambda text: None, may_reason=may_reason, is_reasoning=True)
    assert grammar is not None
    text = '{"p1": 2, "p99": 3}'
    tokens = tokenizer.encode(f"So.</think>{text}" if may_reason else text, add_special_tokens=False).ids
    for length, token in enumerate(tokens):
        assert token in follow(masks, grammar, tokens[:length])
    assert END in follow(masks, grammar, tokens)


def test_the_end_token_is_allowed_where_the_grammar_may_end(masks: LlguidanceMasks, tokenizer: Tokenizer) -> None:
    digit = tokenizer.encode("1", add_special_tokens=False).ids
    grammar = Grammar("regex", "[0-9]+")
    assert not {END, OTHER_END} & follow(masks, grammar, [])
    assert {END, OTHER_END} & follow(masks, grammar, digit) == {END}
    assert {END, OTHER_END} & follow(masks, grammar, digit, (END, OTHER_END)) == {END, OTHER_END}


def test_a_stop_id_that_ends_no_sequence_counts_where_there_is_no_other(
    masks: LlguidanceMasks, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("1x", add_special_tokens=False).ids
    assert follow(masks, Grammar("regex", "1x"), tokens, (300,)) == {300}
    assert follow(masks, Grammar("regex", "1x"), tokens, (300, END)) == {END}


def test_with_ends_ignored_an_end_token_is_allowed_when_nothing_else_is(
    masks: LlguidanceMasks, tokenizer: Tokenizer
) -> None:
    grammar = Grammar("regex", "[0-9]{1,2}")
    one, two = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("1", "11"))
    assert not {END, OTHER_END} & follow(masks, grammar, one, ())
    assert follow(masks, grammar, two, ()) == {END, OTHER_END}
    assert follow(masks, grammar, [*two, END], ()) == {END, OTHER_END}, "and again, up to max_tokens"


def test_a_model_without_an_end(tokenizer: Tokenizer) -> None:
    masks = LlguidanceMasks(bundle(tokenizer, []), tokenizer.get_vocab_size())
    tokens = tokenizer.encode("ab", add_special_tokens=False).ids
    assert follow(masks, Grammar("regex", "ab"), [], ()) <= set(range(tokenizer.get_vocab_size()))
    assert follow(masks, Grammar("regex", "ab"), tokens, ()) == set(), "it is complete, and no token says so"
    assert follow(masks, Grammar("regex", "ab"), tokens, (7,)) == {7}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"type": "nonsense"}'),
        Grammar("json_schema", "[]"),
        Grammar("json_schema", "{"),
        Grammar("regex", "("),
        Grammar("lark", "start: nothing"),
        Grammar("lark", 'start: "a" start'),
    ],
    ids=lambda grammar: f"{grammar.kind} {grammar.source}",
)
def test_what_cannot_be_compiled_or_never_ends_is_an_error_each_time(masks: LlguidanceMasks, grammar: Grammar) -> None:
    def walk() -> None:
        output: list[int] = []
        for _ in range(3):
            output.append(min(follow(masks, grammar, output)))
        raise ValueError("it goes on for ever")

    for _ in range(2):
        with pytest.raises((ValueError, TandemError)):
            walk()


def test_what_was_prepared_on_another_thread_is_not_compiled_again(
    masks: LlguidanceMasks, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = Grammar("regex", "[0-9]+"), Grammar("regex", "(")
    with ThreadPoolExecutor() as threads:
        for _ in threads.map(masks.prepare, [good, bad, Grammar("json_schema", "{"), good]):
            pass
    assert masks.is_prepared(good) and masks.is_prepared(bad) and not masks.is_prepared(Grammar("regex", "[0-9]"))
    monkeypatch.setattr(module, "LLMatcher", None)
    assert follow(masks, good, [])
    with pytest.raises(ValueError, match="unclosed group"):
        follow(masks, bad, [])


def test_an_output_that_breaks_the_grammar_is_refused_with_its_position(
    masks: LlguidanceMasks, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("1a", add_special_tokens=False).ids
    with pytest.raises(ValueError, match=f"token {tokens[1]} may not follow 1"):
        follow(masks, Grammar("regex", "[0-9]+"), tokens)
    assert follow(masks, Grammar("regex", "[0-9]+"), tokens[:1]), "and it is forgotten"


def test_a_tokenizer_that_cannot_be_read() -> None:
    with pytest.raises(TandemError, match="tokenizer"):
        LlguidanceMasks(TokenizerBundle(tokenizer_json=b"{}"), 10)


@pytest.mark.slow
def test_a_mask_depends_on_nothing_but_grammar_and_output(
    masks: LlguidanceMasks, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with a fresh walk: sequences in random order, shortened, replaced, and more than are cached."""
    monkeypatch.setattr(module, "MAX_COMPILED", 2)
    rng = random.Random(5)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}, "required": ["b"]}
    grammars = [
        Grammar("json_schema", json.dumps(schema)),
        Grammar("regex", "([a-c]{2} )+"),
        Grammar("json_schema", "{}"),
    ]
    outputs: list[list[int]] = [[] for _ in range(6)]
    for _ in range(400):
        seq = rng.randrange(len(outputs))
        grammar, output = grammars[seq % len(grammars)], outputs[seq]
        if rng.random() < 0.1:
            del output[rng.randrange(len(output) + 1) :]
        if rng.random() < 0.05:
            masks.retain([SeqId(other) for other in range(6) if other != seq])
        allowed = follow(masks, grammar, output, seq=seq)
        anew = LlguidanceMasks.__new__(LlguidanceMasks)
        anew.__dict__.update(masks.__dict__ | {"_walks": {}, "_compiled": type(masks._compiled)()})
        assert allowed == follow(anew, grammar, output)
        output.append(rng.choice(sorted(allowed)))
        if output[-1] == END:
            output.clear()
        assert len(masks._compiled) <= 2, "compiled grammars"
    masks.retain([])
    assert len(masks._walks) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("lark", 'start: e\ne: e e | "a" | "b" | " "'),
        Grammar("lark", "start: c\nc: /[a-z ]/ c | /[a-z]/"),
    ],
    ids=["ambiguous", "right-recursive"],
)
def test_a_grammar_that_takes_too_much_work_fails_alone(masks: LlguidanceMasks, grammar: Grammar) -> None:
    def walk(grammar: Grammar, seq: int, num_tokens: int) -> None:
        rng, output = random.Random(7), list[int]()
        for _ in range(num_tokens):
            output.append(rng.choice(sorted(follow(masks, grammar, output, (), seq) - {END, OTHER_END})))

    with pytest.raises(TandemError, match="too much work per token") as caught:
        walk(grammar, 0, 400)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    walk(Grammar("json_schema", '{"type":"array","items":{"type":"string"},"minItems":50}'), 1, 50)


def test_states_that_other_outputs_made_do_not_fail_an_output(
    masks: LlguidanceMasks, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar's outputs share its lexer, whose states are bounded."""
    monkeypatch.setattr(module, "MAX_LEXER_STATES", 3_000)
    grammar, texts = Grammar("regex", ".*a.{30}"), ["".join(random.Random(i).choices("ab", k=12)) for i in range(40)]
    compiled: set[int] = set()
    keep: list[object] = []
    for seq, text in enumerate(texts):
        output = tokenizer.encode(text, add_special_tokens=False).ids
        for length in range(len(output)):
            assert follow(masks, grammar, output[:length], seq=seq)
        keep.append(masks._compiled[grammar])
        compiled.add(id(keep[-1]))
    assert len(compiled) > 1, "never full"
