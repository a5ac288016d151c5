"""What the coordinator refuses: each with its reason, the model untouched and the other workers undisturbed."""

import ast
import os
import uuid

import grpc
import numpy as np
import pytest

import harness
from harness import Chunks
from harness import Daemon
from harness import Proxy
from harness import Refusal
from harness import Worker
from harness import admin_pb
from harness import errors_pb2
from harness import eventually
from harness import pb
from harness import refused
from harness import tensor
from harness import types

# Where each reason is tested (function of this file unless a file is named), or why this build cannot give it.
REASONS = {
    "UNSPECIFIED": "NEVER: no refusal is without a reason",
    "UNAUTHENTICATED": "WAITING: credentials are not checked yet, only loopback is served without --insecure-plaintext",
    "WRONG_JOB": "WAITING: credentials are not checked yet",
    "WORKER_EVICTED": "test_evicted_worker_is_refused_until_readmitted",
    "JOB_NOT_FOUND": "test_unknown_job",
    "SESSION_NOT_FOUND": "test_unknown_session",
    "NOT_KEPT": "test_versions_and_workers_that_are_not_there",
    "INVALID_NAME": "test_names_are_checked",
    "INVALID_REQUEST": "test_rules_of_a_job_are_checked",
    "MANIFEST_MISMATCH": "test_another_manifest_names_the_tensor",
    "BAD_CHUNK": "test_messages_out_of_order",
    "SIZE_MISMATCH": "test_lying_sizes",
    "NON_FINITE_DELTA": "numerics_test.py::test_case_55_one_bad_number_is_kept_out",
    "OUT_OF_RANGE_DELTA": "test_huge_deltas",
    "BAD_CODEC": "test_codecs_that_are_not_allowed",
    "STALE_INCARNATION": "test_two_workers_with_one_name",
    "STALE_ROUND": "waiting_test.py::test_case_13_a_late_worker_is_told_how_to_go_on",
    "VERSION_AHEAD": "test_rounds_and_bases_that_do_not_fit",
    "BASE_MISMATCH": "test_rounds_and_bases_that_do_not_fit",
    "JOB_PAUSED": "test_paused_job",
    "JOB_FAILED": "test_failed_job",
    "JOB_FINISHED": "test_finished_job",
    "NO_MODEL": "test_nothing_to_read_before_the_initial_model",
    "NOT_INITIALIZER": "test_nothing_to_read_before_the_initial_model",
    "WRONG_STATE": "test_operators_requests_that_do_not_fit",
    "JOB_EXISTS": "test_operators_requests_that_do_not_fit",
    "DIGEST_MISMATCH": "test_other_bytes_for_the_same_round",
    "OFFSET_MISMATCH": "test_gaps_and_overlaps",
    "CHECKSUM_MISMATCH": "test_wrong_checksums",
    "UPLOAD_BUDGET": "test_more_pushes_than_staging_slots",
    "DISK": "WAITING: state is in memory",
    "MAX_WORKERS": "test_more_workers_than_allowed",
    "MODEL_TOO_LARGE": "test_a_model_above_the_limit",
    "TOO_MANY": "test_more_jobs_than_a_daemon_holds",
    "EPOCH_CHANGED": "test_a_session_of_another_epoch",
    "TRANSFER_CANCELLED": "test_transfers_end_with_their_worker_or_round",
    "TOO_SLOW": "slow_peers_test.py::test_transfers_without_progress_are_ended",
    "RECOVERING": "WAITING: state is in memory, there is nothing to recover",
    "DRAINING": "test_draining_daemon",
    "PROTOCOL_VERSION": "test_no_common_protocol_version",
    "NOT_IMPLEMENTED": "test_features_of_later_builds",
    "INTERNAL": "NEVER: a fault of the coordinator, cannot be asked for",
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon")) as running:
        yield running


class Scene:
    """A job with one open round, a worker that misbehaves and one that does not.

    At the end of the `with` block nothing of the misbehaviour may have been counted, and both complete the round; a
    test that ended the round itself sets `over`.
    """

    def __init__(self, daemon, dim=4, **more):
        self.daemon = daemon
        self.over = False
        self.job = "scene-" + uuid.uuid4().hex[:12]
        settings = dict(min_workers=2, expected_workers=2, lease=30.0, collect_timeout=600.0,
                        variant=types.VARIANT_AVERAGING)
        settings.update(more)
        daemon.create_job(self.job, **settings)
        self.bad = Worker(daemon.address, self.job, "bad", dim=dim)
        self.good = Worker(daemon.address, self.job, "good", dim=dim)
        self.dim = dim
        self.digest = self.bad.started(1).base_digest
        self.payload = harness.payload_of([1.0] * dim)
        self.chunks = Chunks(self.payload)
        self.before = daemon.status(self.job).model_digest

    def header(self, **changes):
        header = self.bad.header(1, len(self.payload), self.digest)
        for key, value in changes.items():
            setattr(header, key, value)
        return header

    def stream(self, *messages):
        """Sends the messages as one push of the bad worker and returns its answer, or raises."""
        return self.bad.raw_stub.PushDelta(iter(messages), timeout=20)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None and not self.over:
            status = self.daemon.status(self.job)
            assert status.model_digest == self.before and status.version == 0
            assert status.round.have == 0
            self.good.push(1, self.payload, base_digest=self.digest)
            self.bad.push(1, self.payload, base_digest=self.digest)
            assert self.good.committed(1).contributors == ["bad", "good"]
            assert self.good.pull(1)[1] == self.payload
        self.bad.close()
        self.good.close()


def part(header=None, chunk=None, end=None):
    if header is not None:
        return pb.PushDeltaRequest(header=header)
    if chunk is not None:
        return pb.PushDeltaRequest(chunk=chunk)
    return pb.PushDeltaRequest(end=pb.TransferEnd(digest=end)) if end is not None else pb.PushDeltaRequest()


def chunk(offset, data):
    return pb.Chunk(offset=offset, crc32c=harness.crc.crc32c(data), data=data)


# ------------------------------------------------------------------------------------------------------------- pushes


def test_messages_out_of_order(daemon):
    """Chunk first, end first, two headers, nothing at all, an empty chunk, no end: BAD_CHUNK each."""
    with Scene(daemon) as scene:
        data = scene.chunks.parts[0]
        header, end = scene.header(), scene.chunks.digest
        for messages in (
            [part(chunk=data)],
            [part(end=end)],
            [part()],
            [part(header=header), part(header=header)],
            [part(header=header), part()],
            [part(header=header), part(chunk=chunk(0, b""))],
            [part(header=header), part(chunk=data), part(header=header)],
        ):
            refused("BAD_CHUNK", scene.stream, *messages)
        # Cut short: an early end, or a half-close without an end.
        refused("BAD_CHUNK", scene.stream, part(header=header), part(chunk=chunk(0, scene.payload[:8])), part(end=end))
        refused("BAD_CHUNK", scene.stream, part(header=header), part(chunk=chunk(0, scene.payload[:8])))
        refused("BAD_CHUNK", scene.stream, part(header=header))
        refused("BAD_CHUNK", scene.stream)


def test_too_many_bytes(daemon):
    """The first byte above the declared size ends the push."""
    with Scene(daemon) as scene:
        refused("BAD_CHUNK", scene.stream, part(header=scene.header()), part(chunk=scene.chunks.parts[0]),
                part(chunk=chunk(len(scene.payload), b"\0")))
        refused("BAD_CHUNK", scene.stream, part(header=scene.header()), part(chunk=chunk(0, scene.payload + b"\0")))


def test_chunks_above_one_mebibyte(daemon):
    """1 MiB is accepted, one byte more is BAD_CHUNK, far more never reaches the coordinator's code."""
    with Scene(daemon, dim=2_000_000) as scene:
        big = scene.payload[:harness.CHUNK_BYTES + 1]
        refused("BAD_CHUNK", scene.stream, part(header=scene.header()), part(chunk=chunk(0, big)))
        with pytest.raises(grpc.RpcError) as caught:
            scene.stream(part(header=scene.header()), part(chunk=chunk(0, scene.payload[:6 << 20])))
        assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)


