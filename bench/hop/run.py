#!/usr/bin/env python3
"""Measures the cost of a router: Kvasir's coordinator, sglang-router and smg in front of backends that
compute nothing.

    cargo build --release && cargo build --release -p kvasir-bench --bin hop
    bench/hop/run.py                          # all rows, three rounds
    bench/hop/run.py --quick                  # one round, short
    bench/hop/run.py --million                # memory over a million requests, Kvasir only

Kvasir's coordinator sends to two dummy workers over QUIC with certificates. The peers send to two dummy
OpenAI servers over HTTP. One such server also receives requests directly; its times are subtracted. All
backends return 16 tokens at once. Peers: `python3 -m venv target/peers/routers &&
target/peers/routers/bin/pip install sglang-router==0.3.2 smg==1.13.0`.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from load import counter, get  # noqa: E402
from machine import facts  # noqa: E402
from servers import Server, free_port  # noqa: E402

MODEL = "smollm2-135m"
BACKENDS = 2
# Number of requests after which a router's memory no longer grows.
FILLING = 10_000
KINDS = [("short", 1), ("short", 32), ("short", 256), ("prefix", 1), ("prefix", 32), ("prefix", 256), ("rag", 1),
         ("rag", 32), ("cold", 1)]


class Backend(Server):
    """A dummy OpenAI server. Requests sent to it directly are the row that all other rows are compared with.
    """

    name, variant = "direct", "server"

    def __init__(self, logs, args):
        super().__init__(logs)
        self.spawn([args.hop, "server"], stdout=subprocess.PIPE)
        self.port = int(self.process.stdout.readline().decode().rsplit(":", 1)[1])
        self.pid = self.process.pid


class Peer(Server):
    """Another router in front of dummy OpenAI servers."""

    variant = "cache_aware"

    def __init__(self, logs, args, name):
        self.name = name
        super().__init__(logs)
        self.backends = [Backend(logs, args) for _ in range(BACKENDS)]
        self.port = free_port()
        urls = [f"http://127.0.0.1:{backend.port}" for backend in self.backends]
        self.spawn([args.routers / name, "launch", "--policy", "cache_aware", "--host", "127.0.0.1", "--port", self.port,
                    "--prometheus-port", free_port(), "--worker-urls", *urls])
        self.wait_ready("/health")
        self.pid = self.process.pid

    def freeze(self):
        super().freeze()
        [backend.freeze() for backend in self.backends]

    def thaw(self):
        super().thaw()
        [backend.thaw() for backend in self.backends]

    def stop(self):
        super().stop()
        [backend.stop() for backend in self.backends]


class Kvasir(Server):
    """A coordinator with the flags of an operator, and dummy workers."""

    # Not frozen, because leases would expire. The reports of idle workers cost next to nothing.
    name, variant, freezable = "kvasir", "coordinator", False
    # The workers' flag for its address.
    coordinator = "--coordinator"

    def front(self, args, at):
        return [args.kvasir, "coordinator", "--identity", at / "c0", "--models", args.model, "--cluster-key", at / "key",
                "--http", "127.0.0.1:0", "--ops", "127.0.0.1:0", "--quic", "127.0.0.1:0"]

    def worker(self, args, logs):
        return [args.hop, "worker", "--model-file", args.model_file]

    def __init__(self, logs, args):
        super().__init__(logs)
        self.dir = tempfile.TemporaryDirectory(prefix="kvasir-hop-")
        at = pathlib.Path(self.dir.name)
        kvasir = lambda *argv: subprocess.run([str(args.kvasir), *map(str, argv)], check=True, capture_output=True)  # noqa: E731
        kvasir("ca", "init", "--dir", at / "ca", "--cluster", "hop")
        names = [("coordinator", "c0")] + [("worker", f"w{number}") for number in range(BACKENDS)]
        for role, node in names:
            kvasir("ca", "issue", "--dir", at / "ca", "--role", role, "--node", node, "--out", at / node)
        self.spawn(self.front(args, at), stdout=subprocess.PIPE)
        told = json.loads(self.process.stdout.readline())
        self.port, self.ops = (int(told[name].rsplit(":", 1)[1]) if name in told else 0 for name in ("http", "ops"))
        self.pid = told["pid"]
        self.workers = []
        for _, node in names[1:]:
            argv = [*self.worker(args, logs), "--identity", at / node, self.coordinator, told["quic"]]
            worker = DummyWorker(logs, argv, f"{self.variant}-{node}")
            self.workers.append(worker)
        self.wait_ready("/health")

    def metrics(self):
        return get(f"http://127.0.0.1:{self.ops}/metrics")

    def stop(self):
        [worker.stop() for worker in getattr(self, "workers", [])]
        super().stop()
        self.dir.cleanup()


class DummyVllm(Server):
    """A vLLM that computes nothing."""

    name, variant, freezable = "dummy-vllm", "server", False

    def __init__(self, logs, args):
        super().__init__(logs)
        self.spawn([args.hop, "vllm"], stdout=subprocess.PIPE)
        self.address = self.process.stdout.readline().decode().strip()


class OverEngine(Kvasir):
    """A coordinator, and Kvasir's own workers over engines that compute nothing."""

    name, variant = "kvasir over an engine", "engines"
    coordinator = "--coordinators"

    def worker(self, args, logs):
        engine = DummyVllm(logs, args)
        self.engines = [*getattr(self, "engines", []), engine]
        return [args.kvasir, "worker", "--engine", "vllm", "--engine-url", f"http://{engine.address}", "--kv-events", "off", "--model",
                f"{args.model}={args.model_file}", "--quic", "127.0.0.1:0", "--ops", "127.0.0.1:0"]

    def stop(self):
        super().stop()
        [engine.stop() for engine in getattr(self, "engines", [])]


