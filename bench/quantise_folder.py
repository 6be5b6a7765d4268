#!/usr/bin/env python3
"""Writes a Hugging Face folder with the matrices of another one in a quantised format, for speed: rounded to nearest,
not calibrated. Needs numpy.

    bench/quantise_folder.py BF16_FOLDER fp8|int8|int4|awq|nvfp4 OUT
"""
import json
import pathlib
import shutil
import struct
import sys

import numpy as np

GROUP = 128
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def read(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (8 + length + at for at in entry["data_offsets"])
            yield name, entry["dtype"], entry["shape"], data[start:end]


def floats(dtype, shape, data):
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, {"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32).reshape(shape)


def bf16(values):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def as_written(values):
    """Values after rounding to bf16."""
    return (bf16(values).astype(np.uint32) << 16).view(np.float32)


def e4m3(values):
    """Codes of the nearest E4M3 values, at most 448."""
    table = np.array([(m / 8 * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)])
    table = table[:127].astype(np.float32)
    middles = (table[1:] + table[:-1]) / 2
    codes = np.searchsorted(middles, np.minimum(np.abs(values), 448)).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << 7)


def words(codes, axis, order=range(8)):
    """Eight codes of 4 bits in a word, along the axis."""
    codes = np.moveaxis(codes.astype(np.uint32), axis, -1)
    codes = codes.reshape(*codes.shape[:-1], -1, 8)[..., list(order)]
    packed = (codes << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    return np.moveaxis(packed, -1, axis)


def fp8(stem, w):
    scale = as_written(np.abs(w).max(1, keepdims=True) / 448)
    return {f"{stem}.weight": ("F8_E4M3", e4m3(w / scale)), f"{stem}.weight_scale": ("BF16", bf16(scale))}


def int8(stem, w):
    scale = as_written(np.abs(w).max(1, keepdims=True) / 127)
    return {f"{stem}.weight": ("I8", np.rint(w / scale).clip(-127, 127).astype(np.int8)),
            f"{stem}.weight_scale": ("BF16", bf16(scale))}


def int4(stem, w):
    rows, cols = w.shape
    group = GROUP if cols % GROUP == 0 else 32
    groups = w.reshape(rows, -1, group)
    scale = as_written(np.abs(groups).max(2, keepdims=True) / 7)
    codes = np.rint(groups / scale).clip(-8, 7).reshape(rows, cols) + 8
    return {f"{stem}.weight_packed": ("I32", words(codes, 1)), f"{stem}.weight_scale": ("BF16", bf16(scale[..., 0])),
            f"{stem}.weight_shape": ("I64", np.array([rows, cols], np.int64))}


def awq(stem, w):
    rows, cols = w.shape
    group = GROUP if cols % GROUP == 0 else 32
    groups = w.reshape(rows, -1, group)
    low, high = groups.min(2, keepdims=True).clip(max=0), groups.max(2, keepdims=True).clip(min=0)
    scale = ((high - low) / 15).astype(np.float16).astype(np.float32)
    zero = np.rint(-low / scale).clip(0, 15)
    codes = (np.rint(groups / scale) + zero).clip(0, 15).reshape(rows, cols)
    return {f"{stem}.qweight": ("I32", words(codes.T, 1, AWQ_ORDER)),
            f"{stem}.qzeros": ("I32", words(zero[..., 0].T, 1, AWQ_ORDER)),
            f"{stem}.scales": ("F16", scale[..., 0].T.astype(np.float16))}


def nvfp4(stem, w):
    rows, cols = w.shape
    if cols % 64:
        return None
    groups = w.reshape(rows, -1, 16)
    whole = np.float32(np.abs(w).max() / (6 * 448))
    codes = e4m3(np.abs(groups).max(2) / 6 / whole).clip(1)
    table = np.array([(m / 8 * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)])
    scaled = groups / (table[codes].astype(np.float32) * whole)[..., None]
    levels = np.searchsorted((E2M1[1:] + E2M1[:-1]) / 2, np.abs(scaled)) | (np.signbit(scaled).astype(int) << 3)
    levels = levels.reshape(rows, -1, 2).astype(np.uint8)
    return {f"{stem}.weight": ("U8", levels[..., 0] | levels[..., 1] << 4), f"{stem}.weight_scale": ("F8_E4M3", codes),
            f"{stem}.weight_scale_2": ("F32", np.array(whole, np.float32))}


CONFIGS = {"fp8": {"quant_method": "compressed-tensors"}, "int8": {"quant_method": "compressed-tensors"},
           "int4": {"quant_method": "compressed-tensors"}, "nvfp4": {"quant_method": "modelopt"},
           "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}}


def main():
    source, kind, out = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja") and path.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copyfile(path, out / path.name)
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIGS[kind]}, indent=2))
    tensors = {}
    for path in sorted(source.glob("model*.safetensors")):
        for name, dtype, shape, data in read(path):
            is_matrix = len(shape) == 2 and name.endswith("_proj.weight")
            stem = name.removesuffix(".weight")
            made = globals()[kind](stem, floats(dtype, shape, data)) if is_matrix else None
            tensors |= made or {name: (dtype, np.frombuffer(data, np.uint8).reshape(-1) if data else data, shape)}
    header, offset = {}, 0
    for name, (dtype, values, *shape) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape[0] if shape else list(values.shape),
                        "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(out / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values, *_ in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())


if __name__ == "__main__":
    main()
