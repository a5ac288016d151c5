"""Real processes for black-box tests: daemons, workers that speak the bare protocol, and a proxy that misbehaves.

Problem: the promises of the coordinator are about what a stranger's client sees over a bad network, so tests must not
share code with it.
Idea: everything here knows only the .proto files and the command line. The channel is gRPC's stock channel without
options: what works here works for every client author. No fixed ports, no fixed times: `eventually` waits for a
condition and fails at its deadline.
Usage:
    with Daemon(tmp_path) as daemon:
        daemon.create_job("j", min_workers=2)
        a = Worker(daemon.address, "j", "a", init=[1, 2, 3])
        b = Worker(daemon.address, "j", "b", dim=3)
"""

import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

import grpc
import numpy as np
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from google.rpc import status_pb2

from bmuf.v1 import admin_service_pb2 as admin_pb
from bmuf.v1 import admin_service_pb2_grpc as admin_grpc
from bmuf.v1 import coordinator_service_pb2 as pb
from bmuf.v1 import coordinator_service_pb2_grpc as pb_grpc
from bmuf.v1 import errors_pb2
from bmuf.v1 import types_pb2 as types

import crc32c as crc

CHUNK_BYTES = 1 << 20
CALL_DEADLINE_S = 20.0


def binary(name):
    """Path of a program under test: `name` as in Bazel's label, for instance "bmuf-coordinator"."""
    variable = "BMUF_TEST_" + name.upper().replace("-", "_")
    path = os.environ.get(variable)
    assert path and os.path.exists(path), "%s must name the program; it is %r" % (variable, path)
    return os.path.abspath(path)


def eventually(predicate, timeout=10.0, what=""):
    """Waits until `predicate()` is true and returns its value; fails at the deadline."""
    end = time.monotonic() + timeout
    pause = 0.005
    while True:
        value = predicate()
        if value:
            return value
        assert time.monotonic() < end, "not within %g s: %s" % (timeout, what or predicate.__name__)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def duration(seconds):
    whole = int(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=int(round((seconds - whole) * 1e9)))


def seconds(proto):
    return proto.seconds + proto.nanos / 1e9


# ------------------------------------------------------------------------------------------------------------- errors


class Refusal:
    """The typed error of a call: code, reason, metadata, named fields, retry delay."""

    def __init__(self, error):
        self.code = error.code()
        self.message = error.details() or ""
        self.reason = None
        self.domain = None
        self.metadata = {}
        self.fields = {}
        self.retry_s = None
        for key, value in error.trailing_metadata() or ():
            if key != "grpc-status-details-bin":
                continue
            status = status_pb2.Status()
            status.ParseFromString(value)
            assert status.code == self.code.value[0], "details and status disagree"
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                bad = error_details_pb2.BadRequest()
                retry = error_details_pb2.RetryInfo()
                if detail.Unpack(info):
                    self.reason, self.domain, self.metadata = info.reason, info.domain, dict(info.metadata)
                elif detail.Unpack(bad):
                    self.fields.update((v.field, v.description) for v in bad.field_violations)
                elif detail.Unpack(retry):
                    self.retry_s = seconds(retry.retry_delay)

    def __repr__(self):
        return "Refusal(%s, %s, %r, metadata=%r, fields=%r)" % (self.code, self.reason, self.message, self.metadata,
                                                                self.fields)


def expected_code(reason):
    """The status code number that errors.proto writes beside a reason."""
    value = errors_pb2.Reason.DESCRIPTOR.values_by_name["REASON_" + reason]
    return value.GetOptions().Extensions[errors_pb2.status_code]


def refused(reason, call, *args, **kwargs):
    """Runs `call` and returns its Refusal, which must carry `reason` and the code that belongs to it."""
    try:
        result = call(*args, **kwargs)
        if isinstance(result, grpc.Call) and hasattr(result, "__next__"):
            result = list(result)
    except grpc.RpcError as error:
        refusal = Refusal(error)
    else:
        raise AssertionError("expected %s, but the call was answered: %r" % (reason, result))
    assert refusal.reason == reason, "expected %s, got %r" % (reason, refusal)
    assert refusal.domain == "bmuf.v1"
    assert refusal.code.value[0] == expected_code(reason), refusal
    assert refusal.message
    return refusal


