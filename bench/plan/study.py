#!/usr/bin/env python3
"""The study of docs/measurements/fleet-planning.md: prints its tables.

    bench/plan/study.py --kvasir target/release/kvasir

Fleets of 8 and 64 equal nodes with more models than fit, traffic by Zipf's law. Each row is the mean over the seeds. A
proposal is made with a seed and judged with that seed and with one that it has not seen (seed + 100).
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

NODE = """
[[node]]
name = "n"
count = {nodes}
memory = "22GiB"
bandwidth = "300GB"
compute = 35e12
read = "2GB"
copy = "12GB"
page_cache = "64GiB"
load_overhead = "500ms"
"""
# Bytes of the files; a loaded model needs a fifth more.
SIZES_GB = [2.0, 4.7, 8.5, 4.7, 9.0, 13.0, 8.5, 16.0]
# By nodes: models, requests per second, requests, simulations of the search, seeds.
FLEETS = {8: (32, 1, 5000, 30, [1, 2]), 64: (224, 8, 4000, 8, [1])}
SETTINGS = {"min": 0, "max": 4, "idle_s": 600, "pin": False}


def fleet(nodes, models, proposed):
    text = NODE.format(nodes=nodes)
    for number in range(models):
        name, size = f"m{number:03}", SIZES_GB[number % len(SIZES_GB)]
        settings = proposed.get(name, SETTINGS)
        text += f"""
[models.{name}]
file = "/models/{name}.gguf"
replicas = "{settings['min']}:{settings['max']}"
idle = "{settings['idle_s']}s"
pin = {str(settings['pin']).lower()}
costs = {{ bytes = {int(size * 1e9)}, needed_bytes = {int(size * 1.2e9)}, products = {size * 0.9e9}, kv_bytes = 98304 }}
"""
    return text


def plan(kvasir, text, traffic, seed, evaluations, compare):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "fleet.toml")
        path.write_text(text)
        command = [kvasir, "plan", "--fleet", path, "--synthetic", traffic, "--seed", str(seed), "--json"]
        command += ["--evaluations", str(evaluations)] + ["--compare"] * compare
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def row(cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def times(outcomes):
    at = lambda name: f"{mean(outcome['ttft'][name] for outcome in outcomes):.2f}"
    return [at(name) for name in ["mean", "p50", "p95", "p99"]]


def loads(outcomes):
    return f"{mean(outcome['loads'] + outcome['wakes'] for outcome in outcomes):.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvasir", default="target/release/kvasir")
    parser.add_argument("--nodes", type=int, choices=sorted(FLEETS), action="append", help="only these fleets")
    arguments = parser.parse_args()
    orders, proposals = [], []
    for nodes in arguments.nodes or sorted(FLEETS):
        models, rate, requests, evaluations, seeds = FLEETS[nodes]
        for exponent, drift in [(0.6, 0), (1.0, 0), (1.4, 0), (1.0, 300)]:
            traffic = f"zipf:{exponent},rate={rate},requests={requests},prompt=800,output=150,drift={drift}"
            run = lambda proposed, seed, evaluations=1, compare=False: plan(
                arguments.kvasir, fleet(nodes, models, proposed), traffic, seed, evaluations, compare
            )
            found = [run({}, seed, evaluations, True) for seed in seeds]
            name = [nodes, models, exponent, drift or "-"]
            now = [one["outcome"] for one in found]
            others = {order: [one["others"][order] for one in found] for order in ["lru", "belady"]}
            for order, outcomes in [("Kvasir", now), ("LRU", others["lru"]), ("Belady", others["belady"])]:
                refused = f"{mean(outcome['refused'] for outcome in outcomes):.0f}"
                evicted = f"{mean(outcome['evictions'] for outcome in outcomes):.0f}"
                orders.append([*name, order, loads(outcomes), evicted, refused, *times(outcomes)])
            proposed = [one["proposal"]["models"] for one in found]
            kept = mean(sum(model["min"] for model in models.values()) for models in proposed)
            unseen = [run({}, seed + 100)["outcome"] for seed in seeds]
            judged = [run(models, seed + 100)["outcome"] for models, seed in zip(proposed, seeds)]
            best = [one["proposal"]["outcome"] for one in found]
            for which, outcomes in [
                ("0:4", now),
                (f"proposal ({kept:.0f} kept)", best),
                ("0:4, unseen", unseen),
                ("proposal, unseen", judged),
            ]:
                proposals.append([*name, which, loads(outcomes), *times(outcomes)])
    columns = ["nodes", "models", "Zipf", "drift"]
    row([*columns, "evicts", "loads", "evicted", "refused", "mean", "p50", "p95", "p99"])
    row(["---"] * 12)
    [row(cells) for cells in orders]
    print()
    row([*columns, "replicas", "loads", "mean", "p50", "p95", "p99"])
    row(["---"] * 10)
    [row(cells) for cells in proposals]


main()
