"""Encode the messages between a worker's first rank and its other ranks as MessagePack.

Ranks of one worker run one version of Tandem, which their first message proves, so the messages need no schema of their
own: a message is the name of its class and the fields of that dataclass, which msgspec checks by their types.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, get_args

import msgspec

from tandem.engine.rank_messages import AgentCommand, GroupCommand, RankCommand, RankEvent

T = TypeVar("T")


class MessageCodec(Generic[T]):
    """Encode and decode messages between the ranks of one worker. `union`: union of the dataclasses that are the types
    of the messages."""

    def __init__(self, union: Any) -> None:
        self._envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
        self._decoders = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(union)}

    def encode(self, message: T) -> bytes:
        """Return a message as bytes, with the name of its class."""
        return msgspec.msgpack.encode((type(message).__name__, message))

    def decode(self, data: bytes) -> T:
        """Return the message in `data`. Raises ValueError where the bytes are malformed or name an unknown class."""
        try:
            name, body = self._envelope.decode(data)
            found: T = self._decoders[name].decode(body)
        except (msgspec.MsgspecError, KeyError) as error:
            raise ValueError(f"malformed message of a rank: {error!r}") from None
        return found


RANK_COMMANDS: MessageCodec[RankCommand | AgentCommand | GroupCommand] = MessageCodec(
    RankCommand | AgentCommand | GroupCommand
)
RANK_EVENTS: MessageCodec[RankEvent] = MessageCodec(RankEvent)
