"""Which tokens a grammar lets follow an output; a function of the two, so what it keeps of sequences is only a cache.

`llguidance` compiles grammars and walks them byte by byte, so that any way of cutting a text into tokens is right. To
walk an output anew takes half a microsecond per token: what is kept is never worth more than that, and never moved.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tandem.core.bundle import TokenizerBundle
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import JSON_FORM, MAX_LEXER_STATES, MAX_STEP_FUEL, MAX_STEP_ITEMS, MAX_SYMBOLS, Grammar
from tandem.core.ids import SeqId

MAX_COMPILED = 32
"""Grammars that stay compiled: those of running sequences, and of clients that ask for the same again. Each grows
as it is walked, mostly to a MB or two and at most to some 20 (`MAX_LEXER_STATES`): 640 MB where all are hostile."""
_FULL = "too many states"
_MAX_ROW_ITEMS = {"json_schema": 2_000, "regex": 500, "lark": 500}
"""Earley items at one place of a text, four for each optional property. Of a schema they cost linear time; of an
ambiguous grammar that a client wrote it is quadratic or worse: 10 ms a mask for 500, 65 ms for 1,000."""


def _limits(grammar: Grammar) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=_MAX_ROW_ITEMS[grammar.kind],
        max_grammar_size=MAX_SYMBOLS,
        max_lexer_states=MAX_LEXER_STATES,
        step_max_items=MAX_STEP_ITEMS,
        step_lexer_fuel=MAX_STEP_FUEL,
        verbose_errors=False,
    )


class LlguidanceMasks:
    """A `grammar_masks.GrammarMasks` over the tokens that a worker's bundle knows, of `vocab_size` that its model draws
    from."""

    def __init__(self, bundle: TokenizerBundle, vocab_size: int) -> None:
        """Takes a quarter of a second for 49,000 tokens. Raises UNSUPPORTED for a tokenizer that cannot be read."""
        self._vocab_size = vocab_size
        self._ends = json.loads(bundle.special_tokens_json or "{}").get("eos_token_ids") or []
        try:
            self._tokenizer = LLTokenizer(bundle.tokenizer_json.decode(), eos_token=self._ends or None)
        except ValueError as error:
            raise TandemError(ErrorKind.UNSUPPORTED, f"no grammars over this tokenizer: {error}") from error
        self._no_text = [token for token in self._tokenizer.eos_tokens if token < vocab_size]
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._walks: dict[SeqId, _Walk] = {}
        self._lock = Lock()

    def allowed(self, seq: SeqId, grammar: Grammar, output: Sequence[int], stop_ids: frozenset[int]) -> torch.Tensor:
        """bool `[vocab_size]`: the tokens that may follow `output`; none where it is complete and no token ends it.

        A sequence ends by those of `stop_ids` that end sequences (where there are none, by all of `stop_ids`): they may
        come where the grammar may end. Without `stop_ids` an end-of-sequence token comes only where nothing else may.
        Raises ValueError for a grammar that cannot be compiled, or that `output` does not follow, and INVALID_REQUEST
        for one of which this mask takes too much work.
        """
        length = len(output)
        while length and output[length - 1] in self._no_text:
            length -= 1
        matcher, mask = self._mask(seq, grammar, output[:length])
        bits = np.frombuffer(mask, np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(np.bool_)
        allowed[self._no_text] = False
        may_end = matcher.is_accepting()
        if may_end and (stop_ids or not allowed.any()):
            allowed[self._ends_of(stop_ids)] = True
        if not (may_end or allowed.any()):
            raise ValueError("grammar: no token may come next")
        return torch.from_numpy(allowed)

    def prepare(self, grammar: Grammar) -> None:
        """Compile it ahead, from any thread, so that no step has to wait half a second for it. Never raises: what is
        wrong with it is told where it is used."""
        with contextlib.suppress(ValueError):
            self._compile(grammar)

    def retain(self, seqs: Collection[SeqId]) -> None:
        """The places of all others are forgotten."""
        self._walks = {seq: walk for seq, walk in self._walks.items() if seq in seqs}

    @property
    def num_kept(self) -> tuple[int, int]:
        """Compiled grammars and places of sequences."""
        return len(self._compiled), len(self._walks)

    def _ends_of(self, stop_ids: frozenset[int]) -> list[int]:
        ends = [token for token in self._ends if token in stop_ids] or list(stop_ids) or self._ends
        return [token for token in ends if token < self._vocab_size]

    def _mask(self, seq: SeqId, grammar: Grammar, output: Sequence[int]) -> tuple[LLMatcher, bytes]:
        """All walks of a grammar share its lexer, so one that is full may be full of others' states: then again, with a
        new one."""
        walk = self._walk(seq, grammar)
        matcher, mask = walk.mask(output)
        if matcher.is_error() and _FULL in matcher.get_error():
            self._forget(walk)
            matcher, mask = self._walk(seq, grammar).mask(output)
        if matcher.is_error():
            del self._walks[seq]
            message = f"this grammar cannot be followed within the bounds on work per token: {matcher.get_error()}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message)
        return matcher, mask

    def _forget(self, walk: _Walk) -> None:
        """The walk, and what it began from unless somebody has replaced that already."""
        self._walks = {seq: other for seq, other in self._walks.items() if other is not walk}
        with self._lock:
            if self._compiled.get(walk.grammar) is walk.beginning:
                del self._compiled[walk.grammar]

    def _walk(self, seq: SeqId, grammar: Grammar) -> _Walk:
        walk = self._walks.get(seq)
        if walk is None or walk.grammar != grammar:
            beginning = self._compile(grammar)
            if beginning.is_error():
                raise ValueError(f"grammar: {beginning.get_error()}")
            walk = self._walks[seq] = _Walk(grammar, beginning)
        return walk

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """At the beginning of a grammar; one that has failed is kept too, it would fail again. Raises ValueError for
        what is no grammar at all."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
                return matcher
        # Not under the lock: the step that another sequence waits for needs it.
        matcher = LLMatcher(self._tokenizer, _written(grammar), log_level=0, limits=_limits(grammar))
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def __repr__(self) -> str:
        return f"<grammar masks {len(self._compiled)} compiled, {len(self._walks)} sequences>"


class _Walk:
    """One output's place in a grammar."""

    __slots__ = ("_matcher", "_tokens", "beginning", "grammar")

    def __init__(self, grammar: Grammar, beginning: LLMatcher) -> None:
        self.grammar = grammar
        self.beginning = beginning
        self._matcher = beginning.deep_copy()
        self._tokens: list[int] = []

    def mask(self, output: Sequence[int]) -> tuple[LLMatcher, bytes]:
        """The matcher behind `output`, and its mask; it has an error where either took too much work. Raises ValueError
        when the grammar does not let `output` come."""
        known = self._tokens
        if list(output[: len(known)]) != known:  # guesses that were wrong, or another output
            self._matcher, known = self.beginning.deep_copy(), []
        fresh = list(output[len(known) :])
        num_right = self._matcher.try_consume_tokens(fresh) if fresh else 0
        self._tokens = [*known, *fresh[:num_right]]
        if num_right < len(fresh) and not self._matcher.is_error():
            raise ValueError(f"grammar: token {fresh[num_right]} may not follow {len(self._tokens)} of output")
        return self._matcher, b"" if self._matcher.is_error() else self._matcher.compute_bitmask()


def _written(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.source, overrides=JSON_FORM)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.source)
