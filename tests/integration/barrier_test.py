"""The barrier as a stranger's workers see it: who is waited for, until when, and what a loss changes."""

import threading
import time

import grpc
import pytest

from harness import Chunks
from harness import Daemon
from harness import Refusal
from harness import Worker
from harness import WorkerProcess
from harness import eventually
from harness import pb
from harness import refused
from harness import seconds
from harness import types

LEASE_S = 1.0
# What a loaded machine may add between a deadline and its effect being seen here.
SLACK_S = 1.5


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon")) as running:
        yield running


def expired_workers(daemon, job):
    return daemon.counters(job).get("workers_expired_total", 0)


def test_case_01_killed_worker_is_dropped_from_the_barrier(daemon):
    """A worker joins and is killed with SIGKILL. The one that comes later must get its round as soon as the dead
    one's lease is over, and the loss must be counted."""
    daemon.create_job("case-01", min_workers=1, lease=LEASE_S, collect_timeout=600.0)
    with WorkerProcess(daemon.address, "case-01", "w1", 3) as doomed:
        daemon_sees = lambda: daemon.status("case-01").round.phase == types.ROUND_PHASE_COLLECTING
        eventually(daemon_sees, what="w1 to be expected in round 1")
        doomed.kill()
        killed = time.monotonic()
        with Worker(daemon.address, "case-01", "w2", dim=3) as w2:
            round_number = w2.joined.round
            # Round 1 dies with its only member; w2 is expected in what follows.
            started = w2.started(round_number, timeout=LEASE_S + SLACK_S)
            w2.push(round_number, [1, 2, 3], base_digest=started.base_digest)
            w2.committed(round_number, timeout=5)
            assert time.monotonic() - killed < LEASE_S + 2 * SLACK_S
    assert expired_workers(daemon, "case-01") == 1
    assert daemon.worker_status("case-01", "w1").state == daemon.worker_status("case-01", "w1").STATE_EXPIRED
    assert [c.worker for c in daemon.records("case-01")[0].contributions] == ["w2"]


def test_case_02_one_failure_does_not_wait_for_the_hard_timeout(daemon):
    """Three workers, ten minutes of hard timeout; one is killed in the middle of its block. The other two push and the
    round closes by the lease, not by the timeout."""
    daemon.create_job("case-02", min_workers=2, expected_workers=3, lease=LEASE_S, collect_timeout=600.0)
    with Worker(daemon.address, "case-02", "a", dim=2) as a, Worker(daemon.address, "case-02", "b", dim=2) as b:
        with WorkerProcess(daemon.address, "case-02", "c", 2) as doomed:
            digest = a.started(1).base_digest
            doomed.kill()
        a.push(1, [2, 4], base_digest=digest)
        b.push(1, [4, 8], base_digest=digest)
        pushed = time.monotonic()
        a.committed(1, timeout=4)
        assert time.monotonic() - pushed < LEASE_S + SLACK_S
    record = daemon.records("case-02")[0]
    assert [c.worker for c in record.contributions] == ["a", "b"]
    assert record.total_weight == 2


def test_case_03_waiting_workers_hear_that_a_peer_died(daemon):
    """W2 waits in WatchRound when W1 dies: an event that no longer names W1 must reach it within the lease."""
    daemon.create_job("case-03", min_workers=1, expected_workers=3, lease=LEASE_S, collect_timeout=600.0)
    with Worker(daemon.address, "case-03", "w2", dim=2) as w2, Worker(daemon.address, "case-03", "w3", dim=2) as w3:
        with WorkerProcess(daemon.address, "case-03", "w1", 2) as doomed:
            watch = w2.watch(1)
            watch.wait("started")
            watch.wait("waiting", accept=lambda s: "w1" in [x.worker for x in s.awaited])
            seen = len(watch.events)
            doomed.kill()
            killed = time.monotonic()

            def told():
                return [e for t, e in watch.events[seen:] if e.HasField("waiting")
                        and "w1" not in [x.worker for x in e.waiting.awaited]]

            event = eventually(told, LEASE_S + SLACK_S, "news of the death of w1")[0]
            assert time.monotonic() - killed < LEASE_S + 1.0 + 0.5
            assert event.waiting.expected == 2


