#!/usr/bin/env python3
"""Turns OUT/samples.jsonl into OUT/table.csv and OUT/table.md."""
import collections
import csv
import json
import pathlib
import statistics
import sys

# If other processes use more than this share of the machine, the row is marked as invalid.
DISTURBED = 0.05
COLUMNS = ["model", "threads", "section", "row", "unit", "engine", "variant", "median", "spread", "rounds", "best",
           "kvasir_over_this", "bandwidth_gbs", "bandwidth_share", "sent", "computed", "ttft_p50", "ttft_max", "others_cpu",
           "stolen_cpu"]


def median(values):
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


class Contender:
    """One engine and variant in one row, over all rounds."""

    def __init__(self, samples):
        self.by_round = {sample["round"]: sample["value"] for sample in samples}
        self.samples = samples
        self.engine, self.variant, self.unit = (samples[0][key] for key in ("engine", "variant", "unit"))
        self.median = median(self.by_round.values())
        self.spread = (max(self.by_round.values()) - min(self.by_round.values())) / self.median

    def of(self, key):
        return median([sample.get(key) for sample in self.samples])


def ratio(kvasir, peer):
    """Median ratio over the rounds that both ran in. A drift of the machine then affects both sides of each
    pair.
    """
    shared = kvasir.by_round.keys() & peer.by_round.keys()
    return median([kvasir.by_round[turn] / peer.by_round[turn] for turn in shared])


