"""Test what both exposition formats hold, as Prometheus' own parsers and promtool read them."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.samples import Sample

from tandem.obs.metrics import instruments as on
from tandem.obs.metrics.instrument import Instrument, Kind, counter, gauge, histogram
from tandem.obs.metrics.instruments import all_instruments
from tandem.obs.metrics.metrics import HistogramSnapshot, MetricFamily, Metrics
from tandem.obs.metrics.prometheus import PrometheusCollector, prometheus_name

PETS = counter("pets", "{pet}", 'Pets, "so far" \\ or\nso.', ("kind", "some.owner"))
SPEED = histogram("speed", "s", "Speed.", (0.5, 1.0), ("lane",))
ALL = [*all_instruments(), PETS, SPEED]


class Collected(Metrics):
    """Metrics of which these families were collected."""

    def __init__(self, families: Sequence[MetricFamily]) -> None:
        super().__init__()
        self._collected = families

    def collect(self) -> list[MetricFamily]:
        return list(self._collected)


def written(*families: MetricFamily, openmetrics: bool) -> str:
    accept = "application/openmetrics-text; version=1.0.0" if openmetrics else "text/plain"
    lines = PrometheusCollector(Collected(families)).exposition(accept)[1].decode().splitlines(keepends=True)
    return "".join(line for line in lines if "vllm:" not in line)


def samples(*families: MetricFamily, openmetrics: bool) -> Iterator[Sample]:
    text = written(*families, openmetrics=openmetrics)
    for family in read_openmetrics(text) if openmetrics else read_text(text):
        yield from family.samples


def a_point(instrument: Instrument) -> float | HistogramSnapshot:
    if instrument.kind is not Kind.HISTOGRAM:
        return 1
    return HistogramSnapshot((1,) * (len(instrument.bounds) + 1), 3.5, {})


def everything() -> list[MetricFamily]:
    """Return one series of each instrument."""
    return [MetricFamily(each, {("x",) * len(each.attributes): a_point(each)}) for each in ALL]


def test_text_follows_the_exposition_format() -> None:
    pets = MetricFamily(PETS, {("cat", 'a"b\\c\nd'): 2, ("dog", ""): 0.5})
    speed = MetricFamily(SPEED, {("batch",): HistogramSnapshot((1, 0, 2), 4.25, {})})
    assert written(pets, speed, openmetrics=False).splitlines() == [
        '# HELP pets_total Pets, "so far" \\\\ or\\nso.',
        "# TYPE pets_total counter",
        'pets_total{kind="cat",some_owner="a\\"b\\\\c\\nd"} 2.0',
        'pets_total{kind="dog",some_owner=""} 0.5',
        "# HELP speed_seconds Speed.",
        "# TYPE speed_seconds histogram",
        'speed_seconds_bucket{lane="batch",le="0.5"} 1.0',
        'speed_seconds_bucket{lane="batch",le="1.0"} 1.0',
        'speed_seconds_bucket{lane="batch",le="+Inf"} 3.0',
        'speed_seconds_count{lane="batch"} 3.0',
        'speed_seconds_sum{lane="batch"} 4.25',
    ]


def test_openmetrics_differs_where_it_does() -> None:
    metrics = Metrics()
    metrics.counter(PETS).add(2, "cat", "a")
    metrics.histogram(SPEED).of("batch").record_traced(0.75, "ab" * 16, 1_700_000_000.25)
    assert written(*metrics.collect(), openmetrics=True).splitlines() == [
        '# HELP pets Pets, \\"so far\\" \\\\ or\\nso.',
        "# TYPE pets counter",
        'pets_total{kind="cat",some_owner="a"} 2.0',
        "# HELP speed_seconds Speed.",
        "# TYPE speed_seconds histogram",
        "# UNIT speed_seconds seconds",
        'speed_seconds_bucket{lane="batch",le="0.5"} 0.0',
        f'speed_seconds_bucket{{lane="batch",le="1.0"}} 1.0 # {{trace_id="{"ab" * 16}"}} 0.75 1700000000.25',
        'speed_seconds_bucket{lane="batch",le="+Inf"} 1.0',
        'speed_seconds_count{lane="batch"} 1.0',
        'speed_seconds_sum{lane="batch"} 0.75',
        "# EOF",
    ]
    (seen,) = [each for each in samples(*metrics.collect(), openmetrics=True) if each.exemplar]
    assert seen.exemplar is not None
    assert (seen.exemplar.labels, seen.exemplar.value) == ({"trace_id": "ab" * 16}, 0.75)
    assert "trace_id" not in written(*metrics.collect(), openmetrics=False), "text has no exemplars"


@pytest.mark.parametrize("openmetrics", [False, True])
def test_every_instrument_is_read_back(openmetrics: bool) -> None:
    text = written(*everything(), openmetrics=openmetrics)
    read = {family.name: family for family in (read_openmetrics(text) if openmetrics else read_text(text))}
    assert len(read) == len(ALL)
    for family in everything():
        name = prometheus_name(family.instrument)
        kind = family.instrument.kind
        parsed = read[name.removesuffix("_total")]
        assert parsed.type == kind.value, name
        sample = f"{name}_count" if kind is Kind.HISTOGRAM else name
        (found,) = [each for each in parsed.samples if each.name == sample]
        (point,) = family.points.values()
        assert found.value == (point.count if isinstance(point, HistogramSnapshot) else point)


@pytest.mark.skipif(not shutil.which("promtool"), reason="Prometheus is not installed")
def test_promtool_has_nothing_against_it() -> None:
    """promtool's lint warnings about names have exit status 3; unreadable text has status 1."""
    text = written(*everything(), openmetrics=False)
    ran = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert ran.returncode in (0, 3), ran.stderr
    assert "no help text" not in ran.stderr and "error" not in ran.stderr.lower(), ran.stderr


