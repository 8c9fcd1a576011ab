"""Counts what this gateway has answered, as Prometheus reads it; never keeps anything of a single request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tandem.gateway.record import AnswerRecord


class Counters:
    """An AnswerObserver. All numbers only grow."""

    __slots__ = ("num_cached_tokens", "num_output_tokens", "num_prompt_tokens", "requests", "responses")

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """By endpoint and outcome: finished, cancelled, or the kind of the error that ended them."""
        self.responses: Counter[int] = Counter()
        """HTTP responses of all endpoints, by status."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0

    def answered(self, record: AnswerRecord) -> None:
        usage = record.usage
        self.requests[record.endpoint, record.outcome] += 1
        self.num_prompt_tokens += usage.num_prompt
        self.num_cached_tokens += usage.num_cached or 0
        self.num_output_tokens += usage.num_output

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
        for family in dict.fromkeys(name.partition("{")[0] for name in gauges):
            lines.append(f"# TYPE {family} gauge")
            lines += [f"{name} {value:g}" for name, value in gauges.items() if name.partition("{")[0] == family]
        return "\n".join([*lines, ""])


def _family(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
