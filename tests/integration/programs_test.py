"""The worker binary and the operator's tool against a real coordinator."""

import gzip
import json
import os
import signal
import struct
import subprocess
import time

import numpy as np
import pytest

import harness
from harness import Daemon
from harness import Worker
from harness import binary
from harness import eventually
from harness import types


def write_images(directory, count=640, name="train", truncate=0):
    """A small data set in the IDX format: two classes that a straight line separates."""
    rng = np.random.default_rng(7)
    labels = rng.integers(0, 2, count).astype(np.uint8)
    pixels = rng.integers(0, 60, (count, 8, 8)).astype(np.uint8)
    pixels[labels == 1, :4] += 150
    images = struct.pack(">IIII", 0x803, count, 8, 8) + pixels.tobytes()
    if truncate:
        images = images[:-truncate]
    with open(os.path.join(directory, name + "-images-idx3-ubyte"), "wb") as out:
        out.write(images)
    with gzip.open(os.path.join(directory, name + "-labels-idx1-ubyte.gz"), "wb") as out:
        out.write(struct.pack(">II", 0x801, count) + labels.tobytes())


@pytest.fixture
def data(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    write_images(str(directory))
    write_images(str(directory), 128, "t10k")
    return str(directory)


class WorkerProgram:
    """A bmuf-worker process with its output."""

    def __init__(self, directory, address, job, name, data, *more):
        self.path = os.path.join(str(directory), "worker-%s.log" % name)
        self._log = open(self.path, "wb")
        self.process = subprocess.Popen(
            [binary("bmuf-worker"), "--coordinator", address, "--job", job, "--name", name, "--model", "mlp",
             "--data", data, "--batch-size", "16", "--lr", "0.05", *more],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)

    def log(self):
        with open(self.path, "rb") as source:
            return source.read().decode("utf-8", "replace")

    def wait(self, timeout=30):
        return self.process.wait(timeout)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *unused):
        if kind is not None:
            print("---- %s\n%s" % (self.path, self.log()[-3000:]))
        self.kill()


def ctl(address, *args, timeout=20, status=0):
    done = subprocess.run([binary("bmufctl"), "--server", address, *args], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout)
    if status is not None:
        assert done.returncode == status, (args, done.returncode, done.stdout, done.stderr)
    return done.stdout.decode(), done.stderr.decode()


def test_case_21_worker_programs_wait_for_the_coordinator(tmp_path, data):
    """Workers first, coordinator later: they say what they wait for, join, and train to the end."""
    holder = harness.socket.socket()
    holder.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % holder.getsockname()[1]
    with WorkerProgram(tmp_path, address, "late", "w0", data) as w0, \
            WorkerProgram(tmp_path, address, "late", "w1", data) as w1:
        for worker in (w0, w1):
            eventually(lambda: "wait" in worker.log().lower() and address in worker.log(), 30,
                       "the worker to say that it waits")
            assert worker.process.poll() is None
        holder.close()
        config = {"jobs": [{"name": "late", "config": {
            "max_rounds": 3, "block_steps": 5,
            "barrier": {"min_workers": 2, "expected_workers": 2, "collect_timeout": "60s"}}}]}
        with Daemon(tmp_path, config, listen=address) as daemon:
            assert w0.wait(60) == 0, w0.log()
            assert w1.wait(60) == 0, w1.log()
            assert [len(record.contributions) for record in daemon.records("late")] == [2, 2, 2]


