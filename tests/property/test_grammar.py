"""Test that an output sampled within a schema's grammar mask is, when it ends, JSON that fits the schema."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tandem.core.bundle import TokenizerBundle
from tandem.core.grammar import Grammar
from tandem.core.ids import SeqId
from tandem.gateway.output.grammar_compiler import compile_grammar
from tandem.gateway.output.response_format import schema_source
from tandem.runtime.grammar_engine import LlguidanceMasks
from tests.effort import effort
from tests.tokenizer import train_tokenizer

END = 1
MAX_TOKENS = 400

_names = st.text('abc_ é"\\', min_size=1, max_size=4)
_numbers = st.integers(-20, 20)


def _between(least: str, most: str, **facts: Any) -> st.SearchStrategy[dict[str, Any]]:
    """A schema with two bounds in order."""
    bounds = st.tuples(_numbers, _numbers).map(sorted)
    return bounds.map(lambda pair: {**facts, least: pair[0], most: pair[1]})


def _objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def finish(properties: dict[str, Any], data: tuple[bool, int]) -> dict[str, Any]:
        is_closed, num_required = data
        required = list(properties)[:num_required]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            **({"additionalProperties": False} if is_closed else {}),
        }

    properties = st.dictionaries(_names, values, max_size=4)
    return st.builds(finish, properties, st.tuples(st.booleans(), st.integers(0, 4)))


_leaves = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "integer"}, {"type": "number"}, {}]),
    _between("minimum", "maximum", type="integer"),
    st.integers(0, 5).map(lambda most: {"type": "string", "maxLength": most}),
    st.lists(st.one_of(_names, _numbers, st.none(), st.booleans()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.just({"type": "string", "pattern": "^[a-c]{2}-[0-9]+$"}),
    _names.map(lambda value: {"const": value}),
)
SCHEMAS = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(
            lambda items, size: {"type": "array", "items": items, "minItems": min(size), "maxItems": max(size)},
            inner,
            st.tuples(st.integers(0, 3), st.integers(0, 3)),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each}),
    ),
    max_leaves=8,
)


@cache
def text() -> tuple[Tokenizer, LlguidanceMasks]:
    tokenizer = train_tokenizer()
    bundle = TokenizerBundle(
        tokenizer_json=tokenizer.to_str().encode(), special_tokens_json=json.dumps({"eos_token_ids": [END]})
    )
    return tokenizer, LlguidanceMasks(bundle, tokenizer.get_vocab_size())


def random_output(grammar: Grammar, seed: int, keen: float) -> str | None:
    """Return the text of random allowed tokens; they end with probability `keen`; None without an end."""
    tokenizer, masks = text()
    masks.retain([])
    rng, output = random.Random(seed), list[int]()
    while len(output) < MAX_TOKENS:
        allowed = masks.allowed(SeqId(0), grammar, output, frozenset({END})).nonzero().flatten().tolist()
        others = [token for token in allowed if token != END]
        if END in allowed and (not others or rng.random() < keen):
            decoded: str = tokenizer.decode(output, skip_special_tokens=False)
            return decoded
        # Closing tokens are picked more often, so that most outputs end.
        closing = [token for token in others if set(tokenizer.decode([token])) & set('"]},')]
        output.append(rng.choice(closing if closing and rng.random() < keen else others))
    return None


@given(schema=SCHEMAS, seed=st.integers(0, 2**32), keen=st.sampled_from([0.2, 0.5, 0.9]))
@effort(80)
def test_what_ends_fits_its_schema(schema: dict[str, Any], seed: int, keen: float) -> None:
    grammar = Grammar("json_schema", schema_source(schema))
    assert compile_grammar(grammar.kind, grammar.source) == (True, "")
    output = random_output(grammar, seed, keen)
    if output is not None:
        jsonschema.validate(json.loads(output), schema)


def test_most_of_them_end() -> None:
    """The property above would hold of nothing otherwise."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    grammar = Grammar("json_schema", schema_source(schema))
    assert sum(random_output(grammar, seed, 0.5) is not None for seed in range(20)) >= 15
