"""Check that grammars which clients wrote compile, tenants in turn, and remember the verdicts."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import replace

from tandem.core.errors import ErrorKind, TandemError, invalid_request
from tandem.core.grammar import MAX_SOURCE_CHARS, Grammar
from tandem.core.ids import TenantId
from tandem.gateway.output.json_limits import check_size
from tandem.gateway.output.response_format import StructuredOutput
from tandem.gateway.serving.grammar_process import GrammarProcess, Verdict
from tandem.gateway.serving.tenant_turns import TenantTurn, TenantTurns

MAX_KNOWN = 32
"""Largest number of verdicts that a GrammarCheck remembers. It equals the number of compiled grammars that a worker
keeps, so that a grammar that workers may have to compile again needs another turn of its tenant."""
MAX_WAITING_OF_TENANT, MAX_WAITING, MAX_WAITING_FIRST = 32, 256, 1024
"""Largest numbers of grammars that wait for compilation. MAX_WAITING_OF_TENANT: of one tenant. MAX_WAITING: of all
tenants together, for the next grammar of a tenant that rests or has another grammar that waits or compiles.
MAX_WAITING_FIRST: of all tenants together, for the next grammar of any other tenant."""
MAX_TENANTS = 64
"""Largest number of tenants that have a grammar which compiles or is next to compile, or that rest after a grammar."""
REST, MAX_REST_S = 4.0, 2.0
"""After a compilation, its tenant's next one waits REST times as long as it took, at most MAX_REST_S seconds. So a
tenant takes at most a fifth of the process, or a third with grammars that take a second, and workers, which compile
each grammar again, have time for other tenants."""


class GrammarCheck:
    """Check in a process of its own whether grammars compile, and remember up to MAX_KNOWN verdicts, which are the same
    for all tenants. Tenants take turns, and each tenant rests after a compilation in proportion to its duration. All
    calls must be on one event loop; `stop` ends the process.

    `process`: the process that compiles; None: a new one. `num_waiting`: how many grammars wait for their turn."""

    def __init__(self, process: GrammarProcess | None = None) -> None:
        self.num_waiting = 0
        self._process = process or GrammarProcess()
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._compiling: set[asyncio.Task[Verdict]] = set()
        self._turn_of_process = asyncio.Lock()
        self._turns = TenantTurns(
            MAX_TENANTS,
            per_tenant=1,
            max_waiting=MAX_WAITING_OF_TENANT,
            what="too many of your grammars wait for compilation at this gateway",
            reason="grammars",
        )

    async def check(self, output: StructuredOutput, tenant: TenantId) -> None:
        """Compile the grammar unless its verdict is known. Raises INVALID_REQUEST for `output.param`, with the reason,
        where it does not compile, and OVERLOADED where too many grammars wait.

        Takes about a millisecond once it is the tenant's turn, and at most MAX_COMPILE_S of processor time."""
        check_size(len(output.grammar.source), MAX_SOURCE_CHARS, "characters", output.param)
        await self._compile(output.grammar.kind, output, tenant)

    async def in_lark(self, output: StructuredOutput, tenant: TenantId) -> StructuredOutput:
        """Return `output` with its grammar converted to Lark where it is in GBNF, otherwise unchanged. The start rule
        is called `root` in GBNF and `start` in Lark. Raises as `check` does."""
        if not output.is_gbnf:
            return output
        source = await self._compile("gbnf", output, tenant)
        return replace(output, grammar=Grammar("lark", source), is_gbnf=False)

    async def stop(self) -> None:
        """End the process, and the compilations whose callers were cancelled. Call this when no `check` is in
        progress."""
        for task in self._compiling:
            task.cancel()
        if self._compiling:
            await asyncio.wait(self._compiling)
        await self._process.stop()

    async def _compile(self, notation: str, output: StructuredOutput, tenant: TenantId) -> str:
        """Return the text of the verdict on a grammar. Raises INVALID_REQUEST where the grammar does not compile."""
        source = output.grammar.source
        digest = hashlib.sha256(f"{notation}\0{source}".encode()).digest()
        verdict = self._recall(digest)
        if verdict is None:
            if self.num_waiting >= (MAX_WAITING if self._turns.has_work(tenant) else MAX_WAITING_FIRST):
                message = "too many grammars wait for compilation at this gateway; retry later"
                raise TandemError(ErrorKind.OVERLOADED, message, retry_after_s=1.0, reason="grammars")
            self.num_waiting += 1
            try:
                turn = await self._turns.begin(tenant)
            except BaseException:
                self.num_waiting -= 1
                raise
            # The compilation goes on where its caller is cancelled: its verdict may be of use to others.
            task = asyncio.create_task(self._take_turn(turn, digest, notation, source))
            self._compiling.add(task)
            task.add_done_callback(self._ended)
            verdict = await asyncio.shield(task)
        if not verdict.is_good:
            raise invalid_request(f"{output.param} does not compile: {verdict.text}", output.param)
        return verdict.text

    async def _take_turn(self, turn: TenantTurn, digest: bytes, notation: str, source: str) -> Verdict:
        duration_s = 0.0
        try:
            async with self._turn_of_process:
                self.num_waiting -= 1
                verdict = self._recall(digest)  # another request may have had the same grammar
                if verdict is None:
                    loop = asyncio.get_running_loop()
                    began_at = loop.time()
                    try:
                        verdict = self._known[digest] = await self._process.compile(notation, source)
                    finally:
                        duration_s = loop.time() - began_at
                    if len(self._known) > MAX_KNOWN:
                        self._known.popitem(last=False)
                return verdict
        finally:
            turn.end(min(REST * duration_s, MAX_REST_S))

    def _recall(self, digest: bytes) -> Verdict | None:
        verdict = self._known.get(digest)
        if verdict is not None:
            self._known.move_to_end(digest)
        return verdict

    def _ended(self, task: asyncio.Task[Verdict]) -> None:
        self._compiling.discard(task)
        if not task.cancelled():
            task.exception()  # read, because nobody awaits a task whose caller has left
