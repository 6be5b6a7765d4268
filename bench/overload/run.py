#!/usr/bin/env python3
"""Sends ten times the requests that a cluster has capacity for.

    cargo build --release && cargo build --release -p kvasir-bench --bin hop
    bench/overload/run.py                     # about four minutes

Runs a real `kvasir up` with two workers. First it measures the capacity in a closed loop: each client sends
its next request when it has received its answer. Then an open loop sends ten times that rate without waiting
for answers. Its first 10 s do not count, the next 30 s do. Then the accepted requests finish.

Prints the times of refusals; the requests finished in these 30 s relative to the capacity; the generator's
share of a CPU, because a generator at its limit measures itself; memory before and after; and the KV that
sequences still hold.
"""
import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from load import counter, get  # noqa: E402
from machine import facts  # noqa: E402
from servers import Server  # noqa: E402


class Cluster(Server):
    name, variant, freezable = "kvasir", "overload", False

    def __init__(self, logs, args):
        super().__init__(logs)
        self.data = tempfile.TemporaryDirectory(prefix="kvasir-overload-")
        self.spawn([args.kvasir, "up", args.model, "--workers", args.workers, "--threads", 1, "--http", "127.0.0.1:0", "--ops",
                    "127.0.0.1:0", "--kv-bytes", args.kv_bytes, "--data-dir", self.data.name, "--json"], stdout=subprocess.PIPE)
        up = json.loads(self.process.stdout.readline())
        self.port, self.ops = (int(up["coordinators"][0][name].rsplit(":", 1)[1]) for name in ("http", "ops"))
        self.pids = {node["id"]: node["pid"] for node in up["coordinators"] + up["workers"]}
        self.pid = up["coordinators"][0]["pid"]

    def status(self):
        return json.loads(get(f"http://127.0.0.1:{self.ops}/admin/v1/cluster"))

    def kv_held(self):
        """Bytes of KV that sequences hold. Cached blocks do not count."""
        return sum(worker["kv_used"] for worker in self.status()["workers"])

    def queued(self):
        return counter(get(f"http://127.0.0.1:{self.ops}/metrics"), "kvasir_queue_requests")

    def settle(self):
        """Waits at most 5 s until no KV is held and no request is queued. Workers report four times a second.
        """
        deadline = time.monotonic() + 5
        while (self.kv_held() or self.queued()) and time.monotonic() < deadline:
            time.sleep(0.25)

    def resident(self):
        pages = {node: int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) for node, pid in self.pids.items()}
        return {node: count * 4096 for node, count in pages.items()}

    def stop(self):
        super().stop()
        self.data.cleanup()


def load(args, cluster, **flags):
    argv = [args.hop, "load", "--address", f"127.0.0.1:{cluster.port}", "--model", args.model, "--body", "short", "--stream",
            "--watch", cluster.pid]
    for name, value in flags.items():
        argv += [f"--{name}", value]
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvasir", type=pathlib.Path, default=ROOT / "target/release/kvasir")
    parser.add_argument("--hop", type=pathlib.Path, default=ROOT / "target/release/hop")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kv-bytes", default="512MiB")
    parser.add_argument("--clients", type=int, default=64, help="of the closed loop")
    parser.add_argument("--warm", type=float, default=10.0, help="first seconds of either loop, of which what is finished does not count")
    parser.add_argument("--measure", type=float, default=20.0, help="seconds of the closed loop")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the open loop")
    parser.add_argument("--times", type=float, default=10.0, help="how much more than it can do")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target/bench/overload")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    cluster = Cluster(args.out, args)
    try:
        closed = load(args, cluster, concurrency=args.clients, seconds=args.warm + args.measure, warm=args.warm, seed=2)
        capacity = closed["in_time"] / args.measure
        cluster.settle()
        held, before = cluster.kv_held(), cluster.resident()
        opened = load(args, cluster, rate=capacity * args.times, seconds=args.warm + args.seconds, warm=args.warm, seed=3)
        cluster.settle()
        after, held_after, queued = cluster.resident(), cluster.kv_held(), cluster.queued()
    finally:
        cluster.stop()
    goodput = opened["in_time"] / args.seconds
    result = {
        "machine": facts(), "capacity": capacity, "rate": capacity * args.times, "goodput": goodput, "closed": closed,
        "open": opened, "resident_before": before, "resident_after": after, "kv_held_before": held,
        "kv_held_after": held_after, "queued_after": queued,
    }
    (args.out / "overload.json").write_text(json.dumps(result, indent=1))
    sent = opened["finished"] + opened["refused"] + opened["failed"]
    ms = lambda us: "none" if us is None else f"{us / 1e3:.1f} ms"  # noqa: E731
    print(json.dumps(result["machine"]))
    print(f"capacity {capacity:.1f} requests/s ({args.clients} clients for {args.measure:.0f} s), "
          f"then {args.times:g}x for {args.warm:.0f} and {args.seconds:.0f} s: {sent} sent")
    print(f"refused {opened['refused']}: p50 {ms(opened['refused_p50_us'])}, p99 {ms(opened['refused_p99_us'])}, "
          f"max {ms(opened['refused_max_us'])}; {opened['no_retry_after']} without Retry-After")
    print(f"accepted and finished {opened['finished']}, {opened['failed']} failed"
          + (f" ({opened['first_failure']})" if opened["failed"] else "")
          + f"; the last one {opened['seconds']:.0f} s after the start")
    overall = opened["finished"] / opened["seconds"]
    print(f"goodput {goodput:.1f} requests/s, {100 * goodput / capacity:.0f} % of the capacity; "
          f"until the last was finished {overall:.1f}, {100 * overall / capacity:.0f} %")
    print(f"generator {100 * opened['generator_cpu']:.1f} % of a CPU over the whole run")
    for node, size in after.items():
        print(f"{node}: {before[node] / 2**20:.0f} MiB resident before, {size / 2**20:.0f} MiB after")
    print(f"KV held by sequences: {held} bytes before, {held_after} after; {queued:.0f} requests queued")


if __name__ == "__main__":
    main()
