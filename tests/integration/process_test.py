"""The coordinator as a process: configuration, addresses, exit statuses, signals."""

import os
import re
import signal
import socket
import subprocess
import time

import grpc
import pytest

import harness
from harness import Daemon
from harness import Worker
from harness import admin_pb
from harness import binary
from harness import eventually
from harness import pb
from harness import refused
from harness import types

EXIT_CONFIG = 64
EXIT_INSECURE = 78


def run(*args, timeout=10, env=None):
    """Runs the coordinator to its end: (status, stdout, stderr, seconds)."""
    began = time.monotonic()
    done = subprocess.run([binary("bmuf-coordinator"), *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=timeout, env=env)
    return done.returncode, done.stdout.decode(), done.stderr.decode(), time.monotonic() - began


GOOD = """\
listen: 127.0.0.1:0
drain_timeout: 2s
compute_threads: 2
memory_limit_bytes: 4GiB
job_defaults:
  lease: 10s
  barrier:
    min_workers: 1
    collect_timeout: 1m
jobs:
  - name: lm
    config:
      block_steps: 40
      outer:
        variant: nesterov
        block_learning_rate: 0.7
        block_momentum: 0.9
  - name: vision
"""


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_a_good_file_passes_the_check(config):
    """--check-config reads the file and starts nothing."""
    code, _, err, _ = run("--config", config(GOOD), "--check-config")
    assert code == 0, err


def test_the_printed_configuration_is_complete_and_can_be_read_again(config):
    """--print-config shows the file over the defaults and is itself a configuration file."""
    code, out, err, _ = run("--config", config(GOOD), "--print-config")
    assert code == 0, err
    for word in ("listen", "lm", "vision", "0.7", "0.9", "block_steps"):
        assert word in out, out
    code, again, err, _ = run("--config", config(out), "--print-config")
    assert code == 0, err
    assert again == out


@pytest.mark.parametrize("line,text,words", [
    (3, "compute_threds: 2", ["compute_threds"]),
    (2, "drain_timeout: soon", ["drain_timeout", "soon"]),
    (2, "drain_timeout: 5", ["drain_timeout"]),
    (3, "compute_threads: two", ["compute_threads", "two"]),
    (3, "compute_threads: -1", ["compute_threads"]),
    (3, "compute_threads: 99999999999", ["compute_threads"]),
    (3, "listen: 127.0.0.1:1", ["listen"]),
    (4, "memory_limit_bytes: 4 elephants", ["memory_limit_bytes"]),
    (6, "  leese: 10s", ["leese"]),
    (15, "        variant: fastest", ["variant", "fastest"]),
    (15, "        variant: [1, 2]", ["variant"]),
    (16, "        block_learning_rate: high", ["block_learning_rate", "high"]),
    (8, "\tmin_workers: 1", []),
], ids=lambda value: str(value).strip()[:30].replace(" ", "_") if isinstance(value, str) else None)
def test_a_mistake_in_the_file_is_named_with_its_line(config, line, text, words):
    """Unknown and repeated keys, wrong types, wrong units, broken YAML: exit 64, one message with line and key."""
    lines = GOOD.splitlines()
    lines[line - 1] = text
    path = config("\n".join(lines) + "\n")
    for extra in (["--check-config"], ["--listen", "127.0.0.1:0"]):
        code, _, err, took = run("--config", path, *extra)
        assert code == EXIT_CONFIG, (code, err)
        assert took < 5
        assert re.search(r"(line |:)%d\b" % line, err), err
        for word in words:
            assert word in err, err


@pytest.mark.parametrize("change", [
    ("block_momentum: 0.9", "block_momentum: 1.5", "block_momentum"),
    ("lease: 10s", "lease: 10ms", "lease"),
    ("- name: vision", "- name: lm", "lm"),
    ("- name: vision", "- name: ../vision", "vision"),
    ("listen: 127.0.0.1:0", "listen: nowhere", "nowhere"),
])
def test_values_out_of_range_are_a_mistake_too(config, change):
    """What CreateJob would refuse, the file may not say."""
    old, new, word = change
    code, _, err, _ = run("--config", config(GOOD.replace(old, new)), "--check-config")
    assert code == EXIT_CONFIG, err
    assert word in err, err


def test_a_missing_file_and_an_unknown_flag(tmp_path):
    """Both end at once with what was wrong."""
    code, _, err, _ = run("--config", str(tmp_path / "absent.yaml"))
    assert code == EXIT_CONFIG and "absent.yaml" in err
    code, _, err, _ = run("--no-such-flag")
    assert code == EXIT_CONFIG and "no-such-flag" in err


def test_flags_go_over_the_environment_and_that_over_the_file(config, tmp_path):
    """defaults < file < environment < flags."""
    path = config(GOOD)
    code, out, err, _ = run("--config", path, "--print-config", env={"BMUF_COMPUTE_THREADS": "3"})
    assert code == 0 and re.search(r"compute_threads: 3\b", out), out + err
    code, out, err, _ = run("--config", path, "--print-config", "--compute-threads", "5",
                            env={"BMUF_COMPUTE_THREADS": "3"})
    assert code == 0 and re.search(r"compute_threads: 5\b", out), out + err


def test_configured_jobs_are_there_from_the_start(tmp_path):
    """With the file's rules over its job defaults, those over the built-in ones."""
    with Daemon(tmp_path, GOOD) as daemon:
        jobs = {job.name: job.config for job in daemon.admin.ListJobs(admin_pb.ListJobsRequest()).jobs}
        assert sorted(jobs) == ["lm", "vision"]
        assert jobs["lm"].outer.block_learning_rate == 0.7
        assert jobs["lm"].outer.variant == types.VARIANT_NESTEROV
        assert jobs["vision"].outer.block_learning_rate == 1.0
        assert {config.lease.seconds for config in jobs.values()} == {10}
        assert {config.barrier.collect_timeout.seconds for config in jobs.values()} == {60}


def test_case_66_a_second_daemon_on_the_port_is_refused(tmp_path):
    """The address is taken: the second ends within two seconds, not 0, naming the address. The first goes on."""
    with Daemon(tmp_path / "first") as first:
        first.create_job("j", min_workers=1)
        code, _, err, took = run("--listen", first.address)
        assert code not in (0, None) and took < 2.0
        assert first.address in err, err
        with Worker(first.address, "j", "w", dim=1) as worker:
            worker.push(1, [1])
            worker.committed(1)


def test_case_66_the_port_is_not_shared_through_reuseport(tmp_path):
    """Another program listens with SO_REUSEPORT. A daemon that used the option too would bind and share the workers."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = "127.0.0.1:%d" % other.getsockname()[1]
        code, _, err, took = run("--listen", address)
        assert code not in (0, None) and took < 2.0
        assert address in err, err
    with Daemon(tmp_path) as daemon, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError):
            other.bind(("127.0.0.1", daemon.port))
            other.listen()


def test_plaintext_beyond_loopback_must_be_asked_for(tmp_path):
    """0.0.0.0 without TLS: exit 78. With the flag it starts."""
    for address in ("0.0.0.0:0", "[::]:0"):
        code, _, err, _ = run("--listen", address)
        assert code == EXIT_INSECURE, (code, err)
        assert "insecure" in err
    with Daemon(tmp_path, {"insecure_plaintext": True}, listen="0.0.0.0:0") as daemon:
        assert daemon.port > 0


def test_sigterm_lets_the_open_round_end(tmp_path):
    """SIGTERM while a round is open: the missing delta is still taken, its watchers hear of the commit, exit 0."""
    daemon = Daemon(tmp_path, {"drain_timeout": "20s"})
    daemon.create_job("j", min_workers=2, lease=30.0)
    a, b = [Worker(daemon.address, "j", name, dim=1) for name in "ab"]
    digest = a.started(1).base_digest
    watch = a.watch(1)
    a.push(1, [1], base_digest=digest)
    began = time.monotonic()
    daemon.signal(signal.SIGTERM)
    refused("DRAINING", eventually, lambda: Worker(daemon.address, "j", "c", dim=1).close())
    b.push(1, [1], base_digest=digest)
    assert watch.wait("committed").version == 1
    assert daemon.wait(15) == 0
    assert time.monotonic() - began < 15
    a.close()
    b.close()
    daemon.stop()


def test_sigterm_does_not_wait_longer_than_it_may(tmp_path):
    """The missing worker never comes: the drain ends at its time-out, with exit 0 all the same."""
    daemon = Daemon(tmp_path, {"drain_timeout": "1s"})
    daemon.create_job("j", min_workers=2, lease=30.0)
    a, b = [Worker(daemon.address, "j", name, dim=1) for name in "ab"]
    watch = a.watch(1)
    watch.wait("started")
    began = time.monotonic()
    daemon.stop(10)
    assert 0.5 < time.monotonic() - began < 6
    watch.wait_end()
    a.close()
    b.close()


def test_an_idle_daemon_ends_at_once(tmp_path):
    """Nothing open: SIGTERM and SIGINT both end it within a moment."""
    for number in (signal.SIGTERM, signal.SIGINT):
        daemon = Daemon(tmp_path)
        daemon.create_job("j")
        began = time.monotonic()
        daemon.signal(number)
        assert daemon.wait(10) == 0
        assert time.monotonic() - began < 3
        daemon.stop()


def test_a_second_signal_does_not_wait(tmp_path):
    """Whoever asks twice means it."""
    daemon = Daemon(tmp_path, {"drain_timeout": "60s"})
    daemon.create_job("j", min_workers=2, lease=30.0)
    a, b = [Worker(daemon.address, "j", name, dim=1) for name in "ab"]
    a.started(1)
    daemon.signal(signal.SIGTERM)
    eventually(lambda: daemon.admin.GetStatus(admin_pb.GetStatusRequest()).draining)
    daemon.signal(signal.SIGTERM)
    daemon.wait(5)
    a.close()
    b.close()
    daemon.kill()


def test_the_daemon_may_end_with_its_jobs(tmp_path):
    """exit_when_done: the last job's last round ends the process with 0."""
    daemon = Daemon(tmp_path, {"exit_when_done": True, "jobs": [{"name": "short", "config": {"max_rounds": 1}}]})
    with Worker(daemon.address, "short", "w", dim=1) as worker:
        worker.push(1, [1])
        worker.committed(1)
        assert daemon.wait(15) == 0
    daemon.stop()


def test_two_ports_and_no_more(tmp_path):
    """One data port, and one for metrics if asked for; both are in the port file, and nothing else listens."""
    with Daemon(tmp_path, {"metrics_listen": "127.0.0.1:0"}) as daemon:
        ports = {daemon.port, int(daemon.metrics_address.rsplit(":", 1)[1])}
        assert listening_ports(daemon.pid) == ports
        with socket.create_connection(daemon.metrics_address.rsplit(":", 1), timeout=5) as page:
            page.sendall(b"GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n")
            answer = b"".join(iter(lambda: page.recv(65536), b""))
        assert b" 200 " in answer.split(b"\r\n", 1)[0]
    with Daemon(tmp_path) as daemon:
        assert listening_ports(daemon.pid) == {daemon.port}


def listening_ports(pid):
    inodes = set()
    for entry in os.listdir("/proc/%d/fd" % pid):
        try:
            link = os.readlink("/proc/%d/fd/%s" % (pid, entry))
        except FileNotFoundError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        with open("/proc/%d/net/%s" % (pid, table)) as source:
            for line in source.readlines()[1:]:
                columns = line.split()
                if columns[3] == "0A" and columns[9] in inodes:
                    ports.add(int(columns[1].rsplit(":", 1)[1], 16))
    return ports


def _unary(daemon, method, request=b""):
    call = daemon.channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
    return call(request, timeout=10)


def test_health_is_served_and_reflection_only_if_asked(tmp_path):
    """The library's own services."""
    with Daemon(tmp_path) as daemon:
        assert _unary(daemon, "/grpc.health.v1.Health/Check") == b"\x08\x01"
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        stream = daemon.channel.stream_stream(reflection, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream(iter([b"\x3a\x00"]), timeout=10))
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    with Daemon(tmp_path, {"reflection": True}) as daemon:
        stream = daemon.channel.stream_stream(reflection, request_serializer=bytes, response_deserializer=bytes)
        answer = b"".join(stream(iter([b"\x3a\x00"]), timeout=10))
        assert b"bmuf.v1.CoordinatorService" in answer and b"bmuf.v1.AdminService" in answer


def test_log_lines_are_json_for_machines(tmp_path):
    """Not on a terminal: each line is one JSON object, and those about a worker name job and worker."""
    with Daemon(tmp_path) as daemon:
        daemon.create_job("j", min_workers=1)
        with Worker(daemon.address, "j", "worker-7", dim=1) as worker:
            worker.push(1, [1])
            worker.committed(1)
        log = daemon.log
    lines = [line for line in log().splitlines() if line.strip()]
    parsed = [harness.json.loads(line) for line in lines]
    assert parsed
    assert any(entry.get("job") == "j" and entry.get("worker") == "worker-7" for entry in parsed), lines
    assert any(entry.get("job") == "j" and str(entry.get("round")) == "1" for entry in parsed), lines


def test_several_jobs_do_not_touch_each_other(tmp_path):
    """Two jobs with workers of the same names: separate models, rounds and refusals."""
    with Daemon(tmp_path) as daemon:
        for job in ("one", "two"):
            daemon.create_job(job, min_workers=1, variant=types.VARIANT_AVERAGING)
        one, two = [Worker(daemon.address, job, "w", init=[start]) for job, start in (("one", 1), ("two", 2))]
        for number in range(1, 4):
            one.push(number, [10])
            one.committed(number)
        refused("NON_FINITE_DELTA", one.push, 4, [float("nan")])
        two.push(1, [5])
        two.committed(1)
        assert list(one.values()) == [31] and list(two.values()) == [7]
        session = pb.Session()
        session.CopyFrom(one.session)
        session.job = "two"
        refused("SESSION_NOT_FOUND", two.stub.Heartbeat, pb.HeartbeatRequest(session=session))
        one.close()
        two.close()
