"""Everything at once: workers die, return, come late, and speak through a network that cuts, delays and loses answers.

Whatever happens, the records of the rounds must explain the model: replaying the deltas that they name gives its
numbers, no worker counts twice in a round, and every watcher saw the same versions.
"""

import random
import threading
import time

import grpc
import numpy as np

import harness
from harness import Daemon
from harness import Proxy
from harness import Refusal
from harness import Worker
from harness import crc
from harness import types

SEED = 20260101
DIM = 5000
ROUNDS = 40
LIMIT_S = 45
# Sudden deaths of one worker: the coordinator slows down a name that more than five processes take over in a minute.
MAX_DEATHS = 4
ETA, ZETA = 0.5, 0.75

# What an honest worker may be told in all this; each has a way on.
EXPECTED = {"STALE_ROUND", "BASE_MISMATCH", "VERSION_AHEAD", "TRANSFER_CANCELLED", "UPLOAD_BUDGET", "SESSION_NOT_FOUND",
            "STALE_INCARNATION", "TOO_MANY"}


class Unlucky:
    """A worker that trains until the last round is there, through a bad network, dying now and then."""

    def __init__(self, name, address, seed):
        self.name, self.address = name, address
        self.random = random.Random(seed)
        self.pushed = {}  # (round, digest) -> delta
        self.versions = {}  # version -> digest
        self.surprises = []
        self.instance = None
        self.lives = 0
        self.deaths = 0
        self.accepted = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.stop.is_set():
            try:
                self.live()
            except grpc.RpcError as error:
                self.note(error)
            except AssertionError as error:
                # A watch that ended without its event: the network again.
                if "UNAVAILABLE" not in str(error) and "the watch ended" not in str(error) and \
                        "no started" not in str(error) and "no committed" not in str(error):
                    self.surprises.append(repr(error))

    def note(self, error):
        refusal = Refusal(error)
        if refusal.reason in EXPECTED:
            # The clients' rule: wait as long as one is told, or a little.
            self.stop.wait(min(refusal.retry_s or 0.02, 1.0))
        elif refusal.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED,
                              grpc.StatusCode.CANCELLED):
            self.stop.wait(0.05)
        else:
            self.surprises.append(repr(refusal))
            self.stop.wait(0.2)

    def live(self):
        """From Join to a sudden end, a Leave or a fault of the network: after the last the same process goes on."""
        self.lives += 1
        worker = Worker(self.address, "chaos", self.name, dim=DIM, join=False, instance=self.instance)
        self.instance = worker.instance
        try:
            worker.join()
            if worker.joined.need_initial_model:
                worker.upload_initial()
            worker.start_heartbeats(0.25)
            blocks = self.random.randint(4, 12)
            round_number = max(1, worker.joined.round)
            for _ in range(blocks):
                watch = worker.watch(round_number, timeout=10)
                started = watch.wait("started", 5)
                # Now and then a straggler.
                self.stop.wait(self.random.choice([0.0, 0.0, 0.02, 0.4]))
                values = np.asarray([self.random.randint(-999, 999) for _ in range(50)]) / 1024
                delta = np.tile(values, DIM // 50).astype("<f4")
                payload = delta.tobytes()
                self.pushed[(round_number, crc.crc32c(payload))] = delta.astype(np.float64)
                header = worker.header(round_number, len(payload), started.base_digest, samples=10)
                for _ in range(4):
                    try:
                        worker.send(header, payload, chunk_bytes=4096, timeout=1.5)
                        self.accepted += 1
                        break
                    except grpc.RpcError as error:
                        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                            raise
                committed = watch.wait("committed", 8)
                self.versions.setdefault(committed.version, set()).add(committed.model_digest)
                watch.cancel()
                round_number = committed.next_round
                if self.stop.is_set():
                    return
            if self.random.random() < 0.3:
                worker.leave()
                self.instance = None
            elif self.deaths < MAX_DEATHS:
                self.deaths += 1
                self.instance = None
        finally:
            worker.close()


def disturb(proxies, stop, rng):
    """Cuts, delays, and loses answers, one proxy at a time."""
    while not stop.wait(rng.uniform(0.05, 0.3)):
        proxy = rng.choice(proxies)
        kind = rng.randrange(4)
        if kind == 0:
            proxy.cut_all()
        elif kind == 1:
            proxy.delay_s = rng.choice([0.0, 0.01, 0.03])
        elif kind == 2:
            proxy.swallow.set()
            stop.wait(rng.uniform(0.05, 0.2))
            proxy.swallow.clear()
            proxy.cut_all()  # A stream with a hole in it is of no use to either side.
        else:
            proxy.stalled.set()
            stop.wait(rng.uniform(0.05, 0.3))
            proxy.stalled.clear()


def replay(records, workers):
    """The model that the records describe, in double."""
    model, velocity, broadcast = np.zeros(DIM), np.zeros(DIM), np.zeros(DIM)
    for record in records:
        total, weight = np.zeros(DIM), 0.0
        for part in record.contributions:
            delta = workers[part.worker].pushed[(record.round, part.digest)]
            total += part.weight * delta
            weight += part.weight
        assert weight == record.total_weight
        velocity = ETA * velocity + ZETA * total / weight
        model = model + velocity
        broadcast = model + ETA * velocity
    return model, broadcast


def test_the_records_explain_the_model(tmp_path):
    """Six workers, four of them behind bad networks, forty rounds."""
    rng = random.Random(SEED)
    with Daemon(tmp_path) as daemon:
        daemon.create_job("chaos", min_workers=2, expected_workers=4, start_timeout=5.0, soft_timeout=0.3, grace=0.3,
                          collect_timeout=3.0, lease=1.0, variant=types.VARIANT_NESTEROV, block_momentum=ETA,
                          block_learning_rate=ZETA, max_inflight_pushes=3)
        proxies = [Proxy(daemon.address, seed) for seed in range(4)]
        addresses = [proxy.address for proxy in proxies] + [daemon.address] * 2
        workers = {"w%d" % i: Unlucky("w%d" % i, address, SEED + i) for i, address in enumerate(addresses)}
        stop = threading.Event()
        disturber = threading.Thread(target=disturb, args=(proxies, stop, rng))
        disturber.start()
        try:
            began = time.monotonic()
            harness.eventually(lambda: daemon.status("chaos").version >= ROUNDS, LIMIT_S, "%d rounds" % ROUNDS)
        finally:
            stop.set()
            for worker in workers.values():
                worker.stop.set()
            disturber.join()
            for proxy in proxies:
                proxy.close()
            for worker in workers.values():
                worker.thread.join(20)
        surprises = {name: worker.surprises for name, worker in workers.items() if worker.surprises}
        assert not surprises, surprises
        # Take the state once nothing moves any more.
        daemon.admin.PauseJob(harness.admin_pb.PauseJobRequest(job="chaos", reason="the test looks at it"))
        harness.eventually(lambda: daemon.status("chaos").round.phase == types.ROUND_PHASE_PAUSED)
        records = daemon.records("chaos")
        status = daemon.status("chaos")
        assert [record.round for record in records] == list(range(1, status.version + 1))
        for record in records:
            names = [part.worker for part in record.contributions]
            assert len(names) == len(set(names)) >= 2, record
        for worker in workers.values():
            for version, digests in worker.versions.items():
                assert digests == {records[version - 1].model_digest}, version
        model, broadcast = replay(records, workers)
        _, served = harness.pull(daemon.coordinator, "chaos")
        np.testing.assert_allclose(np.frombuffer(served, "<f4"), broadcast, rtol=0, atol=1e-4)
        _, served = harness.pull(daemon.coordinator, "chaos", kind=harness.pb.MODEL_KIND_MODEL)
        np.testing.assert_allclose(np.frombuffer(served, "<f4"), model, rtol=0, atol=1e-4)
        assert crc.crc32c(harness.pull(daemon.coordinator, "chaos")[1]) == status.model_digest
        print("%d rounds in %.1f s, %d lives, %d deaths, %d pushes accepted" % (
            len(records), time.monotonic() - began, sum(w.lives for w in workers.values()),
            sum(w.deaths for w in workers.values()), sum(w.accepted for w in workers.values())))
