"""What the front of the gateway needs from the dispatch behind it; owns no implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.core.events import Finished, Token
from tandem.core.request import Request
from tandem.gateway.text import TextModel


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that at least one live worker serves. `created` is in seconds since the epoch."""

    name: str
    max_model_len: int
    text: TextModel
    created: int


class TokenStream(Protocol):
    """One admitted request. Iterating yields its tokens in order of index, then exactly one Finished; or raises
    TandemError. Leaving early must be told by `aclose`, which cancels the request everywhere."""

    @property
    def path(self) -> str:
        """`remote`, `local` or `fallback;reason=...`; final once the first token was yielded."""
        ...

    def __aiter__(self) -> AsyncIterator[Token | Finished]: ...

    async def aclose(self) -> None: ...


class Dispatch(Protocol):
    """Admits and runs requests; the fronts are translators over it."""

    def models(self) -> Sequence[ServedModel]: ...

    def ready(self) -> str | None:
        """None when requests can be served, else what is missing."""
        ...

    async def open(self, request: Request) -> TokenStream:
        """Admit a request. Raises TandemError when it is refused; then nothing of it is left anywhere."""
        ...
