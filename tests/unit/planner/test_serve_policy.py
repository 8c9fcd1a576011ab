"""Test the policy that Serve's controller calls: its answers, how Serve copies it, and that it does not block."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.core.ids import PlannerId, ServeId
from tandem.planner import serve_policy
from tandem.planner.serve_name import serve_name
from tandem.planner.serve_policy import ReplicaPolicy, replicas
from tandem.stores.replica_targets import ReplicaTargets, TargetRecord

MODEL = "tiny"


def context(target: int, least: int = 1, most: int = 10) -> Any:
    return SimpleNamespace(
        target_num_replicas=target,
        current_num_replicas=0,
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
    )


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def settings(directory: Path, url: str, namespace: str) -> str:
    path = directory / "config.yaml"
    path.write_text(f"redis: {{url: {url}, namespace: {namespace}}}\nmodel: {{served_name: {MODEL}}}\n")
    return str(path)


def publish(url: str, namespace: str, **numbers: int) -> None:
    async def store() -> None:
        targets = ReplicaTargets(url, namespace)
        await targets.publish(TargetRecord(model=MODEL, planner=PlannerId("p"), replicas=numbers))
        await targets.close()

    asyncio.run(store())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_policy, "REFRESH_S", 0.01)


@pytest.mark.redis
def test_it_returns_the_published_target_within_bounds(redis_url: str, tmp_path: Path, quick: None) -> None:
    policy = replicas(role="decode", config=settings(tmp_path, redis_url, "policy"))
    assert policy(context(3)) == (3, {}), "nothing is known yet"
    publish(redis_url, "policy", prefill=1, decode=6)
    until(lambda: policy(context(3)) == (6, {}), "the target")
    assert policy(context(3, most=4)) == (4, {}) and policy(context(3, least=8)) == (8, {})
    publish(redis_url, "policy", prefill=2)
    until(lambda: policy(context(3)) == (3, {}), "a target without this role leaves the number as it is")


@pytest.mark.redis
def test_settings_that_change_are_followed(redis_url: str, tmp_path: Path, quick: None) -> None:
    publish(redis_url, "before", decode=6)
    publish(redis_url, "after", decode=7)
    policy = replicas(role="decode", config=settings(tmp_path, redis_url, "before"))
    until(lambda: policy(context(3)) == (6, {}), "the target of the first settings")
    settings(tmp_path, redis_url, "after")
    until(lambda: policy(context(3)) == (7, {}), "the target of the second settings")


@pytest.mark.redis
def test_it_publishes_what_serve_intends_to_run(redis_url: str, tmp_path: Path, quick: None) -> None:
    policy = replicas(role="prefill", config=settings(tmp_path, redis_url, "deployed"), model="other")
    policy(context(5))

    async def read() -> dict[str, dict[ServeId, int]]:
        targets = ReplicaTargets(redis_url, "deployed")
        try:
            return await targets.deployed("other")
        finally:
            await targets.close()

    until(lambda: asyncio.run(read()) == {"prefill": {serve_name(): 5}}, "the number")
    policy = replicas(role="prefill", config=settings(tmp_path, redis_url, "deployed"), model="other")
    policy(context(6))
    until(lambda: 6 in asyncio.run(read())["prefill"].values(), "the number of a deployment anew")
    assert [*asyncio.run(read())["prefill"]] == [serve_name()], "which is by the same Serve"


@pytest.mark.redis
def test_beside_another_serve_the_number_stays(redis_url: str, tmp_path: Path, quick: None) -> None:
    def another(role: str) -> None:
        async def store() -> None:
            targets = ReplicaTargets(redis_url, "beside")
            await targets.publish_deployed(MODEL, role, ServeId("head-2"), 2)
            await targets.close()

        asyncio.run(store())

    policy = replicas(role="decode", config=settings(tmp_path, redis_url, "beside"))
    publish(redis_url, "beside", decode=6)
    another("prefill")
    until(lambda: policy(context(3)) == (6, {}), "the target, beside a Serve of another role")
    another("decode")
    until(lambda: policy(context(3)) == (3, {}), "its own number")


def test_without_redis_or_settings_the_number_stays(tmp_path: Path, quick: None) -> None:
    for config in (settings(tmp_path, f"unix://{tmp_path}/none.sock", "n"), str(tmp_path / "missing.yaml"), ""):
        policy = replicas(role="decode", config=config)
        assert policy(context(4)) == (4, {})


def test_what_was_read_long_ago_does_not_count(tmp_path: Path) -> None:
    policy = replicas(role="decode", config=settings(tmp_path, f"unix://{tmp_path}/none.sock", "n"))
    now = policy._clock.now()
    policy._known.found = serve_policy._Found(7, now)
    assert policy(context(2))[0] == 7
    policy._known.found = serve_policy._Found(7, now - serve_policy.STALE_S)
    assert policy(context(2))[0] == 2


def test_its_thread_ends_with_it(tmp_path: Path, quick: None) -> None:
    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "tandem-target-mixed"]

    policy: ReplicaPolicy | None = replicas(
        role="mixed", config=settings(tmp_path, f"unix://{tmp_path}/none.sock", "n")
    )
    assert threads()
    del policy
    gc.collect()
    until(lambda: not threads(), "the end of its thread")


def test_another_role_is_refused() -> None:
    with pytest.raises(ValueError, match="prefill, decode, mixed"):
        replicas(role="encode")


@pytest.mark.slow
def test_serve_takes_it_as_it_is_copied_and_made() -> None:
    """Run in a process of its own, because importing Serve takes long and reads the environment."""
    code = """
