"""Describe one rank's position among the ranks of its model, and its connections to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.engine.rank_messages import RankCommand, RanksLost
from tandem.runtime.parallel.communicator import ALONE, Communicator
from tandem.runtime.parallel.shard import WHOLE, Shard

SendCommand = Callable[[RankCommand], None]
"""Function that sends a command to every other rank, which executes commands in the order sent. It does not wait for
the execution, and raises when a rank is gone."""


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
    def is_leader(self) -> bool:
        """Return whether this is the first of several ranks, which the others follow."""
        return self.send_command is not None

    @contextmanager
    def run_on_all(self, command: RankCommand) -> Iterator[None]:
        """Return a context manager that sends `command` to the other ranks; its `with` block must execute this rank's
        part of it.

        To be used on the leader, from one thread. Only collectives in the block wait for the other ranks. Raises
        RanksLost if sending fails or the block raises.
        """
        assert self.send_command is not None, "only the first of several ranks leads"
        try:
            self.send_command(command)
            yield
        except RanksLost:
            raise
        except Exception as failure:
            raise RanksLost(f"{type(command).__name__}: {type(failure).__name__}: {failure}") from failure


SINGLE_RANK = RankContext()
