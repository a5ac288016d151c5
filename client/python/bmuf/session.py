"""Membership in a job: joining, the block loop's exchange, riding through restarts."""

import os
import random
import threading
import time
import uuid

import grpc
import numpy as np

from bmuf import codec as codecs
from bmuf import constants, crc32c
from bmuf.errors import Error, from_rpc_error
from bmuf.tensors import Tensors
from bmuf.v1 import coordinator_service_pb2 as pb
from bmuf.v1 import coordinator_service_pb2_grpc as rpc
from bmuf.v1 import types_pb2

# The coordinator or this session is gone for now: join again, the place and the delta are kept.
_REATTACH_REASONS = {"SESSION_NOT_FOUND", "EPOCH_CHANGED", "RECOVERING", "DRAINING"}


def _seconds(duration):
    return duration.seconds + duration.nanos / 1e9


def _normalise(target):
    return target if "://" in target or target.startswith(("dns:", "unix:", "ipv4:", "ipv6:")) else "dns:///" + target


def join(target, *, job, worker=None, model=None, optimizer=None, roles=None, trajectories=1, codec="fp32",
         join_timeout_s=constants.REATTACH_TIMEOUT_S, on_event=None):
    """Becomes a member of `job` and loads the global model into `model`.

    target: "host:port" or any gRPC target. worker: name unique in the job; default host name and process id. model:
    torch.nn.Module or mapping name -> writable numpy array. optimizer: torch optimizer whose state is cleared where the
    job says so. roles, see Tensors. trajectories: independent devices behind this worker. codec: "fp32", "bf16", "fp16"
    or "int8" for pushes (lossy ones keep the rounding error and add it to the next delta). on_event: called with one
    line of text when something a person may want to know happens, from this package's threads.

    Blocks until the first block may begin: until a coordinator answers (at most `join_timeout_s`) and the round has
    gathered its workers. Raises Error. The result is a context manager; leaving it ends the membership.
    """
    session = Session(target, job, worker or f"{os.uname().nodename}-{os.getpid()}", Tensors(model, roles), optimizer,
                      trajectories, codecs.BY_NAME[codec], join_timeout_s, on_event or (lambda text: None))
    try:
        session._start()
    except BaseException:
        session.close()
        raise
    return session


