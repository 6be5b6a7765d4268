#!/usr/bin/env python3
"""Writes a llama model with random Q4_K and Q6_K weights, of any size, with the vocabulary of a small model.

    bench/gpu/random_gguf.py tests/fixtures/tiny/llama/llama-f32.gguf 8b.gguf
    bench/gpu/random_gguf.py SMALL OUT --shape 2,256,4,2,64,512,4096

--shape is `8b` (that of Llama 3.1 8B, 4.9 GB), or a list: layers, width, heads, key/value heads, width of a
head, width of the feed-forward layer, context. The output of the model is meaningless. It serves to measure
speed.
"""
import argparse
import os
import struct

SHAPES = {"8b": "32,4096,32,8,128,14336,40960"}
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, ARRAY = 8, 9
F32, Q4_K, Q6_K = 0, 12, 14
# Bytes of a block of 256 values, and offset and value of its scales. The scales are small, so that nothing
# overflows.
BLOCKS = {Q4_K: (144, [(0, 2e-5), (2, 1.5e-4)]), Q6_K: (210, [(208, 1e-5)])}
RANDOM_BLOCKS = 4096
ALIGNMENT = 32


def skip(file, kind):
    """Skips a value of a GGUF header."""
    if kind == TEXT:
        file.seek(struct.unpack("<Q", file.read(8))[0], 1)
    elif kind == ARRAY:
        element, count = struct.unpack("<IQ", file.read(12))
        for _ in range(count):
            skip(file, element)
    else:
        file.seek(SCALARS[kind], 1)


def head_of(path, changed):
    """Returns the key/value section of a GGUF with some values changed, the number of its keys, and its
    vocabulary size.
    """
    head, vocabulary = b"", 0
    with open(path, "rb") as file:
        magic, _version, _tensors, keys = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF":
            raise SystemExit(f"{path} is no GGUF")
        for _ in range(keys):
            start = file.tell()
            name = file.read(struct.unpack("<Q", file.read(8))[0]).decode()
            (kind,) = struct.unpack("<I", file.read(4))
            value = file.tell()
            skip(file, kind)
            end = file.tell()
            file.seek(start)
            raw = file.read(end - start)
            if name == "llama.vocab_size":
                (vocabulary,) = struct.unpack("<I", raw[-4:])
            head += raw[:value - start] + struct.pack("<I", changed[name]) if name in changed else raw
    return head, keys, vocabulary


def layout(shape, vocabulary):
    """Returns all tensors as (name, type, columns, rows)."""
    layers, width, heads, kv_heads, head, between, _context = shape
    tensors = [("token_embd.weight", Q6_K, width, vocabulary), ("output_norm.weight", F32, width, 1)]
    for layer in range(layers):
        # Q4_K_M uses Q6_K in the first and the last eighth of the layers, and in every third layer between.
        more = Q6_K if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2 else Q4_K
        parts = [("attn_norm", F32, width, 1), ("ffn_norm", F32, width, 1), ("attn_q", Q4_K, width, heads * head),
                 ("attn_k", Q4_K, width, kv_heads * head), ("attn_v", more, width, kv_heads * head),
                 ("attn_output", Q4_K, heads * head, width), ("ffn_gate", Q4_K, width, between),
                 ("ffn_up", Q4_K, width, between), ("ffn_down", more, between, width)]
        tensors += [(f"blk.{layer}.{name}.weight", kind, cols, rows) for name, kind, cols, rows in parts]
    return tensors


def size(kind, cols, rows):
    return cols * rows * 4 if kind == F32 else cols * rows // 256 * BLOCKS[kind][0]


def random_blocks(kind):
    each, scales = BLOCKS[kind]
    data = bytearray(os.urandom(RANDOM_BLOCKS * each))
    for block in range(RANDOM_BLOCKS):
        for place, value in scales:
            data[block * each + place:block * each + place + 2] = struct.pack("<e", value)
    return bytes(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small")
    parser.add_argument("out")
    parser.add_argument("--shape", default="8b")
    args = parser.parse_args()
    shape = [int(number) for number in SHAPES.get(args.shape, args.shape).split(",")]
    if len(shape) != 7 or any(n <= 0 for n in shape) or any(shape[i] % 256 for i in (1, 5)) or shape[2] * shape[4] % 256:
        parser.error("--shape has seven numbers, and widths are multiples of 256")
    layers, width, heads, kv_heads, head, between, context = shape
    changed = {"llama.block_count": layers, "llama.context_length": context, "llama.embedding_length": width,
               "llama.feed_forward_length": between, "llama.attention.head_count": heads,
               "llama.attention.head_count_kv": kv_heads, "llama.attention.key_length": head,
               "llama.attention.value_length": head, "llama.rope.dimension_count": head}
    keys, count, vocabulary = head_of(args.small, changed)
    tensors, infos, at = layout(shape, vocabulary), b"", 0
    for name, kind, cols, rows in tensors:
        dims = (cols,) if kind == F32 else (cols, rows)
        infos += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
        infos += struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, at)
        at += -(-size(kind, cols, rows) // ALIGNMENT) * ALIGNMENT
    blocks = {kind: random_blocks(kind) for kind in BLOCKS}
    with open(args.out, "wb") as out:
        out.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), count) + keys + infos)
        out.write(b"\0" * (-out.tell() % ALIGNMENT))
        for _name, kind, cols, rows in tensors:
            left = size(kind, cols, rows)
            if kind == F32:
                left -= out.write(struct.pack("<f", 1.0) * cols)
            while left:
                left -= out.write(blocks[kind][:left])
            out.write(b"\0" * (-out.tell() % ALIGNMENT))


if __name__ == "__main__":
    main()