def test_gaps_and_overlaps(daemon):
    """Offsets must continue where the transfer stands; the refusal says where that is."""
    with Scene(daemon) as scene:
        first = chunk(0, scene.payload[:8])
        for bad_offset in (4, 9, 12, 1 << 40, (1 << 63), (1 << 64) - 4):
            refusal = refused("OFFSET_MISMATCH", scene.stream, part(header=scene.header()), part(chunk=first),
                              part(chunk=chunk(bad_offset, scene.payload[8:])))
            assert refusal.metadata["offset"] == "8"
        refusal = refused("OFFSET_MISMATCH", scene.stream, part(header=scene.header()),
                          part(chunk=chunk(4, scene.payload[4:])))
        assert refusal.metadata["offset"] == "0"
        refused("OFFSET_MISMATCH", scene.stream, part(header=scene.header(resume_offset=8)),
                part(chunk=chunk(8, scene.payload[8:])))


def test_lying_sizes(daemon):
    """The declared size must be what manifest and codec require; both numbers are named, no payload is read."""
    with Scene(daemon) as scene:
        for size in (0, len(scene.payload) - 4, len(scene.payload) + 4, 1 << 62, (1 << 64) - 1):
            refusal = refused("SIZE_MISMATCH", scene.stream, part(header=scene.header(payload_bytes=size)))
            assert refusal.metadata == {"declared_bytes": str(size), "required_bytes": str(len(scene.payload))}
        refused("SIZE_MISMATCH", scene.stream, part(header=scene.header(codec=types.CODEC_BF16)))
        refused("SIZE_MISMATCH", scene.stream, part(header=scene.header(codec=types.CODEC_INT8)))


def test_wrong_checksums(daemon):
    """A chunk's checksum or the digest of the whole does not fit: DATA_LOSS with the offset, nothing counted."""
    with Scene(daemon) as scene:
        wrong = pb.Chunk(offset=0, crc32c=scene.chunks.parts[0].crc32c ^ 1, data=scene.payload)
        refusal = refused("CHECKSUM_MISMATCH", scene.stream, part(header=scene.header()), part(chunk=wrong))
        assert refusal.metadata["offset"] == "0"
        refused("CHECKSUM_MISMATCH", scene.stream, part(header=scene.header()), part(chunk=scene.chunks.parts[0]),
                part(end=scene.chunks.digest ^ 0x80000000))


def random_payload(seed, count):
    """Numbers that the exact accumulator's grid holds, so that a mean of equal deltas has their bits."""
    values = np.random.default_rng(seed).standard_normal(count)
    return (np.round(values * 2.0**20) / 2.0**20).astype("<f4").tobytes()