def rows(out):
    """(model, threads, section, row) -> contenders, in the order of measurement."""
    grouped = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in (out / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        key = tuple(sample[name] for name in ("model", "threads", "section", "row"))
        grouped[key][(sample["engine"], sample["variant"])].append(sample)
    return {key: [Contender(samples) for samples in found.values()] for key, found in grouped.items()}


def best(contenders, engine):
    """The best variant of an engine. A variant with fewer rounds is excluded, because it lost in those."""
    own = [contender for contender in contenders if contender.engine == engine]
    rounds = max((len(contender.by_round) for contender in own), default=0)
    own = [contender for contender in own if len(contender.by_round) == rounds]
    if not own:
        return None
    choose = min if own[0].unit == "s" else max
    return choose(own, key=lambda contender: contender.median)


def named(contenders, engine, variant):
    return next((c for c in contenders if (c.engine, c.variant) == (engine, variant)), None)


def targets(key, contenders):
    """Returns (peer, sign, target of Kvasir's value divided by the peer's) for a row."""
    _model, _threads, section, label = key
    if section == "burst":
        return [(named(contenders, "llama-server", "default"), "<=", 0.2), (best(contenders, "vllm"), "<=", 1.0)]
    if section == "depth" or label == "decode, 32 sequences":
        return [(best(contenders, "llama.cpp"), ">=", 1.5)]
    if section in ("prefill", "decode"):
        return [(best(contenders, "llama.cpp"), ">=", 1.0)]
    return []


def verdict(kvasir, peer, sign, goal):
    found = ratio(kvasir, peer) if kvasir and peer else None
    if found is None:
        return ""
    return "yes" if (found >= goal if sign == ">=" else found <= goal) else "NO"


def others(contenders):
    """Largest CPU use of other processes, with a mark if it invalidates the row."""
    worst = max(contender.of("others_cpu") for contender in contenders)
    return f"{worst:.0%}{' !' if worst > DISTURBED else ''}"


def number(value, digits=1):
    return "" if value is None else f"{value:,.{digits}f}"


def cell(contender, kvasir):
    """A peer's median, its variant, and Kvasir's value divided by it."""
    if contender is None:
        return ""
    found = ratio(kvasir, contender) if kvasir else None
    tail = "" if found is None else f" · **{found:.2f}x**"
    return f"{number(contender.median)} ({contender.variant}){tail}"


def write_csv(out, table):
    with open(out / "table.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for (model, threads, section, label), contenders in table.items():
            kvasir = best(contenders, "kvasir")
            for contender in contenders:
                record = {"model": model, "threads": threads, "section": section, "row": label, "unit": contender.unit,
                          "engine": contender.engine, "variant": contender.variant, "median": contender.median,
                          "spread": contender.spread, "rounds": len(contender.by_round),
                          "best": best(contenders, contender.engine) is contender,
                          "kvasir_over_this": ratio(kvasir, contender) if kvasir else None}
                for key in ("bandwidth_gbs", "bandwidth_share", "sent", "computed", "ttft_p50", "ttft_max", "others_cpu", "stolen_cpu"):
                    record[key] = contender.of(key)
                writer.writerow(record)


def section_lines(title, header, lines):
    if not lines:
        return []
    return [f"### {title}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header), *lines, ""]


def engine_lines(table):
    for key, contenders in table.items():
        model, threads, section, label = key
        if section in ("burst", "http"):
            continue
        kvasir, peer = best(contenders, "kvasir"), best(contenders, "llama.cpp")
        met = ", ".join(f"{sign} {goal}: {verdict(kvasir, against, sign, goal)}"
                        for against, sign, goal in targets(key, contenders) if verdict(kvasir, against, sign, goal))
        share = kvasir.of("bandwidth_share") if kvasir else None
        any_one = kvasir or peer
        yield "| " + " | ".join([
            model, str(threads), label, number(kvasir.median if kvasir else None), cell(peer, kvasir), met,
            "" if share is None else f"{share:.0%}", number(any_one.of("bandwidth_gbs")),
            others(contenders)]) + " |"


def http_lines(table, section):
    for key, contenders in table.items():
        model, threads, found, label = key
        if found != section:
            continue
        kvasir = best(contenders, "kvasir")
        met = ", ".join(f"{sign} {goal} of {against.engine}: {verdict(kvasir, against, sign, goal)}"
                        for against, sign, goal in targets(key, contenders) if verdict(kvasir, against, sign, goal))
        peers = [named(contenders, "llama-server", "default"), best([c for c in contenders if c.variant != "default"], "llama-server"),
                 best(contenders, "vllm")]
        tokens = [f"{c.engine.replace('llama-server', 'llama')}{' ' + c.variant if c.engine == 'llama-server' else ''} {number(c.of('computed'), 0)}"
                  for c in contenders]
        sent = f"{number(contenders[0].of('sent'), 0)}: " if section == "burst" else ""
        yield "| " + " | ".join([
            model, str(threads), label, number(kvasir.median if kvasir else None, 2), *[cell(p, kvasir) for p in peers], met,
            sent + ", ".join(tokens) if section == "burst" else "", number((kvasir or contenders[0]).of("bandwidth_gbs")),
            others(contenders)]) + " |"


def write(out):
    """Writes both tables."""
    out = pathlib.Path(out)
    table = rows(out)
    write_csv(out, table)
    machine = json.loads((out / "machine.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{machine['date']}, {machine['cpu']} (family {machine['family']}: {machine['isa']}), {machine['cpus']} CPUs, "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}.  ", f"{versions}.", "",
        "Medians over rounds. **x** = Kvasir's value over the peer's, the median of the ratios of single rounds: above "
        "1 is better for tokens per second, below 1 for seconds. *others* = CPU that neither side used, at worst.", ""]
    lines += section_lines("Tokens per second, in process", [
        "model", "threads", "row", "Kvasir", "llama.cpp, best variant", "target met", "of bandwidth", "probe GB/s", "others"],
        list(engine_lines(table)))
    lines += section_lines("Tokens per second, through HTTP", [
        "model", "threads", "row", "Kvasir", "llama-server default", "llama-server, other", "vLLM", "target met", "", "probe GB/s", "others"],
        list(http_lines(table, "http")))
    lines += section_lines("Shared-prefix burst through HTTP, seconds", [
        "model", "threads", "row", "Kvasir", "llama-server default", "llama-server, other", "vLLM", "target met",
        "prompt tokens sent: computed", "probe GB/s", "others"], list(http_lines(table, "burst")))
    (out / "table.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(sys.argv[1])
