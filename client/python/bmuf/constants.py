"""Numbers of the client's behaviour; the same as in client/constants.h."""

PROTOCOL_VERSION = 1
CHUNK_BYTES = 1 << 20
UNARY_TIMEOUT_S = 10.0
# A transfer ends when nothing moved for this long, however long it takes in all.
IDLE_TIMEOUT_S = 30.0
RETRY_ATTEMPTS = 5
BACKOFF_FIRST_S = 0.2
BACKOFF_CAP_S = 10.0
# How long a lost coordinator is waited for.
REATTACH_TIMEOUT_S = 600.0
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.enable_retries", 0),  # Retries are this package's: a push must not be repeated behind its back.
    ("grpc.enable_http_proxy", 0),
)
