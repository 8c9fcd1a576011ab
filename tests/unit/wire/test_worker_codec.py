"""Test the round trips of all messages of worker.proto and kv.proto, and the errors of malformed ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import (
    Cancelled,
    Failed,
    Finished,
    FinishReason,
    JobEvent,
    KVReceived,
    LaneYield,
    MigrationOffered,
    Pauses,
    Preempted,
    Preemption,
    SampledToken,
    Token,
)
from tandem.core.ids import (
    BlockHash,
    BlockId,
    GatewayId,
    HandoffId,
    HandoffKey,
    Incarnation,
    JobKey,
    RequestId,
    WorkerId,
    WorkerRef,
)
from tandem.core.lane import Lane
from tandem.core.request import MAX_COUNT, GenerateJob, PrefillJob, RemotePrefix, Request, ResumeJob, SamplingParams
from tandem.core.request_stages import JobStages, Stage, Wait, WaitCause
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import PROMPT_SIZES, EngineStats, WorkerLoad
from tandem.engine.transfer_messages import TransportPeer, TransportRank
from tandem.kv.handoff import MAX_REMOTE_PREFIX_BLOCKS, Announcement, BlockDigest, RemotePrefixRequest
from tandem.kv.layout import KVGroup, KVLayout, KVRegion
from tandem.wire import job_codec, kv_codec, worker_codec
from tandem.wire.gen import kv_pb2, worker_pb2

U31, U32, U64 = st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
TOKENS = st.lists(U32, max_size=8).map(tuple)
SECONDS = st.floats(0, 1e6)

KEY = JobKey(RequestId("r"), 1)
ENCODED_KEY = job_codec.encode_key(KEY)
LAYOUT = KVLayout(8, (KVGroup(layers=2, heads=2, head_dim=4, dtype="float32"),))
PEER = TransportPeer(
    WorkerRef(WorkerId("w"), Incarnation(1), "h:1"),
    LAYOUT,
    (TransportRank("a", b"m", KVRegion(4096, 3, LAYOUT.block_bytes, 0, 2)),),
)
workers = st.builds(
    WorkerRef, NAMES.map(WorkerId), st.integers(1, 2**64 - 1).map(Incarnation), NAMES.map(lambda n: f"{n}:1")
)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=U31,
    min_p=st.floats(0, 1),
    seed=U64,
    stop_token_ids=st.frozensets(U32, max_size=4),
    logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(
    Request,
    id=NAMES.map(RequestId),
    model=NAMES,
    prompt_tokens=st.lists(U32, min_size=1, max_size=8).map(tuple),
    sampling=samplings,
    priority=st.integers(-MAX_COUNT, MAX_COUNT),
    cache_salt=st.text(max_size=4),
)
prefixes = st.none() | st.builds(
    RemotePrefix, handoff=NAMES.map(HandoffId), source=workers, num_blocks=st.integers(1, MAX_COUNT)
)
one: dict[str, Any] = {"request": requests, "attempt": U32, "choice": st.integers(0, 127), "output_tokens": TOKENS}
several = one | {"choice": st.integers(0, 64), "num_choices": st.integers(2, 64), "output_tokens": st.just(())}
jobs = st.one_of(
    job
    for common in (one, several)
    for job in (
        st.builds(GenerateJob, **common, prefix=prefixes),
        st.builds(PrefillJob, **common, handoff=NAMES.map(HandoffId), prefix=prefixes),
        st.builds(ResumeJob, **common, handoff=NAMES.map(HandoffId), source=workers, offer_attempt=U32),
    )
)
submissions = st.builds(job_codec.Submission, NAMES.map(GatewayId), st.integers(1, 2**64 - 1).map(Incarnation), jobs)
keys = st.builds(JobKey, NAMES.map(RequestId), U32, U32)
sampled = st.builds(
    SampledToken,
    U32,
    st.none() | st.floats(allow_nan=False),
    st.lists(st.tuples(U32, st.floats(allow_nan=False)), max_size=3).map(tuple),
)
finished = st.builds(Finished, keys, st.none() | st.sampled_from(FinishReason), U32, U32)
failed = st.builds(Failed, keys, st.sampled_from(ErrorKind), st.text(max_size=20))
pulled = st.builds(KVReceived, keys, U32, U64, U32, U64, SECONDS, SECONDS, SECONDS, st.none() | workers)
tokens = st.builds(Token, keys, st.integers(0, 2**30), sampled)
handoff_keys = st.builds(HandoffKey, NAMES.map(HandoffId), U32)
moving = st.builds(MigrationOffered, keys, handoff_keys)
preempted = st.builds(Preempted, keys, U32)
counts = {"bool": st.booleans(), "int": U32, "tuple[int, ...]": st.tuples(*[st.integers(0, 2**40)] * len(Lane))}
by_size = st.tuples(*[st.integers(0, 2**40)] * len(Lane) * len(PROMPT_SIZES))
sizes = {"size_tokens": by_size, "size_longest": by_size}
loads = st.builds(WorkerLoad, **{f.name: counts[str(f.type)] for f in fields(WorkerLoad)} | sizes)
books = st.builds(EngineStats, **{f.name: counts[str(f.type)] for f in fields(EngineStats)})


@st.composite
def announcements(draw: st.DrawFn) -> Announcement:
    num_heads = draw(st.integers(0, 3))
    offered = st.builds(BlockDigest, U64.map(BlockId), st.lists(U64, min_size=num_heads, max_size=num_heads).map(tuple))
    blocks = tuple(draw(st.lists(offered, max_size=4)))
    first = tuple(draw(st.lists(sampled, max_size=3)))
    facts = (draw(U32), draw(st.booleans()), draw(st.booleans()))
    return Announcement(draw(handoff_keys), draw(U32), blocks, draw(U32), first, *facts)


@st.composite
def prefix_requests(draw: st.DrawFn) -> RemotePrefixRequest:
    hashes = draw(st.lists(st.binary(min_size=16, max_size=16).map(BlockHash), min_size=1, max_size=5))
    return RemotePrefixRequest(draw(st.integers(0, len(hashes) - 1)), tuple(hashes))


@st.composite
def peers(draw: st.DrawFn) -> TransportPeer:
    heads, layers, head_dim = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(1, 128))
    group = KVGroup(layers, heads, head_dim, draw(st.sampled_from(["float32", "bfloat16"])))
    layout = KVLayout(draw(st.sampled_from([8, 16])), (group,))
    cuts = sorted(draw(st.sets(st.integers(1, heads), min_size=1, max_size=3)))
    regions = [
        KVRegion(
            draw(st.integers(0, 2**48)),
            draw(st.integers(1, 2**20)),
            (stop - start) * group.head_bytes(layout.block_size),
            start,
            stop,
            draw(st.sampled_from(["cpu", "cuda:1"])),
        )
        for start, stop in zip([0, *cuts], cuts, strict=False)
    ]
    ranks = tuple(TransportRank(draw(NAMES), draw(st.binary(max_size=8)), region, draw(NAMES)) for region in regions)
    return TransportPeer(draw(workers), layout, ranks)


def sent(message: Any) -> Any:
    """Return the message after serializing and parsing it."""
    return type(message).FromString(message.SerializeToString())


@given(submissions)
def test_submissions_round_trip(submission: job_codec.Submission) -> None:
    assert job_codec.decode_submission(sent(job_codec.encode_submission(submission))) == submission


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("traceparent", "arrives"),
    [
        (TRACEPARENT, TRACEPARENT),
        ("", ""),
        ("x" * job_codec.MAX_TRACEPARENT, "x" * job_codec.MAX_TRACEPARENT),
        ("x" * (job_codec.MAX_TRACEPARENT + 1), ""),
        (TRACEPARENT.replace("7", "ä"), ""),
    ],
)
def test_a_malformed_traceparent_is_dropped_without_an_error(traceparent: str, arrives: str) -> None:
    message = a_submission()
    message.traceparent = traceparent
    decoded = job_codec.decode_submission(sent(message))
    assert decoded.job.request.traceparent == arrives
    assert job_codec.encode_submission(decoded).traceparent == arrives


@pytest.mark.parametrize(
    ("choice", "num_choices", "output"), [(0, 129, []), (127, 2, []), (2**32 - 1, 0, []), (0, 2, [5])]
)
def test_choices_that_no_request_has_are_refused(choice: int, num_choices: int, output: list[int]) -> None:
    message = a_submission()
    message.generate.SetInParent()
    message.key.choice, message.num_choices = choice, num_choices
    message.output_tokens.extend(output)
    with pytest.raises(TandemError, match="num_choices") as refusal:
        job_codec.decode_submission(sent(message))
    assert refusal.value.kind is ErrorKind.INVALID_REQUEST


@given(st.lists(tokens | finished | failed | pulled | moving | preempted | keys.map(Cancelled), max_size=8), loads)
def test_updates_carry_every_event_and_the_load(events: Sequence[JobEvent], load: WorkerLoad) -> None:
    message = sent(worker_codec.encode_update(events, load))
    got = worker_codec.decode_update(message)
    for kind in (Token, KVReceived, MigrationOffered, Preempted, (Finished, Failed, Cancelled)):
        expected = [e for e in events if isinstance(e, kind)]
        got_of = [e for e in got if isinstance(e, kind)]
        assert sorted(map(repr, got_of)) == sorted(map(repr, expected))
    assert worker_codec.decode_load(message.load) == load


@given(keys, st.integers(0, 2**30), st.lists(sampled, min_size=1, max_size=6), st.none() | U32)
def test_consecutive_tokens_share_a_run(
    key: JobKey, first: int, sampled_tokens: list[SampledToken], cached: int | None
) -> None:
    events = [Token(key, first + i, token, None if i else cached) for i, token in enumerate(sampled_tokens)]
    message = sent(worker_codec.encode_update(events))
    assert len(message.runs) == 1
    assert not message.HasField("load")
    assert worker_codec.decode_update(message) == tuple(events)


def test_the_stages_of_a_job_are_sent_with_its_first_token() -> None:
    stages = JobStages(0.5, 1.0, 0.25, 0.125, 2.0)
    events = (Token(KEY, 0, SampledToken(1), 3, stages), Token(KEY, 1, SampledToken(2)))
    message = sent(worker_codec.encode_update(events))
    assert worker_codec.decode_update(message) == events
    message.runs[0].stages.prefill_s, message.runs[0].stages.transfer_s = -1.0, math.nan
    (first, _) = worker_codec.decode_update(message)
    assert isinstance(first, Token) and first.stages == JobStages(0.5, 0.0, 0.0, 0.125, 2.0)


_WAITS = (
    Wait(Stage.PREFILL_QUEUE, WaitCause.PROMPTS_AHEAD, 0.5, 4096),
    Wait(Stage.PREFILL_QUEUE, WaitCause.SEAT, 1.5),
    Wait(Stage.TRANSFER, WaitCause.SEAT, 0.25),
)


def test_the_waits_of_a_job_are_sent_with_its_stages() -> None:
    stages = JobStages(prefill_queue_s=2.0, waits=_WAITS)
    events = (Token(KEY, 0, SampledToken(1), 3, stages),)
    message = sent(worker_codec.encode_update(events))
    assert worker_codec.decode_update(message) == events
    found = message.runs[0].stages
    found.waits_s[0], found.wait_causes[1], found.wait_stages[2] = math.inf, "of a newer version", "unknown"
    (token,) = worker_codec.decode_update(message)
    assert isinstance(token, Token) and token.stages == stages._replace(waits=(_WAITS[0]._replace(seconds=0.0),))
    del found.waits_s[0]
    with pytest.raises(TandemError, match="unequal numbers"):
        worker_codec.decode_update(message)


def test_what_yielded_is_sent_with_the_next_token() -> None:
    yields = (LaneYield(Lane.STANDARD, 1, 70_000, 4), LaneYield(Lane.BATCH, 2, 5, 1))
    events = (
        Token(KEY, 0, SampledToken(1)),
        Token(KEY, 1, SampledToken(2), preemption=Preemption(yields=yields)),
        Token(KEY, 2, SampledToken(3), preemption=Preemption(Pauses(1, 0.5), yields[:1])),
    )
    message = sent(worker_codec.encode_update(events))
    assert worker_codec.decode_update(message) == events
    message.runs[1].yielded_blocks.append(1)
    with pytest.raises(TandemError, match="number of lanes"):
        worker_codec.decode_update(message)


def test_pauses_are_sent_with_the_token_after_them() -> None:
    tokens = [Token(KEY, index, SampledToken(index)) for index in range(4)]
    events = (*tokens[:2], replace(tokens[2], preemption=Preemption(Pauses(2, 1.5))), tokens[3])
    message = sent(worker_codec.encode_update(events))
    assert worker_codec.decode_update(message) == events
    message.runs[1].paused_s = math.nan
    assert worker_codec.decode_update(message)[2] == replace(tokens[2], preemption=Preemption(Pauses(2, 0.0)))


def test_a_gap_begins_a_run_and_keeps_the_order() -> None:
    other = JobKey(RequestId("q"), 1)
    events = [Token(key, i, SampledToken(i)) for key, i in ((KEY, 4), (other, 0), (KEY, 5), (KEY, 7), (KEY, 8))]
    message = worker_codec.encode_update(events)
    assert [(run.key.request, run.first_index, len(run.tokens)) for run in message.runs] == [
        ("r", 4, 2),
        ("q", 0, 1),
        ("r", 7, 2),
    ]
    indices = [t.index for t in worker_codec.decode_update(message) if t.key == KEY and isinstance(t, Token)]
    assert indices == [4, 5, 7, 8]


@given(peers())
def test_peers_round_trip(peer: TransportPeer) -> None:
    assert kv_codec.decode_peer(sent(kv_codec.encode_peer(peer))) == peer


@given(announcements())
def test_announcements_round_trip(announcement: Announcement) -> None:
    assert kv_codec.decode_announcement(sent(kv_codec.encode_announcement(announcement))) == announcement


@given(handoff_keys, prefix_requests())
def test_prefix_requests_round_trip(key: HandoffKey, prefix_request: RemotePrefixRequest) -> None:
    assert kv_codec.decode_prefix_request(sent(kv_codec.encode_prefix_request(key, prefix_request))) == (
        key,
        prefix_request,
    )


@pytest.mark.parametrize(
    ("hashes", "first_index", "complaint"),
    [
        (b"x" * 17, 0, "16 bytes long"),
        (b"", 0, "no block"),
        (b"x" * 32, 2, "no block"),
        (b"x" * 16 * (MAX_REMOTE_PREFIX_BLOCKS + 1), 0, f"{MAX_REMOTE_PREFIX_BLOCKS} may be"),
    ],
)
def test_a_prefix_request_for_no_block_or_too_many_is_refused(hashes: bytes, first_index: int, complaint: str) -> None:
    key = kv_pb2.HandoffKey(handoff="h", attempt=1)
    with pytest.raises(TandemError, match=complaint):
        kv_codec.decode_prefix_request(kv_pb2.RemotePrefixRequest(key=key, first_index=first_index, hashes=hashes))


@given(books)
def test_books_round_trip(value: EngineStats) -> None:
    assert worker_codec.decode_books(sent(worker_codec.encode_books(value))) == value


@pytest.mark.parametrize("kind", ErrorKind)
def test_refusals_round_trip(kind: ErrorKind) -> None:
    error = worker_codec.decode_refusal(sent(worker_codec.encode_refusal(kind, "because")))
    assert (error.kind, error.message) == (kind, "because")


def test_an_error_of_a_newer_version_stays_an_error() -> None:
    message = worker_pb2.JobEnd(key=ENCODED_KEY)
    message.failed.kind = "melted"
    (end,) = worker_codec.decode_update(worker_pb2.WatchUpdate(ends=[message]))
    assert isinstance(end, Failed)
    assert end.kind is ErrorKind.INTERNAL


@pytest.mark.parametrize("kind", ["Load", "Books", "StepCost"])
def test_our_fields_and_the_protocols_have_the_same_names(kind: str) -> None:
    ours = [f.name for f in fields({"Load": WorkerLoad, "Books": EngineStats, "StepCost": StepCost}[kind])]
    assert sorted(ours) == sorted(field.name for field in getattr(worker_pb2, kind).DESCRIPTOR.fields)


@given(st.builds(StepCost, *[st.floats(0, 10)] * 5))
def test_step_costs_round_trip(cost: StepCost) -> None:
    message = sent(worker_codec.encode_update((), None, cost))
    assert message.HasField("step_cost") and not message.HasField("load")
    assert worker_codec.decode_step_cost(message.step_cost) == cost


# ---- malformed


@pytest.mark.parametrize(
    "field", ["lane_tokens", "lane_longest", "size_tokens", "size_longest", "lane_seqs", "lane_blocks", "lane_paused"]
)
def test_a_load_with_a_list_of_another_length_is_malformed(field: str) -> None:
    with pytest.raises(TandemError) as error:
        worker_codec.decode_load(worker_pb2.Load(**{field: [1, 2]}))
    assert error.value.kind is ErrorKind.INVALID_REQUEST


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_an_invalid_step_cost_is_malformed(bad: float) -> None:
    with pytest.raises(TandemError) as error:
        worker_codec.decode_step_cost(worker_pb2.StepCost(base_s=1.0, decode_seq_s=bad))
    assert error.value.kind is ErrorKind.INVALID_REQUEST


def a_submission() -> worker_pb2.SubmitRequest:
    request = Request(
        id=RequestId("r"), model="m", prompt_tokens=(1, 2), sampling=SamplingParams(max_tokens=4, logprobs=2)
    )
    source = WorkerRef(WorkerId("w"), Incarnation(7), "host:1")
    job = ResumeJob(request=request, attempt=1, handoff=HandoffId("h"), source=source)
    return job_codec.encode_submission(job_codec.Submission(GatewayId("g"), Incarnation(9), job))


@pytest.mark.parametrize(
    ("field", "error"),
    [
        ("gateway", "names no gateway"),
        ("incarnation", "names no incarnation"),
        ("key", "no request"),
        ("prompt_tokens", "at least one token"),
        ("resume", "no job"),
    ],
)
def test_a_submission_that_lacks_something_is_refused(field: str, error: str) -> None:
    message = a_submission()
    message.ClearField(field)
    with pytest.raises(TandemError, match=error) as caught:
        job_codec.decode_submission(message)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


@pytest.mark.parametrize("field", ["id", "incarnation", "address"])
def test_a_resume_whose_source_lacks_something_is_refused(field: str) -> None:
    message = a_submission()
    message.resume.source.ClearField(field)
    with pytest.raises(TandemError, match="a worker has an id"):
        job_codec.decode_submission(message)


def test_a_handoff_without_an_id_is_refused() -> None:
    message = a_submission()
    message.prefill.handoff = ""
    message.prefill.SetInParent()
    with pytest.raises(TandemError, match="no hand-off id"):
        job_codec.decode_submission(message)


@pytest.mark.parametrize("changes", [{"prompt_tokens": (-1,)}, {"prompt_tokens": (2**32,)}, {"model": "\ud800"}])
def test_values_that_do_not_fit_their_field_are_refused_by_the_sender(changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"model": "m", "prompt_tokens": (1,), **changes}
    request = Request(id=RequestId("r"), sampling=SamplingParams(max_tokens=1), **arguments)
    with pytest.raises(TandemError, match="cannot be sent") as caught:
        job_codec.encode_submission(
            job_codec.Submission(GatewayId("g"), Incarnation(1), GenerateJob(request=request, attempt=1))
        )
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


def test_incomplete_ends_and_tokens_are_refused() -> None:
    no_end = worker_pb2.JobEnd(key=ENCODED_KEY)
    odd_reason = worker_pb2.JobEnd(key=ENCODED_KEY, finished=worker_pb2.JobFinished(reason="bored"))
    no_key = worker_pb2.TokenRun()
    half = worker_pb2.TokenRun(key=ENCODED_KEY, tokens=[kv_pb2.SampledToken(id=1, top_ids=[1, 2], top_logprobs=[0.5])])
    updates = [worker_pb2.WatchUpdate(ends=[end]) for end in (no_end, odd_reason)]
    updates += [worker_pb2.WatchUpdate(runs=[run]) for run in (no_key, half)]
    for update in updates:
        with pytest.raises(TandemError, match="malformed message"):
            worker_codec.decode_update(update)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("ranks.0.agent", ""),
        ("layout.block_size", 0),
        ("layout.groups.0.dtype", "int3"),
        ("layout.groups.0.head_dim", 0),
        ("ranks.0.region.head_stop", 0),
        ("ranks.0.region.head_stop", 9),
        ("ranks.0.region.head_stop", 1),
        ("ranks.0.region.num_blocks", 0),
        ("ranks.0.region.block_bytes", 17),
        ("ranks.0.region.device", ""),
        ("ranks.0.region.address", 2**64 - 1),
        ("worker.id", ""),
    ],
)
def test_a_peer_with_an_inconsistent_memory_region_is_refused(path: str, value: object) -> None:
    message = kv_codec.encode_peer(PEER)
    assert kv_codec.decode_peer(message) == PEER
    *parents, leaf = path.split(".")
    holder: Any = message
    for name in parents:
        holder = holder[int(name)] if name.isdigit() else getattr(holder, name)
    setattr(holder, leaf, value)
    with pytest.raises(TandemError, match="malformed message"):
        kv_codec.decode_peer(message)


@pytest.mark.parametrize("missing", ["layout", "ranks", "worker"])
def test_a_peer_that_lacks_something_is_refused(missing: str) -> None:
    message = kv_codec.encode_peer(PEER)
    message.ClearField(missing)
    with pytest.raises(TandemError, match="malformed message"):
        kv_codec.decode_peer(message)


def test_an_announcement_with_uneven_digests_is_refused() -> None:
    message = kv_pb2.Announcement(key=kv_pb2.HandoffKey(handoff="h", attempt=1))
    message.blocks.add(block=1, digests=[1, 2])
    message.blocks.add(block=2, digests=[1])
    with pytest.raises(TandemError, match="different numbers of digests"):
        kv_codec.decode_announcement(message)


@given(st.binary(max_size=64))
def test_garbage_is_a_typed_error_or_a_lawful_value(garbage: bytes) -> None:
    decoders: list[tuple[Any, Any]] = [
        (worker_pb2.SubmitRequest, job_codec.decode_submission),
        (worker_pb2.WatchUpdate, worker_codec.decode_update),
        (kv_pb2.TransportPeer, kv_codec.decode_peer),
        (kv_pb2.Announcement, kv_codec.decode_announcement),
        (kv_pb2.RemotePrefixRequest, kv_codec.decode_prefix_request),
    ]
    for message_type, decode in decoders:
        try:
            message = message_type.FromString(garbage)
        except DecodeError:
            continue
        try:
            decode(message)
        except TandemError as error:
            assert error.kind is ErrorKind.INVALID_REQUEST


def test_yields_of_no_sequence_are_no_preemption() -> None:
    run = worker_pb2.TokenRun(
        key=ENCODED_KEY,
        tokens=[kv_pb2.SampledToken(id=5)],
        yielded_sequences=[0] * len(Lane),
        yielded_tokens=[0, 0, 100],
        yielded_blocks=[0, 0, 7],
    )
    (token,) = worker_codec.decode_update(worker_pb2.WatchUpdate(runs=[run]))
    assert isinstance(token, Token) and token.preemption is None
