"""Long blocks, lost answers, late workers, slow logs: waiting must always end in an answer, and disturb nobody."""

import fcntl
import os
import signal
import subprocess
import threading
import time

import grpc
import pytest

import harness
from harness import Daemon
from harness import Proxy
from harness import Refusal
from harness import Worker
from harness import eventually
from harness import pb
from harness import refused
from harness import types

_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon")) as running:
        yield running


def test_case_10_a_block_longer_than_the_network_keeps_idle_connections(daemon):
    """Between worker and coordinator sits a box that cuts silent connections. Over a block of many such cuts the
    worker stays a member, and its push is counted once."""
    daemon.create_job("case-10", min_workers=1, lease=20.0, collect_timeout=120.0, variant=types.VARIANT_AVERAGING)
    with Proxy(daemon.address) as proxy:
        proxy.idle_drop_s = 2.0
        with Worker(proxy.address, "case-10", "far", dim=2, heartbeats=False) as worker:
            digest = worker.started(1).base_digest
            began = time.monotonic()
            worker.start_heartbeats(period=3.0)
            eventually(lambda: proxy.cuts >= 2 and time.monotonic() - began >= 8, 30, "two cut connections")
            payload = harness.payload_of([1, 2])
            header = worker.header(1, len(payload), digest)
            # The box may cut in this very moment: the same push again then.
            eventually(lambda: _retry(worker, header, payload), 15)
            eventually(lambda: daemon.status("case-10").version == 1)
            assert all(e.code == grpc.StatusCode.UNAVAILABLE for e in worker.heartbeat_errors), worker.heartbeat_errors
            record = daemon.records("case-10")[0]
            assert [(c.worker, c.weight) for c in record.contributions] == [("far", 1.0)]
            with Worker(daemon.address, "case-10", "near", dim=2) as near:
                assert list(near.values(1)) == [1, 2]
            assert daemon.counters("case-10").get("workers_expired_total", 0) == 0


