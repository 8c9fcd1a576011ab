"""Test that every key of a mix file is read, and that errors are refused with file and key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.workload.arrivals import Batches, Bursts, Constant, Poisson
from tandem.workload.lengths import LogNormal, Quantiles
from tandem.workload.mix import Mix
from tandem.workload.mix_file import read_mix
from tandem.workload.request_class import Prefix, RequestClass

WHOLE = """
rate: 2
arrivals: {bursts: {on_s: 10, off_s: 60.5, outside: 0.1}}
groups:
  plain: {share: 0.5, prompt: 7, output: [3, 9]}
  agent:
    share: 0.25
    tenant: acme
    priority: 2
    prefix: {tokens: [10, 20], documents: 30, zipf: 0.8}
    prompt: {median: 250.5, sigma: 0.8, min: 16, max: 4000}
    output: {quantiles: {0: 5, 0.5: 50, 1: 500}}
    turns: [2, 6]
    think_s: 1.5
    arrivals: constant
  batch: {share: 0.25, prompt: 1, output: 1, prefix: {tokens: 5}, arrivals: {batches: {size: 8}}}
"""


def read(tmp_path: Path, text: str) -> Mix:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    return read_mix(path)


def test_every_key_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, WHOLE) == Mix(
        (
            RequestClass("plain", 0.5, (7, 7), (3, 9)),
            RequestClass(
                "agent",
                0.25,
                LogNormal(250.5, 0.8, 16, 4000),
                Quantiles(((0.0, 5), (0.5, 50), (1.0, 500))),
                tenant="acme",
                priority=2,
                prefix=Prefix((10, 20), 30, 0.8),
                turns=(2, 6),
                think_s=1.5,
                arrivals=Constant(),
            ),
            RequestClass("batch", 0.25, (1, 1), (1, 1), prefix=Prefix((5, 5)), arrivals=Batches(8)),
        ),
        Bursts(10.0, 60.5, 0.1),
        2.0,
    )


def test_the_mix_in_the_readme_is_valid(tmp_path: Path) -> None:
    readme = Path(__file__).parents[3] / "loadtest" / "README.md"
    (example,) = re.findall(r"```yaml\n(rate: .*?)```", readme.read_text(), re.DOTALL)
    assert [group.name for group in read(tmp_path, example).groups] == ["agent", "rag"]


def test_a_group_may_override_another(tmp_path: Path) -> None:
    text = "groups: {a: &a {share: 0.5, prompt: 1, output: 1}, b: {<<: *a, prompt: 2}}"
    assert [group.prompt for group in read(tmp_path, text).groups] == [(1, 1), (2, 2)]


def test_omitted_keys_have_defaults(tmp_path: Path) -> None:
    mix = read(tmp_path, "groups: {a: {share: 1, prompt: 1, output: 1}}")
    assert mix == Mix((RequestClass("a", 1.0, (1, 1), (1, 1)),), Poisson(), None)


def one(**keys: str) -> str:
    """Return a mix of one group with some keys beside the three that it needs, or instead of these."""
    text = ", ".join(f"{key}: {value}" for key, value in {"share": 1, "prompt": 1, "output": 1, **keys}.items())
    return f"groups: {{a: {{{text}}}}}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("", "some.yaml: must be a mapping, got None"),
        ("[1, 2]", "some.yaml: must be a mapping, got"),
        ("rate: 1", "some.yaml: 'groups' is missing"),
        ("groups: {}", "some.yaml: groups: must be a mapping"),
        ("groups: {a: 3}", "some.yaml: groups.a: must be a mapping, got 3"),
        ("groups: {a: {share: 1, prompt: 1}}", "some.yaml: groups.a: 'output' is missing"),
        (one(size="3"), "some.yaml: groups.a: 'size' is not known"),
        ("speed: 1\n" + one(), "some.yaml: 'speed' is not known"),
        (one(share="0.9"), "some.yaml: shares must add up to 1, got [0.9]"),
        (one(share="70%"), "groups.a.share: must be a number, got '70%'"),
        (one(share="true"), "groups.a.share: must be a number, got True"),
        (one(share=".nan"), "groups.a.share: must be a number, got nan"),
        (one(share="-1"), "groups.a: share must be in (0, 1], got -1.0"),
        (one(prompt="[9, 3]"), "groups.a.prompt: must be a range [low, high], got [9"),
        (one(prompt="[9]"), "groups.a.prompt: must be a range [low, high]"),
        (one(prompt="[1, 2.5]"), "groups.a.prompt[1]: must be a whole number in [1, "),
        (one(prompt="0"), "groups.a.prompt: must be a whole number in [1, "),
        (one(prompt="1e9"), "groups.a.prompt: must be a whole number in [1, "),
        (one(prompt="{median: 5, sigma: 1, min: 9, max: 20}"), "groups.a.prompt: the median must lie within [9, 20]"),
        (one(prompt="{median: 5, sigma: 1}"), "groups.a.prompt: 'min' is missing"),
        (one(prompt="{quantiles: {0: 5, 0.5: 3, 1: 9}}"), "groups.a.prompt.quantiles: a range must lie"),
        (one(prompt="{quantiles: {low: 5, 1: 9}}"), "groups.a.prompt.quantiles: must be a number, got 'low'"),
        (one(priority="high"), "groups.a.priority: must be a whole number"),
        (one(tenant="7"), "groups.a.tenant: must be text, got 7"),
        (one(think_s="-1"), "groups.a: think_s must not be negative"),
        (one(prefix="{tokens: 4, documents: 0}"), "groups.a.prefix.documents: must be a whole number in [1, "),
        (one(prefix="{tokens: 4, zipf: -2}"), "groups.a.prefix: zipf must be in [0, 10]"),
        ("arrivals: often\n" + one(), "arrivals: must be poisson, constant,"),
        ("arrivals: {bursts: {on_s: 1}}\n" + one(), "some.yaml: arrivals.bursts: 'off_s' is missing"),
        (
            "arrivals: {bursts: {on_s: 1, off_s: 2, outside: 1}}\n" + one(),
            "some.yaml: arrivals: outside is a share in [0, 1)",
        ),
        ("rate: -1\n" + one(), "some.yaml: rate: must not be negative, got -1"),
        ("rate: [1\n", "some.yaml: cannot be read"),
        ("groups: {a: {share: 1, prompt: 1, output: 1}, a: {share: 1, prompt: 1, output: 1}}", "a key twice"),
        ("rate: 2024-13-45", "some.yaml: cannot be read: month must be"),
        ("rate: " + "[" * 1000, "some.yaml: cannot be read"),
        ("groups: !!python/object/apply:os.getcwd []", "some.yaml: cannot be read"),
    ],
)  # fmt: skip
def test_errors_are_refused_with_their_place(tmp_path: Path, wrong: str, message: str) -> None:
    with pytest.raises(TandemError) as caught:
        read(tmp_path, wrong)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert message in caught.value.message and caught.value.message.startswith(str(tmp_path / "some.yaml"))
