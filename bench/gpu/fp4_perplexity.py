#!/usr/bin/env python3
"""Perplexity of a llama GGUF with its activations rounded as each numeric class rounds them, in f32 by numpy.

    bench/gpu/fp4_perplexity.py MODEL.gguf IDS.json [--ctx 512] [--chunks N] CLASS..

Classes: f32, int8, mxfp8, nvfp4, of docs/decisions/0099-multiply-fp4-weights-on-block-scaled-tensor-cores.md. The
chunks and the second halves that count are those of `kvasir perplexity --tokens IDS.json`. Sums are numpy's, so this is
the error of the roundings alone. Needs numpy.
"""
import argparse
import json
import struct

import numpy as np

import fp4


def int8(x):
    blocks = x.reshape(len(x), -1, 32)
    scale = np.abs(blocks).max(2, keepdims=True) / 127
    return (np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)) * scale).reshape(x.shape)


def mxfp8(x):
    blocks = x.reshape(len(x), -1, 32)
    top = np.maximum(np.abs(blocks).max(2, keepdims=True), 2.0**-100)
    scale = np.exp2(np.ceil(np.log2(top / 448)))
    scaled = blocks / scale
    # The step of E4M3 at a value: subnormals below 2^-6.
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-20))), -6) - 3)
    return (np.rint(scaled / step) * step * scale).reshape(x.shape).astype(np.float32)


def nvfp4(x):
    factor = np.exp2(np.ceil(np.log2(np.maximum(np.abs(x).max(1), 2.0**-100) / 2688)))[:, None, None]
    blocks = x.reshape(len(x), -1, 16) / factor
    scale = fp4.E4M3[fp4.nearest(fp4.E4M3, np.abs(blocks).max(2, keepdims=True) / 6)]
    codes = fp4.codes_of(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
    return (fp4.SIGNED[codes] * scale * factor).reshape(x.shape).astype(np.float32)


def rounding(name, kind):
    """How a class rounds the activations of a matrix's type."""
    if name == "f32" or kind in (fp4.F32, fp4.F16):
        return lambda x: x
    if name == "nvfp4" and kind == fp4.NVFP4:
        return nvfp4
    return mxfp8 if name in ("mxfp8", "nvfp4") and kind == fp4.MXFP4 else int8


class Model:
    def __init__(self, path):
        _, keys, metadata, tensors = fp4.read(path)
        reader, found = fp4.Reader(np.frombuffer(b"GGUF" + metadata, np.uint8)), {}
        for _ in range(keys):
            name, kind = reader.text().decode(), reader.number("I")
            start = reader.at
            reader.skip(kind)
            if kind in (4, 6):
                found[name] = struct.unpack("<I" if kind == 4 else "<f", reader.data[start:reader.at])[0]
        of = lambda key: found["llama." + key]
        self.layers, self.heads = of("block_count"), of("attention.head_count")
        self.kv_heads, self.eps = of("attention.head_count_kv"), of("attention.layer_norm_rms_epsilon")
        self.base = found.get("llama.rope.freq_base", 10000.0)
        self.tensors = {n.decode(): (k, fp4.floats(k, d).reshape(dims[::-1])) for n, dims, k, d in tensors}

    def product(self, x, name, activations):
        kind, matrix = self.tensors[name + ".weight"]
        scale = self.tensors.get(name + ".scale", (0, np.ones(1, np.float32)))[1][0]
        return rounding(activations, kind)(x) @ matrix.T * scale

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(1, keepdims=True) + self.eps) * self.tensors[name + ".weight"][1]

    def rope(self, x):
        """Rotates neighbouring pairs of each head, `[tokens][heads][width]`."""
        width = x.shape[2]
        angle = np.arange(len(x))[:, None] * self.base ** (-np.arange(0, width, 2) / width)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out = np.empty_like(x)
        out[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., ::2] * sin + x[..., 1::2] * cos
        return out

    def loss(self, ids, activations):
        """Sum of the negative log-likelihoods of the second half, and their number."""
        kind, table = self.tensors["token_embd.weight"]
        x, count = table[ids], len(ids)
        mask = np.triu(np.full((count, count), -np.inf, np.float32), 1)
        for layer in range(self.layers):
            of = lambda name: f"blk.{layer}.{name}"
            h = self.norm(x, of("attn_norm"))
            q, k, v = (self.product(h, of("attn_" + name), activations) for name in "qkv")
            q = self.rope(q.reshape(count, self.heads, -1))
            k = self.rope(k.reshape(count, self.kv_heads, -1)).repeat(self.heads // self.kv_heads, 1)
            v = v.reshape(count, self.kv_heads, -1).repeat(self.heads // self.kv_heads, 1)
            scores = np.einsum("qhd,khd->hqk", q, k, optimize=True) / q.shape[2] ** 0.5 + mask
            weights = np.exp(scores - scores.max(2, keepdims=True))
            weights /= weights.sum(2, keepdims=True)
            mixed = np.einsum("hqk,khd->qhd", weights, v, optimize=True).reshape(count, -1)
            x = x + self.product(mixed, of("attn_output"), activations)
            h = self.norm(x, of("ffn_norm"))
            gate, up = (self.product(h, of("ffn_" + name), activations) for name in ("gate", "up"))
            x = x + self.product(gate / (1 + np.exp(-gate)) * up, of("ffn_down"), activations)
        first = count // 2
        x = self.norm(x, "output_norm")[first:-1]
        head = "output" if "output.weight" in self.tensors else "token_embd"
        logits = self.product(x, head, activations)
        top = logits.max(1)
        targets = logits[np.arange(len(x)), ids[first + 1:]]
        return float((top + np.log(np.exp(logits - top[:, None]).sum(1)) - targets).sum()), len(x)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("model")
    options.add_argument("ids")
    options.add_argument("--ctx", type=int, default=512)
    options.add_argument("--chunks", type=int)
    options.add_argument("classes", nargs="+", choices=["f32", "int8", "mxfp8", "nvfp4"])
    given = options.parse_args()
    model, ids = Model(given.model), np.array(json.load(open(given.ids))).ravel()
    chunks = ids[:len(ids) // given.ctx * given.ctx].reshape(-1, given.ctx)[:given.chunks]
    for name in given.classes:
        sums = np.array([model.loss(chunk, name) for chunk in chunks]).sum(0)
        perplexity = np.exp(sums[0] / sums[1])
        print(f"{name}: perplexity {perplexity:.4f} over {len(chunks)} chunks of {given.ctx} tokens", flush=True)


main()
