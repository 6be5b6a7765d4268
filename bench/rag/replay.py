#!/usr/bin/env python3
"""Replays RAG traffic through routers in front of the same Kvasir workers, and reports what the workers
computed.

    bench/rag/replay.py --questions 300 --concurrency 8 --rounds 3
    bench/rag/replay.py --questions 300 --only smg-cache_aware-by_rank --append

First it measures the workers' rates for `bench/fleet`, with all workers running at once. Then come the runs
in rounds. Each round has another order. With `--append` the results and rates of earlier calls are kept, so
that a replay can be made in parts.

Policies: Kvasir's `prefix`, `least-load` and `round-robin`; and the cache_aware policy of `sglang-router` and
`smg` in front of workers that are plain OpenAI servers (`kvasir worker --http`). Each policy gets fresh
workers with empty caches and the same questions, with documents by rank. Kvasir also runs with the
`documents` field. Needs both peers: `python3 -m venv target/peers/routers && target/peers/routers/bin/pip
install sglang-router==0.3.2 smg==1.13.0`.
"""
import argparse
import asyncio
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import machine  # noqa: E402
from load import counter, get  # noqa: E402
from servers import Server, free_port  # noqa: E402
from traffic import Traffic, by_popularity, by_rank  # noqa: E402

PREFILLED = "kvasir_prefill_tokens_computed_total"
PREDICTION_ERROR = "kvasir_cached_tokens_mispredicted_total"
EVICTED = "kvasir_kv_evictions_total"
PULLS, PULL_FAILURES = "kvasir_block_transfer_seconds_count", "kvasir_block_transfer_failures_total"
PULL_RATE = "kvasir_block_transfer_rate_bytes"


class Cluster(Server):
    """`kvasir up` with one routing policy."""

    name, freezable = "kvasir", False

    def __init__(self, logs, args, routing):
        self.variant = routing
        super().__init__(logs)
        self.data = tempfile.TemporaryDirectory(prefix="kvasir-rag-")
        self.spawn([args.kvasir, "up", args.model, "--workers", args.workers, "--threads", 1, "--http", "127.0.0.1:0",
                    "--ops", "127.0.0.1:0", "--kv-bytes", args.kv_bytes, "--routing", routing, "--data-dir", self.data.name,
                    "--json"], stdout=subprocess.PIPE)
        up = json.loads(self.process.stdout.readline())
        self.port = int(up["coordinators"][0]["http"].rsplit(":", 1)[1])
        self.router_ops = int(up["coordinators"][0]["ops"].rsplit(":", 1)[1])
        self.ops = [int(worker["ops"].rsplit(":", 1)[1]) for worker in up["workers"]]

    def stop(self):
        super().stop()
        self.data.cleanup()


class Worker(Server):
    """One worker as a plain OpenAI server."""

    name, freezable = "kvasir-worker", False

    def __init__(self, logs, args, number):
        self.variant = str(number)
        super().__init__(logs)
        self.port, self.ops = free_port(), free_port()
        self.spawn([args.kvasir, "worker", "--http", f"127.0.0.1:{self.port}", "--ops", f"127.0.0.1:{self.ops}", "--quic",
                    "127.0.0.1:0", "--model", args.model, "--threads", 1, "--kv-bytes", args.kv_bytes, "--workers-here",
                    args.workers], stdout=subprocess.PIPE)
        if not self.process.stdout.readline():
            raise RuntimeError(f"a worker did not start: {self.log}")


