#!/usr/bin/env python3
"""Kvasir's workers over vLLM: tokens computed, cache hits predicted and found, times, beside other routers.

    bench/setup_peers.sh --only vllm
    python3 -m venv target/peers/routers && target/peers/routers/bin/pip install sglang-router==0.3.2 smg==1.13.0
    bench/engines.py                  # all parts
    bench/engines.py --only exact     # predictions alone: evictions, and an engine that is killed

Two vLLM processes with one CPU each and KV events run behind one router at a time. Every router gets the same RAG
questions and empty caches.

`replay`: the caches hold everything. Kvasir, `sglang-router` with `round_robin` and `cache_aware`, `smg` with
`cache_aware`, and one vLLM alone. "unbounded" is the number of tokens that one unbounded cache with vLLM's blocks
computes for these prompts, one after the other. The `documents` field leaves the order of documents to Kvasir, so for
these prompts one question at a time over one vLLM is measured.

`clients`: scripts of `./test cluster` with the official clients, over one vLLM. Needs `./test setup`.

`exact`: the caches are small, so that blocks are evicted. One question at a time, Kvasir's predictions are compared
with what vLLM reports as cached; then again after one vLLM was killed with SIGKILL and started again. Fails if they
differ by a token.
"""
import argparse
import asyncio
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench/rag")]

import machine  # noqa: E402
from load import counter, get, post_json  # noqa: E402
from replay import ask, quantile, replay  # noqa: E402
from servers import Server, free_port  # noqa: E402
from traffic import Traffic, by_popularity, by_rank  # noqa: E402

MODEL = "smollm2-135m"
ENGINES = 2
READY_LIMIT_S = 120