def test_one_bit_flipped_by_the_network(daemon):
    """A middlebox flips one bit of the payload. The push is refused as DATA_LOSS, the same push again is accepted,
    and the model is that of the true bytes."""
    with Scene(daemon, dim=300_000) as scene, Proxy(daemon.address) as proxy:
        scene.payload = random_payload(5, 300_000)
        channel = grpc.insecure_channel(proxy.address)
        stub = harness.pb_grpc.CoordinatorServiceStub(channel)
        chunks = Chunks(scene.payload)
        messages = [part(header=scene.header())] + [part(chunk=c) for c in chunks.parts] + [part(end=chunks.digest)]
        proxy.flip_marker = scene.payload[700_000:700_032]
        refused("CHECKSUM_MISMATCH", lambda: stub.PushDelta(iter(messages), timeout=20))
        assert proxy.flips == 1
        channel.close()


def test_a_push_goes_on_where_the_connection_broke(daemon):
    """The connection is cut in the middle of a push. QueryPush says what is kept, the push resumes there, and counts
    once."""
    dim = 2_000_000
    with Scene(daemon, dim=dim) as scene, Proxy(daemon.address) as proxy:
        scene.payload = random_payload(9, dim)
        chunks = Chunks(scene.payload)
        channel = grpc.insecure_channel(proxy.address)
        stub = harness.pb_grpc.CoordinatorServiceStub(channel)
        messages = [part(header=scene.header())] + [part(chunk=c) for c in chunks.parts] + [part(end=chunks.digest)]
        proxy.cut_after = 5 << 20
        with pytest.raises(grpc.RpcError) as caught:
            stub.PushDelta(iter(messages), timeout=20)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        channel.close()

        def kept():
            # The coordinator may hear of the cut a little later than we do.
            query = scene.bad.stub.QueryPush(pb.QueryPushRequest(session=scene.bad.session, round=1))
            assert not query.received
            return query if query.committed_offset >= 1 << 20 else None

        query = eventually(kept, 5)
        offset = query.committed_offset
        assert offset < len(scene.payload)
        assert query.crc32c == harness.crc.crc32c(scene.payload[:offset])

        def resume():
            parts = [part(header=scene.header(resume_offset=offset))]
            for begin in range(offset, len(scene.payload), harness.CHUNK_BYTES):
                parts.append(part(chunk=chunk(begin, scene.payload[begin:begin + harness.CHUNK_BYTES])))
            return scene.stream(*parts, part(end=chunks.digest))

        assert resume().outcome == pb.PUSH_OUTCOME_ACCEPTED
        query = scene.bad.stub.QueryPush(pb.QueryPushRequest(session=scene.bad.session, round=1))
        assert query.received
        scene.good.push(1, scene.payload, base_digest=scene.digest)
        assert scene.good.committed(1).contributors == ["bad", "good"]
        assert scene.good.pull(1)[1] == scene.payload
        scene.over = True


def test_codecs_that_are_not_allowed(daemon):
    """Unknown, unset, not in this build, not allowed in this job."""
    with Scene(daemon, push_codecs=[types.CODEC_FP32, types.CODEC_INT8]) as scene:
        for codec in (types.CODEC_UNSPECIFIED, types.CODEC_INT4, types.CODEC_TOP_K, types.CODEC_BF16, 99):
            refused("BAD_CODEC", scene.stream, part(header=scene.header(codec=codec)))
        refused("BAD_CODEC", scene.bad.pull, codec=types.CODEC_INT8)


def test_headers_that_are_malformed(daemon):
    """Fields of the header that break their own limits: named in BadRequest."""
    with Scene(daemon) as scene:
        refused("INVALID_REQUEST", scene.stream, part(header=scene.header(kind=pb.PAYLOAD_KIND_UNSPECIFIED)))
        long_id = scene.header(push_id="x" * 65)
        assert "push_id" in " ".join(refused("INVALID_REQUEST", scene.stream, part(header=long_id)).fields)
        metrics = scene.header()
        for number in range(33):
            metrics.facts.metrics["m%d" % number] = 1.0
        assert "metrics" in " ".join(refused("INVALID_REQUEST", scene.stream, part(header=metrics)).fields)
        huge = scene.header()
        huge.session.token = "t" * 5000
        with pytest.raises(grpc.RpcError) as caught:
            scene.stream(part(header=huge))
        assert Refusal(caught.value).reason in ("INVALID_REQUEST", "BAD_CHUNK", "SESSION_NOT_FOUND")


def test_huge_deltas(daemon):
    """Finite and far too large: outside the accumulator's exact range, above max_abs, or out of line with the norms
    seen so far."""
    guard = types.NormGuard(action=types.NORM_GUARD_ACTION_REJECT, factor=10, max_abs=1000)
    with Scene(daemon, norm_guard=guard) as scene:
        for value in (3e38, 1e30, 1001.0, -1001.0):
            refusal = refused("OUT_OF_RANGE_DELTA", scene.bad.push, 1, [0, 0, value, 0], base_digest=scene.digest)
            assert refusal.metadata
    with Scene(daemon, norm_guard=types.NormGuard(action=types.NORM_GUARD_ACTION_OFF)) as scene:
        for value in (3e38, -3e38, 200_000.0):
            refusal = refused("OUT_OF_RANGE_DELTA", scene.bad.push, 1, [0, 0, value, 0], base_digest=scene.digest)
            assert float(refusal.metadata["norm"]) == pytest.approx(abs(value), rel=1e-5)
            assert 1000 < float(refusal.metadata["limit"]) <= 131072
    daemon.create_job("norms", min_workers=1, lease=30.0, variant=types.VARIANT_AVERAGING)
    with Worker(daemon.address, "norms", "w", dim=4) as worker:
        for number in range(1, 10):
            worker.push(number, [1, 1, 1, 1])
            worker.committed(number)
        refusal = refused("OUT_OF_RANGE_DELTA", worker.push, 10, [21, 0, 0, 0])
        assert float(refusal.metadata["norm"]) == pytest.approx(21)
        assert float(refusal.metadata["limit"]) == pytest.approx(20)
        worker.push(10, [19, 0, 0, 0])
        worker.committed(10)