class Session:
    """A membership. Made by `join`. `step`, `sync` and `close` belong to one thread; properties may be read anywhere."""

    def __init__(self, target, job, worker, tensors, optimizer, trajectories, codec, join_timeout_s, on_event):
        self._tensors, self._optimizer, self._codec, self._on_event = tensors, optimizer, codec, on_event
        self._join_timeout_s = join_timeout_s
        self._request = pb.JoinRequest(
            protocol_min=constants.PROTOCOL_VERSION, protocol_max=constants.PROTOCOL_VERSION, job=job, worker=worker,
            instance=uuid.uuid4().bytes, trajectories=trajectories, manifest=tensors.manifest,
            client_info=f"python bmuf, {os.uname().nodename}, pid {os.getpid()}")
        self._channel = grpc.insecure_channel(_normalise(target), options=constants.CHANNEL_OPTIONS)
        self._stub = rpc.CoordinatorServiceStub(self._channel)
        self._stop = threading.Event()
        self._heartbeats = None
        self._joined = None     # JoinResponse in force; replaced as a whole, by the heartbeats too.
        self._known_token = ""  # Of the session that the calling thread has reckoned with.
        self._started = None    # RoundStarted of the block in progress.
        self._base = None       # Flat vector of the broadcast the block started from.
        self._base_digest = 0
        self._version = 0
        self._highest_epoch = 0
        self._residual = None
        self._steps = self._samples = self._tokens = 0
        self._steps_done = 0
        self._loss_sum = self._loss_count = 0
        self._block_began = time.monotonic()
        self.done = False
        self.round = 0

    # ------------------------------------------------------------------------------------------------- for the loop

    @property
    def version(self):
        """Version of the model the current block started from."""
        return self._version

    @property
    def rank(self):
        """First trajectory of this worker among all of the round's."""
        return self._started.rank

    @property
    def size(self):
        """Trajectories of the round in all."""
        return self._started.size

    @property
    def block_steps(self):
        """Local steps of a block."""
        return self._started.block_steps

    @property
    def config(self):
        """The job's resolved JobConfig."""
        return self._joined.config

    def step(self, samples=0, tokens=0, loss=None):
        """Counts one local step; at the end of a block, sync(). Returns True if the model was exchanged."""
        self._steps += 1
        self._steps_done = self._steps
        self._samples += samples
        self._tokens += tokens
        if loss is not None:
            self._loss_sum += loss
            self._loss_count += 1
        if self._steps < self.block_steps:
            return False
        self.sync()
        return True

    def sync(self, metrics=None):
        """Ends the block now: pushes the delta, waits for the commit, loads the new model. Blocks; raises Error.

        A delta that came too late is dropped, as the protocol demands, and the newest model loaded instead.
        """
        if self.done:
            return
        flat, auxiliary = self._tensors.read()
        delta = flat - self._base
        if self._residual is not None:
            delta += self._residual
        encoded = codecs.encode(self._codec, delta)
        payload = encoded + auxiliary
        facts = types_pb2.BlockFacts(samples=self._samples, steps=self._steps, tokens=self._tokens)
        facts.block_time.FromNanoseconds(int((time.monotonic() - self._block_began) * 1e9))
        if self._loss_count:
            facts.metrics["loss"] = self._loss_sum / self._loss_count
        for name, value in (metrics or {}).items():
            facts.metrics[name] = value
        if self._exchange(payload, facts) and self._codec != types_pb2.CODEC_FP32:
            self._residual = delta - codecs.decode(self._codec, encoded, delta.size)[0]
        self._begin_block()

    def close(self):
        """Leaves the job, if it can be reached, and frees everything. Does not raise."""
        self._stop.set()
        if self._heartbeats is not None:
            self._heartbeats.join()
        if self._joined is not None:
            try:
                self._stub.Leave(pb.LeaveRequest(session=self._joined.session), timeout=constants.UNARY_TIMEOUT_S)
            except grpc.RpcError:
                pass
            self._joined = None
        self._channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    # --------------------------------------------------------------------------------------------------- membership

    def _start(self):
        self._attach()
        self._heartbeats = threading.Thread(target=self._beat, name="bmuf-heartbeat", daemon=True)
        self._heartbeats.start()
        self._settle()
        self._begin_block()

    def _attach(self):
        """Join, waiting for a coordinator that is not there."""
        deadline = time.monotonic() + self._join_timeout_s
        attempt, told = 0, False
        while True:
            try:
                joined = self._stub.Join(self._request, timeout=constants.UNARY_TIMEOUT_S)
                if joined.session.epoch < self._highest_epoch:
                    raise Error("ABORTED", f"coordinator epoch went back from {self._highest_epoch} to {joined.session.epoch}")
                self._highest_epoch = joined.session.epoch
                self._joined = joined
                self._known_token = joined.session.token
                return
            except grpc.RpcError as error:
                wait_s = self._retry_delay(error, attempt)
                if wait_s is None or time.monotonic() + wait_s > deadline:
                    raise from_rpc_error(error) from None
                if not told:
                    self._on_event(f"waiting for the coordinator: {error.details()}")
                    told = True
            attempt += 1
            if self._stop.wait(wait_s):
                raise Error("CANCELLED", "the session was closed")

    @staticmethod
    def _retry_delay(error, attempt):
        """Seconds to wait before another try (full jitter), or None if a retry does not help."""
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return None
        pushback = from_rpc_error(error).retry_after_s or 0
        cap = min(constants.BACKOFF_CAP_S, constants.BACKOFF_FIRST_S * 2 ** min(attempt, 16))
        return pushback + random.uniform(0, cap)

    def _beat(self):
        while not self._stop.wait(_seconds(self._joined.heartbeat_period)):
            request = pb.HeartbeatRequest(session=self._joined.session, steps_done=self._steps_done)
            try:
                self._stub.Heartbeat(request, timeout=constants.UNARY_TIMEOUT_S)
            except grpc.RpcError as error:
                # The loop's own calls meet the same fault and deal with it; between them a place can be kept.
                if from_rpc_error(error).reason in _REATTACH_REASONS:
                    try:
                        self._joined = self._stub.Join(self._request, timeout=constants.UNARY_TIMEOUT_S)
                    except grpc.RpcError:
                        pass

    def _riding(self, call):
        """Runs `call` until it succeeds, joining again when the coordinator or the session was lost."""
        attempt = 0
        deadline = time.monotonic() + constants.REATTACH_TIMEOUT_S
        while True:
            try:
                return call()
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                wait_s = self._retry_delay(rpc_error, attempt)
                if error.reason in _REATTACH_REASONS:
                    wait_s = (wait_s or 0) + random.uniform(0, constants.BACKOFF_FIRST_S)
                elif error.reason in ("UPLOAD_BUDGET", "DISK", "JOB_PAUSED", "CHECKSUM_MISMATCH", "OFFSET_MISMATCH"):
                    wait_s = error.retry_after_s or random.uniform(0, constants.BACKOFF_FIRST_S)
                if wait_s is None or time.monotonic() + wait_s > deadline:
                    raise error from None
                if self._stop.wait(wait_s):
                    raise Error("CANCELLED", "the session was closed") from None
                self._on_event(f"trying again after {error}")
                attempt += 1
                if error.reason in _REATTACH_REASONS or rpc_error.code() == grpc.StatusCode.UNAVAILABLE:
                    self._attach()

    # ------------------------------------------------------------------------------------------------ model and round

    def _settle(self):
        """After a join: bring the initial model if asked, else load the newest."""
        self.round = self._joined.round
        while not self._joined.has_model:
            if self._joined.need_initial_model:
                self._upload_initial()
            event = self._watch(0, {"committed", "ended"})
            if event is not None and event.HasField("ended"):
                raise Error("FAILED_PRECONDITION", event.ended.reason, "JOB_FAILED")
            self._attach()
        self._pull()
        self.round = self._version + 1

    def _upload_initial(self):
        self._on_event("bringing the initial model")
        flat, auxiliary = self._tensors.read()
        if self._base is not None:  # A coordinator that lost its model gets the last broadcast one back.
            flat = self._base
        header = pb.PushHeader(kind=pb.PAYLOAD_KIND_INITIAL_MODEL, round=0, codec=types_pb2.CODEC_FP32)
        self._push(header, codecs.encode(types_pb2.CODEC_FP32, flat) + auxiliary)

    def _begin_block(self):
        """Waits until this worker may train the next block, and holds the model it starts from."""
        while not self.done:
            event = self._watch(self.round, {"started", "committed", "ended"})
            if event is None:
                self._settle()
                continue
            if event.HasField("ended"):
                self._end(event.ended)
            elif event.HasField("committed"):  # A round went by without this worker.
                self._take_commit(event.committed)
            else:
                self._started = event.started
                if event.started.base_version != self._version or event.started.base_digest != self._base_digest:
                    self._pull(event.started.base_version)
                break
        self._steps = self._steps_done = self._samples = self._tokens = 0
        self._loss_sum = self._loss_count = 0
        self._block_began = time.monotonic()

    def _end(self, ended):
        if ended.job_state == types_pb2.JOB_STATE_FINISHED:
            self.done = True
        else:
            raise Error("FAILED_PRECONDITION", ended.reason, "JOB_FAILED")

    def _exchange(self, payload, facts):
        """Pushes until the round's commit was seen; loads it. True if the delta was part of a round."""
        while True:
            header = pb.PushHeader(kind=pb.PAYLOAD_KIND_DELTA, round=self.round, base_version=self._version,
                                   base_digest=self._base_digest, codec=self._codec, facts=facts)
            try:
                self._push(header, payload)
            except Error as error:
                if error.reason in ("STALE_ROUND", "VERSION_AHEAD", "BASE_MISMATCH", "NO_MODEL", "OUT_OF_RANGE_DELTA"):
                    self._on_event(f"this block does not count: {error.message}")
                    self._attach()
                    self._settle()
                    return False
                if error.reason == "JOB_FINISHED":
                    self.done = True
                    self._pull()
                    return False
                raise
            event = self._watch(self.round, {"started", "committed", "restarted", "ended"})
            if event is None or event.HasField("restarted") or event.HasField("started"):
                continue  # The delta is not in (any more): a new attempt, a new coordinator. It is still good for the round.
            if event.HasField("ended"):
                self._end(event.ended)
                return False
            self._take_commit(event.committed)
            return True

    def _take_commit(self, committed):
        self.done = committed.job_finished
        self._pull(committed.version if self.done else None)
        self.round = self._version + 1
        if committed.reset_inner_state and self._optimizer is not None:
            self._optimizer.state.clear()

    def _watch(self, round_, wanted):
        """The first wanted event of a round; None if the session was made anew meanwhile, by whatever thread.

        A round of the old session may mean nothing to the new one: to go on waiting for it could last for ever.
        """
        before = self._known_token

        def call():
            if self._joined.session.token != before:
                return None
            stream = self._stub.WatchRound(pb.WatchRoundRequest(session=self._joined.session, round=round_))
            try:
                for event in stream:
                    if event.WhichOneof("event") in wanted:
                        return event
            finally:
                stream.cancel()
            return None

        event = self._riding(call)
        self._known_token = self._joined.session.token
        return event

    def _push(self, header, payload):
        digest = 0
        for at in range(0, len(payload), constants.CHUNK_BYTES):
            digest = crc32c.extend(digest, payload[at : at + constants.CHUNK_BYTES])
        header.payload_bytes = len(payload)
        header.digest = digest
        header.push_id = uuid.uuid4().hex

        def parts(offset):
            yield pb.PushDeltaRequest(header=header)
            view = memoryview(payload)
            while offset < len(payload):
                data = bytes(view[offset : offset + constants.CHUNK_BYTES])
                yield pb.PushDeltaRequest(chunk=pb.Chunk(offset=offset, crc32c=crc32c.extend(0, data), data=data))
                offset += len(data)
            yield pb.PushDeltaRequest(end=pb.TransferEnd(digest=digest))

        def call():
            header.session.CopyFrom(self._joined.session)
            query = pb.QueryPushRequest(session=self._joined.session, round=header.round)
            kept = self._stub.QueryPush(query, timeout=constants.UNARY_TIMEOUT_S)
            offset = kept.committed_offset
            if offset > len(payload) or crc32c.extend(0, payload[:offset]) != kept.crc32c:
                offset = 0
            header.resume_offset = offset
            return self._stub.PushDelta(parts(offset))

        return self._riding(call)

    def _pull(self, version=None):
        """Loads a version (default: the newest) after its digest and its numbers were checked."""
        received = {}

        def call():
            request = pb.PullModelRequest(job=self._request.job, session=self._joined.session)
            if version is not None:
                request.version = version
            if received:
                request.version, request.offset = received["header"].version, len(received["data"])
                request.codec = received["header"].codec
            stream = self._stub.PullModel(request)
            try:
                for message in stream:
                    kind = message.WhichOneof("part")
                    if kind == "header":
                        if not received:
                            received.update(header=message.header, data=bytearray())
                    elif kind == "chunk":
                        chunk = message.chunk
                        if chunk.offset != len(received["data"]) or crc32c.extend(0, chunk.data) != chunk.crc32c:
                            raise Error("DATA_LOSS", f"damaged chunk at offset {chunk.offset}", "CHECKSUM_MISMATCH")
                        received["data"] += chunk.data
            finally:
                stream.cancel()

        try:
            self._riding(call)
        except Error as error:
            if error.reason != "NOT_KEPT" or version is None:
                raise
            return self._pull()
        header, data = received["header"], bytes(received["data"])
        digest = 0
        for at in range(0, len(data), constants.CHUNK_BYTES):
            digest = crc32c.extend(digest, data[at : at + constants.CHUNK_BYTES])
        if len(data) != header.payload_bytes or digest != header.payload_digest:
            raise Error("DATA_LOSS", f"version {header.version} arrived damaged", "CHECKSUM_MISMATCH")
        elements = sum(int(np.prod(t.shape, dtype=np.int64)) for t in self._request.manifest.tensors
                       if t.role == types_pb2.TENSOR_ROLE_BMUF)
        flat, used = codecs.decode(header.codec, data, elements)
        if not np.isfinite(flat).all():
            raise Error("DATA_LOSS", f"version {header.version} holds a NaN or an infinity")
        self._tensors.write(flat, data[used:])
        self._base, self._base_digest, self._version = flat, header.model_digest, header.version
        return None
