"""Test that a workload is found by its name, and the errors when it cannot be opened."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane
from tandem.workload.source import built_in, built_in_names, open_workload

DOCS = Path(__file__).resolve().parents[3] / "docs/simulator.md"
MIX = "rate: 3\ngroups: {only: {share: 1.0, prompt: 10, output: [1, 2]}}\n"


def refusal(name: str, **changes: object) -> str:
    options: dict[str, object] = {"seed": 1, "count": 1, "rate": 1.0, **changes}
    with pytest.raises(TandemError) as caught:
        list(open_workload(name, **options))  # type: ignore[arg-type]
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    return caught.value.message


@pytest.mark.parametrize("name", built_in_names())
def test_every_built_in_mix_has_a_rate_and_all_its_groups(name: str) -> None:
    requests = list(open_workload(name, seed=1, count=400, rate=None))
    assert {scheduled.group for scheduled in requests} == {group.name for group in built_in(name).groups}


@pytest.mark.parametrize("name", built_in_names())
def test_the_documents_list_every_mix_with_its_rate_and_its_groups(name: str) -> None:
    mix = built_in(name)
    (row,) = re.findall(rf"^\| `{name}` \| ([\d.]+) \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    assert float(row[0]) == mix.rate
    assert {f"`{group.name}`" for group in mix.groups} <= set(re.findall(r"`[a-z]+`", row[1]))


@pytest.mark.slow
def test_built_in_mixes_have_their_shapes() -> None:
    def shape(name: str) -> dict[str, tuple[float, object]]:
        return {group.name: (group.share, group.prompt) for group in built_in(name).groups}

    assert shape("mix") == {"short": (0.7, (64, 200)), "medium": (0.2, (550, 650)), "long": (0.1, (2400, 2600))}
    by_group: dict[str, list[int]] = {}
    for scheduled in open_workload("rag", seed=1, count=1000, rate=1.0):
        by_group.setdefault(scheduled.group, []).append(len(scheduled.request.prompt_tokens))
    assert {name: len(found) for name, found in by_group.items()} == {"short": 600, "rag": 300, "transcript": 100}
    assert max(by_group["short"]) < 256 and min(by_group["transcript"]) > 14_000
    assert min(by_group["rag"]) >= 8_000 and max(by_group["rag"]) < 16_500
    (agent,) = built_in("agent").groups
    assert agent.prefix is not None and agent.prefix.num_documents == 1 and agent.turns != (1, 1)
    tenants = {group.tenant: group.lane for group in built_in("tenants").groups}
    assert sorted(tenants.values()) == list(Lane) and "" not in tenants


@pytest.mark.parametrize("name", ["my.yaml", "my.yml"])
def test_a_path_to_a_mix_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(MIX)
    requests = list(islice(open_workload(str(path), seed=1, count=None, rate=None), 50))
    assert [len(scheduled.request.prompt_tokens) for scheduled in requests] == [10] * 50


def test_opening_errors_have_a_reason(tmp_path: Path) -> None:
    names = "agent, batch-night, cached-documents, flood, long-paste, mix, month-end, noisy, rag, tenants"
    assert refusal("nothing").startswith("nothing: ") and refusal("nothing").endswith(names)
    assert "cannot be read" in refusal(str(tmp_path / "missing.yaml"))
    assert refusal("mix", count=0) == "mix: count must be at least 1, got 0"
    assert refusal("mix", rate=-1.0) == "mix: a rate of requests per second is needed, got -1.0"
    assert "give a rate" in refusal("mix", speedup=2.0)


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(TandemError):
        open_workload("nothing", seed=1, count=1, rate=1.0)