def test_deltas_that_are_too_large_together(daemon):
    """Each delta fits the exact accumulator, their sum does not: the one that comes last is refused, and the round
    closes with the others."""
    guard = types.NormGuard(action=types.NORM_GUARD_ACTION_OFF)
    daemon.create_job("together", min_workers=4, expected_workers=5, lease=30.0, variant=types.VARIANT_AVERAGING,
                      norm_guard=guard)
    workers = [Worker(daemon.address, "together", "w%d" % i, dim=3) for i in range(5)]
    digest = workers[0].started(1).base_digest
    for worker in workers[:4]:
        worker.push(1, [0, 30_000, 0], base_digest=digest)
    refused("OUT_OF_RANGE_DELTA", workers[4].push, 1, [0, 30_000, 0], base_digest=digest)
    # Nobody else is awaited any more.
    assert workers[0].committed(1).contributors == ["w0", "w1", "w2", "w3"]
    assert list(workers[0].values(1)) == [0, 30_000, 0]
    for worker in workers:
        worker.close()


def test_rounds_and_bases_that_do_not_fit(daemon):
    """Ahead of the coordinator, or from another model than it serves: told what to use instead."""
    with Scene(daemon) as scene:
        refusal = refused("VERSION_AHEAD", scene.bad.push, 5, scene.payload, base_digest=scene.digest)
        assert refusal.metadata == {"round": "1", "version": "0"}
        refused("VERSION_AHEAD", scene.bad.push, 1, scene.payload, base_digest=scene.digest, base_version=3)
        refusal = refused("BASE_MISMATCH", scene.bad.push, 1, scene.payload, base_digest=scene.digest ^ 1)
        assert refusal.metadata["version"] == "0"


def test_other_bytes_for_the_same_round(daemon):
    """The same push again is DUPLICATE, with and without its body; other bytes for the round are refused."""
    with Scene(daemon) as scene:
        assert scene.bad.push(1, scene.payload, base_digest=scene.digest).outcome == pb.PUSH_OUTCOME_ACCEPTED
        assert scene.bad.push(1, scene.payload, base_digest=scene.digest).outcome == pb.PUSH_OUTCOME_DUPLICATE
        known = scene.header(digest=scene.chunks.digest)
        assert scene.stream(part(header=known)).outcome == pb.PUSH_OUTCOME_DUPLICATE
        refused("DIGEST_MISMATCH", scene.bad.push, 1, [9, 9, 9, 9], base_digest=scene.digest)
        assert daemon.status(scene.job).round.have == 1
        scene.good.push(1, scene.payload, base_digest=scene.digest)
        assert scene.good.committed(1).contributors == ["bad", "good"]
        assert scene.good.pull(1)[1] == scene.payload
        scene.over = True


def test_more_pushes_than_staging_slots(daemon):
    """One slot, taken: the second push is told when to come back, and is welcome then."""
    with Scene(daemon, max_inflight_pushes=1) as scene:
        held = scene.good.open_push(scene.good.header(1, len(scene.payload), scene.digest))
        eventually(lambda: daemon.worker_status(scene.job, "good").part ==
                   daemon.worker_status(scene.job, "good").PART_UPLOADING)
        refusal = refused("UPLOAD_BUDGET", scene.bad.push, 1, scene.payload, base_digest=scene.digest)
        assert refusal.retry_s > 0
        held.cancel()
        eventually(lambda: daemon.worker_status(scene.job, "good").part !=
                   daemon.worker_status(scene.job, "good").PART_UPLOADING)


def test_transfers_end_with_their_worker_or_round(daemon):
    """An open push is ended when its worker leaves, is replaced or evicted, or when its round is over: with the reason
    that tells its worker most."""

    def leave(scene):
        scene.bad.leave()

    def replace(scene):
        Worker(daemon.address, scene.job, "bad", dim=4, heartbeats=False).close()

    def evict(scene):
        daemon.admin.EvictWorker(admin_pb.EvictWorkerRequest(job=scene.job, worker="bad"))

    def commit(scene):
        scene.good.push(1, scene.payload, base_digest=scene.digest)
        scene.good.committed(1)

    reasons = {leave: "TRANSFER_CANCELLED", replace: "STALE_INCARNATION", evict: "WORKER_EVICTED", commit: "STALE_ROUND"}
    for ending, reason in reasons.items():
        more = dict(min_workers=1, soft_timeout=0.2) if ending is commit else {}
        with Scene(daemon, **more) as scene:
            held = scene.bad.open_push(scene.header()).chunk(chunk(0, scene.payload[:4]))
            eventually(lambda: daemon.worker_status(scene.job, "bad").received_bytes == 4)
            ending(scene)
            refused(reason, held.answer, 10)
            held.half_close()
            scene.over = True


# ------------------------------------------------------------------------------------------------- sessions and jobs


