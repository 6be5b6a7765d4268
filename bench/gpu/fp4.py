#!/usr/bin/env python3
"""Rewrites the matrices of a GGUF in a 4-bit float format, to compare the numeric classes of such weights.

    bench/gpu/fp4.py IN.gguf OUT.gguf mxfp4|nvfp4

Matrices of blocks that are Q4_0, Q4_1, Q8_0, F16 or F32 become MXFP4, with the power of two of the least squared error
for each 32 values, or NVFP4, with an E4M3 for each 16 and an f32 for the matrix. Other tensors are copied. Needs numpy.
"""
import struct
import sys

import numpy as np

F32, F16, Q4_0, Q4_1, Q8_0, MXFP4, NVFP4 = 0, 1, 2, 3, 8, 39, 40
SIZES = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q8_0: (32, 34), MXFP4: (32, 17), NVFP4: (64, 36)}
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
SIGNED = np.concatenate([LEVELS, -LEVELS])
# The positive E4M3 values, by code.
E4M3 = np.array([(c & 7) / 512 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(127)], np.float32)


def nearest(table, values):
    """Indices of the nearest entries of an ascending table."""
    return np.searchsorted((table[1:] + table[:-1]) / 2, values).astype(np.uint8)


def floats(kind, data):
    """The values of a tensor."""
    if kind == MXFP4:
        blocks = data.reshape(-1, 17)
        codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], 1)
        return (SIGNED[codes] * 2.0 ** (blocks[:, :1].astype(np.float32) - 127)).ravel()
    if kind == NVFP4:
        blocks = data.reshape(-1, 36)
        packed = blocks[:, 4:].reshape(-1, 4, 8)
        codes = np.concatenate([packed & 15, packed >> 4], 2)
        return (SIGNED[codes] * E4M3[blocks[:, :4]][..., None]).ravel()
    if kind in (F32, F16):
        return data.view(np.float32 if kind == F32 else np.float16).astype(np.float32)
    blocks = data.reshape(-1, SIZES[kind][1])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == Q8_0:
        return (scale * blocks[:, 2:].view(np.int8)).ravel()
    codes = blocks[:, -16:]
    codes = np.concatenate([codes & 15, codes >> 4], 1).astype(np.float32)
    low = blocks[:, 2:4].copy().view(np.float16).astype(np.float32) if kind == Q4_1 else -8 * scale
    return (scale * codes + low).ravel()


def codes_of(values):
    """E2M1 codes of scaled values."""
    return nearest(LEVELS, np.abs(values)) | np.signbit(values).astype(np.uint8) << 3


def mxfp4(values):
    """Blocks of MXFP4."""
    values = values.reshape(-1, 32)
    top = np.floor(np.log2(np.maximum(np.abs(values).max(1, keepdims=True), 2.0**-120)))
    best, error = None, None
    for exponent in (top - 2, top - 1):
        codes = codes_of(values / 2.0**exponent)
        signs = np.where(codes & 8, -1, 1)
        wrong = ((LEVELS[codes & 7] * signs * 2.0**exponent - values) ** 2).sum(1)
        found = np.concatenate([(exponent + 127).astype(np.uint8), codes[:, :16] | codes[:, 16:] << 4], 1)
        best = found if best is None else np.where((wrong < error)[:, None], found, best)
        error = wrong if error is None else np.minimum(error, wrong)
    return best.tobytes()


def nvfp4(values):
    """Blocks of NVFP4, and the matrix's scale."""
    whole = max(float(np.abs(values).max()) / (6 * 448), 1e-30)
    values = values.reshape(-1, 4, 16) / whole
    scales = nearest(E4M3, np.abs(values).max(2) / 6)
    step = E4M3[scales][..., None]
    codes = codes_of(np.divide(values, step, out=np.zeros_like(values), where=step > 0))
    packed = (codes[..., :8] | codes[..., 8:] << 4).reshape(len(values), 32)
    return np.concatenate([scales, packed], 1).tobytes(), whole


class Reader:
    """The header of a GGUF."""

    def __init__(self, data):
        self.data, self.at = data, 4

    def number(self, form):
        value = struct.unpack_from("<" + form, self.data, self.at)[0]
        self.at += struct.calcsize("<" + form)
        return value

    def text(self):
        length = self.number("Q")
        self.at += length
        return bytes(self.data[self.at - length:self.at])

    def skip(self, kind):
        if kind == 8:
            self.text()
        elif kind == 9:
            of, count = self.number("I"), self.number("Q")
            for _ in range(count):
                self.skip(of)
        else:
            self.at += {0: 1, 1: 1, 2: 2, 3: 2, 7: 1}.get(kind, 8 if kind in (10, 11, 12) else 4)


def read(path):
    """Version, number of keys, their bytes, and the tensors of a file: name, dimensions, type, bytes."""
    reader = Reader(np.fromfile(path, np.uint8))
    version, count, keys = reader.number("I"), reader.number("Q"), reader.number("Q")
    start = reader.at
    for _ in range(keys):
        reader.text()
        reader.skip(reader.number("I"))
    metadata = bytes(reader.data[start:reader.at])
    tensors = []
    for _ in range(count):
        name, dims = reader.text(), [reader.number("Q") for _ in range(reader.number("I"))]
        tensors.append((name, dims, reader.number("I"), reader.number("Q")))
    base = (reader.at + 31) // 32 * 32

    def data(dims, kind, offset):
        values, size = SIZES[kind]
        return reader.data[base + offset:base + offset + int(np.prod(dims)) // values * size]

    return version, keys, metadata, [(name, dims, kind, data(dims, kind, at)) for name, dims, kind, at in tensors]


def main():
    source, target, form = sys.argv[1:]
    version, keys, metadata, tensors = read(source)
    out = []
    for name, dims, kind, data in tensors:
        if not name.startswith(b"blk.") or len(dims) < 2 or dims[0] % 64:
            out.append((name, dims, kind, data.tobytes()))
        elif form == "mxfp4":
            out.append((name, dims, MXFP4, mxfp4(floats(kind, data))))
        else:
            packed, whole = nvfp4(floats(kind, data))
            out.append((name, dims, NVFP4, packed))
            out.append((name.removesuffix(b"weight") + b"scale", [1], F32, struct.pack("<f", whole)))
    infos, body = b"", b""
    for name, dims, kind, data in out:
        infos += struct.pack("<Q", len(name)) + name
        infos += struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(body))
        body += data + bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", version, len(out), keys) + metadata + infos
    with open(target, "wb") as file:
        file.write(head + bytes(-len(head) % 32) + body)


if __name__ == "__main__":
    main()
