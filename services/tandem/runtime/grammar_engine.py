"""Compute with llguidance which tokens a grammar allows after an output.

The mask is a pure function of grammar and output; state kept per sequence is only a cache. `llguidance` matches
grammars byte by byte, so that every tokenization of a valid text is accepted. Matching an output again takes half a
microsecond per token, so the cached state of a sequence is not worth moving to another worker."""

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
"""Compiled grammars that are cached, for running sequences and for repeated requests. Each grows as it is matched,
usually to one or two MB and at most to about 20 (`MAX_LEXER_STATES`): 640 MB if all are hostile."""
_FULL = "too many states"
_MAX_ROW_ITEMS = {"json_schema": 2_010, "regex": 500, "lark": 500}
"""Bound on Earley items at one position of a text, by kind of grammar; a JSON schema needs four per optional property,
and seven more. For a schema they cost linear time. For an ambiguous grammar written by a client the time is quadratic
or worse: 10 ms per mask for 500 items, 65 ms for 1,000."""


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
    """Computes with llguidance which tokens a grammar allows.

    Token ids are those of the worker's tokenizer bundle; masks have the model's `vocab_size`. Compiled grammars are
    shared by all sequences. `prepare` and `is_prepared` may be called from any thread, the other methods only from the
    executor's thread.
    """

    def __init__(self, bundle: TokenizerBundle, vocab_size: int) -> None:
        """Build the token trie, which takes a quarter of a second for 49,000 tokens.

        Raises TandemError(UNSUPPORTED) for a tokenizer that llguidance cannot read."""
        self._vocab_size = vocab_size
        self._end_ids = json.loads(bundle.special_tokens_json or "{}").get("eos_token_ids") or []
        try:
            self._tokenizer = LLTokenizer(bundle.tokenizer_json.decode(), eos_token=self._end_ids or None)
        except ValueError as error:
            raise TandemError(
                ErrorKind.UNSUPPORTED,
                f"structured output is off, because llguidance does not support this tokenizer: {error}",
            ) from error
        self._textless_ids = [token for token in self._tokenizer.eos_tokens if token < vocab_size]
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._walks: dict[SeqId, _Walk] = {}
        self._lock = Lock()

    def allowed(self, seq: SeqId, grammar: Grammar, output: Sequence[int], stop_ids: frozenset[int]) -> torch.Tensor:
        """Return which tokens may follow `output` in the sequence `seq`, as bool `[vocab_size]`.

        `output`: all tokens that the sequence has sampled. `stop_ids`: the request's stop tokens. Where the grammar may
        end, end tokens are allowed too: those of `stop_ids` that are end-of-sequence tokens of the model, or all of
        `stop_ids` if none of them is one. If `stop_ids` is empty, the model's end-of-sequence tokens are allowed, but
        only where the grammar allows no other token. If the output is complete and there is no end token, no token is
        allowed.

        Raises ValueError for a grammar that does not compile, that `output` violates, or that allows neither a token
        nor an end after `output`. Raises TandemError(INVALID_REQUEST) when computing this mask takes more work than is
        permitted for one token."""
        length = len(output)
        while length and output[length - 1] in self._textless_ids:
            length -= 1
        matcher, mask = self._mask(seq, grammar, output[:length])
        bits = np.frombuffer(mask, np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(np.bool_)
        allowed[self._textless_ids] = False
        may_end = matcher.is_accepting()
        if may_end and (stop_ids or not allowed.any()):
            allowed[self._end_ids_of(stop_ids)] = True
        if not (may_end or allowed.any()):
            raise ValueError("grammar: no token may come next")
        return torch.from_numpy(allowed)

    def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar and cache it before its first use, so that no step waits for the compilation.

        Compiling takes up to three times the processor time of the gateway's check of the grammar, and does not hold
        the GIL. May be called from any thread. Never raises: for an invalid grammar `allowed` raises.
        """
        with contextlib.suppress(ValueError):
            self._compile(grammar)

    def is_prepared(self, grammar: Grammar) -> bool:
        """Return whether the compiled grammar is cached. May be called from any thread."""
        with self._lock:
            return grammar in self._compiled

    def retain(self, seqs: Collection[SeqId]) -> None:
        """Drop the cached matching state of all sequences that are not in `seqs`.

        It is only a cache: if a dropped sequence is used again, its output is matched from the start."""
        self._walks = {seq: walk for seq, walk in self._walks.items() if seq in seqs}

    def _end_ids_of(self, stop_ids: frozenset[int]) -> list[int]:
        ends = [token for token in self._end_ids if token in stop_ids] or list(stop_ids) or self._end_ids
        return [token for token in ends if token < self._vocab_size]

    def _mask(self, seq: SeqId, grammar: Grammar, output: Sequence[int]) -> tuple[LLMatcher, bytes]:
        """Return the matcher behind `output` and its mask, as bytes with one bit per token.

        All sequences of a grammar share its lexer, which may be full of other sequences' states; then the grammar is
        compiled again and the mask computed with a new lexer. Raises as `allowed` does."""
        walk = self._walk(seq, grammar)
        matcher, mask = walk.mask(output)
        if matcher.is_error() and _FULL in matcher.get_error():
            self._forget(walk)
            matcher, mask = self._walk(seq, grammar).mask(output)
        if matcher.is_error():
            del self._walks[seq]
            message = f"the grammar takes too much work per token, so simplify it: {matcher.get_error()}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message)
        return matcher, mask

    def _forget(self, walk: _Walk) -> None:
        """Drop a sequence's walk, and the compiled grammar that it started from unless that was replaced already."""
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
        """Return the cached or newly compiled matcher at the start of a grammar.

        A matcher whose compilation failed is cached too, because it would fail again. Raises ValueError for a source
        that is not a grammar of its kind."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
                return matcher
        # Compiled without the lock, which the step thread needs for other sequences.
        matcher = LLMatcher(self._tokenizer, _llguidance_source(grammar), log_level=0, limits=_limits(grammar))
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def __repr__(self) -> str:
        return f"<grammar masks {len(self._compiled)} compiled, {len(self._walks)} sequences>"


class _Walk:
    """Position of one output in a grammar: a matcher that has consumed `_tokens`."""

    __slots__ = ("_matcher", "_tokens", "beginning", "grammar")

    def __init__(self, grammar: Grammar, beginning: LLMatcher) -> None:
        self.grammar = grammar
        self.beginning = beginning
        self._matcher = beginning.deep_copy()
        self._tokens: list[int] = []

    def mask(self, output: Sequence[int]) -> tuple[LLMatcher, bytes]:
        """Return the matcher after it has consumed `output`, and the mask of the tokens that may follow, one bit per
        token.

        If matching or masking took too much work, the matcher is in an error state and the mask must not be used.
        Raises ValueError when `output` violates the grammar."""
        known = self._tokens
        if list(output[: len(known)]) != known:  # rejected draft tokens, or another output
            self._matcher, known = self.beginning.deep_copy(), []
        fresh = list(output[len(known) :])
        num_right = self._matcher.try_consume_tokens(fresh) if fresh else 0
        self._tokens = [*known, *fresh[:num_right]]
        if num_right < len(fresh) and not self._matcher.is_error():
            raise ValueError(f"grammar: token {fresh[num_right]} may not follow {len(self._tokens)} of output")
        return self._matcher, b"" if self._matcher.is_error() else self._matcher.compute_bitmask()


def _llguidance_source(grammar: Grammar) -> str:
    """Return a grammar in llguidance's own syntax. Raises ValueError for an invalid one."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.source, overrides=JSON_FORM)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.source)