def test_training_goes_on_when_a_worker_is_killed(tmp_path, data):
    """Three worker programs, one killed with SIGKILL: the others finish, and the loss went down."""
    with Daemon(tmp_path) as daemon:
        daemon.create_job("kill", min_workers=1, expected_workers=3, lease=1.0, collect_timeout=60.0, max_rounds=30,
                          block_steps=5)
        with WorkerProgram(tmp_path, daemon.address, "kill", "w0", data) as w0, \
                WorkerProgram(tmp_path, daemon.address, "kill", "w1", data) as w1, \
                WorkerProgram(tmp_path, daemon.address, "kill", "w2", data) as w2:
            eventually(lambda: daemon.status("kill").version >= 2, 60)
            w2.process.kill()
            assert w0.wait(60) == 0, w0.log()
            assert w1.wait(60) == 0, w1.log()
        assert daemon.status("kill").state == types.JOB_STATE_FINISHED
        records = daemon.records("kill")
        assert len(records) == 30
        assert {c.worker for c in records[-1].contributions} == {"w0", "w1"}
        first, last = records[0].contributions[0].facts, records[-1].contributions[0].facts
        assert first.samples == 5 * 16
        assert last.metrics["loss"] < first.metrics["loss"]


def test_sigterm_stops_a_worker_at_a_block_boundary(tmp_path, data):
    """The worker says Leave and exits 0; the job goes on without a time-out."""
    with Daemon(tmp_path) as daemon:
        daemon.create_job("stop", min_workers=1, lease=30.0, collect_timeout=600.0, block_steps=5)
        with WorkerProgram(tmp_path, daemon.address, "stop", "w0", data) as w0:
            eventually(lambda: daemon.status("stop").version >= 1, 60)
            w0.process.send_signal(signal.SIGTERM)
            assert w0.wait(20) == 0, w0.log()
            worker = daemon.worker_status("stop", "w0")
            assert worker.state == worker.STATE_LEFT


@pytest.mark.parametrize("fault", ["missing", "truncated", "empty"])
def test_data_that_cannot_be_used(tmp_path, fault):
    """One clear error that names the file, a status that is not 0, and no membership left behind."""
    directory = tmp_path / "broken"
    directory.mkdir()
    write_images(str(directory), 128, "t10k")
    if fault != "missing":
        write_images(str(directory), truncate=100)
    if fault == "empty":
        open(str(directory / "train-images-idx3-ubyte"), "w").close()
    with Daemon(tmp_path) as daemon:
        daemon.create_job("data", min_workers=1)
        with WorkerProgram(tmp_path, daemon.address, "data", "w0", str(directory)) as w0:
            assert w0.wait(20) not in (0, None)
            log = w0.log()
            assert "train-images-idx3-ubyte" in log, log
            assert w0.process.returncode > 0, "ended by a signal"
            assert sum("train-images-idx3-ubyte" in line for line in log.splitlines()) == 1, log
        assert not [w for w in daemon.status("data").workers if w.state == w.STATE_ACTIVE]


def test_a_worker_for_an_unknown_job_ends(tmp_path, data):
    """A wrong job name is an error, not something to wait for."""
    with Daemon(tmp_path) as daemon:
        with WorkerProgram(tmp_path, daemon.address, "no-such-job", "w0", data) as w0:
            assert w0.wait(30) not in (0, None)
            assert "no-such-job" in w0.log()


def test_two_worker_programs_with_one_name(tmp_path, data):
    """The older process stops with a reason; the newer trains on."""
    with Daemon(tmp_path) as daemon:
        daemon.create_job("twins", min_workers=1, lease=10.0, block_steps=5)
        with WorkerProgram(tmp_path, daemon.address, "twins", "w0", data) as older:
            eventually(lambda: daemon.status("twins").version >= 1, 60)
            with WorkerProgram(tmp_path, daemon.address, "twins", "w0", data) as newer:
                assert older.wait(60) not in (0, None)
                assert "STALE_INCARNATION" in older.log() or "newer" in older.log()
                version = daemon.status("twins").version
                eventually(lambda: daemon.status("twins").version > version + 1, 30)
                newer.process.send_signal(signal.SIGTERM)
                assert newer.wait(20) == 0


