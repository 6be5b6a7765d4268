#!/usr/bin/env python3
"""Writes the pages and plots of a replay and of the simulator.

    bench/rag/report.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --words 40 --plots docs/measurements

Reads the folder of bench/rag/replay.py. Writes runs.md (medians over rounds and seeds), against.jsonl (the
same runs simulated, with the errors of the simulation), fleet.jsonl (2 to 64 workers), fleet.md, and the
plots rag-replay.svg and rag-fleet.svg. The floor is the number of tokens that one unbounded cache would
compute. It comes from the simulator, which has the tokens.
"""
import argparse
import json
import pathlib
import statistics
import subprocess

import plots

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = {
    ("kvasir", "prefix", "by_popularity"): "Kvasir, `documents`", ("kvasir", "prefix", "by_rank"): "Kvasir",
    ("kvasir", "least-load", "by_rank"): "Kvasir, least-load", ("kvasir", "round-robin", "by_rank"): "Kvasir, round-robin",
    ("sglang-router", "cache_aware", "by_rank"): "sglang-router", ("smg", "cache_aware", "by_rank"): "smg",
}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def name(row):
    return NAMES[(row["router"], row["policy"], row["prompt"])]


def table(head, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def medians(runs, floors):
    """Median of each figure over rounds and seeds, for each contender. `above`: tokens computed beyond the
    floor, in per cent of the floor.
    """
    found = {}
    figures = ("computed", "above", "hit_ratio", "load_cov", "seconds", "ttft_p50", "ttft_p99")
    runs = [{**run, "above": 100 * (run["computed"] / floors[name(run), run["seed"]] - 1)} for run in runs]
    for key, label in NAMES.items():
        own = [run for run in runs if (run["router"], run["policy"], run["prompt"]) == key]
        if own:
            found[label] = {figure: statistics.median(run[figure] for run in own) for figure in figures}
    return found


def runs_page(out, runs, floors):
    rows = [[label, f"{row['computed']:,.0f}", f"{row['above']:+.2f} %", f"{row['hit_ratio']:.3f}", f"{row['load_cov']:.4f}",
             f"{row['seconds']:.1f}", f"{row['ttft_p50']:.2f}", f"{row['ttft_p99']:.2f}"]
            for label, row in medians(runs, floors).items()]
    head = ["router", "tokens computed", "beyond the floor", "hit ratio", "load CoV", "seconds", "TTFT p50", "TTFT p99"]
    wrong = [run["prediction_error"] for run in runs if run.get("evictions") == 0]
    note = f"Predicted and actual cached tokens differ by {sum(wrong)} in the {len(wrong)} runs without evictions.\n" if wrong else ""
    one = {label: [floor for (other, _), floor in sorted(floors.items()) if other == label] for label, _ in floors}
    note += "".join(f"Floor, {label}: {', '.join(f'{floor:,}' for floor in found)}.\n" for label, found in one.items()
                    if label in ("Kvasir", "Kvasir, `documents`"))
    machine = json.loads((out / "machine.json").read_text())
    (out / "runs.md").write_text(table(head, rows) + "\n" + note + "\n" + ", ".join(f"{k} {v}" for k, v in machine.items()) + "\n")


def simulate(args, runs, seed, options):
    """Returns the simulator's rows for the questions of a seed."""
    traffic = args.results / f"traffic-{seed}.jsonl"
    with open(traffic, "w") as file:
        subprocess.run([ROOT / "bench/rag/traffic.py", "--questions", str(args.questions), "--documents", str(args.documents),
                        "--words", str(args.words), "--seed", str(seed)], stdout=file, check=True)
    measured = [run["pull_mbps"] for run in runs if run.get("pull_mbps")]
    pulls = ["--pull-mbps", str(statistics.median(measured))] if measured else []
    command = [args.fleet, "--gguf", args.gguf, "--traffic", traffic, "--rates", args.results / "rates.json", "--chunk",
               str(args.chunk), *pulls, *options]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    return [{**json.loads(line), "seed": seed} for line in printed.splitlines()]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def against(args, runs):
    """Simulates each real run. Returns rows with both results."""
    rows = []
    for seed in sorted({run["seed"] for run in runs}):
        own = args.results / f"runs-{seed}.jsonl"
        write(own, [run for run in runs if run["seed"] == seed])
        rows += simulate(args, runs, seed, ["--against", own])
    write(args.results / "against.jsonl", rows)
    return rows


def fleet_page(out, rows, compared):
    text = ""
    if compared:
        figures = ("computed", "seconds", "ttft_p50", "ttft_p99")
        head = ["router", "seed", *[f"{figure}, error" for figure in ("tokens computed", "seconds", "TTFT p50", "TTFT p99")]]
        errors = [[name(row), row["seed"], *[f"{100 * row[figure][2]:+.1f} %" for figure in figures]] for row in compared]
        text = "The real runs, simulated:\n\n" + table(head, errors) + "\n"
    labels = [label for label in NAMES.values() if any(name(row) == label for row in rows)]
    lines_ = []
    for workers, load in sorted({(row["workers"], row["load"]) for row in rows}):
        own = {name(row): row for row in rows if (row["workers"], row["load"]) == (workers, load)}
        lines_.append([workers, load, *[f"{own[label]['ttft_p50']:.2f} / {own[label]['ttft_p99']:.2f}" for label in labels]])
        beyond = [f"{100 * (own[label]['computed'] / own[label]['floor'] - 1):+.1f} %, {own[label]['load_cov']:.3f}" for label in labels]
        lines_.append(["", "", *beyond])
    text += table(["workers", "load", *labels], lines_)
    (out / "fleet.md").write_text(text)


def worst_margins(rows):
    """Kvasir's TTFT p99 relative to the best other contender with documents by rank, for each seed, fleet and
    load. Largest first.
    """
    margins = []
    for key in sorted({(row["seed"], row["workers"], row["load"]) for row in rows}):
        found = {name(row): row["ttft_p99"] for row in rows if (row["seed"], row["workers"], row["load"]) == key}
        others = min(p99 for label, p99 in found.items() if not label.startswith("Kvasir") or ", " in label and "`" not in label)
        margins.append((found["Kvasir"] / others - 1, *key))
    return sorted(margins, reverse=True)


def draw(out, runs, floors, rows):
    plain = {label: label.replace("`", "") for label in NAMES.values()}
    if runs:
        found = [(plain[label], row) for label, row in medians(runs, floors).items()]
        panels = (("tokens computed", "computed", "{:,.0f}"), ("beyond one cache without bounds, %", "above", "{:.2f}"),
                  ("load CoV", "load_cov", "{:.4f}"), ("TTFT p99, seconds", "ttft_p99", "{:.2f}"))
        plots.bars(out / "rag-replay.svg", found, panels)
    series = {plain[label]: [row for row in rows if name(row) == label] for label in NAMES.values()}
    panels = (("TTFT p50, s", "ttft_p50"), ("TTFT p99, s", "ttft_p99"))
    plots.lines(out / "rag-fleet.svg", series, sorted({row["load"] for row in rows}), panels)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "target/bench/rag")
    parser.add_argument("--fleet", type=pathlib.Path, default=ROOT / "target/release/fleet")
    parser.add_argument("--gguf", type=pathlib.Path, required=True, help="the model's file")
    parser.add_argument("--questions", type=int, default=4000, help="of the simulated fleets, at most")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--words", type=int, default=120, help="words of a document, as in the replay")
    parser.add_argument("--chunk", type=int, default=448, help="the workers' prefill chunk, as `kvasir worker --explain` says")
    parser.add_argument("--seeds", default="1", help="of the simulated fleets; the first is shown")
    parser.add_argument("--plots", type=pathlib.Path, help="where plots go, if not beside the results")
    args = parser.parse_args()
    real = args.results / "runs.jsonl"
    runs = lines(real) if real.exists() else []
    compared = against(args, runs)
    floors = {(name(row), row["seed"]): row["floor"] for row in compared}
    seeds = [int(seed) for seed in args.seeds.split(",")]
    # Enough questions that a p99 depends on more than three of them.
    sizes = [(workers, max(60, 2000 // workers)) for workers in (2, 4, 16, 64)]
    fleets = [row for seed in seeds for workers, each in sizes
              for row in simulate(args, runs, seed, ["--workers", str(workers), "--questions", str(each)])]
    write(args.results / "fleet.jsonl", fleets)
    shown = [row for row in fleets if row["seed"] == seeds[0]]
    if runs:
        runs_page(args.results, runs, floors)
    fleet_page(args.results, shown, compared)
    draw(args.plots or args.results, runs, floors, shown)
    for margin, seed, workers, load in worst_margins(fleets)[:5]:
        print(f"p99 beside the best other: {100 * margin:+.1f} % (seed {seed}, {workers} workers, load {load})")


if __name__ == "__main__":
    main()
