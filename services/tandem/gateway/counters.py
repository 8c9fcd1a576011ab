"""Counts what this gateway has answered, as Prometheus reads it; never keeps anything of a single request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tandem.core.errors import TandemError
from tandem.gateway.usage import Usage

FINISHED, CANCELLED, INTERNAL = "finished", "cancelled", "internal"


class Counters:
    """All numbers only grow, but `num_open`."""

    __slots__ = ("num_cached_tokens", "num_open", "num_output_tokens", "num_prompt_tokens", "requests", "responses")

    def __init__(self) -> None:
        self.num_open = 0
        self.requests: Counter[tuple[str, str]] = Counter()
        """By endpoint and outcome: finished, cancelled, or the kind of the error that ended them."""
        self.responses: Counter[int] = Counter()
        """HTTP responses of all endpoints, by status."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0

    @contextmanager
    def admission(self, endpoint: str) -> Iterator[Count]:
        """Counts a refusal; what is admitted counts when it ends."""
        count = Count(self, endpoint)
        try:
            yield count
        except BaseException as error:
            count.ended(error, Usage(0, 0, None), is_complete=False)
            raise

    def text(self, gauges: Mapping[str, float], counts: Mapping[str, int] | None = None) -> str:
        """Prometheus' text format, version 0.0.4, with `gauges` and `counts` of others; names of gauges may have
        labels."""
        lines = _family("tandem_requests_total", "counter", "Requests that ended, by endpoint and outcome.")
        for (endpoint, outcome), number in sorted(self.requests.items()):
            lines.append(f'tandem_requests_total{{endpoint="{endpoint}",outcome="{outcome}"}} {number}')
        lines += _family("tandem_http_responses_total", "counter", "HTTP responses, by status.")
        for status, number in sorted(self.responses.items()):
            lines.append(f'tandem_http_responses_total{{status="{status}"}} {number}')
        for name, number, meaning in (
            ("prompt", self.num_prompt_tokens, "Prompt tokens of admitted requests."),
            ("cached_prompt", self.num_cached_tokens, "Of these, tokens out of a prefix cache."),
            ("output", self.num_output_tokens, "Tokens given to clients."),
        ):
            lines += [
                *_family(f"tandem_{name}_tokens_total", "counter", meaning),
                f"tandem_{name}_tokens_total {number}",
            ]
        for name, number in (counts or {}).items():
            lines += [f"# TYPE {name} counter", f"{name} {number}"]
        told = {"tandem_open_requests": self.num_open, **gauges}
        for family in dict.fromkeys(name.partition("{")[0] for name in told):
            lines.append(f"# TYPE {family} gauge")
            lines += [f"{name} {value:g}" for name, value in told.items() if name.partition("{")[0] == family]
        return "\n".join([*lines, ""])


class Count:
    """One request, counted once: open from the beginning, and by its outcome in the end."""

    __slots__ = ("_counters", "_endpoint", "_is_open")

    def __init__(self, counters: Counters, endpoint: str) -> None:
        self._counters = counters
        self._endpoint = endpoint
        self._is_open = True
        counters.num_open += 1

    def ended(self, error: BaseException | None, usage: Usage, *, is_complete: bool) -> None:
        if not self._is_open:
            return
        self._is_open = False
        counters = self._counters
        counters.num_open -= 1
        counters.requests[self._endpoint, _outcome(error, is_complete)] += 1
        counters.num_prompt_tokens += usage.num_prompt
        counters.num_cached_tokens += usage.num_cached or 0
        counters.num_output_tokens += usage.num_output


def _outcome(error: BaseException | None, is_complete: bool) -> str:
    match error:
        case TandemError():
            return error.kind.value
        case Exception():
            return INTERNAL
        case _:
            return FINISHED if is_complete else CANCELLED


def _family(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