class Pulse:
    """Heartbeats from a process of its own, so that this one's work does not spoil the measured times."""

    def __init__(self, address, job, name, dim):
        here = os.path.dirname(os.path.abspath(__file__))
        self._process = subprocess.Popen(
            ["/usr/bin/python3", os.path.join(here, "worker_process.py"), address, job, name, str(dim), "pulse"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout.readline() == b"joined\n"

    def stop(self):
        """Number of heartbeats, and the slowest one's time in seconds."""
        out, _ = self._process.communicate(timeout=20)
        count, slowest = out.split()
        return int(count), float(slowest)


def test_case_11_heartbeats_are_answered_while_a_large_model_is_committed(daemon):
    """100 MB are verified, folded and committed; a bystander's heartbeats are answered within a second throughout."""
    elements = 25_000_000
    daemon.create_job("case-11", min_workers=1, expected_workers=1, lease=20.0, collect_timeout=120.0)
    with Worker(daemon.address, "case-11", "big", dim=elements) as worker:
        pulse = Pulse(daemon.address, "case-11", "bystander", elements)
        payload = bytes(4 * elements)
        digest = worker.started(1).base_digest
        worker.send(worker.header(1, len(payload), digest), payload)
        worker.committed(1, 60)
        beats, slowest = pulse.stop()
        assert beats >= 10
        assert slowest < 1.0
        worker.leave()


def test_case_11_heartbeats_are_answered_while_nobody_reads_the_log(tmp_path):
    """The log goes to a pipe that is full, as when a log collector hangs. The daemon goes on working."""
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, _SET_PIPE_SIZE, 4096)
    with Daemon(tmp_path, args=["--log-level", "debug"], stderr=write_end) as daemon:
        os.close(write_end)
        try:
            daemon.create_job("case-11-log", min_workers=1, lease=5.0)
            with Worker(daemon.address, "case-11-log", "w", dim=1, heartbeats=False) as worker:
                slowest, rounds = 0.0, 0
                # Many joins, rounds and refusals: far more lines than the pipe holds.
                for number in range(1, 41):
                    worker.push(number, [1])
                    worker.committed(number)
                    refused("VERSION_AHEAD", worker.push, number + 5, [2], base_digest=1)
                    began = time.monotonic()
                    worker.heartbeat()
                    slowest = max(slowest, time.monotonic() - began)
                    rounds += 1
                assert rounds == 40 and slowest < 1.0
        finally:
            drain = threading.Thread(target=lambda: _read_all(read_end), daemon=True)
            drain.start()
    drain.join(10)


def _read_all(descriptor):
    while os.read(descriptor, 65536):
        pass
    os.close(descriptor)


def test_case_13_a_late_worker_is_told_how_to_go_on(daemon):
    """A push after the cut-off is refused with the round and version to use next; with them it contributes again."""
    daemon.create_job("case-13", min_workers=1, expected_workers=2, soft_timeout=0.2, collect_timeout=60.0, lease=20.0,
                      variant=types.VARIANT_AVERAGING)
    with Worker(daemon.address, "case-13", "prompt", dim=1) as prompt, \
            Worker(daemon.address, "case-13", "late", dim=1) as late:
        base = late.started(1)
        prompt.push(1, [4], base_digest=base.base_digest)
        prompt.committed(1, 5)
        refusal = refused("STALE_ROUND", late.push, 1, [100], base_digest=base.base_digest)
        round_number, version = int(refusal.metadata["round"]), int(refusal.metadata["version"])
        assert (round_number, version) == (2, 1)
        header, _ = late.pull(version)
        late.push(round_number, [6], base_digest=header.model_digest)
        prompt.push(round_number, [8], base_digest=header.model_digest)
        assert late.committed(round_number, 5).contributors == ["late", "prompt"]
        assert list(late.values(2)) == [4 + 7]


def test_case_14_a_lost_answer_costs_one_deadline_and_counts_once(daemon):
    """The answer to a push is lost on the way. The caller's deadline ends its wait, the retry is recognised, and the
    daemon holds no call that nobody waits for."""
    daemon.create_job("case-14", min_workers=2, expected_workers=2, lease=30.0, collect_timeout=120.0,
                      variant=types.VARIANT_AVERAGING)
    with Proxy(daemon.address) as proxy:
        with Worker(proxy.address, "case-14", "unlucky", dim=2, heartbeats=False) as unlucky, \
                Worker(daemon.address, "case-14", "other", dim=2) as other:
            digest = unlucky.started(1).base_digest
            payload = harness.payload_of([2, 4])
            header = unlucky.header(1, len(payload), digest)
            proxy.swallow.set()
            began = time.monotonic()
            with pytest.raises(grpc.RpcError) as caught:
                unlucky.send(header, payload, timeout=1.5)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert time.monotonic() - began < 3
            eventually(lambda: daemon.status("case-14").round.have == 1)
            proxy.swallow.clear()
            proxy.cut_all()
            answer = eventually(lambda: _retry(unlucky, header, payload), 15, "the push to go through again")
            assert answer.outcome == pb.PUSH_OUTCOME_DUPLICATE
            other.push(1, [4, 8], base_digest=digest)
            assert other.committed(1, 5).contributors == ["other", "unlucky"]
            assert list(other.values(1)) == [3, 6]
    assert daemon.records("case-14")[0].total_weight == 2


def _retry(worker, header, payload):
    try:
        return worker.send(header, payload, timeout=5)
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE, Refusal(error)
        return None


def test_case_14_every_wait_ends_when_its_worker_is_gone(daemon):
    """A watcher that left or was replaced gets an error instead of silence, and a watch ends at its caller's
    deadline."""
    daemon.create_job("case-14-watch", min_workers=3, expected_workers=3, lease=30.0, collect_timeout=600.0)
    with Worker(daemon.address, "case-14-watch", "gone", dim=1) as gone, \
            Worker(daemon.address, "case-14-watch", "older", dim=1) as older:
        short = gone.watch(1, timeout=0.5)
        short.wait_end(3)
        assert short.error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        left, replaced = gone.watch(1), older.watch(1)
        gone.leave()
        left.wait_end(4)
        assert Refusal(left.error).reason == "SESSION_NOT_FOUND"
        with Worker(daemon.address, "case-14-watch", "older", dim=1):
            replaced.wait_end(4)
            assert Refusal(replaced.error).reason == "STALE_INCARNATION"


def test_case_20_a_thousand_waiters_hold_no_thread(tmp_path):
    """Two threads for the work, many workers that wait in WatchRound: the next push is still answered at once."""
    waiters = 64
    with Daemon(tmp_path, {"compute_threads": 2}) as daemon:
        daemon.create_job("case-20", min_workers=waiters + 1, expected_workers=waiters + 1, lease=30.0,
                          collect_timeout=600.0)
        workers = [Worker(daemon.address, "case-20", "w%03d" % i, dim=1, heartbeats=False) for i in range(waiters)]
        pusher = Worker(daemon.address, "case-20", "x", dim=1)
        # Sixteen streams each: more than a thousand waits on the daemon.
        watches = [worker.watch(1) for worker in workers]
        streams = [worker.raw_stub.WatchRound(pb.WatchRoundRequest(session=worker.session, round=1), timeout=60)
                   for worker in workers for _ in range(15)]
        for watch in watches:
            watch.wait("started")
        threads_before = len(os.listdir("/proc/%d/task" % daemon.pid))
        began = time.monotonic()
        digest = pusher.started(1).base_digest
        assert pusher.push(1, [1], base_digest=digest).outcome == pb.PUSH_OUTCOME_ACCEPTED
        assert time.monotonic() - began < 2.0
        assert threads_before < 64, "threads grow with the waiters"
        for worker in workers:
            worker.push(1, [1], base_digest=digest)
        for watch in watches:
            watch.wait("committed", 20)
        for stream in streams:
            stream.cancel()
        for worker in workers + [pusher]:
            worker.close()


def test_case_21_workers_may_come_before_the_coordinator(tmp_path):
    """Any start order: a client that is told UNAVAILABLE tries again and joins once the coordinator is there."""
    holder = harness.socket.socket()
    holder.bind(("127.0.0.1", 0))  # Bound, not listening: connections are refused, and the port stays ours.
    address = "127.0.0.1:%d" % holder.getsockname()[1]
    workers, attempts = [], []

    def start(name):
        worker = Worker(address, "case-21", name, dim=1, join=False)
        while True:
            try:
                worker.join()
                break
            except grpc.RpcError as error:
                assert Refusal(error).code in (grpc.StatusCode.UNAVAILABLE,) or \
                    Refusal(error).reason == "JOB_NOT_FOUND", Refusal(error)
                attempts.append(name)
                time.sleep(0.1)
        if worker.joined.need_initial_model:
            worker.upload_initial()
        worker.start_heartbeats()
        workers.append(worker)

    threads = [threading.Thread(target=start, args=("w%d" % i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(set(attempts)) == 3, 20, "all three to have been refused once")
    holder.close()
    with Daemon(tmp_path, listen=address) as daemon:
        daemon.create_job("case-21", min_workers=3, lease=20.0)
        for thread in threads:
            thread.join(30)
        assert len(workers) == 3
        digest = workers[0].started(1).base_digest
        for worker in workers:
            worker.push(1, [1], base_digest=digest)
        assert workers[0].committed(1).contributors == ["w0", "w1", "w2"]
        for worker in workers:
            worker.close()


def test_case_22_heartbeats_alone_keep_a_worker_alive(daemon):
    """Nothing but heartbeats for ten leases; then the push is accepted."""
    daemon.create_job("case-22", min_workers=2, expected_workers=2, lease=1.0, collect_timeout=600.0)
    with Worker(daemon.address, "case-22", "long", dim=1) as worker, \
            Worker(daemon.address, "case-22", "peer", dim=1) as peer:
        began = time.monotonic()
        digest = worker.started(1).base_digest
        eventually(lambda: time.monotonic() - began > 10.0 and len(worker.heartbeat_answers) > 10, 20)
        assert not worker.heartbeat_errors
        assert worker.push(1, [1], base_digest=digest).outcome == pb.PUSH_OUTCOME_ACCEPTED
        peer.push(1, [3], base_digest=digest)
        assert worker.committed(1).contributors == ["long", "peer"]
        assert daemon.counters("case-22").get("workers_expired_total", 0) == 0


def test_case_22_a_worker_that_was_silent_too_long_comes_back(daemon):
    """A lease that ran out is not the end: the next heartbeat of the same session brings the worker back."""
    daemon.create_job("case-22-back", min_workers=1, lease=1.0)
    with Worker(daemon.address, "case-22-back", "w", dim=1, heartbeats=False) as worker:
        eventually(lambda: daemon.worker_status("case-22-back", "w").state ==
                   daemon.worker_status("case-22-back", "w").STATE_EXPIRED, 5, "the lease to run out")
        round_number = worker.heartbeat().round
        worker.start_heartbeats()
        assert daemon.worker_status("case-22-back", "w").state == daemon.worker_status("case-22-back", "w").STATE_ACTIVE
        worker.push(round_number, [1])
        assert worker.committed(round_number).contributors == ["w"]


def test_a_paused_process_expires_nobody_when_it_wakes(tmp_path):
    """The whole daemon stands still for three leases (a suspended machine). The heartbeats that came meanwhile are read
    before anybody is declared dead."""
    with Daemon(tmp_path) as daemon:
        daemon.create_job("paused", min_workers=2, lease=1.0, collect_timeout=600.0)
        with Worker(daemon.address, "paused", "a", dim=1) as a, Worker(daemon.address, "paused", "b", dim=1) as b:
            digest = a.started(1).base_digest
            answered = len(a.heartbeat_answers), len(b.heartbeat_answers)
            daemon.signal(signal.SIGSTOP)
            began = time.monotonic()
            eventually(lambda: time.monotonic() - began > 3.0, 10)
            daemon.signal(signal.SIGCONT)
            eventually(lambda: len(a.heartbeat_answers) > answered[0] + 1 and
                       len(b.heartbeat_answers) > answered[1] + 1, 10)
            assert daemon.counters("paused")["workers_expired_total"] == 0
            assert daemon.status("paused").round.attempt == 1
            for worker in (a, b):
                worker.push(1, [1], base_digest=digest)
            assert a.committed(1).contributors == ["a", "b"]
