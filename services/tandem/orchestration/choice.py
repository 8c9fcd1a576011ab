"""Order the tokens of one choice as its client sees them: each once, then one end."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from tandem.core.events import Finished, FinishReason, Token
from tandem.core.request import SamplingParams


class Choice:
    """Tokens and end of one choice. `tokens`: the ids that the client has, from which any worker can continue.

    Tokens ahead of the next index wait, and so does an end that counts more tokens than have arrived.
    """

    __slots__ = ("_early", "_finished", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self._early: dict[int, Token] = {}
        self._finished: Finished | None = None

    @property
    def next_index(self) -> int:
        return len(self.tokens)

    def take(self, token: Token) -> None:
        """Add a token. Both sides of a hand-off report the first token, and both sides of a migration several; each
        counts once."""
        if token.index >= len(self.tokens):
            self._early[token.index] = token

    def due(self) -> list[Token]:
        """Return and count the tokens that are next in order."""
        out: list[Token] = []
        while (token := self._early.pop(len(self.tokens), None)) is not None:
            out.append(token)
            self.tokens.append(token.token.id)
        return out

    def skip(self, first_index: int, ids: Iterable[int]) -> bool:
        """Count consecutive ids if `first_index` is next. Returns False, and changes nothing, otherwise."""
        if self._early or self._finished is not None or first_index != len(self.tokens):
            return False
        self.tokens.extend(iter(ids))
        return True

    def finish(self, finished: Finished) -> None:
        self._finished = finished

    @property
    def end(self) -> Finished | None:
        """Return the end once all the tokens that it counts have been taken."""
        finished = self._finished
        return finished if finished is not None and len(self.tokens) >= finished.num_output_tokens else None

    def last_word(self, sampling: SamplingParams) -> FinishReason | None:
        """Return why nothing may follow the tokens that the client has; None when something may.

        For a choice whose worker was lost between its last token and its end: no worker may sample one more.
        """
        if self.tokens and self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if 0 < sampling.max_tokens <= len(self.tokens) else None

    def restart(self) -> None:
        """Drop what the client has not seen; another attempt samples the same tokens."""
        self._early.clear()
        self._finished = None