def test_unknown_job(daemon):
    """A job that does not exist is named; nothing is created on the way."""
    refusal = refused("JOB_NOT_FOUND", Worker, daemon.address, "no-such-job", "w", dim=1)
    assert refusal.metadata["job"] == "no-such-job"
    refused("JOB_NOT_FOUND", daemon.admin.GetJob, admin_pb.GetJobRequest(job="no-such-job"))
    refused("JOB_NOT_FOUND", daemon.admin.GetStatus, admin_pb.GetStatusRequest(job="no-such-job"))
    refused("JOB_NOT_FOUND", lambda: list(daemon.coordinator.PullModel(pb.PullModelRequest(job="no-such-job"))))
    refused("JOB_NOT_FOUND", lambda: list(daemon.admin.WatchJob(admin_pb.WatchJobRequest(job="no-such-job"))))
    refused("JOB_NOT_FOUND", daemon.admin.PauseJob, admin_pb.PauseJobRequest(job="no-such-job"))
    assert "no-such-job" not in [job.name for job in daemon.admin.ListJobs(admin_pb.ListJobsRequest()).jobs]


def test_unknown_session(daemon):
    """Sessions cannot be guessed: another token, incarnation or worker is no session."""
    with Scene(daemon) as scene:
        for change in (dict(token="guess"), dict(token=""), dict(worker="nobody"),
                       dict(incarnation=scene.bad.session.incarnation + 1000)):
            session = pb.Session()
            session.CopyFrom(scene.bad.session)
            for key, value in change.items():
                setattr(session, key, value)
            refused("SESSION_NOT_FOUND", scene.bad.stub.Heartbeat, pb.HeartbeatRequest(session=session))
            refused("SESSION_NOT_FOUND", scene.bad.stub.Leave, pb.LeaveRequest(session=session))
            header = scene.header()
            header.session.CopyFrom(session)
            refused("SESSION_NOT_FOUND", scene.stream, part(header=header))
            refused("SESSION_NOT_FOUND", lambda: list(
                scene.bad.stub.WatchRound(pb.WatchRoundRequest(session=session, round=1))))


def test_a_session_of_another_epoch(daemon):
    """A session of an earlier or later life of the coordinator is told the present one."""
    with Scene(daemon) as scene:
        for epoch in (scene.bad.session.epoch + 1, 0):
            session = pb.Session()
            session.CopyFrom(scene.bad.session)
            session.epoch = epoch
            refusal = refused("EPOCH_CHANGED", scene.bad.stub.Heartbeat, pb.HeartbeatRequest(session=session))
            assert refusal.metadata["epoch"] == str(scene.bad.session.epoch)


def test_two_workers_with_one_name(daemon):
    """The newer process has the place at once; the older hears STALE_INCARNATION from every call, and is never
    counted twice. The same process joining twice gets the same answer."""
    with Scene(daemon) as scene:
        again = scene.good.stub.Join(pb.JoinRequest(
            protocol_min=1, protocol_max=1, job=scene.job, worker="good", instance=scene.good.instance,
            trajectories=1, manifest=scene.good.manifest))
        assert again.session == scene.good.session
        older = scene.bad
        scene.bad = newer = Worker(daemon.address, scene.job, "bad", dim=4)
        assert newer.session.incarnation > older.session.incarnation
        calls = {
            "heartbeat": older.heartbeat,
            "push": lambda: older.push(1, scene.payload, base_digest=scene.digest),
            "query": lambda: older.stub.QueryPush(pb.QueryPushRequest(session=older.session, round=1)),
            "watch": lambda: list(older.stub.WatchRound(pb.WatchRoundRequest(session=older.session, round=1))),
            "leave": lambda: older.stub.Leave(pb.LeaveRequest(session=older.session)),
        }
        for call in calls.values():
            refusal = refused("STALE_INCARNATION", call)
            assert refusal.metadata["incarnation"] == str(newer.session.incarnation)
        older.close()
        # The newcomer joined in the middle of round 1: either it has the older one's place, or round 1 goes on
        # without it. Never are there two of the name.
        scene.good.push(1, scene.payload, base_digest=scene.digest)
        if "bad" in [a.worker for a in daemon.status(scene.job).round.awaited]:
            newer.push(1, scene.payload, base_digest=scene.digest)
        committed = scene.good.committed(1)
        assert sorted(committed.contributors) in (["bad", "good"], ["good"])
        assert scene.good.pull(1)[1] == scene.payload
        scene.over = True


def test_processes_that_keep_replacing_each_other(daemon):
    """Two processes were given one name by mistake. A replaced one cannot take the place back, and new ones are slowed
    down after a few."""
    daemon.create_job("same-name", min_workers=1, lease=30.0)
    first = Worker(daemon.address, "same-name", "w", dim=1)
    second = Worker(daemon.address, "same-name", "w", dim=1)
    refused("STALE_INCARNATION", first.join)
    refusal = None
    for _ in range(20):
        try:
            Worker(daemon.address, "same-name", "w", dim=1, heartbeats=False).close()
        except grpc.RpcError as error:
            refusal = Refusal(error)
            break
    assert refusal is not None and refusal.reason == "TOO_MANY" and 0 < refusal.retry_s <= 60
    first.close()
    second.close()


def test_evicted_worker_is_refused_until_readmitted(daemon):
    """The name is refused in every call and in Join until an operator lets it back."""
    with Scene(daemon) as scene:
        evict = admin_pb.EvictWorkerRequest(job=scene.job, worker="bad")
        daemon.admin.EvictWorker(evict)
        refusal = refused("WORKER_EVICTED", scene.bad.heartbeat)
        assert refusal.metadata["worker"] == "bad"
        refused("WORKER_EVICTED", scene.bad.push, 1, scene.payload, base_digest=scene.digest)
        refused("WORKER_EVICTED", Worker, daemon.address, scene.job, "bad", dim=4)
        daemon.admin.ReadmitWorker(admin_pb.ReadmitWorkerRequest(job=scene.job, worker="bad"))
        back = Worker(daemon.address, scene.job, "bad", dim=4)
        back.close()
        scene.over = True


