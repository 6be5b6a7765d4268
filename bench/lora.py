#!/usr/bin/env python3
"""Measures batched decoding with LoRA adapters against the same batch without.

    bench/gpu/random_gguf.py tests/fixtures/tiny/llama/llama-f32.gguf M.gguf --shape 28,1536,12,2,128,8960,32768
    bench/lora.py M.gguf --shape 28,1536,12,2,128,8960,32768 [--binary target/release/kvasir]

--shape is that of the model, as bench/gpu/random_gguf.py takes it; the one above is that of Qwen2.5-Coder-1.5B. The
adapters are random, of rank 8 on queries, keys, values and outputs of attention. Prints a row of the table in
docs/measurements/lora.md for each batch.
"""
import argparse
import json
import os
import pathlib
import struct
import subprocess
import tempfile

# Random bytes become bfloat16 values between 0.008 and 0.03 of either sign: the upper byte from its highest bit.
UPPER = bytes(0xbc if byte & 0x80 else 0x3c for byte in range(256))


def random_bf16(count):
    values = bytearray(os.urandom(2 * count))
    values[1::2] = bytes(values[1::2]).translate(UPPER)
    return bytes(values)


def write_adapter(folder, shape, rank):
    layers, width, heads, kv_heads, head, _, _ = shape
    outputs = {"q_proj": heads * head, "k_proj": kv_heads * head, "v_proj": kv_heads * head, "o_proj": width}
    header, data = {}, []
    end = 0
    for layer in range(layers):
        for module, rows in outputs.items():
            cols = heads * head if module == "o_proj" else width
            for part, dims in (("A", [rank, cols]), ("B", [rows, rank])):
                size = 2 * dims[0] * dims[1]
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{part}.weight"
                header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [end, end + size]}
                data.append(random_bf16(dims[0] * dims[1]))
                end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    with open(folder / "adapter_model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(data)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(outputs)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--binary", default="target/release/kvasir")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", default="2")
    parser.add_argument("--repeat", default="5")
    options = parser.parse_args()
    shape = [int(number) for number in options.shape.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        command = [options.binary, "bench", options.model, "-p", "0", "-d", "0", "-n", str(options.tokens),
                   "-b", options.batch, "-t", options.threads, "-r", options.repeat, "--device", "cpu", "--json"]
        for number in range(options.adapters):
            folder = pathlib.Path(scratch) / f"a{number}"
            write_adapter(folder, shape, options.rank)
            command += ["--lora", f"a{number}={folder}"]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    print("| batch | adapters | rank | without, t/s | with, t/s | ratio |")
    print("|---:|---:|---:|---:|---:|---:|")
    plain = {row["batch"]: row for row in report["rows"] if row["test"] == "batch"}
    for row in report["rows"]:
        if row["test"] == "lora":
            before = plain[row["batch"]]["tps"]
            used = min(row["batch"], options.adapters)
            print(f"| {row['batch']} | {used} | {options.rank} | {before:.1f} | {row['tps']:.1f}"
                  f" | {row['tps'] / before:.3f} |")


if __name__ == "__main__":
    main()