def test_operators_tool(tmp_path):
    """jobs, status, rounds, set, pause, resume, evict, export: for people and as JSON."""
    with Daemon(tmp_path) as daemon:
        daemon.create_job("ops", min_workers=2, variant=types.VARIANT_AVERAGING, lease=30.0)
        a, b = [Worker(daemon.address, "ops", name, init=[1, 2, 3]) for name in ("alpha", "beta")]
        for number in (1, 2):
            harness.run_round([a, b], [[1, 1, 1], [3, 3, 3]], number)
        a.push(3, [0, 0, 0])
        out, _ = ctl(daemon.address, "jobs")
        assert "ops" in out
        out, _ = ctl(daemon.address, "status", "ops")
        assert "beta" in out and "3" in out
        status = json.loads(ctl(daemon.address, "--json", "status", "ops")[0])
        assert "beta" in json.dumps(status)
        rounds, _ = ctl(daemon.address, "rounds", "ops")
        assert "2" in rounds
        ctl(daemon.address, "pause", "ops")
        assert daemon.status("ops").state == types.JOB_STATE_PAUSED
        ctl(daemon.address, "resume", "ops")
        assert daemon.status("ops").state == types.JOB_STATE_RUNNING
        path = str(tmp_path / "model.safetensors")
        ctl(daemon.address, "export", "ops", path)
        with open(path, "rb") as source:
            blob = source.read()
        size = struct.unpack("<Q", blob[:8])[0]
        header = json.loads(blob[8:8 + size])
        begin, end = header["w"]["data_offsets"]
        assert header["w"]["dtype"] == "F32" and header["w"]["shape"] == [3]
        exported = np.frombuffer(blob[8 + size + begin:8 + size + end], "<f4")
        assert list(exported) == list(a.values(2, harness.pb.MODEL_KIND_MODEL)) == [5, 6, 7]
        ctl(daemon.address, "evict", "ops", "beta")
        assert daemon.worker_status("ops", "beta").state == daemon.worker_status("ops", "beta").STATE_EVICTED
        a.close()
        b.close()


def test_operators_tool_changes_rules_and_watches_to_the_end(tmp_path):
    """create with settings, set for the next round, watch until the job is finished: one line a round, exit 0."""
    with Daemon(tmp_path) as daemon:
        ctl(daemon.address, "create", "w", "--set", "max_rounds=4", "--set", "outer.variant=averaging",
            "--set", "barrier.min_workers=1", "--set", "lease=30s")
        watching = subprocess.Popen([binary("bmufctl"), "--server", daemon.address, "watch", "w"],
                                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with Worker(daemon.address, "w", "a", dim=1) as worker:
            digest = worker.started(1).base_digest
            ctl(daemon.address, "set", "w", "block_steps=17")
            worker.push(1, [1], base_digest=digest)
            worker.committed(1)
            assert worker.started(2).block_steps == 17
            for number in (2, 3, 4):
                worker.push(number, [1])
                worker.committed(number)
            out, err = watching.communicate(timeout=20)
        assert watching.returncode == 0, err
        for number in range(1, 5):
            assert sum("round %d" % number in line for line in out.decode().splitlines()) == 1, out
        assert "finished" in out.decode().lower()
        _, err = ctl(daemon.address, "set", "w", "block_stepz=17", status=64)
        assert "block_stepz" in err


def test_operators_tool_says_what_is_wrong(tmp_path):
    """Unknown job: 1, wrong usage: 64, nobody there: 69; one line on stderr, soon."""
    with Daemon(tmp_path) as daemon:
        for command in ("status", "rounds", "pause", "watch"):
            out, err = ctl(daemon.address, command, "no-such-job", status=1)
            assert "no-such-job" in err and len(err.splitlines()) == 1 and not out
        path = str(tmp_path / "model.safetensors")
        ctl(daemon.address, "export", "no-such-job", path, status=1)
        assert not [name for name in os.listdir(str(tmp_path)) if "safetensors" in name]
        ctl(daemon.address, "no-such-command", status=64)
    with harness.socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        began = time.monotonic()
        ctl("127.0.0.1:%d" % holder.getsockname()[1], "jobs", status=69)
        assert time.monotonic() - began < 15