def test_names_are_checked(daemon):
    """Names end up in paths, labels and logs: one rule, checked at the door."""
    bad_names = ["", ".", "..", "a..b", "../../etc/passwd", "a/b", "a b", "x" * 65, "a\n", "\x1b[31m", "-a", "a-", "é"]
    for name in bad_names:
        refused("INVALID_NAME", daemon.create_job, name)
        refused("INVALID_NAME", Worker, daemon.address, "no-such-job", name, dim=1)
    daemon.create_job("x" * 64)


@pytest.mark.parametrize("rules", [
    dict(block_learning_rate=0.0),
    dict(block_learning_rate=-1.0),
    dict(block_learning_rate=101.0),
    dict(block_learning_rate=float("nan")),
    dict(block_momentum=1.0),
    dict(block_momentum=-0.1),
    dict(block_momentum=float("inf")),
    dict(beta1=1.0),
    dict(beta2=-1.0),
    dict(tau=0.0),
    dict(min_fraction=1.5),
    dict(min_fraction=float("nan")),
    dict(lease=0.5),
    dict(collect_timeout=-1.0),
    dict(max_workers=4097),
    dict(weighting=types.WEIGHTING_SAMPLES),
    dict(pull_codec=types.CODEC_INT8),
    dict(push_codecs=[types.CODEC_TOP_K]),
    dict(labels={"k%d" % i: "v" for i in range(65)}),
    dict(variant=77),
], ids=lambda rules: next(iter(rules)))
def test_rules_of_a_job_are_checked(daemon, rules):
    """A value out of its range is refused when the job is made, and named."""
    refusal = refused("INVALID_REQUEST", daemon.create_job, "bad-rules", **rules)
    key = next(iter(rules))
    if key == "weighting":
        key = "nominal_block"
    assert any(key in field for field in refusal.fields), refusal


def test_another_manifest_names_the_tensor(daemon):
    """Name, shape, dtype, role, order, one missing, one too many: the first tensor that differs is named."""
    base = [tensor("layer1.w", [3, 2]), tensor("layer1.b", [3]), tensor("steps", [], types.DTYPE_I64,
                                                                      types.TENSOR_ROLE_MAX)]
    daemon.create_job("manifest", min_workers=1, lease=30.0)
    first = Worker(daemon.address, "manifest", "first", manifest=types.Manifest(tensors=base))
    variations = {
        "layer1.weight": [tensor("layer1.weight", [3, 2])] + base[1:],
        "layer1.w": [tensor("layer1.w", [2, 3])] + base[1:],
        "layer1.b": [base[0], tensor("layer1.b", [3], types.DTYPE_BF16), base[2]],
        "steps": base[:2] + [tensor("steps", [], types.DTYPE_I64, types.TENSOR_ROLE_FIRST)],
        "extra": base + [tensor("extra", [1])],
    }
    for name, tensors in variations.items():
        refusal = refused("MANIFEST_MISMATCH", Worker, daemon.address, "manifest", "second",
                          manifest=types.Manifest(tensors=tensors))
        named = " ".join(list(refusal.fields) + list(refusal.fields.values()))
        assert name in named or (name == "layer1.weight" and "layer1.w" in named), refusal
    refused("MANIFEST_MISMATCH", Worker, daemon.address, "manifest", "second", manifest=types.Manifest(tensors=base[:2]))
    swapped = types.Manifest(tensors=[base[1], base[0], base[2]])
    refused("MANIFEST_MISMATCH", Worker, daemon.address, "manifest", "second", manifest=swapped)
    assert [w.worker for w in daemon.status("manifest").workers] == ["first"]
    first.close()


def test_manifests_that_make_no_sense(daemon):
    """A job's first manifest is checked by itself: types, roles, dimensions, names."""
    daemon.create_job("manifest-rules", min_workers=1, lease=30.0)
    big = 1 << 40
    for tensors in (
        [],
        [tensor("", [1])],
        [tensor("n" * 513, [1])],
        [tensor("w", [1]), tensor("w", [1])],
        [tensor("w", [0])],
        [tensor("w", [1], types.DTYPE_UNSPECIFIED)],
        [tensor("w", [1], 99)],
        [tensor("w", [1], types.DTYPE_F32, types.TENSOR_ROLE_UNSPECIFIED)],
        [tensor("w", [1], types.DTYPE_F32, 99)],
        [tensor("w", [1], types.DTYPE_I32, types.TENSOR_ROLE_BMUF)],
        [tensor("w", [1]), tensor("m", [1], types.DTYPE_I64, types.TENSOR_ROLE_MEAN)],
        [tensor("w", [1] * 17)],
        [tensor("w", [big, big])],
    ):
        with pytest.raises(grpc.RpcError) as caught:
            Worker(daemon.address, "manifest-rules", "w", manifest=types.Manifest(tensors=tensors))
        allowed = {"INVALID_REQUEST"} | ({"MODEL_TOO_LARGE"} if tensors and list(tensors[0].shape) == [big, big]
                                         else set())
        assert Refusal(caught.value).reason in allowed, (tensors, Refusal(caught.value))
    assert not daemon.status("manifest-rules").workers


def test_joins_that_make_no_sense(daemon):
    """An instance too short to tell two processes apart, or more trajectories than a worker may have."""
    daemon.create_job("join-rules", min_workers=1, lease=30.0)
    for more in (dict(instance=b"short"), dict(trajectories=4097)):
        refused("INVALID_REQUEST", Worker, daemon.address, "join-rules", "w", dim=1, **more)