class Vllm(Server):
    """A vLLM on one CPU that publishes KV events."""

    name, freezable = "vllm", False

    def __init__(self, logs, args, number, blocks, flags):
        self.variant, self.args, self.number, self.blocks, self.flags = str(number), args, number, blocks, flags
        super().__init__(logs)
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        self.begin()

    def begin(self):
        cpus = sorted(os.sched_getaffinity(0))
        # The development mode adds the request that empties the cache.
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(cpus[self.number % len(cpus)]),
               "VLLM_CACHE_ROOT": str(self.args.peers / "vllm-cache"), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
               "VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1"}
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{self.events}",
                  "replay_endpoint": f"tcp://127.0.0.1:{self.replay}", "topic": ""}
        # `vllm serve` requires a package of another name. The module does not.
        self.spawn([self.args.peers / "vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model",
                    self.args.folder, "--served-model-name", MODEL, "--dtype", "bfloat16", "--enforce-eager",
                    "--max-model-len", 8192, "--block-size", self.args.block, "--num-gpu-blocks-override", self.blocks,
                    "--enable-prefix-caching", "--enable-prompt-tokens-details", "--host", "127.0.0.1", "--port", self.port,
                    "--kv-events-config", json.dumps(events), *self.flags], env=env)

    def kill(self):
        """Kills all of its processes, and starts it again with an empty cache at the same ports."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.begin()

    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def forget(self):
        urllib.request.urlopen(urllib.request.Request(f"{self.url()}/reset_prefix_cache", method="POST"), timeout=30).read()

    def computed(self):
        text = get(f"{self.url()}/metrics")
        return counter(text, "vllm:prompt_tokens_total") - counter(text, "vllm:prefix_cache_hits_total")


class Alone:
    """One vLLM without a router."""

    name, policy = "vllm", "one process, one CPU"

    def __init__(self, engine):
        self.port, self.model = engine.port, MODEL

    def stop(self):
        pass


class Kvasir(Server):
    """`kvasir up` with a worker for each engine."""

    name, policy, variant, freezable = "kvasir", "prefix", "over-vllm", False

    def __init__(self, logs, args, engines, flags=()):
        super().__init__(logs)
        self.data = tempfile.TemporaryDirectory(prefix="kvasir-engines-")
        listed = lambda values: ",".join(values)  # noqa: E731
        self.spawn([args.kvasir, "up", args.folder, "--engine", "vllm", "--engine-url", listed(e.url() for e in engines),
                    "--kv-events", listed(f"127.0.0.1:{e.events}" for e in engines),
                    "--kv-events-replay", listed(f"127.0.0.1:{e.replay}" for e in engines), "--workers", len(engines),
                    "--http", "127.0.0.1:0", "--ops", "127.0.0.1:0", "--data-dir", self.data.name, "--json", *flags],
                   stdout=subprocess.PIPE)
        up = json.loads(self.process.stdout.readline())
        self.model = up["model"]
        self.port = int(up["coordinators"][0]["http"].rsplit(":", 1)[1])
        self.ops = int(up["coordinators"][0]["ops"].rsplit(":", 1)[1])

    def ready(self):
        """Number of workers that are ready."""
        cluster = json.loads(get(f"http://127.0.0.1:{self.ops}/admin/v1/cluster"))
        return sum(worker["state"] == "ready" for worker in cluster["workers"])

    def predicted(self):
        text = get(f"http://127.0.0.1:{self.ops}/metrics")
        return {name: int(counter(text, f"kvasir_cached_tokens_{name}_total"))
                for name in ("predicted", "actual", "mispredicted")}

    def stop(self):
        super().stop()
        self.data.cleanup()


class Router(Server):
    """A peer in front of the engines."""

    freezable = False

    def __init__(self, logs, args, engines, name, policy):
        self.name, self.policy, self.variant, self.model = name, policy, policy, MODEL
        super().__init__(logs)
        self.port = free_port()
        self.spawn([args.peers / "routers/bin" / name, "launch", "--policy", policy, "--host", "127.0.0.1", "--port", self.port,
                    "--prometheus-port", free_port(), "--worker-urls", *(engine.url() for engine in engines)])
        self.wait_ready("/health")
        # It says that it is healthy before it has found its workers.
        wait(lambda: answers(self.port), f"an answer through {name}")


def wait(condition, what):
    deadline = time.monotonic() + READY_LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within {READY_LIMIT_S} s")
        time.sleep(0.2)


def body(model, prompt, args):
    return {"model": model, "max_tokens": args.out_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, **prompt}


def answers(port):
    ready = {"model": MODEL, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1, "stream": True,
             "stream_options": {"include_usage": True}}
    try:
        return asyncio.run(ask(port, ready))
    except (OSError, RuntimeError):
        return None


def unbounded(engine, questions, block):
    """Prompt tokens that one unbounded cache computes. vLLM computes at least the last token of a prompt."""
    seen, computed = set(), 0
    for question in questions:
        asked = {"model": MODEL, "messages": by_rank(question)["messages"], "add_generation_prompt": True}
        tokens = post_json(f"{engine.url()}/tokenize", asked)["tokens"]
        chain = [hash(tuple(tokens[:end])) for end in range(block, len(tokens) + 1, block)]
        held = next((place for place, name in enumerate(chain) if name not in seen), len(chain))
        computed += len(tokens) - min(held, (len(tokens) - 1) // block) * block
        seen.update(chain)
    return computed


def empty(engines):
    for engine in engines:
        engine.forget()


def measure(server, engines, questions, shape, args, concurrency):
    before, started = [engine.computed() for engine in engines], time.monotonic()
    bodies = [body(server.model, shape(question), args) for question in questions]
    results = asyncio.run(replay(server.port, bodies, concurrency))
    wall = time.monotonic() - started
    loads = [engine.computed() - then for engine, then in zip(engines, before)]
    prompt, cached = (sum(answer[name] for answer in results) for name in ("prompt", "cached"))
    return {"router": server.name, "policy": server.policy, "prompt": shape.__name__, "questions": len(questions),
            "concurrency": concurrency, "prompt_tokens": prompt, "computed": int(sum(loads)), "cached": cached,
            "hit_ratio": round(cached / prompt, 4),
            "loads": [int(load) for load in loads], "seconds": round(wall, 2),
            "requests_per_s": round(len(questions) / wall, 2),
            "ttft_p50": round(quantile([a["ttft"] for a in results], 0.5), 3),
            "ttft_p99": round(quantile([a["ttft"] for a in results], 0.99), 3)}


def start_engines(logs, args, blocks, count=ENGINES, flags=()):
    engines = []
    try:
        for number in range(count):
            engines.append(Vllm(logs, args, number, blocks, flags))
        for engine in engines:
            engine.wait_ready("/health")
    except BaseException:
        stop(engines)
        raise
    return engines


def stop(servers):
    for server in servers:
        server.stop()


def replays(args, record):
    engines = start_engines(args.out, args, args.blocks)
    try:
        questions = list(Traffic(documents=args.documents, length=args.words, seed=args.seed).questions(args.questions))
        ideal = {by_rank.__name__: unbounded(engines[0], questions, args.block)}
        empty(engines)
        server = Kvasir(args.out, args, engines[:1])
        try:
            alone = measure(server, engines, questions, by_popularity, args, 1)
        finally:
            server.stop()
        ideal[by_popularity.__name__] = alone["computed"]
        runs = [("kvasir", lambda: Kvasir(args.out, args, engines), by_rank)]
        runs += [("kvasir", lambda: Kvasir(args.out, args, engines), by_popularity)]
        peers = [("sglang-router", "round_robin"), ("sglang-router", "cache_aware"), ("smg", "cache_aware")]
        runs += [(name, lambda name=name, policy=policy: Router(args.out, args, engines, name, policy), by_rank)
                 for name, policy in peers if name in args.routers]
        runs += [("vllm", lambda: Alone(engines[0]), by_rank)]
        for turn in range(args.rounds):
            for _, begin, shape in runs[turn % len(runs):] + runs[:turn % len(runs)]:
                empty(engines)
                server = begin()
                try:
                    row = measure(server, engines, questions, shape, args, args.concurrency)
                    if isinstance(server, Kvasir):
                        row |= server.predicted()
                finally:
                    server.stop()
                least = ideal[row["prompt"]]
                row |= {"unbounded": least, "computed_ratio": round(row["computed"] / least, 4)}
                record(part="replay", round=turn, **row)
    finally:
        stop(engines)


# Scripts with official clients: the environment that has these, and further arguments, among them what vLLM does
# not honour. The last one needs a key; from then on the others would, too.
SCRIPTS = [("openai_client.py", "test-venv", ["seed"]), ("tools.py", "clients-venv", ["seed", "strict", "pattern"]),
           ("engine_client.py", "test-venv", ["KEY", "vllm"])]


def clients(args, record):
    """Returns the number of scripts that failed."""
    # Kvasir's tool calls are Lark grammars, which this backend compiles. A small model may write white space forever.
    engines = start_engines(args.out, args, args.blocks, 1, ["--structured-outputs-config", '{"backend": "guidance", "disable_any_whitespace": true}'])
    failed = 0
    try:
        server = Kvasir(args.out, args, engines, ["--engine-options", "llguidance"])
        try:
            for script, venv, more in SCRIPTS:
                if "KEY" in more:
                    more = [post_json(f"http://127.0.0.1:{server.ops}/admin/v1/keys", {"tenant": "a"})["key"], *more[1:]]
                argv = [args.target / venv / "bin/python", ROOT / "tests/tests/cluster" / script,
                        f"http://127.0.0.1:{server.port}/v1", server.model, *more]
                done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=600)
                failed += done.returncode != 0
                record(part="clients", script=script, passed=done.returncode == 0, error=done.stderr.strip()[-500:])
        finally:
            server.stop()
    finally:
        stop(engines)
    return failed


def exact(args, record):
    """Whether predictions and facts differ. Returns the number of rows in which they did."""
    engines = start_engines(args.out, args, args.small_blocks)
    wrong = 0
    try:
        questions = list(Traffic(documents=args.documents, length=args.words, seed=args.seed).questions(args.questions))
        server = Kvasir(args.out, args, engines)
        try:
            last = server.predicted()
            for phase, asked in (("evictions", questions), ("after a kill", questions[:args.questions // 2])):
                if phase != "evictions":
                    engines[0].kill()
                    wait(lambda: server.ready() < ENGINES, "notice of the killed engine")
                    wait(lambda: server.ready() == ENGINES, "engine after its restart")
                row = measure(server, engines, asked, by_rank, args, 1)
                # The coordinator counts a request after its client has the end. Clients and vLLM count the same.
                wait(lambda: server.predicted()["actual"] - last["actual"] == row["cached"], "agreement on cached tokens")
                now = server.predicted()
                row |= {name: now[name] - last[name] for name in now}
                last = now
                wrong += row["mispredicted"] != 0 or row["prompt_tokens"] - row["computed"] != row["cached"]
                record(part="exact", phase=phase, blocks=args.small_blocks, **row)
        finally:
            server.stop()
    finally:
        stop(engines)
    return wrong


def table(rows):
    lines = ["| router | policy | prompts | computed | of unbounded | hit ratio | seconds | ttft p50 | ttft p99 |",
             "|---|---|---|---|---|---|---|---|---|"]
    groups = {}
    for row in rows:
        if row["part"] == "replay":
            groups.setdefault((row["router"], row["policy"], row["prompt"]), []).append(row)
    for (router, policy, prompt), group in groups.items():
        middle = lambda name: statistics.median(row[name] for row in group)  # noqa: E731
        lines.append(f"| {router} | {policy} | {prompt} | {middle('computed'):,.0f} | {middle('computed_ratio'):.4f} | {middle('hit_ratio'):.3f} | "
                     f"{middle('seconds'):.1f} | {middle('ttft_p50'):.3f} | {middle('ttft_p99'):.3f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvasir", type=pathlib.Path, default=ROOT / "target/release/kvasir")
    parser.add_argument("--peers", type=pathlib.Path, default=ROOT / "target/peers")
    parser.add_argument("--target", type=pathlib.Path, default=ROOT / "target", help="where ./test setup installs")
    parser.add_argument("--routers", default="sglang-router,smg", type=lambda text: text.split(","))
    parser.add_argument("--only", choices=("replay", "clients", "exact"))
    parser.add_argument("--block", type=int, default=32, help="tokens of a block of vLLM")
    parser.add_argument("--blocks", type=int, default=8_000, help="blocks of a cache that holds everything")
    parser.add_argument("--small-blocks", type=int, default=400, help="blocks of a cache that evicts")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--words", type=int, default=24, help="words of a document")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--out-tokens", type=int, default=4, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=1, help="of documents and questions")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target/bench/engines")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.folder = args.peers / f"{MODEL}-bf16"
    if not (args.folder / "tokenizer_config.json").exists():
        subprocess.run([args.kvasir, "models", "pull", MODEL], check=True)
        home = pathlib.Path(os.environ.get("KVASIR_HOME") or pathlib.Path.home() / ".cache/kvasir")
        [gguf] = (home / "models" / MODEL).glob("*.gguf")
        subprocess.run([args.peers / "vllm/bin/python", ROOT / "bench/gguf_to_hf.py", gguf, args.folder], check=True)
    rows, wrong = [], 0
    with open(args.out / "runs.jsonl", "w", encoding="utf-8") as results:
        def record(**row):
            rows.append(row)
            results.write(json.dumps(row) + "\n")
            results.flush()
            print(json.dumps(row), file=sys.stderr, flush=True)

        parts = {"replay": replays, "clients": clients, "exact": exact}
        for name in [args.only] if args.only else parts:
            wrong += parts[name](args, record) or 0
    text = f"{json.dumps(machine.facts())}\n\n{table(rows)}\n"
    (args.out / "engines.md").write_text(text)
    print(text)
    sys.exit("a client failed, or a prediction differs from vLLM's cached tokens" if wrong else 0)


if __name__ == "__main__":
    main()