# ------------------------------------------------------------------------------------------------------------ daemons


def to_yaml(value, indent=0):
    """Block-style YAML of dicts, lists and scalars: enough for configuration files."""
    pad = "  " * indent
    lines = []
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, (dict, list)) and item:
                lines.append("%s%s:\n%s" % (pad, key, to_yaml(item, indent + 1)))
            else:
                lines.append("%s%s: %s\n" % (pad, key, json.dumps(item)))
    else:
        for item in value:
            if isinstance(item, (dict, list)):
                body = to_yaml(item, indent + 1)
                lines.append(pad + "- " + body[2 * (indent + 1):])
            else:
                lines.append("%s- %s\n" % (pad, json.dumps(item)))
    return "".join(lines)


class Daemon:
    """One coordinator process on a port that the system picks. `stop` ends it in good order, `kill` does not."""

    def __init__(self, directory, config=None, args=(), wait=True, stderr=None, env=None, listen="127.0.0.1:0"):
        self.directory = str(directory)
        os.makedirs(self.directory, exist_ok=True)
        token = uuid.uuid4().hex[:8]
        self.port_file = os.path.join(self.directory, "port-" + token)
        self.log_path = os.path.join(self.directory, "log-" + token)
        self._log = None
        if stderr is None:
            self._log = open(self.log_path, "wb")
            stderr = self._log
        command = [binary("bmuf-coordinator")]
        if config is not None:
            path = os.path.join(self.directory, "config-%s.yaml" % token)
            with open(path, "w") as out:
                out.write(config if isinstance(config, str) else to_yaml(config))
            self.config_path = path
            command += ["--config", path]
        if listen is not None:
            command += ["--listen", listen]
        command += ["--port-file", self.port_file]
        command += list(args)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, env=env)
        self.address = None
        self.killed = False
        self._channel = None
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout=20.0):
        def bound():
            assert self.process.poll() is None, "the coordinator ended with %s: %s" % (self.process.returncode,
                                                                                       self.log())
            try:
                with open(self.port_file) as source:
                    text = source.read()
            except FileNotFoundError:
                return None
            return text if text.endswith("\n") else None

        lines = eventually(bound, timeout, "the port file").split("\n")
        self.address = lines[0].strip()
        self.metrics_address = lines[1].strip() if len(lines) > 1 else ""
        return self

    @property
    def port(self):
        return int(self.address.rsplit(":", 1)[1])

    @property
    def pid(self):
        return self.process.pid

    def log(self):
        if self._log is None:
            return ""
        with open(self.log_path, "rb") as source:
            return source.read().decode("utf-8", "replace")

    @property
    def channel(self):
        if self._channel is None:
            self._channel = grpc.insecure_channel(self.address)
        return self._channel

    @property
    def admin(self):
        return Bounded(admin_grpc.AdminServiceStub(self.channel))

    @property
    def coordinator(self):
        return Bounded(pb_grpc.CoordinatorServiceStub(self.channel))

    def create_job(self, name, **rules):
        return self.admin.CreateJob(admin_pb.CreateJobRequest(job=name, config=job_config(**rules))).job

    def status(self, job):
        answer = self.admin.GetStatus(admin_pb.GetStatusRequest(job=job))
        assert len(answer.jobs) == 1
        return answer.jobs[0]

    def counters(self, job):
        return dict(self.status(job).counters)

    def worker_status(self, job, name):
        for worker in self.status(job).workers:
            if worker.worker == name:
                return worker
        return None

    def records(self, job):
        """Round records, oldest first."""
        answer = self.admin.ListRounds(admin_pb.ListRoundsRequest(job=job, limit=1000))
        return list(reversed(answer.rounds))

    def rss_kib(self, field="VmRSS"):
        with open("/proc/%d/status" % self.pid) as source:
            for line in source:
                if line.startswith(field + ":"):
                    return int(line.split()[1])
        raise AssertionError(field)

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self, timeout=30.0):
        return self.process.wait(timeout)

    def stop(self, timeout=30.0):
        """SIGTERM; the exit status must be 0."""
        self._close_channel()
        if self.killed:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError("no end within %g s of SIGTERM: %s" % (timeout, self.log()[-4000:]))
        if self._log:
            self._log.close()
        assert code == 0, "exit status %d after SIGTERM: %s" % (code, self.log()[-4000:])

    def kill(self):
        """SIGKILL; a stop() afterwards asks for no exit status."""
        self.killed = True
        self._close_channel()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self._log:
            self._log.close()

    def _close_channel(self):
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is not None:
            text = self.log()
            sys.stderr.write("---- coordinator log (last 4000 bytes)\n%s\n" % text[-4000:])
            self.kill()
        else:
            self.stop()


