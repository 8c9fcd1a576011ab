"""Share a capacity of this gateway, such as its tokenizer threads, among tenants."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from types import TracebackType

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import TenantId


class TenantTurns:
    """Let work begin while the cost of all running work is at most `capacity`; tenants take turns.

    Work of one tenant begins in the order of its arrival. Tenants with waiting work form a queue, in which a tenant
    moves to the end after each of its turns. The running work of a tenant costs at most `per_tenant`, so that other
    tenants need not wait for the end of that work. A piece of work that costs more counts as `per_tenant`, so it runs
    without other work of its tenant.

    `max_waiting`: largest cost of one tenant's waiting work; further work is refused with OVERLOADED, except that one
    piece may always wait. `what`: beginning of that error's message. `reason`: that error's `reason`. `refused_s`: work
    that ends with an error of the client counts as running for this many seconds more, which limits how often a tenant
    can have work done for nothing. `used`: the cost of all running work. Not thread-safe: all calls must be on one
    event loop."""

    def __init__(
        self, capacity: int, *, per_tenant: int, max_waiting: int, what: str, reason: str, refused_s: float = 0.0
    ) -> None:
        self.refused_s = refused_s
        self._capacity = capacity
        self._per_tenant = min(per_tenant, capacity)
        self._max_waiting = max_waiting
        self._what = what
        self._reason = reason
        self.used = 0
        self._used_by: Counter[TenantId] = Counter()
        self._waiting: OrderedDict[TenantId, deque[TenantTurn]] = OrderedDict()
        """Waiting work by tenant, without empty entries; the tenant whose turn is next comes first."""

    def has_work(self, tenant: TenantId) -> bool:
        """Return whether work of the tenant waits or runs."""
        return tenant in self._waiting or tenant in self._used_by

    async def begin(self, tenant: TenantId, cost: int = 1) -> TenantTurn:
        """Wait until work of `tenant` may begin, and return its turn, which the caller ends. `cost`: the part of the
        capacity that the work uses. Raises OVERLOADED where too much work of the tenant waits already. A caller that is
        cancelled while it waits leaves the queue."""
        turn = TenantTurn(self, tenant, min(cost, self._per_tenant))
        self._enter(turn)
        try:
            if not turn.begun.done():
                await asyncio.wait({turn.begun})  # a cancellation of the caller does not cancel `begun`
        except BaseException:
            turn.end()
            raise
        return turn

    def _enter(self, turn: TenantTurn) -> None:
        waiting = self._waiting.setdefault(turn.tenant, deque())
        if waiting and sum(other.cost for other in waiting) + turn.cost > self._max_waiting:
            message = f"{self._what}; retry later"
            raise TandemError(ErrorKind.OVERLOADED, message, retry_after_s=1.0, reason=self._reason)
        waiting.append(turn)
        self._begin_next()

    def leave(self, turn: TenantTurn) -> None:
        """Free the capacity that `turn` uses, or remove the turn from the queue where it has not begun. Only
        `TenantTurn.end` may call this."""
        if turn.begun.done():
            self.used -= turn.cost
            self._used_by[turn.tenant] -= turn.cost
            if not self._used_by[turn.tenant]:
                del self._used_by[turn.tenant]
        else:
            waiting = self._waiting[turn.tenant]
            waiting.remove(turn)
            if not waiting:
                del self._waiting[turn.tenant]
        self._begin_next()

    def _begin_next(self) -> None:
        """Begin all work that may run now. Work that is too large for the free capacity is not overtaken by work of the
        tenants after it; work of a tenant that uses up its share is."""
        while (turn := self._next()) is not None and self.used + turn.cost <= self._capacity:
            waiting = self._waiting[turn.tenant]
            waiting.popleft()
            self._waiting.move_to_end(turn.tenant)
            if not waiting:
                del self._waiting[turn.tenant]
            self.used += turn.cost
            self._used_by[turn.tenant] += turn.cost
            turn.begun.set_result(None)

    def _next(self) -> TenantTurn | None:
        for tenant, waiting in self._waiting.items():
            if self._used_by[tenant] + waiting[0].cost <= self._per_tenant:
                return waiting[0]
        return None


class TenantTurn:
    """Hold one tenant's share of a capacity while a piece of work runs. As a context manager it ends at the exit of the
    `with` block; where the block raises an error of the client, `TenantTurns.refused_s` seconds later.

    `begun`: future that is done once the work may begin."""

    __slots__ = ("_has_ended", "_queue", "begun", "cost", "tenant")

    def __init__(self, queue: TenantTurns, tenant: TenantId, cost: int) -> None:
        self.tenant = tenant
        self.cost = cost
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue = queue
        self._has_ended = False

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_refused = isinstance(error, TandemError) and error.kind.http < 500
        self.end(self._queue.refused_s if is_refused else 0.0)

    def end(self, delay_s: float = 0.0) -> None:
        """Free the share after `delay_s` seconds, so that other work can begin; a second call does nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._queue.leave, self)
        else:
            self._queue.leave(self)
