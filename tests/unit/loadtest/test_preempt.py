"""Test how the rounds of full clusters are summarised."""

from __future__ import annotations

from loadtest.cluster.preempt import Round, report


def test_the_delay_of_the_question_is_counted_in_decode_steps() -> None:
    rounds = [
        Round(0.1, 0.12, 0.02, 0.03, 0.01, 1, (0.5,), 0, 0),
        Round(0.1, 0.13, 0.02, 0.03, 0.01, 2, (0.7, 0.9), 1, 7),
    ]
    (row,) = [line for line in report({"migrate": rounds, "park": []}).splitlines() if "migrate" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert (
        cells[:2] == ["migrate", "2"]
        and cells[4:6] == ["20.0 / 20.0", "30.0 / 30.0"]
        and cells[6:] == ["10.0", "2.5", "3", "700 / 900", "1", "7"]
    )
    assert "| park |" not in report({"park": []})