class Bounded:
    """A stub whose calls all carry a deadline: no test waits for ever."""

    def __init__(self, stub, timeout=CALL_DEADLINE_S):
        self._stub = stub
        self._timeout = timeout

    def __getattr__(self, name):
        method = getattr(self._stub, name)

        def call(request, timeout=None):
            return method(request, timeout=self._timeout if timeout is None else timeout)

        call.future = lambda request, timeout=None: method.future(
            request, timeout=self._timeout if timeout is None else timeout)
        return call


_OUTER = {"variant", "block_learning_rate", "block_momentum", "beta1", "beta2", "tau", "momentum_policy",
          "warmup_rounds"}
_BARRIER = {"min_workers", "min_fraction", "expected_workers", "start_timeout", "soft_timeout",
            "adaptive_soft_factor", "collect_timeout", "on_timeout", "max_extensions", "grace", "max_failed_attempts"}


def job_config(**rules):
    """A JobConfig from plain values: durations in seconds, enums as numbers of the proto."""
    config = types.JobConfig()
    for key, value in rules.items():
        target = config.outer if key in _OUTER else config.barrier if key in _BARRIER else config
        if key == "norm_guard":
            config.norm_guard.CopyFrom(value)
        elif key == "push_codecs":
            config.push_codecs.extend(value)
        elif key == "labels":
            config.labels.update(value)
        elif target.DESCRIPTOR.fields_by_name[key].message_type is not None:
            getattr(target, key).CopyFrom(duration(value))
        else:
            setattr(target, key, value)
    return config


# ------------------------------------------------------------------------------------------------------------ workers


def tensor(name, shape, dtype=types.DTYPE_F32, role=types.TENSOR_ROLE_BMUF):
    return types.TensorSpec(name=name, shape=shape, dtype=dtype, role=role)


def flat_manifest(dim):
    return types.Manifest(tensors=[tensor("w", [dim])])


def payload_of(values):
    return np.ascontiguousarray(np.asarray(values, dtype="<f4")).tobytes()


def bf16_bytes(values):
    """Round to nearest even, as the codec table says; numpy has no such type."""
    bits = np.ascontiguousarray(np.asarray(values, dtype="<f4")).view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").tobytes()


def bf16_values(data):
    return (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).view("<f4")


def int8_encode(values, block=256):
    values = np.asarray(values, dtype=np.float32)
    scales, codes = [], []
    for start in range(0, len(values), block):
        part = values[start:start + block]
        scale = np.float32(np.max(np.abs(part)) / np.float32(127))
        scales.append(scale)
        codes.append(np.zeros(len(part), np.int8) if scale == 0 else
                     np.clip(np.rint(part / scale), -127, 127).astype(np.int8))
    return np.asarray(scales, "<f4").tobytes() + np.concatenate(codes).tobytes()


def int8_decode(data, count, block=256):
    blocks = (count + block - 1) // block
    scales = np.frombuffer(data[:4 * blocks], "<f4")
    codes = np.frombuffer(data[4 * blocks:], np.int8).astype(np.float32)
    return np.repeat(scales, block)[:count] * codes


