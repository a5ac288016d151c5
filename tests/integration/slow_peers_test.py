"""Peers that stop in the middle of a transfer: ended and counted, and nobody else notices."""

import grpc
import numpy as np

import harness
from harness import Daemon
from harness import Refusal
from harness import Worker
from harness import eventually
from harness import pb
from harness import types

# The progress rule of transfers gives a stalled one this long, with something to spare.
LIMIT_S = 50


def test_transfers_without_progress_are_ended(tmp_path):
    """Row 16 and the slow upload beside it: one client asks for the model and never reads it, another starts a push
    and never goes on. Both are ended with 'TOO_SLOW' and counted; rounds go on meanwhile."""
    with Daemon(tmp_path) as daemon:
        # The job whose round goes on.
        daemon.create_job("busy", min_workers=1, lease=120.0, variant=types.VARIANT_AVERAGING)
        # The model must exceed what gRPC and the sockets hold by themselves.
        elements = 12 << 20
        daemon.create_job("large", min_workers=2, expected_workers=2, lease=120.0, collect_timeout=600.0)
        with Worker(daemon.address, "large", "reader", dim=elements) as reader, \
                Worker(daemon.address, "large", "sender", dim=elements) as sender, \
                Worker(daemon.address, "busy", "w", dim=1) as worker:
            digest = sender.started(1).base_digest
            unread = reader.raw_stub.PullModel(pb.PullModelRequest(job="large", codec=types.CODEC_FP32), timeout=120)
            assert next(unread).HasField("header")
            data = bytes(1000)
            held = sender.open_push(sender.header(1, 4 * elements, digest), timeout=120)
            held.chunk(pb.Chunk(offset=0, crc32c=harness.crc.crc32c(data), data=data))
            number = 0

            def both_ended():
                nonlocal number
                number += 1
                worker.push(number, [1])
                worker.committed(number, 5)
                counters = daemon.admin.GetStatus(harness.admin_pb.GetStatusRequest()).counters
                return held.done() and counters.get("transfers_too_slow_total", 0) >= 2

            eventually(both_ended, LIMIT_S, "both transfers to be ended")
            assert number > 10
            try:
                held.answer(1)
                raise AssertionError("the push was answered")
            except grpc.RpcError as error:
                assert Refusal(error).reason == "TOO_SLOW", Refusal(error)
            held.half_close()
            # What was on its way is read, then the error.
            received = 0
            try:
                for message in unread:
                    received += len(message.chunk.data)
                raise AssertionError("the read came to its end")
            except grpc.RpcError as error:
                assert Refusal(error).reason == "TOO_SLOW", Refusal(error)
            assert received < 4 * elements
            # Both are welcome to try again.
            assert np.frombuffer(reader.pull(0)[1], "<f4").size == elements
            assert daemon.status("large").model_digest == digest
            # A round that is open for long says in the log what it waits for, every 30 s.
            eventually(lambda: any("large" in line and "open for" in line for line in daemon.log().splitlines()), 30)


def test_case_16_a_reader_that_stops_is_named(tmp_path):
    """A reader behind a dead network: the connection is given up, the next reader is served at once."""
    with Daemon(tmp_path) as daemon:
        elements = 4 << 20
        daemon.create_job("dead", min_workers=1, lease=120.0)
        with harness.Proxy(daemon.address) as proxy, Worker(daemon.address, "dead", "w", dim=elements) as worker:
            channel = grpc.insecure_channel(proxy.address)
            stub = harness.pb_grpc.CoordinatorServiceStub(channel)
            unread = stub.PullModel(pb.PullModelRequest(job="dead"), timeout=3)
            next(unread)
            proxy.stalled.set()
            pull = worker.pull(0)
            assert len(pull[1]) == 4 * elements
            try:
                for _ in unread:
                    pass
                raise AssertionError("read through a stalled network")
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            proxy.stalled.clear()
            channel.close()
