#!/usr/bin/env python3
"""Time to the first token, and memory, of a large NVFP4 folder of random weights that is not in the page cache.

    bench/open_folder.py KVASIR DIR [--layers N] [--rounds N] [--keep] [-- FLAG..]

Writes a folder of the shape of a 12B model to DIR (8.8 GB), in modelopt's layout. In each round it reads all its bytes,
into a small buffer and into memory of their size, then runs `kvasir run FOLDER -n 1` with the flags twice: without the
model's digest in the cache, and with it. Each time the folder's pages are dropped from the page cache first. Memory is
the largest sum of resident pages, and of those that are no file's. The last line has the median ratios of the times to
the first token and those of both ways of reading. Deletes the folder unless --keep is given.
"""
import argparse
import json
import mmap
import os
import pathlib
import resource
import select
import shutil
import statistics
import struct
import subprocess
import tempfile
import time

import machine

HIDDEN, HEADS, KV_HEADS, HEAD, FEED_FORWARD, VOCAB = 5120, 32, 8, 128, 14336, 131072
TOKENIZER = pathlib.Path(__file__).parent.parent / "tests/fixtures/hf/fmt-nvfp4-ct"
FILE_BYTES = 2 << 30
PIECE = 8 << 20
# E4M3 scales from 2^-4 to 2^-1, and upper bytes of bf16 values below 2^-5.
SCALES = bytes(24 + byte % 24 for byte in range(256))
UPPER = bytes(0x3c - byte % 4 | byte & 0x80 for byte in range(256))


def tensors(layers):
    """Names, dtypes and shapes."""
    yield from (("model.embed_tokens.weight", "BF16", [VOCAB, HIDDEN]), ("lm_head.weight", "BF16", [VOCAB, HIDDEN]))
    yield "model.norm.weight", "BF16", [HIDDEN]
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{stem}.{norm}.weight", "BF16", [HIDDEN]
        for name, rows, cols in (("self_attn.q_proj", HEADS * HEAD, HIDDEN), ("self_attn.k_proj", KV_HEADS * HEAD, HIDDEN),
                                 ("self_attn.v_proj", KV_HEADS * HEAD, HIDDEN), ("self_attn.o_proj", HIDDEN, HEADS * HEAD),
                                 ("mlp.gate_proj", FEED_FORWARD, HIDDEN), ("mlp.up_proj", FEED_FORWARD, HIDDEN),
                                 ("mlp.down_proj", HIDDEN, FEED_FORWARD)):
            yield f"{stem}.{name}.weight", "U8", [rows, cols // 2]
            yield f"{stem}.{name}.weight_scale", "F8_E4M3", [rows, cols // 16]
            yield f"{stem}.{name}.weight_scale_2", "F32", []


def size(dtype, shape):
    count = {"BF16": 2, "F32": 4}.get(dtype, 1)
    for length in shape:
        count *= length
    return count


def values(dtype, count):
    """Random bytes of a tensor, in pieces."""
    while count:
        piece = bytearray(os.urandom(min(count, PIECE)))
        if dtype == "F8_E4M3":
            piece = piece.translate(SCALES)
        elif dtype == "BF16":
            piece[1::2] = piece[1::2].translate(UPPER)
        elif dtype == "F32":
            piece = struct.pack("<f", 0.01)
        yield piece
        count -= len(piece)


def write(folder, layers):
    folder.mkdir(parents=True)
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": HIDDEN, "head_dim": HEAD,
              "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
              "intermediate_size": FEED_FORWARD, "vocab_size": VOCAB, "max_position_embeddings": 131072,
              "rms_norm_eps": 1e-5, "rope_theta": 1e6, "hidden_act": "silu", "sliding_window": None,
              "tie_word_embeddings": False, "torch_dtype": "bfloat16",
              "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    taken = set(vocab.values()) | {token["id"] for token in tokenizer["added_tokens"]}
    vocab.update((f"filler{id}", id) for id in range(VOCAB) if id not in taken)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copyfile(TOKENIZER / "tokenizer_config.json", folder / "tokenizer_config.json")
    files, room = [[]], FILE_BYTES
    for tensor in tensors(layers):
        if size(*tensor[1:]) > room and files[-1]:
            files.append([])
            room = FILE_BYTES
        files[-1].append(tensor)
        room -= size(*tensor[1:])
    index = {}
    for number, of_file in enumerate(files, 1):
        name, header, end = f"model-{number:05}-of-{len(files):05}.safetensors", {}, 0
        for tensor, dtype, shape in of_file:
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + size(dtype, shape)]}
            index[tensor] = name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, dtype, shape in of_file:
                file.writelines(values(dtype, size(dtype, shape)))
            os.fsync(file.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def weights(folder):
    """Bytes of its safetensors files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def drop(folder):
    """Drops the folder's pages from the page cache."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder, keep):
    """Seconds that reading all bytes in order takes, into memory of their size or into a small buffer."""
    memory = mmap.mmap(-1, weights(folder) + PIECE) if keep else bytearray(PIECE)
    if keep:
        memory.madvise(mmap.MADV_HUGEPAGE)
    started, end = time.monotonic(), 0
    with memoryview(memory) as view:
        for path in sorted(folder.glob("*.safetensors")):
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while count := file.readinto(view[end:end + PIECE]):
                    end += count if keep else 0
    return time.monotonic() - started


def resident(pid):
    """Bytes in memory: of all pages, and of those of no file."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}
    return sum(fields.values()), fields.get("RssAnon", 0) + fields.get("RssShmem", 0)


def first_token(kvasir, folder, home, flags):
    """Seconds from the start to the first token, CPU seconds, and the largest amounts of memory."""
    drop(folder)
    started, most, used = time.monotonic(), (0, 0), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [kvasir, "run", str(folder), "-p", "Hello", "-n", "1", *flags]
    environment = {**os.environ, "KVASIR_HOME": home}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        while not select.select([process.stdout], [], [], 0.02)[0]:
            most = tuple(map(max, most, resident(process.pid)))
        seconds = time.monotonic() - started
        _, errors = process.communicate()
        if process.returncode:
            raise SystemExit(errors.decode())
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (now.ru_utime - used.ru_utime, now.ru_stime - used.ru_stime)
    return {"s": round(seconds, 2), "cpu_s": [round(part, 2) for part in cpu],
            "resident_gb": round(most[0] / 1e9, 2), "of_no_file_gb": round(most[1] / 1e9, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kvasir")
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    folder = arguments.dir / "nvfp4-random"
    print(json.dumps(machine.facts()))
    if not folder.exists():
        write(folder, arguments.layers)
    ratios = {"first": [], "later": []}
    try:
        for _ in range(arguments.rounds):
            row = {"weights_gb": round(weights(folder) / 1e9, 2)}
            for what, keep in (("read_s", False), ("read_to_memory_s", True)):
                drop(folder)
                row[what] = round(read(folder, keep), 2)
            with tempfile.TemporaryDirectory(dir=arguments.dir) as home:
                for start in ratios:
                    row[start] = first_token(arguments.kvasir, folder, home, arguments.flags)
                    ratios[start].append([row[start]["s"] / row[what] for what in ("read_s", "read_to_memory_s")])
            print(json.dumps(row), flush=True)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    median = lambda of: round(statistics.median(of), 2)
    print(json.dumps({start: [median(of) for of in zip(*rounds)] for start, rounds in ratios.items()}))


if __name__ == "__main__":
    main()
