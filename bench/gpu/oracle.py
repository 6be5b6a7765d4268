#!/usr/bin/env python3
"""Runs small models of every layer kind on a device and prints one line of JSON for each.

Compares with the reference of each model (all f32), and with the CPU on 8-bit activations, the default of a
worker. Exits with 1 if a difference is too large.

    bench/gpu/oracle.py --kvasir target/release/kvasir --device cuda --seconds 80
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures"
CHUNK = 64
RUN_LIMIT_S = 60
# Limits of the relative distance of logits. Sources of a distance: sums in another order; with 8-bit
# activations also values that are rounded to another integer.
F32_AT_MOST, INT8_AT_MOST = 1e-4, 2e-2
TYPES = {"F32": np.float32, "I32": np.int32, "U32": np.uint32, "I64": np.int64}


def tensors(path):
    """Returns the arrays of a safetensors file."""
    data = pathlib.Path(path).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:begin])
    return {name: np.frombuffer(data[begin + entry["data_offsets"][0]:begin + entry["data_offsets"][1]],
                                TYPES[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in head.items() if name != "__metadata__"}


class Runner:
    def __init__(self, kvasir, device):
        self.kvasir, self.device = kvasir, device

    def run(self, model, prompts, count, *more, device=None):
        """Returns the logits of prompts and of `count` greedy tokens after them."""
        with tempfile.TemporaryDirectory() as folder:
            ids, out = pathlib.Path(folder) / "ids.json", pathlib.Path(folder) / "out.safetensors"
            ids.write_text(json.dumps(prompts))
            done = subprocess.run([self.kvasir, "logits", model, "--tokens", ids, "--out", out, "--greedy", str(count),
                                   "--device", device or self.device, "--threads", "4", "--chunk", str(CHUNK), *more],
                                  capture_output=True, text=True, timeout=RUN_LIMIT_S)
            if done.returncode != 0:
                raise RuntimeError((done.stderr or done.stdout).strip()[-300:])
            return tensors(out)

    def beside_cpu(self, model, prompts, count):
        """Returns the largest distance between device and CPU, and whether the generated tokens are equal."""
        gpu, cpu = (self.run(model, prompts, count, device=device) for device in (None, "cpu"))
        off = max(distance(gpu[f"p{i}.logits"], cpu[f"p{i}.logits"]) for i in range(len(prompts)))
        return off, all(np.array_equal(gpu[f"p{i}.greedy"], cpu[f"p{i}.greedy"]) for i in range(len(prompts)))

    def beside_reference(self, model, reference):
        prompts = [reference[f"p{i}.ids"].tolist() for i in range(sum(name.endswith(".ids") for name in reference))]
        count = len(reference["p0.greedy"])
        found = self.run(model, prompts, count, "--activations", "f32", "--kv-type", "f32")
        same = all(np.array_equal(found[f"p{i}.greedy"], reference[f"p{i}.greedy"]) for i in range(len(prompts)))
        known = [i for i in range(len(prompts)) if f"p{i}.logits" in reference]
        off = max((distance(found[f"p{i}.logits"], reference[f"p{i}.logits"]) for i in known), default=0.0)
        cpu, _ = self.beside_cpu(model, prompts, count)
        return {"reference": off, "cpu": cpu, "same_tokens": same, "holds": same and off <= F32_AT_MOST and cpu <= INT8_AT_MOST}

    def quantised(self, model):
        cpu, same = self.beside_cpu(model, [[(7 * i + 3) % 400 + 5 for i in range(90)]], 8)
        return {"cpu": cpu, "same_tokens": same, "holds": cpu <= INT8_AT_MOST}


def distance(found, wanted):
    """Relative distance over the rows that both arrays have (rows without NaN)."""
    rows = ~np.isnan(found).any(-1) & ~np.isnan(wanted).any(-1)
    if not rows.any():
        return float("inf")
    return float(np.linalg.norm(found[rows] - wanted[rows]) / np.linalg.norm(wanted[rows]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvasir", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=100, help="begin no further model when so much time has passed")
    args = parser.parse_args()
    until, runner, bad = time.monotonic() + args.seconds, Runner(args.kvasir, args.device), 0
    jobs = []
    for folder in sorted((FIXTURES / "tiny").iterdir()):
        model, reference = folder / f"{folder.name}-f32.gguf", folder / "ref.safetensors"
        # An assistant drafts tokens for another model and generates nothing by itself.
        if model.exists() and reference.exists() and "assistant" not in folder.name:
            known = tensors(reference)
            if "p0.greedy" in known:
                jobs.append((folder.name, lambda model=model, known=known: runner.beside_reference(model, known)))
    for model in sorted((FIXTURES / "quant").glob("*/*.gguf")):
        jobs.append((model.stem, lambda model=model: runner.quantised(model)))
    for name, job in jobs:
        if time.monotonic() > until:
            row = {"holds": False, "why": "no time left"}
        else:
            try:
                row = job()
            except Exception as error:  # noqa: BLE001: the other models still run
                row = {"holds": False, "why": f"{type(error).__name__}: {error}"}
        bad += not row["holds"]
        print(json.dumps({"model": name, **row}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
