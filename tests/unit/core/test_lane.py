"""Test the text form of sets of lanes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.config import WorkerConfig
from tandem.core.lane import ALL_LANES, Lane, lane_labels, lanes_of, parse_lanes


@given(st.frozensets(st.sampled_from(list(Lane)), min_size=1))
def test_labels_round_trip(lanes: frozenset[Lane]) -> None:
    labels = lane_labels(lanes)
    assert lanes_of(labels) == parse_lanes(", ".join(labels)) == lanes
    assert (labels == ()) is (lanes == ALL_LANES)


def test_an_empty_text_means_all_lanes() -> None:
    assert WorkerConfig().served_lanes == ALL_LANES
    assert WorkerConfig(lanes="batch").served_lanes == {Lane.BATCH}


@pytest.mark.parametrize("text", ["nightly", "batch,", "Batch"])
def test_an_unknown_lane_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a lane: use interactive, standard, batch"):
        parse_lanes(text)
