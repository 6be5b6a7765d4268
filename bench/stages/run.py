#!/usr/bin/env python3
"""Measures a model over two and three stages against one engine and two independent engines.

    cargo build --release && cargo build --release -p kvasir-bench --bin stages --bin make-model
    bench/stages/run.py                       # five rounds
    bench/stages/run.py --rounds 1 --quick    # one, short
    bench/stages/run.py --rows stream         # one stream only; streams: 8 of them; prefill

Each engine or stage has one thread. All processes run at the same time, each on its own CPU. Those that are
not measured wait. S is the rate of two independent engines together, each with half of the work, divided by
the rate of one engine alone with that half. It is the most that these CPUs and their memory allow. On a
virtual machine S may change from one second to the next. So the stages' rate is compared with the rate of the
two engines immediately before and after it.

One stream over stages uses the CPUs in turn. So it is compared with one engine on either CPU, in turns, three
times per round. A process may be some percent faster or slower than another one for its whole life, depending
on where its memory lies. So every round of this row starts new processes. A third stage shares the CPU of the
second one. The first and the last stage compute the logits of one stream together.

If `bench/setup_peers.sh --only llama.cpp` has been run, llama.cpp does the same in the same rounds: one
engine with one thread, and the model split over two of its RPC servers with one thread and one CPU each.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from machine import facts  # noqa: E402


TURNS = 3


class Engine:
    """One process that reads a line per run and returns a line with its rates."""

    def __init__(self, args, cpu, later=()):
        argv = ["taskset", "-c", str(cpu), args.stages, "engine", args.model, "--kvasir", args.kvasir]
        if later:
            argv += ["--cpus", ",".join(map(str, later))]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("an engine has ended")
        return json.loads(line)

    def run(self, streams, prompt, tokens):
        self.process.stdin.write(f"{streams} {prompt} {tokens}\n")
        self.process.stdin.flush()
        return self.read()

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


def both(engines, *work):
    """Runs the same work on all engines at the same time. Returns the sums of their rates."""
    answers = [None] * len(engines)

    def one(index):
        answers[index] = engines[index].run(*work)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {key: sum(answer[key] or 0 for answer in answers) for key in ("prefill", "decode")}


def between(pair, two, streams, prompt, tokens, key):
    """Returns the rate of two engines together (mean of one run before and one run after the stages' run),
    and the stages' rate.
    """
    before = both(pair, streams[0], prompt, tokens)[key]
    stages = two.run(streams[1], prompt, tokens)[key]
    return (before + both(pair, streams[0], prompt, tokens)[key]) / 2, stages


def one_stream(args, tokens):
    """Measures one stream on new processes, in turns. Returns tokens per second, and for stages, per token in
    ms: the busy time of each stage, and the rest of the time. The rest is negative if stages compute at the
    same time.
    """
    engines = {"first": Engine(args, 0), "two": Engine(args, 0, [1]),
               "second": Engine(args, 1), "three": Engine(args, 0, [1, 1])}
    answers = {name: [] for name in engines}
    for turn in range(TURNS + 1):
        for name, engine in engines.items():
            answer = engine.run(1, 32, tokens)
            # The first turn is a warm-up.
            if turn:
                answers[name].append(answer)
    for engine in engines.values():
        engine.stop()
    row = {f"{name}_stream": statistics.harmonic_mean(a["decode"] for a in of) for name, of in answers.items()}
    for name in ("two", "three"):
        steps = TURNS * (tokens - 1)
        busy = [1e3 * sum(stage) / steps for stage in zip(*(a["busy"] for a in answers[name]))]
        row[f"{name}_busy_ms"] = [round(stage, 2) for stage in busy]
        row[f"{name}_waits_ms"] = round(1e3 / row[f"{name}_stream"] - sum(busy), 2)
    return row | {"local_stream": statistics.harmonic_mean([row["first_stream"], row["second_stream"]])}


class Llama:
    """llama.cpp alone, and split over two RPC servers that keep running."""

    def __init__(self, args):
        self.model, self.bin = args.model, args.llama
        self.ports = [50052, 50053]
        self.servers = []
        for cpu, port in enumerate(self.ports):
            argv = [self.bin / "ggml-rpc-server", "-H", "127.0.0.1", "-p", port, "-t", 1, "-d", "CPU"]
            self.servers.append(pinned(cpu, argv, subprocess.Popen))
        self.split = ["--rpc", ",".join(f"127.0.0.1:{port}" for port in self.ports), "-ngl", 99]

    def run(self, split, streams, prompt, tokens):
        """Returns tokens per second of prefill and of decode. Loading the model does not count."""
        room = streams * (prompt + tokens)
        argv = [self.bin / "llama-batched-bench", "-m", self.model, "-t", 1, "-c", room, "-npp", prompt, "-ntg", tokens,
                "-npl", streams, "--output-format", "jsonl", *(self.split if split else ["-ngl", 0])]
        if split:
            done = subprocess.run(list(map(str, argv)), **QUIET)
        else:
            done = pinned(0, argv, subprocess.run)
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not answers:
            sys.exit(f"llama-batched-bench: {done.stderr[-2000:]}")
        return {"prefill": answers[-1]["speed_pp"], "decode": answers[-1]["speed_tg"]}

    def stop(self):
        for server in self.servers:
            server.kill()
            server.wait()


QUIET = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def pinned(cpu, argv, start):
    quiet = QUIET if start is subprocess.run else {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return start(["taskset", "-c", str(cpu), *map(str, argv)], **quiet)


def bandwidth(args):
    argv = ["taskset", "-c", "0", args.kvasir, "bench", args.model, "-p", "0", "-n", "0", "-r", "1", "--json"]
    return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)["bandwidth_gbs"]


def random_weights(args):
    path = ROOT / "target/models/qwen3-0.6b-q4_k_m.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([args.make_model, "--shape", "qwen3-0.6b", "--quant", "q4-k-m", "--out", str(path)], check=True)
    return str(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="a file; random weights of Qwen3-0.6B's shape, made when they are not there")
    parser.add_argument("--kvasir", default=str(ROOT / "target/release/kvasir"))
    parser.add_argument("--stages", default=str(ROOT / "target/release/stages"))
    parser.add_argument("--llama", type=pathlib.Path, default=ROOT / "target/peers/llama.cpp/bin", help="its programs")
    parser.add_argument("--make-model", default=str(ROOT / "target/release/make-model"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="stream,streams,prefill", help="some of them, by commas")
    parser.add_argument("--quick", action="store_true", help="fewer tokens")
    args = parser.parse_args()
    args.model = args.model or random_weights(args)
    tokens, prompt = (32, 1024) if args.quick else (96, 2048)
    rows = args.rows.split(",")
    alone = Engine(args, 0)
    other = Engine(args, 1)
    two = Engine(args, 0, [1])
    llama = Llama(args) if (args.llama / "ggml-rpc-server").exists() else None
    rounds = []
    for number in range(args.rounds + 1):
        row = {"bandwidth": bandwidth(args)}
        if "stream" in rows:
            row |= one_stream(args, tokens)
        if "streams" in rows:
            row["one_4"] = alone.run(4, 32, tokens)["decode"]
            row["pair_4"], row["two_8"] = between([alone, other], two, (4, 8), 32, tokens, "decode")
        if "prefill" in rows:
            row["one_prefill"] = alone.run(1, prompt, 1)["prefill"]
            row["pair_prefill"], row["two_prefill"] = between([alone, other], two, (1, 1), prompt, 1, "prefill")
            row["two_prefill_2"] = two.run(2, prompt, 1)["prefill"]
        if llama:
            if "stream" in rows:
                row["llama_stream"] = llama.run(False, 1, 32, tokens)["decode"]
                row["llama_two_stream"] = llama.run(True, 1, 32, tokens)["decode"]
            if "streams" in rows:
                row["llama_one_4"] = llama.run(False, 4, 32, tokens)["decode"]
                row["llama_two_8"] = llama.run(True, 8, 32, tokens)["decode"]
            if "prefill" in rows:
                row["llama_prefill"] = llama.run(False, 1, prompt, 1)["prefill"]
                row["llama_two_prefill"] = llama.run(True, 1, prompt, 1)["prefill"]
        print(json.dumps(row), flush=True)
        # The first round is a warm-up, in which the stages also measure the time of their steps.
        if number:
            rounds.append(row)
    for engine in filter(None, (alone, other, two, llama)):
        engine.stop()

    def ratio(of, over):
        return statistics.median(row[of] / row[over] for row in rounds)

    def median(name):
        return statistics.median(row[name] for row in rounds)

    prefill = ("pair_prefill", "one_prefill")
    scale = {"streams": {"8 streams": ("pair_4", "one_4", "two_8")},
             "prefill": {"prefill": (*prefill, "two_prefill"), "prefill, two prompts": (*prefill, "two_prefill_2")}}
    print(json.dumps(facts()))
    print(f"memory read at {median('bandwidth'):.1f} GB/s by one thread; {len(rounds)} rounds, medians of ratios within a round")
    print("| row | one engine t/s | S | two stages t/s | over one | of S |")
    print("|---|---|---|---|---|---|")
    for name, (pair, one, stages) in (row for key in rows for row in scale.get(key, {}).items()):
        of_s = statistics.median(row[stages] / row[pair] for row in rounds)
        print(f"| {name} | {median(one):.1f} | {ratio(pair, one):.2f} | {median(stages):.1f} | {ratio(stages, one):.2f} | {of_s:.2f} |")
    for stages in ("two", "three") if "stream" in rows else ():
        print(f"| one stream, {stages} stages | {median('local_stream'):.1f} | | {median(stages + '_stream'):.1f} | {ratio(stages + '_stream', 'local_stream'):.3f} | |")
    names = {"stream": ("one stream", "llama_stream", "llama_two_stream", "two_stream"),
             "streams": ("8 streams", "llama_one_4", "llama_two_8", "two_8"),
             "prefill": ("prefill", "llama_prefill", "llama_two_prefill", "two_prefill")}
    if llama:
        print("| row | llama.cpp t/s | split over two t/s | over one | Kvasir's two stages over its two |")
        print("|---|---|---|---|---|")
    for name, one, split, stages in (names[key] for key in rows if llama):
        print(f"| {name} | {median(one):.1f} | {median(split):.1f} | {ratio(split, one):.2f} | {ratio(stages, split):.2f} |")


main()