def test_case_05_status_says_what_is_awaited_until_when_and_why(daemon):
    """During an open barrier the status has the numbers, the names, the time left, and one sentence that says them."""
    daemon.create_job("case-05", min_workers=2, expected_workers=3, soft_timeout=30.0, collect_timeout=60.0, lease=20.0)
    with Worker(daemon.address, "case-05", "w1", dim=2) as w1, Worker(daemon.address, "case-05", "w2", dim=2) as w2, \
            Worker(daemon.address, "case-05", "w3", dim=2) as w3:
        digest = w1.started(1).base_digest
        w1.push(1, [1, 1], base_digest=digest)
        w2.push(1, [1, 1], base_digest=digest)
        status = eventually(lambda: (lambda s: s if s.round.have == 2 else None)(daemon.status("case-05")))
        assert status.round.round == 1 and status.round.attempt == 1
        assert status.round.phase == types.ROUND_PHASE_COLLECTING
        assert (status.round.have, status.round.expected, status.round.need) == (2, 3, 2)
        assert [x.worker for x in status.round.awaited] == ["w3"]
        assert 25 < seconds(status.round.time_to_deadline) <= 30
        assert status.round.HasField("deadline")
        for word in ("2", "3", "w3"):
            assert word in status.round.reason, status.round.reason
        parts = {x.worker: x.part for x in status.workers}
        assert parts["w1"] == parts["w2"] == status.workers[0].PART_FOLDED
        assert parts["w3"] == status.workers[0].PART_TRAINING
        w3.push(1, [1, 1], base_digest=digest)
        w3.committed(1)