class Relay(Kvasir):
    """A relay to dummy workers that does nothing else. The workers send no reports."""

    name, variant = "bare relay", "relay"

    def front(self, args, at):
        return [args.hop, "relay", "--identity", at / "c0"]

    def worker(self, args, logs):
        return [*super().worker(args, logs), "--silent"]

    def metrics(self):
        return ""


class DummyWorker(Server):
    freezable = False

    def __init__(self, logs, argv, node):
        self.name, self.variant = "dummy-worker", node
        super().__init__(logs)
        self.spawn(argv)


def load(args, server, **flags):
    argv = [args.hop, "load", "--address", f"127.0.0.1:{server.port}", "--watch", server.pid]
    for name, value in flags.items():
        argv += [f"--{name.replace('_', '-')}"] + ([] if value is True else [value])
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    row = json.loads(done.stdout)
    if row["failed"] or row["refused"]:
        raise RuntimeError(f"{server.name}: {row['failed']} failed, {row['refused']} refused: {row['first_failure']}")
    return row


# Seconds that threads of Kvasir's coordinator have spent on tokenising, and bytes of text tokenised.
TOKENISING = "kvasir_tokenise_seconds_total"
TOKENISED = "kvasir_tokenised_bytes_total"


def measure(args, server, kind, concurrency, stream, seed):
    flags = {"body": kind, "concurrency": concurrency, "seed": seed, **({"stream": True} if stream else {})}
    before = server.metrics() if isinstance(server, Kvasir) else ""
    row = load(args, server, seconds=args.seconds, **flags)
    row["router"] = server.name
    if before:
        after = server.metrics()
        spent, bytes_in = (counter(after, name) - counter(before, name) for name in (TOKENISING, TOKENISED))
        row["tokenising_us"] = spent * 1e6 / row["finished"]
        row["tokenised_mb_s"] = bytes_in / 1e6 / spent if spent else None
    return row


def start(args, logs):
    servers = []
    try:
        servers.append(Backend(logs, args))
        servers.append(Kvasir(logs, args))
        servers += [Relay(logs, args)] if args.relay else []
        servers += [OverEngine(logs, args)] if args.engines else []
        servers += [Peer(logs, args, name) for name in args.peers]
    except BaseException:
        [server.stop() for server in servers]
        raise
    return servers


def rounds(args, logs):
    servers = start(args, logs)
    samples = []
    try:
        wanted = args.only.split(",") if args.only else []
        kinds = [(kind, concurrency) for kind, concurrency in KINDS
                 if not wanted or kind in wanted or f"{kind}:{concurrency}" in wanted]
        for server in servers:
            for kind in sorted({kind for kind, _ in kinds} - {"cold"}):
                # Warms up caches, so that every prefix and document has been in many requests.
                load(args, server, body=kind, requests=200 if kind == "short" else 400, concurrency=8, seed=999)
            if any(kind != "short" for kind, _ in kinds):
                # Fills the memos of texts to their final size. Before, the process allocates new memory. A
                # virtual machine's host may need between 0.2 and 4 ms for each 2 MiB of it, and this changes
                # from one minute to the next.
                load(args, server, body="prefix", requests=FILLING, concurrency=32, seed=998)
        for number in range(args.rounds):
            for kind, concurrency in kinds:
                turn = servers[number % len(servers):] + servers[:number % len(servers)]
                for server in turn:
                    [other.freeze() for other in servers if other is not server]
                    server.thaw()
                    seed = 1 + number * 100 + concurrency
                    row = measure(args, server, kind, concurrency, not args.whole, seed)
                    row["round"] = number
                    samples.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
    finally:
        for server in servers:
            server.thaw()
        for server in servers:
            server.stop()
    return samples


