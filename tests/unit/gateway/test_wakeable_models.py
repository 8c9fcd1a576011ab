"""Test which models a gateway knows that a planner can wake, with a real Redis."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from tandem.core.bundle import TokenizerBundle
from tandem.core.clock import SystemClock
from tandem.core.ids import PlannerId
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.text.text_models import TextModels
from tandem.gateway.workers import wakeable_models
from tandem.gateway.workers.wakeable_models import WakeableModels
from tandem.stores.model_registry import ModelRecord, ModelRegistry
from tandem.stores.redis_client import RedisClient
from tandem.stores.replica_targets import ReplicaTargets, TargetRecord
from tests.unit.gateway.scripted_worker import until

pytestmark = pytest.mark.redis
_numbers = itertools.count()


class Rig:
    """A Redis namespace with gateways' searches and one planner's target of the model `tiny`."""

    def __init__(self, url: str, bundle: TokenizerBundle) -> None:
        self.bundle = bundle
        self._url = url
        self._namespace = f"wakeable{next(_numbers)}"
        self._targets = ReplicaTargets(url, self._namespace)
        self._redis = RedisClient(url)
        self.registry = ModelRegistry(url, self._namespace)
        self._searches: list[WakeableModels] = []

    async def search(self, *, is_live: bool) -> tuple[WakeableModels, TextModels]:
        """Start the search of one gateway, which sees a live worker of the model or none."""
        texts = TextModels(keep_bundles=True)
        live: dict[str, ServedModel] = {}
        if is_live:
            text = await texts.load(self.bundle.digest, self.bundle)
            live["tiny"] = ServedModel("tiny", 64, text, 7, ("alias",))
        registry, targets = (kind(self._url, self._namespace) for kind in (ModelRegistry, ReplicaTargets))
        made = WakeableModels(lambda: live, registry, targets, texts, SystemClock())  # type: ignore[arg-type]
        self._searches.append(made)
        await made.start()
        return made, texts

    async def plan(self) -> None:
        planner = PlannerId("p")
        await self._targets.publish(
            TargetRecord(
                model="tiny",
                planner=planner,
                replicas={"prefill": 0, "decode": 0},
                minimums={"prefill": 0, "decode": 1},
            )
        )

    async def forget_target(self) -> None:
        await self._redis.execute("DEL", self._targets._keys("tiny")[0])

    async def stop(self) -> None:
        for search in self._searches:
            await search.stop()
        for store in (self._targets, self.registry):
            await store.close()
        await self._redis.aclose()


@pytest.fixture
async def rig(redis_url: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(wakeable_models, "PERIOD_S", 0.02)
    made = Rig(redis_url, TokenizerBundle(tokenizer_json=tokenizer.to_str().encode(), chat_template="{{ 1 }}"))
    yield made
    await made.stop()


async def test_a_model_can_be_woken_as_long_as_a_planner_publishes_its_target(rig: Rig) -> None:
    search, _ = await rig.search(is_live=True)
    await until(lambda: search._published)
    assert not search.models()
    await rig.plan()
    await until(lambda: list(search.models()) == ["tiny"])
    assert search.optional_roles() == {"tiny": {"prefill"}}
    await rig.forget_target()
    await until(lambda: not search.models())


async def test_a_gateway_that_starts_after_the_last_worker_is_gone_knows_the_model(rig: Rig) -> None:
    first, _ = await rig.search(is_live=True)
    await until(lambda: first._published)
    second, texts = await rig.search(is_live=False)
    await until(lambda: second._stored is not None)
    assert not texts._loaded, "a model that no planner has is not loaded"
    await rig.plan()
    await until(lambda: second.models())
    model = second.models()["tiny"]
    assert (model.name, model.max_model_len, model.aliases) == ("tiny", 64, ("alias",))
    assert model.text.decode(model.text.encode("hello").ids, skip_special_tokens=True) == "hello"


async def test_a_changed_model_is_published_again_and_an_unchanged_one_is_not(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, _ = await rig.search(is_live=True)
    publish, records = search._registry.publish, list[ModelRecord]()

    async def publish_and_record(record: ModelRecord) -> None:
        records.append(record)
        await publish(record)

    monkeypatch.setattr(search._registry, "publish", publish_and_record)
    await until(lambda: records)
    live: Callable[[], dict[str, ServedModel]] = search._live  # type: ignore[assignment]
    longer = {name: replace(model, max_model_len=128) for name, model in live().items()}
    search._live = lambda: longer
    await until(lambda: len(records) == 2)
    assert [record.max_model_len for record in records] == [64, 128]
    monkeypatch.setattr(wakeable_models, "PUBLISH_PERIOD_S", 0.1)
    await until(lambda: len(records) == 3)
    assert (await rig.registry.read())[0] == records[-1]


async def test_a_record_whose_tokenizer_cannot_be_read_is_reported_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    broken = TokenizerBundle(tokenizer_json=b"{")
    await rig.registry.publish(ModelRecord(name="tiny", max_model_len=7, bundle=broken))
    await rig.plan()
    search, _ = await rig.search(is_live=False)
    await until(lambda: "the tokenizer of model tiny in Redis cannot be used" in caplog.text)
    assert not search.models()