class Chunks:
    """A payload cut into chunks, each with its checksum, and the digest of the whole."""

    def __init__(self, payload, chunk_bytes=CHUNK_BYTES):
        self.payload = payload
        self.parts = []
        self.digest = 0
        view = memoryview(payload)
        for offset in range(0, len(payload), chunk_bytes):
            data = bytes(view[offset:offset + chunk_bytes])
            value = crc.crc32c(data)
            self.digest = value if offset == 0 else crc.combine(self.digest, value, len(data))
            self.parts.append(pb.Chunk(offset=offset, crc32c=value, data=data))


class Watch:
    """A WatchRound stream read in the background."""

    def __init__(self, stub, session, round_number, timeout=60.0):
        self.events = []
        self.error = None
        self.ended = False
        self._changed = threading.Condition()
        self._stream = stub.WatchRound(pb.WatchRoundRequest(session=session, round=round_number), timeout=timeout)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        try:
            for event in self._stream:
                with self._changed:
                    self.events.append((time.monotonic(), event))
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self.error = error
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def wait(self, kind, timeout=15.0, accept=lambda event: True):
        """The first event of `kind` ("waiting", "started", "committed", "restarted", "ended") that `accept` takes."""
        end = time.monotonic() + timeout
        seen = 0
        with self._changed:
            while True:
                while seen < len(self.events):
                    event = self.events[seen][1]
                    seen += 1
                    if event.WhichOneof("event") == kind and accept(getattr(event, kind)):
                        return getattr(event, kind)
                assert not self.ended, "the watch ended without %s: %r, events %s" % (
                    kind, self.error and Refusal(self.error), [e.WhichOneof("event") for _, e in self.events])
                left = end - time.monotonic()
                assert left > 0, "no %s within %g s; last event: %s" % (kind, timeout, self.events[-1:])
                self._changed.wait(left)

    def wait_end(self, timeout=15.0):
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended, timeout), "the watch did not end in %g s" % timeout

    def cancel(self):
        self._stream.cancel()
        self._thread.join(5)


class PushStream:
    """A push that a test drives message by message."""

    def __init__(self, stub, timeout=30.0):
        self._queue = queue.Queue()
        self._future = stub.PushDelta.future(iter(self._queue.get, None), timeout=timeout)

    def header(self, header):
        self._queue.put(pb.PushDeltaRequest(header=header))
        return self

    def chunk(self, chunk):
        self._queue.put(pb.PushDeltaRequest(chunk=chunk))
        return self

    def end(self, digest):
        self._queue.put(pb.PushDeltaRequest(end=pb.TransferEnd(digest=digest)))
        return self

    def raw(self, message):
        self._queue.put(message)
        return self

    def half_close(self):
        self._queue.put(None)
        return self

    def result(self, timeout=20.0):
        """Half-closes and returns the answer or raises grpc.RpcError."""
        self._queue.put(None)
        return self.answer(timeout)

    def answer(self, timeout=20.0):
        return self._future.result(timeout)

    def done(self):
        return self._future.done()

    def cancel(self):
        self._future.cancel()
        self._queue.put(None)


