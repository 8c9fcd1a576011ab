"""One choice of a request as its client sees it: tokens in order, each once, and one end; never knows who draws."""

from __future__ import annotations

from tandem.core.events import Finished, Token


class Choice:
    """`next_index`: tokens that the client has. Tokens that come ahead of their turn wait, as an end does that counts
    more than have come."""

    __slots__ = ("_early", "_finished", "next_index")

    def __init__(self) -> None:
        self.next_index = 0
        self._early: dict[int, Token] = {}
        self._finished: Finished | None = None

    def take(self, token: Token) -> None:
        """Both sides of a hand-off report the first token; it counts once."""
        if token.index >= self.next_index:
            self._early[token.index] = token

    def due(self) -> list[Token]:
        """Those whose turn has come."""
        out: list[Token] = []
        while self.next_index in self._early:
            out.append(self._early.pop(self.next_index))
            self.next_index += 1
        return out

    def skip(self, first_index: int, num_tokens: int) -> bool:
        """Count consecutive ones whose turn it is. False, and nothing has changed, where something else is due."""
        if self._early or self._finished is not None or first_index != self.next_index:
            return False
        self.next_index += num_tokens
        return True

    def finish(self, finished: Finished) -> None:
        self._finished = finished

    @property
    def end(self) -> Finished | None:
        """Set once all the tokens that it counts have been taken."""
        finished = self._finished
        return finished if finished is not None and self.next_index >= finished.num_output_tokens else None

    def restart(self) -> None:
        """Another attempt draws what the client has not seen: the same tokens as this one would have."""
        self._early.clear()
        self._finished = None