@given(
    st.dictionaries(
        st.tuples(st.text(), st.text()), st.floats() | st.integers(min_value=0, max_value=2**53), max_size=5
    ),
    st.booleans(),
)
def test_no_value_and_no_label_is_too_strange(points: dict[tuple[str, str], float], openmetrics: bool) -> None:
    free = gauge("strange", "", "Strange.", ("one", "two"))
    found = {
        (each.labels["one"], each.labels["two"]): each.value
        for each in samples(MetricFamily(free, points), openmetrics=openmetrics)
    }
    assert found.keys() == points.keys()
    for values, value in points.items():
        assert found[values] == value or (math.isnan(found[values]) and math.isnan(value))


@pytest.mark.parametrize(
    ("instrument", "name"),
    [
        (on.TIME_TO_FIRST_TOKEN, "gen_ai_server_time_to_first_token_seconds"),
        (on.REQUESTS, "tandem_requests_total"),
        (on.TRANSFER_BYTES, "tandem_transfer_bytes_total"),
        (on.TRANSFER_BUSY, "tandem_transfer_busy_seconds_total"),
        (on.PREFIX_INDEX_BYTES, "tandem_prefix_index_size_bytes"),
        (on.KV_UNUSED, "tandem_kv_free_ratio"),
        (on.TENANT_QUOTA_LEFT, "tandem_tenant_quota_left_ratio"),
        (on.TOKEN_USAGE, "gen_ai_client_token_usage"),
        (on.READY, "tandem_ready"),
        (on.WORKER_INFO, "tandem_worker_info"),
        (on.PROCESS_CPU, "process_cpu_time_seconds_total"),
    ],
)
def test_names_are_translated_by_opentelemetry_s_rules(instrument: Instrument, name: str) -> None:
    assert prometheus_name(instrument) == name


def test_no_two_instruments_have_a_name() -> None:
    assert len({prometheus_name(each) for each in ALL}) == len(ALL)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "text/plain; version=0.0.4; charset=utf-8"),
        (";;,,=;q", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        ),
    ],
)
def test_the_accept_header_chooses_the_format(accept: str, content_type: str) -> None:
    assert PrometheusCollector(Metrics()).exposition(accept)[0] == content_type