class Worker:
    """One worker speaking the bare protocol over a stock channel.

    Joins in the constructor; if elected, uploads `init` (or zeros). `heartbeats=False` leaves the sign of life to the
    test.
    """

    def __init__(self, address, job, name, dim=None, init=None, manifest=None, trajectories=1, instance=None,
                 heartbeats=True, join=True, upload=True, protocol=(1, 1)):
        self.job, self.name = job, name
        if init is not None and not isinstance(init, bytes):
            init = payload_of(init)
        if manifest is None:
            dim = dim if dim is not None else len(init) // 4
            manifest = flat_manifest(dim)
        self.manifest = manifest
        self.init = init
        self.trajectories = trajectories
        self.instance = instance or uuid.uuid4().bytes
        self.protocol = protocol
        self.channel = grpc.insecure_channel(address)
        self.raw_stub = pb_grpc.CoordinatorServiceStub(self.channel)
        self.stub = Bounded(self.raw_stub)
        self.heartbeat_errors = []
        self.heartbeat_answers = []
        self.heartbeat_latencies_s = []
        self._stop = threading.Event()
        self._beat = None
        self._watches = []
        self.joined = None
        if join:
            self.join()
            if upload and self.joined.need_initial_model:
                self.upload_initial()
            if heartbeats:
                self.start_heartbeats()

    def join(self):
        self.joined = self.stub.Join(
            pb.JoinRequest(protocol_min=self.protocol[0], protocol_max=self.protocol[1], job=self.job,
                           worker=self.name, instance=self.instance, trajectories=self.trajectories,
                           manifest=self.manifest, client_info="integration test"))
        self.session = self.joined.session
        return self.joined

    def start_heartbeats(self, period=None):
        period = period or seconds(self.joined.heartbeat_period)
        assert period > 0

        def beat():
            while not self._stop.wait(period):
                began = time.monotonic()
                try:
                    answer = self.stub.Heartbeat(pb.HeartbeatRequest(session=self.session), timeout=10)
                    self.heartbeat_answers.append(answer)
                    self.heartbeat_latencies_s.append(time.monotonic() - began)
                except grpc.RpcError as error:
                    self.heartbeat_errors.append(Refusal(error))
                except ValueError:
                    return  # The channel was closed under us.

        self._beat = threading.Thread(target=beat, daemon=True)
        self._beat.start()

    def stop_heartbeats(self):
        self._stop.set()
        if self._beat:
            self._beat.join()

    def heartbeat(self, steps_done=0):
        return self.stub.Heartbeat(pb.HeartbeatRequest(session=self.session, steps_done=steps_done))

    def initial_header(self, payload):
        return pb.PushHeader(session=self.session, kind=pb.PAYLOAD_KIND_INITIAL_MODEL, round=0,
                             codec=types.CODEC_FP32, payload_bytes=len(payload), push_id=uuid.uuid4().hex)

    def upload_initial(self, payload=None):
        if payload is None:
            payload = self.init
        if payload is None:
            payload = bytes(manifest_bytes(self.manifest))
        return self.send(self.initial_header(payload), payload)

    def header(self, round_number, payload_bytes, base_digest, codec=types.CODEC_FP32, base_version=None, **facts):
        header = pb.PushHeader(session=self.session, kind=pb.PAYLOAD_KIND_DELTA, round=round_number,
                               base_version=round_number - 1 if base_version is None else base_version,
                               base_digest=base_digest, codec=codec, payload_bytes=payload_bytes,
                               push_id=uuid.uuid4().hex)
        block_time = facts.pop("block_time", None)
        if block_time is not None:
            header.facts.block_time.CopyFrom(duration(block_time))
        metrics = facts.pop("metrics", None)
        if metrics:
            header.facts.metrics.update(metrics)
        for key, value in facts.items():
            setattr(header.facts, key, value)
        return header

    def send(self, header, payload, chunk_bytes=CHUNK_BYTES, timeout=60.0):
        """A whole push in one go."""
        chunks = Chunks(payload, chunk_bytes)

        def messages():
            yield pb.PushDeltaRequest(header=header)
            for chunk in chunks.parts:
                yield pb.PushDeltaRequest(chunk=chunk)
            yield pb.PushDeltaRequest(end=pb.TransferEnd(digest=chunks.digest))

        return self.raw_stub.PushDelta(messages(), timeout=timeout)

    def push(self, round_number, delta, base_digest=None, codec=types.CODEC_FP32, base_version=None, timeout=60.0,
             chunk_bytes=CHUNK_BYTES, **facts):
        """Pushes a delta given as numbers (encoded as FP32 or BF16) or as bytes already encoded."""
        if isinstance(delta, bytes):
            payload = delta
        else:
            payload = {types.CODEC_FP32: payload_of, types.CODEC_BF16: bf16_bytes,
                       types.CODEC_FP16: lambda v: np.asarray(v, "<f2").tobytes(),
                       types.CODEC_INT8: int8_encode}[codec](delta)
        if base_digest is None:
            base_digest = self.started(round_number).base_digest
        header = self.header(round_number, len(payload), base_digest, codec, base_version, **facts)
        return self.send(header, payload, chunk_bytes, timeout)

    def open_push(self, header, timeout=30.0):
        return PushStream(self.raw_stub, timeout).header(header)

    def watch(self, round_number, timeout=60.0):
        watch = Watch(self.raw_stub, self.session, round_number, timeout)
        self._watches.append(watch)
        return watch

    def started(self, round_number, timeout=15.0):
        watch = self.watch(round_number)
        try:
            return watch.wait("started", timeout)
        finally:
            watch.cancel()

    def committed(self, round_number, timeout=15.0):
        watch = self.watch(round_number)
        try:
            return watch.wait("committed", timeout)
        finally:
            watch.cancel()

    def pull(self, version=None, kind=pb.MODEL_KIND_BROADCAST, codec=types.CODEC_FP32, timeout=60.0):
        return pull(self.stub, self.job, version, kind, codec, timeout)

    def values(self, version=None, kind=pb.MODEL_KIND_BROADCAST):
        """The model as float32 numbers (manifests of F32 tensors only)."""
        return np.frombuffer(self.pull(version, kind)[1], dtype="<f4")

    def leave(self, reason="done"):
        self.stop_heartbeats()
        return self.stub.Leave(pb.LeaveRequest(session=self.session, reason=reason))

    def close(self):
        self.stop_heartbeats()
        for watch in self._watches:
            watch.cancel()
        self.channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()


