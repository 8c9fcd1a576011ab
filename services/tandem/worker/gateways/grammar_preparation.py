"""Compile the grammars of new jobs in a thread, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tandem.core.grammar import Grammar
from tandem.core.thread_priority import lower_priority


class GrammarPreparation:
    """Compile grammars before their jobs start. However many arrive at once, running steps share the processors with
    one compilation.

    `prepare`: compiles and caches a grammar without raising. `is_prepared`: returns whether it is cached. Both may be
    called from any thread."""

    def __init__(self, prepare: Callable[[Grammar], None], is_prepared: Callable[[Grammar], bool]) -> None:
        self._prepare = prepare
        self._is_prepared = is_prepared
        self._thread = ThreadPoolExecutor(1, "tandem-grammar", lower_priority)

    async def prepare(self, grammar: Grammar) -> None:
        """Return once the grammar is compiled, at once where it is cached. A caller that is cancelled before its turn
        leaves the queue."""
        if not self._is_prepared(grammar):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._prepare, grammar)

    def close(self) -> None:
        """Drop what waits. The thread ends after the running compilation."""
        self._thread.shutdown(wait=False, cancel_futures=True)