def test_no_common_protocol_version(daemon):
    """Both ranges are named, so that a person sees which side is old."""
    daemon.create_job("protocol", min_workers=1, lease=30.0)
    refusal = refused("PROTOCOL_VERSION", Worker, daemon.address, "protocol", "w", dim=1, protocol=(2, 9))
    assert refusal.metadata == {"server_min": "1", "server_max": "1", "client_min": "2", "client_max": "9"}


def test_nothing_to_read_before_the_initial_model(daemon):
    """Until the elected worker has uploaded, pulls and deltas say NO_MODEL and other initial models are refused. If it
    goes, the next one is elected."""
    daemon.create_job("no-model", min_workers=1, lease=30.0)
    elected = Worker(daemon.address, "no-model", "a", init=[1, 2], upload=False)
    other = Worker(daemon.address, "no-model", "b", init=[3, 4], upload=False)
    assert elected.joined.need_initial_model and not other.joined.need_initial_model
    assert not other.joined.has_model
    refused("NO_MODEL", other.pull)
    refused("NO_MODEL", other.push, 1, [1, 1], base_digest=0)
    refused("NOT_INITIALIZER", other.upload_initial)
    refused("NON_FINITE_DELTA", elected.upload_initial, harness.payload_of([np.nan, 1]))
    elected.leave()
    eventually(lambda: other.heartbeat().need_initial_model)
    other.upload_initial()
    assert list(other.values(0)) == [3, 4]
    elected.close()
    other.close()


def test_versions_and_workers_that_are_not_there(daemon):
    """The newest two versions are kept for certain; what is not kept is refused with the newest that is."""
    daemon.create_job("kept", min_workers=1, lease=30.0)
    with Worker(daemon.address, "kept", "w", dim=1) as worker:
        for number in range(1, 4):
            worker.push(number, [1])
            worker.committed(number)
        worker.pull(3)
        worker.pull(2)
        refusal = refused("NOT_KEPT", worker.pull, 99)
        assert refusal.metadata["version"] == "3"
        refused("NOT_KEPT", daemon.admin.EvictWorker, admin_pb.EvictWorkerRequest(job="kept", worker="nobody"))


def test_reading_outside_the_model(daemon):
    """Ranges are served exactly, and one that starts behind the end is refused."""
    daemon.create_job("ranges", min_workers=1, lease=30.0)
    with Worker(daemon.address, "ranges", "w", init=np.arange(300_000)) as worker:
        whole = worker.pull(0)[1]
        for offset, length in ((0, 1), (3, 5), (1_100_000, 0), (17, 1_150_000)):
            _, data = harness.pull(worker.stub, "ranges", 0, offset=offset, length=length)
            assert data == (whole[offset:offset + length] if length else whole[offset:])
        refused("OFFSET_MISMATCH", lambda: harness.pull(worker.stub, "ranges", 0, offset=len(whole) + 1))
        refused("OFFSET_MISMATCH", lambda: harness.pull(worker.stub, "ranges", 0, offset=1 << 63))


def test_paused_job(daemon):
    """A pause reaches workers by push, heartbeat and status; after resume the same delta is taken."""
    with Scene(daemon) as scene:
        daemon.admin.PauseJob(admin_pb.PauseJobRequest(job=scene.job, reason="maintenance window"))
        refusal = refused("JOB_PAUSED", scene.bad.push, 1, scene.payload, base_digest=scene.digest)
        assert refusal.retry_s > 0
        beat = scene.bad.heartbeat()
        assert beat.job_state == types.JOB_STATE_PAUSED and "maintenance window" in beat.reason
        assert "maintenance window" in daemon.status(scene.job).state_reason
        daemon.admin.ResumeJob(admin_pb.ResumeJobRequest(job=scene.job))
        refused("WRONG_STATE", daemon.admin.ResumeJob, admin_pb.ResumeJobRequest(job=scene.job))


def test_failed_job(daemon):
    """A job that failed says so to everybody: watchers, pushes, joins, heartbeats."""
    daemon.create_job("failed", min_workers=2, expected_workers=2, lease=30.0, collect_timeout=0.3,
                      on_timeout=types.ON_TIMEOUT_FAIL_ROUND, max_failed_attempts=1)
    a, b = [Worker(daemon.address, "failed", name, dim=1) for name in "ab"]
    ended = a.watch(1).wait("ended", 5)
    assert ended.job_state == types.JOB_STATE_FAILED and ended.reason
    refused("JOB_FAILED", b.push, 1, [1], base_digest=0)
    refused("JOB_FAILED", Worker, daemon.address, "failed", "c", dim=1)
    assert b.heartbeat().job_state == types.JOB_STATE_FAILED
    a.close()
    b.close()


def test_finished_job(daemon):
    """The last round's commit says that no round follows; later requests say JOB_FINISHED; the model stays."""
    daemon.create_job("finished", min_workers=1, lease=30.0, max_rounds=2, variant=types.VARIANT_AVERAGING)
    with Worker(daemon.address, "finished", "w", dim=1) as worker:
        worker.push(1, [1])
        assert not worker.committed(1).job_finished
        digest = worker.joined and worker.pull(1)[0].model_digest
        worker.push(2, [1])
        assert worker.committed(2).job_finished
        refused("JOB_FINISHED", worker.push, 3, [1], base_digest=digest)
        refused("JOB_FINISHED", Worker, daemon.address, "finished", "late", dim=1)
        assert worker.heartbeat().job_state == types.JOB_STATE_FINISHED
        assert list(worker.values(2)) == [2]


