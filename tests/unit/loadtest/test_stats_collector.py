"""What a tally makes of records, and what a report says of it, on numbers that can be checked by hand."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from loadtest.client.records import Record
from loadtest.load import stats_collector as tally_module
from loadtest.load.load_markdown import MOST_WINDOWS, markdown
from loadtest.load.load_report import METRICS, ClientFacts, LoadReport, LoadWindow
from loadtest.load.report_file import NoReport, read_report
from loadtest.load.stats_collector import StatsCollector, timed
from tandem.core.slo import Slo
from tests.unit.loadtest.made import failed, record, reported


def tallied(*records: Record, slo: Slo | None = None) -> StatsCollector:
    found = StatsCollector(slo or Slo())
    for number, one in enumerate(records):
        found.sent(one.sent_s, number + 1)
        found.ended(one, 0)
    return found


RECORDS = (
    record("short", 0.0, 0.25, 0.5, 0.25),
    record("short", 1.0, 0.25, 0.25, 0.25, ttft_s=1.5, tenant="acme"),
    record("long", 2.0, 0.125, 0.5, ttft_s=4.0, sent_s=2.25),
    failed("long", 12.0, "http 429", tenant="acme"),
)


def test_phases_of_a_request_add_up() -> None:
    values = {metric: list(found) for metric, found in timed(RECORDS[0]).items()}
    assert set(values) == set(METRICS)
    assert values == {
        "ttft": [0.5],
        "itl": [0.25, 0.5, 0.25],
        "tpot": [pytest.approx(1 / 3)],
        "e2e": [1.5],
        "first_gap": [0.25],
        "rest": [0.75],
    }
    assert values["ttft"][0] + values["first_gap"][0] + values["rest"][0] == values["e2e"][0]


def test_a_single_token_has_a_ttft_and_no_gaps() -> None:
    values = {metric: list(found) for metric, found in timed(record("one", 0.0)).items()}
    assert values == {"ttft": [0.5], "itl": [], "tpot": [], "e2e": [0.5], "first_gap": [], "rest": []}


def test_classes_and_tenants_are_separate_and_add_up() -> None:
    whole, long, short, none, acme = tallied(*RECORDS).scopes(wall_s=20.0)
    named = [("all", "all"), ("class", "long"), ("class", "short"), ("tenant", ""), ("tenant", "acme")]
    assert [(s.kind, s.name) for s in (whole, long, short, none, acme)] == named
    assert [s.num_requests for s in (whole, long, short, none, acme)] == [4, 2, 2, 2, 2]
    assert [s.num_whole for s in (whole, long, short, none, acme)] == [3, 1, 2, 2, 1]
    assert whole.errors == long.errors == acme.errors == {"http 429": 1}
    assert short.errors == none.errors == {}
    assert whole.output_rate == pytest.approx(11 / 20)
    assert whole.prompt_rate == pytest.approx(300 / 20)
    assert long.times["ttft"].p50 == long.times["ttft"].max == 4.0
    assert whole.times["itl"].count == 8


def test_without_tenants_there_is_no_row_of_them() -> None:
    assert [s.kind for s in tallied(RECORDS[0]).scopes(1.0)] == ["all", "class"]


def test_failures_count_into_goodput_and_not_into_latencies() -> None:
    whole, *_ = tallied(*RECORDS, slo=Slo(ttft_s=1.0)).scopes(wall_s=2.0)
    assert (whole.num_good, whole.good_rate) == (1, 0.5)
    assert whole.times["ttft"].count == 3


def test_tokens_and_gaps_fall_into_the_windows_of_their_arrival() -> None:
    slow = record("a", 8.0, 4.0, 0.5, ttft_s=1.0)
    windows = tallied(slow, failed("a", 31.0, "timeout")).windows(35.0)
    assert [w.start_s for w in windows] == [0.0, 10.0, 20.0, 30.0]
    assert [w.num_sent for w in windows] == [1, 0, 0, 1]
    assert [w.num_ended for w in windows] == [0, 1, 0, 1]
    assert [w.num_failed for w in windows] == [0, 0, 0, 1]
    assert [w.output_rate for w in windows] == [0.1, 0.2, 0.0, pytest.approx(1 / 5)]  # the last one lasts 5 s
    assert [w.itl_p99_s is None for w in windows] == [True, False, True, True]
    assert windows[1].itl_p99_s == pytest.approx(3.965, rel=0.01)


def test_a_sample_is_uniform_and_holds_no_more_than_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_module, "SAMPLE", 100)
    found = StatsCollector(Slo(), seed=3)
    for number in range(1_000):
        found.ended(record("a", 0.0, ttft_s=1.0 + number), 0)
        found.ended(failed("a", 0.0, "timeout"), 0)
    sample = found.sample()
    assert len(sample) == len({one.ttft_s for one in sample}) == 100
    assert sum(one.ttft_s > 500 for one in sample) in range(30, 71)  # 4 standard deviations around half


def test_a_tally_keeps_no_records() -> None:
    """Ten times the requests, the same buckets and windows."""
    chance = random.Random(0)

    def size(count: int) -> int:
        found = StatsCollector(Slo())
        for _ in range(count):
            found.ended(record("a", chance.uniform(0, 50), *(chance.uniform(0.01, 0.02) for _ in range(9))), 0)
        report = LoadReport(name="x", wall_s=60.0, scopes=found.scopes(60.0), windows=found.windows(60.0))
        return len(msgspec.json.encode(report))

    assert size(2_000) < 1.2 * size(200)


# ---- the report


def report(*records: Record, slo: Slo | None = None, **changes: object) -> LoadReport:
    return reported(tallied(*records, slo=slo), slo=slo or Slo(), **changes)


def test_a_report_reads_as_it_should() -> None:
    """To see what a change does to it: write the text to the file and look at the difference."""
    client = ClientFacts(late_p99_s=0.25, late_max_s=0.25, most_open=4, num_held=0, held_s=0.0)
    text = markdown(report(*RECORDS, slo=Slo(ttft_s=1.0, itl_s=0.6), client=client))
    assert text == (Path(__file__).parent / "load_report.md").read_text()


def test_what_no_reader_may_overlook_is_bold() -> None:
    facts = {"late_p99_s": 0.001, "late_max_s": 0.002, "most_open": 3, "num_held": 0, "held_s": 0.0}
    calm = markdown(report(*RECORDS, client=ClientFacts(**facts)))
    assert "At most 3 open at once; client late 1.0 ms at p99, 2.0 ms at most." in calm and "**" not in calm
    late = markdown(report(*RECORDS, client=ClientFacts(**{**facts, "late_max_s": 0.3})))
    assert "**The client fell behind its schedule**" in late
    held = markdown(report(*RECORDS, client=ClientFacts(**{**facts, "num_held": 7, "held_s": 1.25})))
    assert "**This was no open loop: --max-open was reached, 7 requests were held back, 1.2 s together.**" in held
    assert "**Stopped before its end.**" in markdown(report(*RECORDS, is_whole=False))


def test_a_long_timeline_is_thinned_and_marked() -> None:
    windows = tuple(
        LoadWindow(
            start_s=10.0 * i, num_sent=i, num_ended=0, num_failed=0, output_rate=0.0, itl_p99_s=None, most_open=0
        )
        for i in range(100)
    )
    text = markdown(report(*RECORDS, windows=windows))
    assert "Every 4th window" in text
    assert sum(line.endswith("| 0.0 | - |") for line in text.splitlines()) == 25 <= MOST_WINDOWS


def test_json_can_be_read_again_and_what_is_no_report_is_named(tmp_path: Path) -> None:
    result = report(*RECORDS, slo=Slo(ttft_s=1.0))
    path = tmp_path / "a.json"
    path.write_bytes(msgspec.json.encode(result))
    assert read_report(path) == result
    path.write_text('{"name": "x", "wall_s": 1, "scopes": [{"kind": 3}]}')
    with pytest.raises(NoReport, match=r"a\.json is no report: .*\$\.scopes"):
        read_report(path)
    with pytest.raises(NoReport, match=r"b\.json"):
        read_report(tmp_path / "b.json")
