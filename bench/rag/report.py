#!/usr/bin/env python3
"""What a replay and the simulator say, as one page.

    bench/rag/report.py --fleet target/release/fleet

From the folder that bench/rag/replay.py has filled it makes runs.md (medians over rounds), against.jsonl (the same runs
simulated, and how far off that is), fleet.jsonl (2 to 64 workers), fleet.md, and the plots rag.png and fleet.png. The
plots need matplotlib, which the peers' environment has; without it there are none.
"""
import argparse
import json
import pathlib
import statistics
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = {
    ("kvasir", "prefix", "by_popularity"): "Kvasir, `documents`", ("kvasir", "prefix", "by_rank"): "Kvasir",
    ("kvasir", "least-load", "by_rank"): "Kvasir, least-load", ("kvasir", "round-robin", "by_rank"): "Kvasir, round-robin",
    ("sglang-router", "cache_aware", "by_rank"): "sglang-router", ("smg", "cache_aware", "by_rank"): "smg",
}
COLOURS = ["#0b3c5d", "#1b6ca8", "#7fb2d6", "#b9d3e6", "#c96f2e", "#5b8c3a"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def name(row):
    return NAMES[(row["router"], row["policy"], row["prompt"])]


def table(head, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def medians(runs):
    """Of each contender, the median over rounds of each figure."""
    found = {}
    for key, label in NAMES.items():
        own = [run for run in runs if (run["router"], run["policy"], run["prompt"]) == key]
        if own:
            figures = ("computed", "hit_ratio", "load_cov", "seconds", "ttft_p50", "ttft_p99")
            found[label] = {figure: statistics.median(run[figure] for run in own) for figure in figures}
    return found


def runs_page(out, runs):
    rows = [[label, f"{row['computed']:,.0f}", f"{row['hit_ratio']:.3f}", f"{row['load_cov']:.4f}", f"{row['seconds']:.1f}",
             f"{row['ttft_p50']:.2f}", f"{row['ttft_p99']:.2f}"] for label, row in medians(runs).items()]
    head = ["router", "tokens computed", "hit ratio", "load CoV", "seconds", "TTFT p50", "TTFT p99"]
    wrong = [run["prediction_error"] for run in runs if run.get("evictions") == 0]
    note = f"Predicted minus actual cached tokens in the {len(wrong)} runs without evictions: {sum(wrong)}.\n" if wrong else ""
    machine = json.loads((out / "machine.json").read_text())
    (out / "runs.md").write_text(table(head, rows) + "\n" + note + "\n" + ", ".join(f"{k} {v}" for k, v in machine.items()) + "\n")


def simulate(args, options, name_):
    with open(args.results / name_, "w") as file:
        subprocess.run([args.fleet, "--gguf", args.gguf, "--traffic", args.results / "traffic.jsonl", "--rates",
                        args.results / "rates.json", "--chunk", str(args.chunk), *options], stdout=file, check=True)
    return lines(args.results / name_)


def fleet_page(out, rows, against):
    text = ""
    if against:
        head = ["router", "tokens computed, error", "seconds, error", "TTFT p50, error", "TTFT p99, error"]
        errors = [[name(row), *[f"{100 * row[figure][2]:+.1f} %" for figure in ("computed", "seconds", "ttft_p50", "ttft_p99")]]
                  for row in against]
        text = "The real runs, simulated:\n\n" + table(head, errors) + "\n"
    head = ["workers", "load", "router", "tokens computed", "hit ratio", "load CoV", "TTFT p50", "TTFT p99"]
    text += table(head, [[row["workers"], row["load"], name(row), f"{row['computed']:,}", f"{row['hit_ratio']:.3f}",
                          f"{row['load_cov']:.3f}", f"{row['ttft_p50']:.2f}", f"{row['ttft_p99']:.2f}"] for row in rows])
    (out / "fleet.md").write_text(text)


def plots(out, runs, rows):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if runs:
        found = medians(runs)
        figure, axes = plt.subplots(1, 3, figsize=(10, 2.6), sharey=True)
        panels = (("computed", "prompt tokens computed"), ("load_cov", "load CoV"), ("ttft_p99", "TTFT p99, seconds"))
        for place, (key, title) in zip(axes, panels):
            values = [row[key] for row in found.values()]
            place.barh(range(len(values)), values, color=COLOURS[:len(values)])
            place.set_yticks(range(len(values)), [label.replace("`", "") for label in found], fontsize=7)
            place.set_title(title, fontsize=8)
            place.tick_params(axis="x", labelsize=6)
        axes[0].invert_yaxis()
        figure.tight_layout()
        figure.savefig(out / "rag.png", dpi=130)
    loads = sorted({row["load"] for row in rows})
    figure, axes = plt.subplots(2, len(loads), figsize=(3.4 * len(loads), 5), sharex=True, squeeze=False)
    for column, load in enumerate(loads):
        for line, (key, title) in enumerate((("ttft_p50", "TTFT p50, seconds"), ("ttft_p99", "TTFT p99, seconds"))):
            place = axes[line][column]
            for colour, label in zip(COLOURS, NAMES.values()):
                own = [row for row in rows if row["load"] == load and name(row) == label]
                place.plot([row["workers"] for row in own], [row[key] for row in own], marker="o", markersize=3, lw=1.2,
                           color=colour, label=label.replace("`", ""))
            place.set_xscale("log", base=2)
            place.set_xticks(sorted({row["workers"] for row in rows}), sorted({row["workers"] for row in rows}))
            place.set_title(f"{title}, load {load}", fontsize=8)
            place.set_ylim(bottom=0)
            place.tick_params(labelsize=6)
    axes[1][0].set_xlabel("workers", fontsize=7)
    axes[0][0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(out / "fleet.png", dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "target/bench/rag")
    parser.add_argument("--fleet", type=pathlib.Path, default=ROOT / "target/release/fleet")
    parser.add_argument("--gguf", type=pathlib.Path, required=True, help="the model's file")
    parser.add_argument("--questions", type=int, default=4000, help="of the simulated fleets, at most")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--words", type=int, default=120, help="words of a document, as in the replay")
    parser.add_argument("--chunk", type=int, default=448, help="the workers' prefill chunk, as `kvasir worker --explain` says")
    args = parser.parse_args()
    with open(args.results / "traffic.jsonl", "w") as file:
        subprocess.run([ROOT / "bench/rag/traffic.py", "--questions", str(args.questions), "--documents", str(args.documents),
                        "--words", str(args.words)], stdout=file, check=True)
    real = args.results / "runs.jsonl"
    runs = lines(real) if real.exists() else []
    against = simulate(args, ["--against", real], "against.jsonl") if runs else []
    rows = simulate(args, [], "fleet.jsonl")
    if runs:
        runs_page(args.results, runs)
    fleet_page(args.results, rows, against)
    try:
        plots(args.results, runs, rows)
    except ImportError as error:
        print(f"no plots: {error}")


if __name__ == "__main__":
    main()