_DTYPE_BYTES = {types.DTYPE_F32: 4, types.DTYPE_BF16: 4, types.DTYPE_F16: 4, types.DTYPE_I32: 4, types.DTYPE_I64: 8}


def manifest_bytes(manifest):
    """Payload size with codec FP32: half-precision parameters travel as F32."""
    total = 0
    for spec in manifest.tensors:
        if spec.role != types.TENSOR_ROLE_LOCAL:
            total += int(np.prod(spec.shape, dtype=np.int64)) * _DTYPE_BYTES[spec.dtype]
    return total


def pull(stub, job, version=None, kind=pb.MODEL_KIND_BROADCAST, codec=types.CODEC_FP32, timeout=60.0, offset=0,
         length=0):
    """Reads a model and checks everything the stream says about itself. Returns (header, bytes)."""
    request = pb.PullModelRequest(job=job, codec=codec, offset=offset, length=length, kind=kind)
    if version is not None:
        request.version = version
    header, parts, position, running, end = None, [], offset, 0, None
    for message in stub.PullModel(request, timeout=timeout):
        part = message.WhichOneof("part")
        if part == "header":
            assert header is None
            header = message.header
        elif part == "chunk":
            chunk = message.chunk
            assert header is not None and end is None
            assert chunk.offset == position, (chunk.offset, position)
            assert 0 < len(chunk.data) <= CHUNK_BYTES
            value = crc.crc32c(chunk.data)
            assert value == chunk.crc32c
            running = crc.combine(running, value, len(chunk.data)) if parts else value
            parts.append(chunk.data)
            position += len(chunk.data)
        else:
            end = message.end
    assert header is not None and end is not None
    assert end.digest == running
    data = b"".join(parts)
    if offset == 0 and length == 0:
        assert len(data) == header.payload_bytes
        assert running == header.payload_digest
        if codec == types.CODEC_FP32 and header.kind == pb.MODEL_KIND_BROADCAST:
            assert running == header.model_digest
    return header, data


def run_round(workers, deltas, round_number=None, timeout=20.0, **facts):
    """Everyone in `workers` pushes its delta for the open round; returns what the commit says."""
    if round_number is None:
        round_number = workers[0].heartbeat().round
    for worker, delta in zip(workers, deltas):
        worker.push(round_number, delta, **facts)
    return workers[0].committed(round_number, timeout)


