"""Encodings of the flat vector; the layouts are in types.proto."""

import numpy as np

from bmuf.v1 import types_pb2

_INT8_BLOCK = 256
BY_NAME = {
    "fp32": types_pb2.CODEC_FP32,
    "bf16": types_pb2.CODEC_BF16,
    "fp16": types_pb2.CODEC_FP16,
    "int8": types_pb2.CODEC_INT8,
}


def encode(codec, x):
    """bytes of the float32 vector `x`."""
    if codec == types_pb2.CODEC_FP32:
        return x.astype("<f4", copy=False).tobytes()
    if codec == types_pb2.CODEC_BF16:
        bits = x.astype("<f4", copy=False).view("<u4")
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    if codec == types_pb2.CODEC_FP16:
        return x.astype("<f2").tobytes()
    if codec == types_pb2.CODEC_INT8:
        blocks = np.zeros(-(-x.size // _INT8_BLOCK) * _INT8_BLOCK, np.float32)
        blocks[: x.size] = x
        blocks = blocks.reshape(-1, _INT8_BLOCK)
        scales = (np.abs(blocks).max(axis=1) / np.float32(127)).astype("<f4")
        safe = np.where(scales > 0, scales, np.float32(1))
        values = np.clip(np.rint(blocks / safe[:, None]), -127, 127).astype(np.int8)
        return scales.tobytes() + values.reshape(-1)[: x.size].tobytes()
    raise ValueError(f"no encoder for codec {codec}")


def decode(codec, data, elements):
    """The float32 vector and the number of bytes it took from the front of `data`."""
    if codec == types_pb2.CODEC_FP32:
        return np.frombuffer(data, "<f4", elements).astype(np.float32), 4 * elements
    if codec == types_pb2.CODEC_BF16:
        bits = np.frombuffer(data, "<u2", elements).astype(np.uint32) << 16
        return bits.view(np.float32), 2 * elements
    if codec == types_pb2.CODEC_FP16:
        return np.frombuffer(data, "<f2", elements).astype(np.float32), 2 * elements
    if codec == types_pb2.CODEC_INT8:
        count = -(-elements // _INT8_BLOCK)
        scales = np.frombuffer(data, "<f4", count)
        values = np.frombuffer(data, np.int8, elements, 4 * count).astype(np.float32)
        return values * np.repeat(scales, _INT8_BLOCK)[:elements], 4 * count + elements
    raise ValueError(f"no decoder for codec {codec}")