def test_case_06_two_groups_never_split_the_rounds(daemon):
    """Two groups push for rounds r and r + 1 alternately and without pause. Whoever is not in the open round is
    refused; each round has one commit, and every worker sees the same one."""
    daemon.create_job("case-06", min_workers=2, expected_workers=4, lease=10.0, soft_timeout=0.2, collect_timeout=30.0)
    workers = [Worker(daemon.address, "case-06", name, dim=4) for name in ("a1", "a2", "b1", "b2")]
    digests, errors = {}, []
    lock = threading.Lock()

    def run(worker, ahead):
        try:
            round_number = 1
            while round_number <= 6:
                watch = worker.watch(round_number)
                started = watch.wait("started")
                if ahead:
                    # If the round closed by its soft deadline meanwhile, the push is for the right round and from the
                    # wrong model.
                    with pytest.raises(grpc.RpcError) as caught:
                        worker.push(round_number + 1, [1] * 4, base_digest=started.base_digest)
                    assert Refusal(caught.value).reason in ("VERSION_AHEAD", "BASE_MISMATCH", "STALE_ROUND")
                try:
                    worker.push(round_number, [1] * 4, base_digest=started.base_digest)
                except Exception as error:  # A late one is told so; anything else fails below.
                    refused("STALE_ROUND", _raise, error)
                committed = watch.wait("committed")
                with lock:
                    digests.setdefault(committed.version, set()).add(committed.model_digest)
                watch.cancel()
                round_number = committed.next_round
        except BaseException as error:  # pylint: disable=broad-except
            errors.append(error)

    threads = [threading.Thread(target=run, args=(w, w.name.startswith("b"))) for w in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not errors, errors
    for worker in workers:
        worker.close()
    rounds = [record.round for record in daemon.records("case-06")]
    assert rounds == sorted(set(rounds)), "a round has two commits"
    assert rounds[:6] == [1, 2, 3, 4, 5, 6]
    assert all(len(values) == 1 for values in digests.values()), digests


def _raise(error):
    raise error


class TestCase08:
    """Time budget, minimum number and minimum ratio: each knob alone and together decides when a round closes."""

    def start(self, daemon, job, **rules):
        daemon.create_job(job, lease=20.0, expected_workers=4, **rules)
        workers = [Worker(daemon.address, job, "w%d" % i, dim=2) for i in range(4)]
        return workers, workers[0].started(1).base_digest

    @pytest.mark.parametrize("min_workers,min_fraction,pushes,commits", [
        (2, 0.0, 2, True),
        (3, 0.0, 2, False),
        (1, 0.75, 2, False),
        (1, 0.75, 3, True),
        (3, 0.5, 2, False),
        (2, 0.5, 2, True),
    ])
    def test_case_08_soft_timeout_closes_only_with_a_quorum(self, daemon, min_workers, min_fraction, pushes, commits):
        """At the soft deadline a round with a quorum closes at once; one without waits on."""
        job = "case-08-%d-%d-%d" % (min_workers, int(min_fraction * 100), pushes)
        workers, digest = self.start(daemon, job, min_workers=min_workers, min_fraction=min_fraction,
                                     soft_timeout=0.3, collect_timeout=60.0)
        for worker in workers[:pushes]:
            worker.push(1, [1, 1], base_digest=digest)
        watch = workers[0].watch(1)
        if commits:
            assert watch.wait("committed", 5).contributors == ["w%d" % i for i in range(pushes)]
        else:
            # The soft deadline passed without a commit: the next one is the hard deadline.
            waiting = watch.wait("waiting", 5,
                                 accept=lambda s: s.have == pushes and seconds(s.time_to_deadline) > 5)
            assert waiting.have < waiting.need
            for worker in workers[pushes:waiting.need]:
                worker.push(1, [1, 1], base_digest=digest)
            assert len(watch.wait("committed", 5).contributors) == waiting.need
        for worker in workers:
            worker.close()

    def test_case_08_without_a_soft_timeout_everybody_is_awaited(self, daemon):
        """No soft deadline: a quorum alone closes nothing."""
        workers, digest = self.start(daemon, "case-08-all", min_workers=1, collect_timeout=60.0)
        for worker in workers[:3]:
            worker.push(1, [1, 1], base_digest=digest)
        watch = workers[0].watch(1)
        watch.wait("waiting", accept=lambda s: s.have == 3)
        assert daemon.status("case-08-all").version == 0
        workers[3].push(1, [1, 1], base_digest=digest)
        assert len(watch.wait("committed").contributors) == 4
        for worker in workers:
            worker.close()

    def test_case_08_hard_timeout_commits_a_quorum(self, daemon):
        """on_timeout = commit_if_quorum, and there is one."""
        workers, digest = self.start(daemon, "case-08-hard-commit", min_workers=2, collect_timeout=0.7,
                                     on_timeout=types.ON_TIMEOUT_COMMIT_IF_QUORUM)
        workers[0].push(1, [1, 1], base_digest=digest)
        workers[3].push(1, [1, 1], base_digest=digest)
        assert workers[0].committed(1, 5).contributors == ["w0", "w3"]
        for worker in workers:
            worker.close()

    def test_case_08_hard_timeout_without_quorum_starts_the_round_again(self, daemon):
        """on_timeout = commit_if_quorum, and there is none: the attempt fails, the model stays, the same delta counts
        in the next attempt."""
        workers, digest = self.start(daemon, "case-08-hard-fail", min_workers=3, collect_timeout=0.7,
                                     variant=types.VARIANT_AVERAGING, on_timeout=types.ON_TIMEOUT_COMMIT_IF_QUORUM)
        watch = workers[0].watch(1)
        workers[0].push(1, [8, 8], base_digest=digest)
        restarted = watch.wait("restarted", 5)
        assert restarted.attempt == 2 and restarted.reason
        assert daemon.status("case-08-hard-fail").version == 0
        again = watch.wait("started", 5, accept=lambda s: s.attempt >= 2)
        assert again.base_digest == digest and again.base_version == 0

        # Push until an attempt holds three: a slow machine may see one more attempt fail.
        def committed():
            for worker in workers[:3]:
                try:
                    worker.push(1, [8, 8], base_digest=digest)
                except grpc.RpcError as error:
                    assert Refusal(error).reason in ("STALE_ROUND", "TRANSFER_CANCELLED"), Refusal(error)
            return daemon.status("case-08-hard-fail").version >= 1

        eventually(committed, 10)
        assert list(workers[0].values(1)) == [8, 8]
        for worker in workers:
            worker.close()

    def test_case_08_hard_timeout_can_extend(self, daemon):
        """on_timeout = extend: the deadline moves, and nobody's delta is lost."""
        workers, digest = self.start(daemon, "case-08-extend", min_workers=3, collect_timeout=0.4,
                                     on_timeout=types.ON_TIMEOUT_EXTEND, max_extensions=100)
        workers[0].push(1, [3, 3], base_digest=digest)
        watch = workers[0].watch(1)
        eventually(lambda: daemon.counters("case-08-extend").get("rounds_extended_total", 0) >= 2)
        for worker in workers[1:4]:
            worker.push(1, [3, 3], base_digest=digest)
        assert len(watch.wait("committed", 5).contributors) >= 3
        assert daemon.records("case-08-extend")[0].attempts == 1
        for worker in workers:
            worker.close()

    def test_case_08_hard_timeout_can_fail_the_round(self, daemon):
        """on_timeout = fail_round: even a quorum does not commit at the hard deadline."""
        workers, digest = self.start(daemon, "case-08-fail", min_workers=1, collect_timeout=0.5,
                                     on_timeout=types.ON_TIMEOUT_FAIL_ROUND)
        watch = workers[0].watch(1)
        workers[0].push(1, [3, 3], base_digest=digest)
        watch.wait("restarted", 5)
        assert daemon.status("case-08-fail").version == 0
        for worker in workers:
            worker.close()

    def test_case_08_an_upload_in_progress_gets_its_grace(self, daemon):
        """The soft deadline comes while a worker is uploading: within the grace its delta still counts."""
        workers, digest = self.start(daemon, "case-08-grace", min_workers=3, soft_timeout=0.5, grace=20.0,
                                     collect_timeout=60.0)
        payload = b"\x00\x00\x80\x3f" * 2
        header = workers[3].header(1, len(payload), digest)
        slow = workers[3].open_push(header)
        watch = workers[0].watch(1)
        for worker in workers[:3]:
            worker.push(1, [1, 1], base_digest=digest)
        # Past the soft deadline the next one is the end of the grace.
        watch.wait("waiting", 6, accept=lambda s: s.have == 3 and 5 < seconds(s.time_to_deadline) <= 20)
        chunks = Chunks(payload)
        slow.chunk(chunks.parts[0]).end(chunks.digest)
        assert slow.result().outcome == pb.PUSH_OUTCOME_ACCEPTED
        assert len(watch.wait("committed", 5).contributors) == 4
        for worker in workers:
            worker.close()


def test_leaving_shrinks_the_barrier_at_once(daemon):
    """The end of a worker's data is no time-out: Leave closes the round in that moment."""
    daemon.create_job("leave", min_workers=1, expected_workers=2, lease=20.0, collect_timeout=600.0)
    with Worker(daemon.address, "leave", "a", dim=1) as a, Worker(daemon.address, "leave", "b", dim=1) as b:
        digest = a.started(1).base_digest
        a.push(1, [5], base_digest=digest)
        b.leave()
        assert a.committed(1, 3).contributors == ["a"]
        # A delta that is in still counts after its worker left.
        c = Worker(daemon.address, "leave", "c", dim=1)
        a.push(2, [1])
        a.committed(2)
        digest = c.started(3).base_digest
        c.push(3, [3], base_digest=digest)
        c.leave()
        a.push(3, [1], base_digest=digest)
        assert a.committed(3).contributors == ["a", "c"]
        c.close()


def test_watchers_of_a_finished_round_are_answered_at_once(daemon):
    """A round that is over answers `committed`, also to a worker that joined later."""
    daemon.create_job("over", min_workers=1, lease=20.0)
    with Worker(daemon.address, "over", "a", dim=1) as a:
        for round_number in (1, 2, 3):
            a.push(round_number, [1])
            a.committed(round_number)
        with Worker(daemon.address, "over", "b", dim=1) as b:
            committed = b.committed(1, 3)
            assert committed.version == 1 and committed.newest_version == 3 and committed.next_round == 4


def test_a_late_joiner_is_told_what_an_old_worker_is_told(daemon):
    """Round, version, rules, momentum, samples: one answer for all. And what the joiner pulls is the global model,
    whatever it was started with."""
    daemon.create_job("late-join", min_workers=2, lease=20.0, labels={"data": "shard-set-3"}, seed=7)
    with Worker(daemon.address, "late-join", "a", init=[1, 1]) as a, \
            Worker(daemon.address, "late-join", "b", init=[9, 9]) as b:
        assert list(b.values(0)) == [1, 1]
        digest = a.started(1).base_digest
        for worker in (a, b):
            worker.push(1, [2, 2], base_digest=digest, samples=100)
        a.committed(1)
        with Worker(daemon.address, "late-join", "c", init=[5, 5]) as c:
            old, new = a.join(), c.joined
            for answer in (old, new):
                answer.ClearField("session")
            assert old == new
            assert (new.round, new.version, new.total_samples) == (2, 1, 200)
            assert new.resolved_block_momentum == 0.5
            assert new.config.labels["data"] == "shard-set-3" and new.config.seed == 7
            assert new.model_digest == c.pull()[0].model_digest
