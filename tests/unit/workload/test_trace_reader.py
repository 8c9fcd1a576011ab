"""Test that trace formats are detected and replayed in time and order, and that errors name their line.

The lines are invented, in the exact format of each trace.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane
from tandem.workload.scheduled_request import ScheduledRequest
from tandem.workload.source import open_workload

MOONCAKE = """\
{"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 27500, "input_length": 1300, "output_length": 0, "hash_ids": [46, 47, 53]}
{"timestamp": 27500, "input_length": 40000, "output_length": 7, "hash_ids": [%s]}
{"timestamp": 30000, "input_length": 512, "output_length": 3, "hash_ids": [46]}
""" % ", ".join(map(str, range(100, 179)))  # noqa: UP031 - braces
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 23:59:59.9799600,4808,10\r\n"
    "2023-11-17 00:00:00.0319600,318,8\r\n"
    "2023-11-17 00:00:01.9799609,110,0"
)
RECORDED = """\
{"format": "tandem-requests", "version": 1, "block_size": 64}
{"due_s": 3.25, "group": "chat", "tenant": "acme", "priority": 2, "prompt_tokens": [5, 6, 7], "num_output_tokens": 4}
{"due_s": 3.5, "num_prompt_tokens": 130, "blocks": [9, 8, 7], "num_output_tokens": 1}
{"due_s": 3.5, "num_prompt_tokens": 9000, "lane": "batch", "num_output_tokens": 2}
"""
ALL = {"mooncake.jsonl": MOONCAKE, "azure.csv": AZURE, "own.jsonl": RECORDED}


def replayed(
    tmp_path: Path, text: str, *, seed: int = 1, count: int | None = None, speedup: float = 1.0, salt: str = ""
) -> Iterator[ScheduledRequest]:
    path = tmp_path / "some.trace"
    path.write_bytes(text.encode())
    return open_workload(str(path), seed=seed, count=count, rate=None, speedup=speedup, salt=salt)


def refusal(tmp_path: Path, text: str, **options: object) -> str:
    """Return the error message without the folder of the file."""
    with pytest.raises(TandemError) as caught:
        list(replayed(tmp_path, text, **options))  # type: ignore[arg-type]
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert caught.value.message.startswith(f"{tmp_path}/")
    return caught.value.message.removeprefix(f"{tmp_path}/")


def seen(scheduled: ScheduledRequest) -> tuple[str, float, int, int]:
    return scheduled.group, scheduled.due_s, len(scheduled.request.prompt_tokens), scheduled.request.sampling.max_tokens


# ---- formats


def test_mooncake(tmp_path: Path) -> None:
    requests = list(replayed(tmp_path, MOONCAKE))
    assert [seen(scheduled) for scheduled in requests] == [
        ("1K to 8K", 0.0, 1100, 52),
        ("1K to 8K", 0.5, 1300, 1),
        ("over 32K", 0.5, 40000, 7),
        ("under 1K", 3.0, 512, 3),
    ]
    first, second, long, last = [scheduled.request.prompt_tokens for scheduled in requests]
    assert first[:1024] == second[:1024] and first[1024:1040] != second[1024:1040]
    assert last == first[:512]
    assert not set(zip(*[iter(long)] * 16, strict=False)) & set(zip(*[iter(first)] * 16, strict=False))
    assert [scheduled.request.id for scheduled in requests] == ["r0", "r1", "r2", "r3"]


def test_azure(tmp_path: Path) -> None:
    requests = list(replayed(tmp_path, AZURE))
    assert [seen(scheduled) for scheduled in requests] == [
        ("1K to 8K", 0.0, 4808, 10),
        ("under 1K", 0.052, 318, 8),
        ("under 1K", 2.0, 110, 1),
    ]
    assert len({scheduled.request.prompt_tokens[:16] for scheduled in requests}) == 3


def test_a_time_without_a_zone_is_utc_and_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    text = "\ufeff" + AZURE + "\n2023-11-17 01:00:02+01:00,9,5"
    assert [scheduled.due_s for scheduled in replayed(tmp_path, text)][-1] == 2.02004


@pytest.mark.parametrize(
    ("num_tokens", "name"),
    [(1023, "under 1K"), (1024, "1K to 8K"), (8192, "8K to 32K"), (32767, "8K to 32K"), (32768, "over 32K")],
)
def test_requests_without_a_group_are_classified_by_length(tmp_path: Path, num_tokens: int, name: str) -> None:
    text = AZURE.splitlines()[0] + f"\n2024-05-10 00:00:00,{num_tokens},5"
    assert [scheduled.group for scheduled in replayed(tmp_path, text)] == [name]


def test_azure_of_2024_has_zones(tmp_path: Path) -> None:
    text = AZURE.splitlines()[0] + "\n2024-05-10 00:00:00.009930+00:00,9,5\n2024-05-10 02:00:01+02:00,8,4\n"
    assert [scheduled.due_s for scheduled in replayed(tmp_path, text)] == [0.0, 0.99007]


def test_recorded(tmp_path: Path) -> None:
    requests = list(replayed(tmp_path, RECORDED))
    assert [seen(scheduled) for scheduled in requests] == [
        ("chat", 0.0, 3, 4),
        ("under 1K", 0.25, 130, 1),
        ("8K to 32K", 0.25, 9000, 2),
    ]
    assert requests[0].request.prompt_tokens == (5, 6, 7)
    assert [(scheduled.tenant, scheduled.request.priority) for scheduled in requests] == [("acme", 2), ("", 0), ("", 0)]
    assert [scheduled.request.lane for scheduled in requests] == [Lane.INTERACTIVE, Lane.INTERACTIVE, Lane.BATCH]


@pytest.mark.parametrize("name", ALL)
def test_a_gzip_trace_is_the_same(tmp_path: Path, name: str) -> None:
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(ALL[name].encode()))
    assert list(open_workload(str(packed), seed=1, count=None, rate=None)) == list(replayed(tmp_path, ALL[name]))


# ---- replay


@pytest.mark.parametrize("name", ALL)
def test_a_speed_up_divides_times_and_a_count_takes_the_first(tmp_path: Path, name: str) -> None:
    usual = list(replayed(tmp_path, ALL[name]))
    fast = list(replayed(tmp_path, ALL[name], speedup=4.0, count=2))
    assert [scheduled.due_s for scheduled in fast] == [scheduled.due_s / 4 for scheduled in usual[:2]]
    assert [scheduled.request for scheduled in fast] == [scheduled.request for scheduled in usual[:2]]


@pytest.mark.parametrize("name", ALL)
def test_seed_and_salt_change_what_a_trace_does_not_contain(tmp_path: Path, name: str) -> None:
    usual, again = list(replayed(tmp_path, ALL[name])), list(replayed(tmp_path, ALL[name]))
    assert usual == again
    for other in (list(replayed(tmp_path, ALL[name], seed=2)), list(replayed(tmp_path, ALL[name], salt="b"))):
        assert [seen(scheduled) for scheduled in other] == [seen(scheduled) for scheduled in usual]
        message = [a.request.prompt_tokens == b.request.prompt_tokens for a, b in zip(usual, other, strict=True)]
        assert message == [name == "own.jsonl" and number == 0 for number in range(len(usual))]


def test_a_trace_is_read_lazily(tmp_path: Path) -> None:
    """A bad line has no effect before it is reached."""
    requests = replayed(tmp_path, MOONCAKE + "nonsense\n")
    assert len(list(islice(requests, 4))) == 4
    with pytest.raises(TandemError, match=r"some.trace:5: is not JSON"):
        next(requests)


def test_blank_lines_are_ignored(tmp_path: Path) -> None:
    spaced = MOONCAKE.replace("\n", "\n\n")
    assert list(replayed(tmp_path, spaced, count=4)) == list(replayed(tmp_path, MOONCAKE))


# ---- refusals


def test_a_file_that_is_no_trace_is_refused_at_once(tmp_path: Path) -> None:
    for text, message in {
        "": "some.trace: is empty",
        "due,tokens\n1,2": "some.trace: is none of the traces that can be read: Mooncake's JSON lines, TIMESTAMP,",
        '{"model": "a"}': "some.trace: is none of the traces",
        "{": "some.trace:1: is not JSON",
        '{"timestamp": 0, "input_length": 5}': "some.trace:1: 'output_length' is missing",
        AZURE.splitlines()[0]: "some.trace: holds 0 requests, 1 are requested",
        '{"format": "tandem-requests", "version": 2, "block_size": 1}': "some.trace:1: version: must be 1, got 2",
    }.items():
        assert refusal(tmp_path, text).startswith(message), message
    with pytest.raises(TandemError, match="cannot be read further"):
        open_workload(str(tmp_path), seed=1, count=None, rate=None)


def test_too_few_requests_are_reported_before_the_first(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    assert len(list(open_workload(str(path), seed=1, count=3, rate=None))) == 3
    with pytest.raises(TandemError, match=r"azure.csv: holds 3 requests, 4 are requested"):
        open_workload(str(path), seed=1, count=4, rate=None)


def test_a_trace_has_its_own_times(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    with pytest.raises(TandemError, match="give a speed-up, not a rate"):
        open_workload(str(path), seed=1, count=None, rate=1.0)
    for speedup in (0.0, -1.0, float("inf"), float("nan")):
        assert "a speed-up must be above 0" in refusal(tmp_path, AZURE, speedup=speedup)


LINE = '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}'
OWN = RECORDED.splitlines()[0] + "\n" + '{"due_s": 1, "num_prompt_tokens": 9, "num_output_tokens": 1}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LINE + "\n[1]", ":2: must be a mapping, got [1]"),
        (LINE + "\n" + LINE.replace("timestamp", "time"), ":2: 'time' is not known; did you mean timestamp? Known are"),
        (LINE.replace("[1, 2]", "[1]"), ":1: hash_ids: 600 tokens are 2 blocks of 512, but 1 are named"),
        (LINE.replace("[1, 2]", "[1, -2]"), ":1: hash_ids[1]: must be a whole number in [0, "),
        (LINE.replace("[1, 2]", "[true, 2]"), ":1: hash_ids[0]: must be a whole number in [0, "),
        (LINE.replace("[1, 2]", "7"), ":1: hash_ids: must be a list, got 7"),
        (LINE.replace("600", "0"), ":1: input_length: must be a whole number in [1, "),
        (LINE.replace("600", "1e3"), ":1: input_length: must be a whole number in [1, "),
        (LINE.replace("600", "true"), ":1: input_length: must be a whole number in [1, "),
        (LINE.replace("600", "99999999999"), ":1: input_length: must be a whole number in [1, "),
        (LINE.replace(": 1,", ": NaN,", 1), ":1: timestamp: must be a number, got nan"),
        (LINE.replace(": 1,", ": 1e400,", 1), ":1: timestamp: must be a number, got inf"),
        (LINE.replace(": 1,", ": " + "9" * 400 + ",", 1), ":1: timestamp: must be a number, got 999"),
        (LINE.replace(": 1,", ": " + "9" * 5000 + ",", 1), ":1: is not JSON"),
        (LINE + "\n" + "[" * 200_000, ":2: is not JSON"),
        (LINE + "\n" + LINE.replace(": 1,", ": 0.5,", 1), ":2: is due 0.0005 s before the line above it; sort the"),
        (AZURE + "\nnever,1,1", ":5: 'never' is no time such as"),
        (AZURE + "\n2023-11-17 00:00:09,1", ":5: must be TIMESTAMP,ContextTokens,GeneratedTokens, got"),
        (AZURE + "\n2023-11-17 00:00:09,1.5,1", ":5: '1.5' is no number of tokens"),
        (AZURE + "\n2023-11-17 00:00:09,-1,1", ":5: '-1' is no number of tokens"),
        (AZURE + "\n2023-11-17 00:00:09,0,1", ":5: a prompt must be of 1 to"),
        (AZURE + "\n2023-11-17 00:00:00,9,1", ":5: is due 1.97996 s before the line above it"),
        (OWN + "\n" + '{"due_s": 1, "num_output_tokens": 1}', ":3: a prompt is num_prompt_tokens, with blocks"),
        (OWN.replace("}\n", "}\n\n").replace("9,", '9, "prompt_tokens": [1],'), ":3: a prompt is num_prompt_tokens,"),
        (OWN.replace("9,", '9, "blocks": [],'), ":2: blocks: 9 tokens are 1 blocks of 64, but 0 are named"),
        (OWN.replace('"num_prompt_tokens": 9', '"prompt_tokens": []'), ":2: prompt_tokens: must be 1 to"),
        (OWN.replace('"num_prompt_tokens": 9', '"prompt_tokens": [1.0]'), ":2: prompt_tokens[0]: must be a whole"),
        (OWN.replace('"due_s": 1', '"due_s": "now"'), ":2: due_s: must be a number, got 'now'"),
        (OWN.replace('"due_s": 1', '"due_s": 1, "pace": 2'), ":2: 'pace' is not known; known are due_s,"),
        (OWN.replace('"due_s": 1', '"due_s": 1, "lane": 2'), ":2: lane: must be interactive, standard, batch, got 2"),
    ],
)  # fmt: skip
def test_a_bad_line_is_reported_with_its_number(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).startswith(f"some.trace{message}")


def test_invalid_utf8_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "some.trace"
    path.write_bytes(AZURE.encode() + b"\n\xff\xfe")
    requests = open_workload(str(path), seed=1, count=None, rate=None)
    with pytest.raises(TandemError, match=r"some.trace:5: cannot be read"):
        list(requests)


def test_a_truncated_gzip_trace_is_reported(tmp_path: Path) -> None:
    packed = tmp_path / "cut.gz"
    packed.write_bytes(gzip.compress(MOONCAKE.encode())[:-20])
    with pytest.raises(TandemError, match="cannot be read"):
        list(open_workload(str(packed), seed=1, count=None, rate=None))


# ---- the published traces, where they are at hand


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_requests", "last_s", "num_prompt_tokens"),
    [
        ("mooncake_conversation.jsonl.gz", 12_031, 3536.999, 144_793_823),
        ("azure_llm_code_2023.csv.gz", 8_819, 3435.948056, 18_059_974),
    ],
)
def test_a_published_trace_is_read_completely(
    name: str, num_requests: int, last_s: float, num_prompt_tokens: int
) -> None:
    path = Path(os.environ.get("TANDEM_TRACES", "")) / name
    if not path.is_file():
        pytest.skip(f"no {name} in the folder that TANDEM_TRACES names")
    requests = [
        (scheduled.due_s, len(scheduled.request.prompt_tokens))
        for scheduled in open_workload(str(path), seed=1, count=None, rate=None)
    ]
    assert (len(requests), requests[-1][0], sum(length for _, length in requests)) == (
        num_requests,
        last_s,
        num_prompt_tokens,
    )
