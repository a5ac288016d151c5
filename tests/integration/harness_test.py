"""The tools of these tests are right themselves: checksum, codecs, proxy, configuration writer."""

import os
import socket
import threading
import time

import numpy as np
import pytest

import harness
from harness import Proxy
from harness import crc


def bytewise(data):
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def test_crc32c_is_the_published_one():
    """RFC 3720 B.4 and the catalogue's check value."""
    assert crc.crc32c(b"") == 0
    assert crc.crc32c(b"123456789") == 0xE3069283
    assert crc.crc32c(bytes(32)) == 0x8A9136AA
    assert crc.crc32c(b"\xff" * 32) == 0x62A8AB43


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 5000, 70_001])
def test_crc32c_of_any_length_and_its_combination(size):
    """The lanes give what one byte after the other gives, and parts combine to the whole."""
    data = np.random.default_rng(size).bytes(size)
    value = crc.crc32c(data)
    assert value == bytewise(data)
    for cut in (0, 1, size // 3, size):
        head, tail = data[:cut], data[cut:]
        assert crc.combine(crc.crc32c(head), crc.crc32c(tail), len(tail)) == value


def test_codecs():
    """bf16 rounds to nearest even; int8 blocks may be short."""
    values = np.asarray([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -2.5], np.float32)
    assert list(harness.bf16_values(harness.bf16_bytes(values))) == [1.0, 1.0, 1.0 + 2**-6, -2.5]
    numbers = np.linspace(-3, 3, 300).astype(np.float32)
    encoded = harness.int8_encode(numbers)
    assert len(encoded) == 2 * 4 + 300
    np.testing.assert_allclose(harness.int8_decode(encoded, 300), numbers, atol=3 / 254 + 1e-6)


def test_yaml():
    """Block style, nested lists and maps."""
    text = harness.to_yaml({"a": 1, "jobs": [{"name": "x", "config": {"lease": "1s"}}, {"name": "y"}], "b": True})
    assert text == ('a: 1\njobs:\n  - name: "x"\n    config:\n      lease: "1s"\n  - name: "y"\nb: true\n')


def test_durations():
    """Seconds to protobuf and back."""
    assert (harness.duration(1.25).seconds, harness.duration(1.25).nanos) == (1, 250_000_000)
    assert harness.seconds(harness.duration(0.3)) == 0.3


class Echo:
    """Answers every byte with itself."""

    def __init__(self):
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.address = "127.0.0.1:%d" % self._listener.getsockname()[1]
        self.received = bytearray()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(peer,), daemon=True).start()

    def _echo(self, peer):
        try:
            for data in iter(lambda: peer.recv(4096), b""):
                self.received += data
                peer.sendall(data)
        except OSError:
            pass
        peer.close()

    def close(self):
        self._listener.close()


@pytest.fixture
def proxied():
    echo = Echo()
    with Proxy(echo.address) as proxy:
        yield echo, proxy
    echo.close()


def connect(proxy):
    host, port = proxy.address.split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def read(peer, size):
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            break
        data += part
    return data


def test_proxy_forwards(proxied):
    """Undisturbed and with seeded delays: bytes go both ways."""
    _, proxy = proxied
    proxy.delay_s = 0.01
    with connect(proxy) as peer:
        data = os.urandom(100_000)
        threading.Thread(target=peer.sendall, args=(data,)).start()
        assert read(peer, len(data)) == data


def test_proxy_flips_one_bit_after_the_marker(proxied):
    """Also when the marker comes in two pieces."""
    echo, proxy = proxied
    proxy.flip_marker = b"marker"
    with connect(proxy) as peer:
        for piece in (b"xxxmar", b"keryyy", b"marker"):
            peer.sendall(piece)
            read(peer, len(piece))
    assert proxy.flips == 1
    assert bytes(echo.received) == b"xxxmarke" + bytes([ord("r") ^ 1]) + b"yyymarker"


def test_proxy_cuts_swallows_stalls_and_drops(proxied):
    """Each fault by itself."""
    echo, proxy = proxied
    proxy.cut_after = 10
    with connect(proxy) as peer:
        peer.sendall(b"0123456789")
        assert read(peer, 10) == b"0123456789"
        peer.sendall(b"x")
        assert read(peer, 1) == b""
    proxy.cut_after = None
    with connect(proxy) as peer:
        proxy.swallow.set()
        before = len(echo.received)
        peer.sendall(b"lost answer")
        harness.eventually(lambda: len(echo.received) == before + 11)
        peer.settimeout(0.2)
        with pytest.raises(socket.timeout):
            peer.recv(1)
        proxy.swallow.clear()
    with connect(proxy) as peer:
        proxy.stalled.set()
        before = len(echo.received)
        peer.sendall(b"waits")
        peer.settimeout(0.2)
        with pytest.raises(socket.timeout):
            peer.recv(1)
        assert len(echo.received) == before
        proxy.stalled.clear()
        peer.settimeout(5)
        assert read(peer, 5) == b"waits"
    proxy.idle_drop_s = 0.3
    with connect(proxy) as peer:
        began = time.monotonic()
        assert read(peer, 1) == b""
        assert 0.25 < time.monotonic() - began < 3