def spread(values):
    middle = statistics.median(values)
    return f"{middle:,.0f}" if len(values) == 1 else f"{middle:,.0f} ({min(values):,.0f}-{max(values):,.0f})"


def table(samples):
    """Medians over rounds, with minimum and maximum in brackets. "Added" is relative to the direct row of the
    same round.
    """
    direct = {(row["round"], row["body"], row["concurrency"]): row for row in samples if row["router"] == "direct"}
    lines = ["| body | at a time | router | p50 us | added p50 us | p99 us | requests/s | router CPU us | of it tokenising |",
             "|---|---|---|---|---|---|---|---|---|"]
    keys = dict.fromkeys((row["body"], row["concurrency"], row["router"]) for row in samples)
    for body, concurrency, router in keys:
        rows = [row for row in samples if (row["body"], row["concurrency"], row["router"]) == (body, concurrency, router)]
        added = [row["p50_us"] - direct[row["round"], body, concurrency]["p50_us"] for row in rows]
        column = lambda name: spread([row[name] for row in rows])  # noqa: E731
        tokenising = column("tokenising_us") if "tokenising_us" in rows[0] else ""
        cpu = "" if router == "direct" else column("watched_cpu_us")
        lines.append(f"| {body} | {concurrency} | {router} | {column('p50_us')} | {'' if router == 'direct' else spread(added)} | "
                     f"{column('p99_us')} | {column('per_second')} | {cpu} | {tokenising} |")
    cold = [row["tokenised_mb_s"] for row in samples if row["body"] == "cold" and row.get("tokenised_mb_s")]
    if cold:
        lines += ["", f"Cold tokenising: {statistics.median(cold):.1f} MB/s on one core."]
    return "\n".join(lines)


def million(args, logs):
    """Measures memory over many short requests, and its growth per request in the second half."""
    server = Kvasir(logs, args)
    try:
        row = load(args, server, body="short", requests=args.requests, concurrency=64, at_most=args.at_most,
                   memory_every=max(1, args.requests // 100))
    finally:
        server.stop()
    points = row["memory"]
    second = [(done, size) for done, size in points if done >= row["finished"] // 2]
    slope = statistics.linear_regression(*zip(*second)).slope if len(second) > 1 else float("nan")
    row["slope_bytes_per_request"] = slope
    print(f"{row['finished']:,} requests in {row['seconds']:.0f} s ({row['per_second']:,.0f} a second), {row['failed']} failed")
    for done, size in points[:: max(1, len(points) // 10)] + points[-1:]:
        print(f"  after {done:>9,}: {size / 2**20:7.1f} MiB resident")
    print(f"  second half: {slope:+.2f} bytes a request")
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvasir", type=pathlib.Path, default=ROOT / "target/release/kvasir")
    parser.add_argument("--hop", type=pathlib.Path, default=ROOT / "target/release/hop")
    parser.add_argument("--routers", type=pathlib.Path, default=ROOT / "target/peers/routers/bin")
    parser.add_argument("--peers", default="sglang-router,smg", type=lambda text: [name for name in text.split(",") if name])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--model-file", type=pathlib.Path,
                        default=next(iter((pathlib.Path.home() / f".cache/kvasir/models/{MODEL}").glob("*.gguf")), None))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row and router in each round")
    parser.add_argument("--only", help="bodies, of short,prefix,rag,cold, or single rows as prefix:32")
    parser.add_argument("--whole", action="store_true", help="answers as one JSON object, not as events")
    parser.add_argument("--quick", action="store_true", help="one round of a second each")
    parser.add_argument("--relay", action="store_true", help="also a relay from HTTP to QUIC that does nothing else")
    parser.add_argument("--engines", action="store_true", help="also Kvasir's workers over dummy vLLM servers")
    parser.add_argument("--million", action="store_true", help="only: memory over --requests short requests to Kvasir")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--at-most", type=float, default=600.0, help="seconds; fewer requests are sent if they take longer")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target/bench/hop")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, 1.0
    args.out.mkdir(parents=True, exist_ok=True)
    machine = facts()
    if args.million:
        result = million(args, args.out)
        (args.out / "million.json").write_text(json.dumps({"machine": machine, "run": result}, indent=1))
        return
    samples = rounds(args, args.out)
    text = f"{json.dumps(machine)}\n\n{table(samples)}\n"
    (args.out / "hop.json").write_text(json.dumps({"machine": machine, "samples": samples}, indent=1))
    (args.out / "hop.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
