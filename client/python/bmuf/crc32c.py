"""CRC32C (Castagnoli) of bytes: by ISA-L where its library is installed, else by a table, slowly."""

import ctypes

_POLYNOMIAL = 0x82F63B78


def _load_isal():
    try:
        function = ctypes.CDLL("libisal.so.2").crc32_iscsi
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    function.restype = ctypes.c_uint32
    return function


def _make_table():
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_isal = _load_isal()
_table = _make_table()


def extend_by_table(crc, data):
    """The definition; kept callable so that a test can compare."""
    crc ^= 0xFFFFFFFF
    for byte in bytes(data):
        crc = (crc >> 8) ^ _table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def extend(crc, data):
    """CRC of A followed by `data`, where `crc` is the CRC of A (0 for nothing). `data`: bytes, at most 2 GiB."""
    if _isal is None:
        return extend_by_table(crc, data)
    data = bytes(data)
    return _isal(data, len(data), crc ^ 0xFFFFFFFF) ^ 0xFFFFFFFF
