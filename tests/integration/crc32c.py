"""CRC32C (Castagnoli) of large buffers with numpy only.

Problem: the protocol wants a CRC32C of every chunk, and a loop over bytes in Python makes 1 MB/s.
Idea: cut the buffer into lanes, run the table-driven CRC over all lanes at once, then join the lanes in pairs: the CRC
of A followed by B is shift(crc(A), len(B)) ^ crc(B), and the shift is linear, hence four tables.
"""

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78
_LANES = 1024


def _byte_table():
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


_TABLE = _byte_table()


def _apply(columns, value):
    """The linear map given by its images of the 32 bits, applied to one number."""
    result = 0
    bit = 0
    while value:
        if value & 1:
            result ^= columns[bit]
        value >>= 1
        bit += 1
    return result


@functools.lru_cache(maxsize=None)
def _power_columns(log2_bytes):
    """The map "feed 2**log2_bytes zero bytes" as its images of the 32 bits."""
    if log2_bytes == 0:
        return tuple(int(_TABLE[(1 << bit) & 0xFF]) ^ ((1 << bit) >> 8) for bit in range(32))
    half = _power_columns(log2_bytes - 1)
    return tuple(_apply(half, column) for column in half)


@functools.lru_cache(maxsize=256)
def _shift_columns(size_bytes):
    columns = tuple(1 << bit for bit in range(32))
    power = 0
    while size_bytes:
        if size_bytes & 1:
            step = _power_columns(power)
            columns = tuple(_apply(step, column) for column in columns)
        size_bytes >>= 1
        power += 1
    return columns


@functools.lru_cache(maxsize=64)
def _shift_tables(size_bytes):
    columns = _shift_columns(size_bytes)
    return np.array([[_apply(columns, byte << (8 * position)) for byte in range(256)] for position in range(4)],
                    dtype=np.uint32)


def combine(crc_a, crc_b, size_b):
    """The CRC of A followed by B, from their CRCs and B's length."""
    return _apply(_shift_columns(size_b), crc_a) ^ crc_b


def _small(data):
    crc = 0xFFFFFFFF
    table = _TABLE
    for byte in data:
        crc = int(table[(crc ^ byte) & 0xFF]) ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def crc32c(data):
    """CRC32C of bytes, a bytearray, a memoryview or a numpy array."""
    view = np.frombuffer(data, dtype=np.uint8)
    lane_bytes = len(view) // _LANES
    if lane_bytes < 4:
        return _small(view.tobytes())
    body = view[:lane_bytes * _LANES].reshape(_LANES, lane_bytes)
    by_position = np.ascontiguousarray(body.T)
    crc = np.full(_LANES, 0xFFFFFFFF, dtype=np.uint32)
    for position in range(lane_bytes):
        crc = _TABLE[(crc ^ by_position[position]) & 0xFF] ^ (crc >> 8)
    crc ^= np.uint32(0xFFFFFFFF)
    width = lane_bytes
    while len(crc) > 1:
        left, right = crc[0::2], crc[1::2]
        tables = _shift_tables(width)
        shifted = (tables[0][left & 0xFF] ^ tables[1][(left >> 8) & 0xFF] ^ tables[2][(left >> 16) & 0xFF]
                   ^ tables[3][left >> 24])
        crc = shifted ^ right
        width *= 2
    tail = view[lane_bytes * _LANES:].tobytes()
    return combine(int(crc[0]), _small(tail), len(tail)) if tail else int(crc[0])
