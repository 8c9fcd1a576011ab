"""Where one rank stands among those of its model, and how it reaches them; never loads what it computes."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.runtime.parallel.communicator import ALONE, Communicator
from tandem.runtime.parallel.shard import WHOLE, Shard
from tandem.runtime.ranks.leader import FollowerCommands, Tell


@dataclass(frozen=True, slots=True)
class RankContext:
    """`tell` is the first rank's, when there are others: how it has them do what it does."""

    shard: Shard = WHOLE
    communicator: Communicator = ALONE
    tell: Tell | None = None

    @property
    def lead(self) -> FollowerCommands | None:
        """None on a rank that follows, or is alone."""
        return None if self.tell is None else FollowerCommands(self.tell, self.communicator)
