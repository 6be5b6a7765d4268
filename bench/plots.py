#!/usr/bin/env python3
"""Draws OUT/speed.png and OUT/burst.png from OUT/samples.jsonl. Needs matplotlib, which the environment of
the peers has.
"""
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import report

COLOURS = {"kvasir": "#1b6ca8", "llama.cpp": "#c96f2e", "llama-server": "#c96f2e", "vllm": "#5b8c3a"}


def panel(axes, title, rows, unit):
    """Draws horizontal bars: one group per row, one bar per contender."""
    y, labels, places = 0.0, [], []
    for label, bars in rows:
        start = y
        for name, value, low, high, colour in bars:
            axes.barh(y, value, 0.8, color=colour, xerr=[[value - low], [high - value]], error_kw={"lw": 0.8})
            axes.text(high, y, f" {name} {value:,.1f}", va="center", fontsize=6)
            y += 0.9
        labels.append(label)
        places.append((start + y - 0.9) / 2)
        y += 0.7
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=7)
    axes.tick_params(axis="x", labelsize=6)
    axes.set_title(title, fontsize=8)
    axes.margins(x=0.25)


def bars(contenders):
    found = []
    for engine in ("kvasir", "llama.cpp", "vllm"):
        chosen = report.best(contenders, engine)
        if chosen:
            found.append((engine, chosen))
    found += [(f"llama-server, {c.variant}", c) for c in contenders if c.engine == "llama-server"]
    return [(name, c.median, min(c.by_round.values()), max(c.by_round.values()), COLOURS[c.engine]) for name, c in found]


def draw(out, name, table, unit, wanted):
    panels = {}
    for (model, threads, section, label), contenders in table.items():
        if section in wanted:
            panels.setdefault((model, threads), []).append((label, bars(contenders)))
    if not panels:
        return
    height = sum(0.5 + sum(0.22 * len(group) + 0.12 for _, group in rows) for rows in panels.values())
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, max(3, height)), squeeze=False,
                                height_ratios=[sum(len(group) + 0.7 for _, group in rows) for rows in panels.values()])
    for place, ((model, threads), rows) in zip(axes[:, 0], panels.items()):
        panel(place, f"{model}, {threads} thread(s)", rows, unit)
    figure.tight_layout()
    figure.savefig(out / name, dpi=130)
    plt.close(figure)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = pathlib.Path(sys.argv[1])
    table = report.rows(out)
    draw(out, "speed.png", table, "tokens per second (whiskers: slowest and fastest round)", ("prefill", "decode", "depth", "batch", "http"))
    draw(out, "burst.png", table, "seconds for all requests (whiskers: fastest and slowest round)", ("burst",))


if __name__ == "__main__":
    main()