import sys
from types import SimpleNamespace as N
from ray.serve.config import AutoscalingPolicy
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig
named = AutoscalingPolicy(
    policy_function="tandem.planner.serve_policy:replicas", policy_kwargs={"role": "decode", "config": "/nowhere"}
)
copied = AutoscalingPolicy.from_serialized_policy_def(
    {"policy_function": named.policy_function, "policy_kwargs": named.policy_kwargs}, named.get_serialized_policy_def()
)
policy = _resolve_policy_callable(copied)
config = AutoscalingConfig(min_replicas=1, max_replicas=9, upscale_delay_s=0, downscale_delay_s=0)
ctx = N(target_num_replicas=3, current_num_replicas=3, capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9, policy_state={}, total_num_requests=0, config=config)
assert policy(ctx) == (3, {}), policy(ctx)
number, state = _apply_autoscaling_config(policy)(ctx)
assert number == 3, (number, state)
def decide(target, current):
    policy._known.found = type(policy).__call__.__globals__["_Found"](target, policy._clock.now())
    config = AutoscalingConfig(min_replicas=0, max_replicas=9, upscale_delay_s=0, downscale_delay_s=0)
    ctx = N(target_num_replicas=current, current_num_replicas=current, capacity_adjusted_min_replicas=0,
            capacity_adjusted_max_replicas=9, policy_state={}, total_num_requests=0, config=config)
    return _apply_autoscaling_config(policy)(ctx)[0]
numbers = [decide(0, 1), decide(0, 0), decide(1, 0), decide(3, 0), decide(0, 3)]
assert numbers == [0, 0, 1, 3, 1], numbers  # from 3 to 0 by way of 1, which is Serve's own rule
again = AutoscalingPolicy.from_serialized_policy_def(
    {"policy_function": named.policy_function, "policy_kwargs": named.policy_kwargs}, named.get_serialized_policy_def()
)
# Copied by value, with the name left where it is: one for each process.
names = {type(made).__call__.__globals__["_exchange_target"].__globals__["serve_name"] for made in
         (policy, _resolve_policy_callable(again))}
from tandem.planner.serve_name import serve_name
assert names == {serve_name}, names
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_policy_imports_neither_ray_nor_torch() -> None:
    heavy = {"torch", "ray", "numpy", "kubernetes"}
    code = f"import sys, tandem.planner.serve_policy, tandem.planner.main; print(*({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
