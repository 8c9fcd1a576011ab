"""Describe one rank's position among the ranks of its model, and its connections to them."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.runtime.parallel.communicator import ALONE, Communicator
from tandem.runtime.parallel.shard import WHOLE, Shard
from tandem.runtime.ranks.leader import FollowerCommands, SendCommand


@dataclass(frozen=True, slots=True)
class RankContext:
    """Position of one rank among the ranks of its model, and its connections to them.

    The defaults describe a model without tensor parallelism. `shard`: the rank's part of the model. `communicator`:
    collectives with the other ranks. `send_command`: sends a command to all other ranks; None except on the first of
    several ranks."""

    shard: Shard = WHOLE
    communicator: Communicator = ALONE
    send_command: SendCommand | None = None

    @property
    def followers(self) -> FollowerCommands | None:
        """Return a channel to the other ranks if this is the first of several ranks; None on any other rank or a single
        rank."""
        return None if self.send_command is None else FollowerCommands(self.send_command, self.communicator)