class Router(Server):
    """A peer in front of Kvasir workers that are plain OpenAI servers."""

    freezable = False

    def __init__(self, logs, args, name):
        self.name, self.variant = name, "cache_aware"
        super().__init__(logs)
        self.workers = []
        try:
            self.workers = [Worker(logs, args, number) for number in range(args.workers)]
            self.ops = [worker.ops for worker in self.workers]
            self.port = free_port()
            urls = [f"http://127.0.0.1:{worker.port}" for worker in self.workers]
            self.spawn([args.routers / name, "launch", "--policy", "cache_aware", "--host", "127.0.0.1", "--port", self.port,
                        "--prometheus-port", free_port(), "--worker-urls", *urls])
            self.wait_ready("/health")
            self.wait_for_workers(args)
        except BaseException:
            self.stop()
            raise

    def wait_for_workers(self, args):
        """Waits until a request succeeds. The router reports that it is healthy before it has found its
        workers.
        """
        body = {"model": model_id(args), "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1, "stream": True,
                "stream_options": {"include_usage": True}}
        deadline = time.monotonic() + 60
        while True:
            try:
                asyncio.run(ask(self.port, body))
                return
            except (OSError, RuntimeError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def stop(self):
        super().stop()
        for worker in self.workers:
            worker.stop()


async def ask(port, body):
    """Sends one streamed chat. Returns the seconds to its first token, its prompt tokens, and how many of
    them were cached.
    """
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    started = time.monotonic()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                 b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    first, usage, status = None, None, await reader.readline()
    while line := await reader.readline():
        if b"data:" not in line:
            continue
        if b'"content":"' in line and b'"content":""' not in line:
            first = first or time.monotonic() - started
        if b'"usage":{' in line:
            usage = json.loads(line[line.index(b"{"):])["usage"]
    writer.close()
    if b" 200 " not in status or usage is None:
        raise RuntimeError(f"no answer: {status.decode().strip()}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {"ttft": first or time.monotonic() - started, "prompt": usage["prompt_tokens"], "cached": cached}


async def replay(port, bodies, concurrency):
    """Sends all bodies in order, `concurrency` at a time."""
    waiting, answers = list(enumerate(bodies))[::-1], [None] * len(bodies)

    async def client():
        while waiting:
            place, body = waiting.pop()
            answers[place] = await ask(port, body)

    await asyncio.gather(*[client() for _ in range(concurrency)])
    return answers


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def model_id(args):
    return pathlib.Path(args.model).stem if "/" in args.model else args.model


def metric(ports, name):
    return [counter(get(f"http://127.0.0.1:{port}/metrics"), name) for port in ports]


def believed(server):
    """Returns the errors of a router's predictions in tokens, and the figures of its KV transfers.

    Fails if more tokens were cached than predicted. Fewer are allowed only if blocks were evicted meanwhile,
    or if a transfer failed, which has its own counter.
    """
    if not hasattr(server, "router_ops"):
        return {}
    lines = get(f"http://127.0.0.1:{server.router_ops}/metrics").splitlines()
    over, under, unpulled = (counter("\n".join(line for line in lines if f'direction="{way}"' in line), PREDICTION_ERROR)
                             for way in ("over", "under", "unpulled"))
    evicted = sum(metric(server.ops, EVICTED))
    pulls, failures = sum(metric(server.ops, PULLS)), sum(metric(server.ops, PULL_FAILURES))
    if under or over and not evicted or unpulled and not failures:
        raise RuntimeError(f"of predicted tokens {over:.0f} were not found, {under:.0f} more were, {unpulled:.0f} were not "
                           f"pulled; {evicted:.0f} blocks were evicted and {failures:.0f} pulls failed")
    rates = [rate for rate in metric(server.ops, PULL_RATE) if rate]
    return {"prediction_error": int(over + under), "unpulled": int(unpulled), "evictions": int(evicted), "pulls": int(pulls),
            "pull_failures": int(failures), "pull_mbps": round(statistics.fmean(rates) / 1e6, 1) if rates else None}


def rates(args):
    """Runs `kvasir bench` in one process per worker, all at once, so that the rates include their effect on
    each other.
    """
    command = [args.kvasir, "bench", args.model, "-p", "128,512,2048", "-n", "32", "-d", "0,2048", "-b", "1,8,32", "-t", "1",
               "-r", str(args.bench_repeats), "--json"]
    benches = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(args.workers)]
    return [json.loads(bench.communicate()[0]) for bench in benches]


def bytes_of(text):
    number = text.rstrip("KMGiB")
    return int(number) << {"": 0, "KiB": 10, "MiB": 20, "GiB": 30}[text[len(number):]]


def measure(server, shape, args):
    traffic = Traffic(documents=args.documents, length=args.words, seed=args.seed)
    common = {"model": model_id(args), "max_tokens": args.out, "temperature": 0, "ignore_eos": True, "stream": True,
              "stream_options": {"include_usage": True}}
    bodies = [{**shape(question), **common} for question in traffic.questions(args.questions)]
    before, started = metric(server.ops, PREFILLED), time.monotonic()
    answers = asyncio.run(replay(server.port, bodies, args.concurrency))
    wall = time.monotonic() - started
    loads = [now - then for now, then in zip(metric(server.ops, PREFILLED), before)]
    prompt = sum(answer["prompt"] for answer in answers)
    mean = statistics.fmean(loads)
    return {
        "router": server.name, "policy": server.variant, "prompt": shape.__name__, "prompt_tokens": prompt,
        "hit_ratio": round(sum(answer["cached"] for answer in answers) / prompt, 4), "computed": int(sum(loads)),
        "load_cov": round(statistics.pstdev(loads) / mean, 4) if mean else 0.0, "seconds": round(wall, 2),
        "ttft_p50": round(quantile([a["ttft"] for a in answers], 0.5), 3),
        "ttft_p99": round(quantile([a["ttft"] for a in answers], 0.99), 3),
        "workers": args.workers, "kv_bytes": bytes_of(args.kv_bytes), "questions": args.questions,
        "concurrency": args.concurrency, "out": args.out, "seed": args.seed, **believed(server),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvasir", type=pathlib.Path, default=ROOT / "target/release/kvasir")
    parser.add_argument("--routers", type=pathlib.Path, default=ROOT / "target/peers/routers/bin")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kv-bytes", default="512MiB")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--words", type=int, default=120, help="words of a document")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--out", type=int, default=4, help="tokens of an answer")
    parser.add_argument("--only", help="router, policy and shape of the prompt, some of kvasir-prefix-by_rank, "
                        "kvasir-prefix-by_popularity, smg-cache_aware-by_rank, ..")
    parser.add_argument("--append", action="store_true", help="to what earlier calls have measured")
    parser.add_argument("--seed", type=int, default=1, help="of documents and questions")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--bench-repeats", type=int, default=3)
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "target/bench/rag",
                        help="a folder for runs.jsonl, rates.json, machine.json, logs")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    logs = args.results
    (args.results / "machine.json").write_text(json.dumps(machine.facts()))
    if not (args.append and (args.results / "rates.json").exists()):
        (args.results / "rates.json").write_text(json.dumps(rates(args)))
    runs = [("kvasir", routing, by_rank) for routing in ("prefix", "least-load", "round-robin")]
    runs += [("kvasir", "prefix", by_popularity)]
    runs += [(name, "cache_aware", by_rank) for name in ("sglang-router", "smg")]
    if args.only:
        runs = [run for run in runs if f"{run[0]}-{run[1]}-{run[2].__name__}" in args.only.split(",")]
    with open(args.results / "runs.jsonl", "a" if args.append else "w") as results:
        turns = [runs[(at + turn) % len(runs)] for turn in range(args.rounds) for at in range(len(runs))]
        for name, policy, shape in turns:
            server = Cluster(logs, args, policy) if name == "kvasir" else Router(logs, args, name)
            try:
                row = measure(server, shape, args)
            finally:
                server.stop()
            results.write(json.dumps(row) + "\n")
            results.flush()
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