class WorkerProcess:
    """A worker in a process of its own, so that it can be killed: joins, heartbeats, pushes nothing unless asked."""

    def __init__(self, address, job, name, dim, mode="idle"):
        here = os.path.dirname(os.path.abspath(__file__))
        self.process = subprocess.Popen(
            ["/usr/bin/python3", os.path.join(here, "worker_process.py"), address, job, name, str(dim), mode],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        line = self.process.stdout.readline().decode().strip()
        assert line == "joined", "%s %s" % (line, self.process.stderr.read().decode()[-2000:] if not line else "")

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.kill()


# -------------------------------------------------------------------------------------------------------------- proxy


class Proxy:
    """A TCP proxy on loopback that misbehaves on command.

    Attributes a test may set at any time:
      delay_s        each piece is forwarded after a seeded random delay up to this
      stalled        threading.Event: while set, nothing moves in either direction
      swallow        threading.Event: while set, bytes from the server are read and thrown away
      idle_drop_s    a connection with no byte for this long is cut (as a middlebox does, without a word to anybody)
      cut_after      connections are cut once this many bytes went from client to server
      flip_marker    the first time these bytes pass towards the server, one bit inside them is flipped
    Thread-safe for such use.
    """

    def __init__(self, target, seed=1):
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._random = random.Random(seed)
        self.delay_s = 0.0
        self.stalled = threading.Event()
        self.swallow = threading.Event()
        self.idle_drop_s = None
        self.cut_after = None
        self.flip_marker = None
        self.flips = 0
        self.cuts = 0
        self.connections = 0
        self._open = set()
        self._lock = threading.Lock()
        self._closing = False
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self.address = "127.0.0.1:%d" % self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            pair = _Pair(client, server)
            with self._lock:
                self.connections += 1
                self._open.add(pair)
            for source, sink, upward in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=(pair, source, sink, upward), daemon=True).start()

    def _pump(self, pair, source, sink, upward):
        carry = b""
        try:
            source.settimeout(0.1)
        except OSError:
            return  # Cut before this direction began.
        while not pair.closed:
            try:
                data = source.recv(1 << 16)
            except socket.timeout:
                if self.idle_drop_s is not None and time.monotonic() - pair.last_byte > self.idle_drop_s:
                    self.cuts += 1
                    self._cut(pair)
                continue
            except OSError:
                break
            if not data:
                break
            pair.last_byte = time.monotonic()
            while self.stalled.is_set() and not pair.closed:
                time.sleep(0.01)
            if self.delay_s:
                time.sleep(self._random.random() * self.delay_s)
            if not upward and self.swallow.is_set():
                continue
            if upward:
                data = self._flip(carry, data)
                carry = data[-256:]
                pair.upward += len(data)
                if self.cut_after is not None and pair.upward > self.cut_after:
                    self.cuts += 1
                    break
            try:
                sink.sendall(data)
            except OSError:
                break
        self._cut(pair)

    def _flip(self, carry, data):
        marker = self.flip_marker
        if marker is None:
            return data
        joined = carry + data
        at = joined.find(marker)
        # The bit that changes must lie in what has not been sent yet.
        at = at + len(marker) - 1 - len(carry) if at >= 0 else -1
        if at < 0:
            return data
        with self._lock:
            if self.flip_marker is None:
                return data
            self.flip_marker = None
            self.flips += 1
        changed = bytearray(data)
        changed[at] ^= 0x01
        return bytes(changed)

    def _cut(self, pair):
        with self._lock:
            self._open.discard(pair)
        pair.close()

    def cut_all(self):
        """Cuts every open connection."""
        with self._lock:
            pairs = list(self._open)
        for pair in pairs:
            self._cut(pair)

    def close(self):
        self._listener.close()
        self.cut_all()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()


class _Pair:
    def __init__(self, client, server):
        self.client, self.server = client, server
        self.upward = 0
        self.last_byte = time.monotonic()
        self.closed = False

    def close(self):
        self.closed = True
        for end in (self.client, self.server):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()