def test_operators_requests_that_do_not_fit(daemon):
    """The same job again is no error, another one of its name is; what is fixed at creation stays fixed."""
    daemon.create_job("operators", min_workers=1, lease=30.0, block_learning_rate=0.5)
    daemon.create_job("operators", min_workers=1, lease=30.0, block_learning_rate=0.5)
    refused("JOB_EXISTS", daemon.create_job, "operators", min_workers=1, lease=30.0, block_learning_rate=0.25)
    with Worker(daemon.address, "operators", "w", dim=1) as worker:
        change = admin_pb.UpdateJobRequest(job="operators",
                                           changes=harness.job_config(variant=types.VARIANT_FED_ADAM))
        refused("WRONG_STATE", daemon.admin.UpdateJob, change)
        bad = admin_pb.UpdateJobRequest(job="operators", changes=harness.job_config(block_momentum=2.0))
        refused("INVALID_REQUEST", daemon.admin.UpdateJob, bad)
        good = admin_pb.UpdateJobRequest(job="operators", changes=harness.job_config(block_momentum=0.25))
        daemon.admin.UpdateJob(good)
        worker.push(1, [1])
        worker.committed(1)
        worker.push(2, [1])
        assert worker.committed(2).block_momentum == 0.25


def test_more_workers_than_allowed(daemon):
    """The limit is named; a place that becomes free is given to the next."""
    daemon.create_job("full", min_workers=1, lease=30.0, max_workers=2)
    a, b = [Worker(daemon.address, "full", name, dim=1) for name in "ab"]
    assert refused("MAX_WORKERS", Worker, daemon.address, "full", "c", dim=1).metadata["limit"] == "2"
    b.leave()
    Worker(daemon.address, "full", "c", dim=1).close()
    a.close()
    b.close()


def test_a_model_above_the_limit(daemon):
    """Refused at Join, with what it needs and what there is."""
    daemon.create_job("too-large", min_workers=1, lease=30.0, max_model_bytes=1000)
    refusal = refused("MODEL_TOO_LARGE", Worker, daemon.address, "too-large", "w", dim=251)
    assert int(refusal.metadata["required_bytes"]) >= 1004 and refusal.metadata["limit_bytes"] == "1000"
    Worker(daemon.address, "too-large", "w", dim=250).close()


def test_a_model_above_the_memory(tmp_path):
    """A job that could not fit in the memory the daemon may use is refused before a byte is sent."""
    with Daemon(tmp_path, {"memory_limit_bytes": 64 << 20}) as daemon:
        daemon.create_job("memory", min_workers=1, lease=30.0)
        refusal = refused("MODEL_TOO_LARGE", Worker, daemon.address, "memory", "w", dim=1 << 30, upload=False)
        assert int(refusal.metadata["required_bytes"]) > int(refusal.metadata["limit_bytes"])
        Worker(daemon.address, "memory", "w", dim=1000).close()


def test_more_jobs_than_a_daemon_holds(tmp_path):
    """Jobs have buffers of model size, so their number is limited."""
    with Daemon(tmp_path) as daemon:
        for number in range(64):
            daemon.create_job("job-%d" % number)
        refused("TOO_MANY", daemon.create_job, "job-64")


def test_draining_daemon(tmp_path):
    """While the open round ends, newcomers are told to try the successor; who is in it still counts."""
    daemon = Daemon(tmp_path)
    daemon.create_job("drain", min_workers=2, expected_workers=2, lease=30.0)
    a, b = [Worker(daemon.address, "drain", name, dim=1) for name in "ab"]
    digest = a.started(1).base_digest
    watch = a.watch(1)
    daemon.admin.Drain(admin_pb.DrainRequest())
    assert daemon.admin.GetStatus(admin_pb.GetStatusRequest()).draining
    refused("DRAINING", Worker, daemon.address, "drain", "c", dim=1)
    refused("DRAINING", daemon.create_job, "another")
    a.push(1, [1], base_digest=digest)
    b.push(1, [1], base_digest=digest)
    watch.wait("committed")
    assert daemon.wait() == 0
    a.close()
    b.close()
    daemon.stop()


def test_features_of_later_builds(daemon):
    """What the protos promise and this build lacks says so, by name."""
    daemon.create_job("later", min_workers=1, lease=30.0)
    with Worker(daemon.address, "later", "w", dim=1):
        refused("NOT_IMPLEMENTED", daemon.admin.Checkpoint, admin_pb.CheckpointRequest(job="later"))
        refused("NOT_IMPLEMENTED", daemon.admin.RollbackJob, admin_pb.RollbackJobRequest(job="later"))


def test_every_reason_is_tested_or_accounted_for():
    """errors.proto and the table above list the same reasons, and each named test exists."""
    names = {name[len("REASON_"):] for name in errors_pb2.Reason.keys()}
    assert set(REASONS) == names
    here = os.path.dirname(os.path.abspath(__file__))
    functions = {}
    for reason, where in REASONS.items():
        if where.startswith(("WAITING: ", "NEVER: ")):
            print("%s %s" % (reason, where))
            continue
        file, _, function = where.rpartition("::")
        file = file or os.path.basename(__file__)
        if file not in functions:
            with open(os.path.join(here, file)) as source:
                tree = ast.parse(source.read())
            functions[file] = {node.name: ast.unparse(node) for node in ast.walk(tree)
                               if isinstance(node, ast.FunctionDef)}
        assert function in functions[file], "%s is not in %s" % (function, file)
        assert repr(reason) in functions[file][function], "%s does not ask for %s" % (function, reason)
    assert all(expected >= 0 for expected in map(harness.expected_code, names - {"UNSPECIFIED"}))
