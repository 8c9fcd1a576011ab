"""One choice of a request as its client sees it: tokens in order, each once, and one end; never knows who draws."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from tandem.core.events import Finished, FinishReason, Token
from tandem.core.request import SamplingParams


class Choice:
    """`tokens`: ids that the client has, which is all that another worker needs to go on. Tokens that come ahead of
    their turn wait, as an end does that counts more than have come."""

    __slots__ = ("_early", "_finished", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self._early: dict[int, Token] = {}
        self._finished: Finished | None = None

    @property
    def next_index(self) -> int:
        return len(self.tokens)

    def take(self, token: Token) -> None:
        """Both sides of a hand-off report the first token, and both sides of a move several; each counts once."""
        if token.index >= len(self.tokens):
            self._early[token.index] = token

    def due(self) -> list[Token]:
        """Those whose turn has come."""
        out: list[Token] = []
        while (token := self._early.pop(len(self.tokens), None)) is not None:
            out.append(token)
            self.tokens.append(token.token.id)
        return out

    def skip(self, first_index: int, ids: Iterable[int]) -> bool:
        """Count consecutive ones whose turn it is. False, and nothing has changed, where something else is due."""
        if self._early or self._finished is not None or first_index != len(self.tokens):
            return False
        self.tokens.extend(iter(ids))
        return True

    def finish(self, finished: Finished) -> None:
        self._finished = finished

    @property
    def end(self) -> Finished | None:
        """Set once all the tokens that it counts have been taken."""
        finished = self._finished
        return finished if finished is not None and len(self.tokens) >= finished.num_output_tokens else None

    def last_word(self, sampling: SamplingParams) -> FinishReason | None:
        """Why nothing may follow the tokens that the client has; None: something may. It is for a choice whose worker
        is lost after its last token and before its end: nobody may be asked to draw one more."""
        if self.tokens and self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if 0 < sampling.max_tokens <= len(self.tokens) else None

    def restart(self) -> None:
        """Another attempt draws what the client has not seen: the same tokens as this one would have."""
        self._early.clear()
        self._finished = None
