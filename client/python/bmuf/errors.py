"""Typed errors of the service, as an exception."""

import os
import pkgutil

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DOMAIN = "bmuf.v1"


def _rpc_messages():
    # google.rpc in a pool of its own: other packages may bring the same file names into the default pool.
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString(pkgutil.get_data("bmuf", "rpc_descriptors.bin"))
    for file in files.file:
        pool.Add(file)
    factory = message_factory.MessageFactory(pool)
    return [factory.GetPrototype(pool.FindMessageTypeByName(f"google.rpc.{name}"))
            for name in ("Status", "ErrorInfo", "RetryInfo")]


_Status, _ErrorInfo, _RetryInfo = _rpc_messages()


class Error(Exception):
    """A refusal or failure that a retry does not cure.

    code: gRPC status code name, for instance "FAILED_PRECONDITION"; reason: name from errors.proto without "REASON_",
    or "" if the server gave none; metadata: facts that go with the reason.
    """

    def __init__(self, code, message, reason="", metadata=None, retry_after_s=None):
        super().__init__(f"{code}{'/' + reason if reason else ''}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s


def from_rpc_error(error):
    """The Error in a grpc.RpcError."""
    reason, metadata, retry_after_s = "", {}, None
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for detail in _Status.FromString(value).details:
            kind = os.path.basename(detail.type_url)
            if kind == "google.rpc.ErrorInfo":
                info = _ErrorInfo.FromString(detail.value)
                if info.domain == DOMAIN:
                    reason, metadata = info.reason, dict(info.metadata)
            elif kind == "google.rpc.RetryInfo":
                delay = _RetryInfo.FromString(detail.value).retry_delay
                retry_after_s = delay.seconds + delay.nanos / 1e9
    return Error(error.code().name, error.details() or "", reason, metadata, retry_after_s)
