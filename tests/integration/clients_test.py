"""The two client packages against a real daemon: together in one job, through a restart, through a replacement."""

import os
import subprocess

import pytest
from harness import Daemon, binary, eventually

TRUTH = [float(i) for i in range(8)]


def start(kind, daemon_address, worker, **popen):
    if kind == "cpp":
        command = [binary("cpp-example"), daemon_address, "fit", worker]
        env = dict(os.environ)
    else:
        command = ["/usr/bin/python3", binary("python-example"), daemon_address, "fit", worker]
        env = dict(os.environ, PYTHONPATH=binary("python-zip"))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **popen)


def result(process, timeout=60):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    words = out.split()
    assert words[0] == "version" and words[2] == "w"
    return int(words[1]), [float(word) for word in words[3:]]


def rules(workers, rounds):
    return dict(
        outer=dict(variant="nesterov", block_learning_rate=0.7, block_momentum=0.5),
        barrier=dict(min_workers=1, expected_workers=workers, start_timeout="30s", collect_timeout="30s"),
        # Where the fit is exact, deltas are rounding noise, and noise has outliers.
        norm_guard=dict(action="off"),
        block_steps=40, max_rounds=rounds, lease="2s")


def config(workers, rounds):
    return dict(jobs=[dict(name="fit", config=rules(workers, rounds))])


@pytest.mark.parametrize("kinds", [["cpp", "cpp"], ["python", "python"], ["cpp", "python"]])
def test_workers_of_any_language_end_with_the_same_model(tmp_path, kinds):
    """All members of a job hold the same numbers at its end, and they are the solution."""
    with Daemon(tmp_path, config(len(kinds), 30)) as daemon:
        processes = [start(kind, daemon.address, f"w{i}") for i, kind in enumerate(kinds)]
        results = [result(process) for process in processes]
        assert all(version == 30 for version, _ in results)
        assert results[0][1] == results[1][1]
        assert results[0][1] == pytest.approx(TRUTH, abs=0.05)
        record = daemon.records("fit")[0]
        assert [part.worker for part in record.contributions] == ["w0", "w1"]


@pytest.mark.parametrize("kind", ["cpp", "python"])
def test_a_worker_that_starts_first_waits_for_its_coordinator(tmp_path, kind):
    """Start order does not matter: the worker says that it waits, and joins when the daemon is there."""
    with Daemon(tmp_path / "a", config(1, 3)) as daemon:
        address = daemon.address
    process = start(kind, address, "w0")
    eventually(lambda: "waiting for the coordinator" in process.stderr.readline(), timeout=20, what="a word of waiting")
    with Daemon(tmp_path / "b", config(1, 3), listen=address):
        assert result(process)[0] == 3


@pytest.mark.parametrize("kind", ["cpp", "python"])
def test_workers_ride_through_a_killed_coordinator(tmp_path, kind):
    """State is in memory: after a kill the workers bring the last broadcast model back and train on, unasked."""
    with Daemon(tmp_path / "a", config(2, 100000)) as daemon:
        address = daemon.address
        processes = [start(kind, address, f"w{i}") for i in range(2)]
        eventually(lambda: daemon.status("fit").version >= 20, timeout=60, what="20 rounds")
        daemon.kill()
    with Daemon(tmp_path / "b", config(2, 20), listen=address):
        results = [result(process) for process in processes]
    assert results[0] == results[1]
    assert results[0][0] == 20
    assert results[0][1] == pytest.approx(TRUTH, abs=0.05)


@pytest.mark.parametrize("kind", ["cpp", "python"])
def test_a_job_goes_on_when_a_worker_is_killed_and_replaced(tmp_path, kind):
    """The replacement gets the global model and counts from the next round."""
    with Daemon(tmp_path, config(2, 400)) as daemon:
        first = [start(kind, daemon.address, f"w{i}") for i in range(2)]
        eventually(lambda: daemon.status("fit").version >= 5, timeout=60, what="5 rounds")
        first[1].kill()
        first[1].communicate()
        replacement = start(kind, daemon.address, "w2")
        results = [result(first[0]), result(replacement)]
        assert results[0] == results[1]
        names = {part.worker for record in daemon.records("fit") for part in record.contributions}
        assert names == {"w0", "w1", "w2"}


@pytest.mark.parametrize("kind", ["cpp", "python"])
def test_a_permanent_refusal_ends_the_worker_with_its_reason(tmp_path, kind):
    with Daemon(tmp_path) as daemon:
        process = start(kind, daemon.address, "w0")
        _, err = process.communicate(timeout=20)
        assert process.returncode != 0
        assert "fit" in err and "no job" in err.lower(), err
