#!/usr/bin/env python3
"""Runs all GPU measurements with one command, in less than ten minutes.

    bench/gpu/run.py --out DIR                # builds what it needs, then all parts
    bench/gpu/run.py --only check,attention   # some
    bench/gpu/run.py --bin DIR                # with an executable that is there already: no compiler, no network
    bench/gpu/run.py --limit oracle=30        # another limit for a part
    bench/gpu/run.py --render FILE.json       # the table of a run again

Parts, the most important first:

- `check`: every kernel against the CPU
- `products`: large matrices, as a share of the copy bandwidth
- `attention`: KV blocks in order and in random order
- `decode`: a step of an 8B model with random weights, as a graph
- `oracle`: small models of every layer kind against their references
- `answers`: `kvasir up` on the GPU against the CPU
- `tokens`: `kvasir bench`
- `variants`: products compiled in several ways, if pack.sh has packed them
- `sanitizer`: every kernel under compute-sanitizer, if it is installed

If a part fails or exceeds its limit, the report says so and the next part begins. A part that has no time
left is skipped. The report is written before the first part and after each part, as JSON and as a table, to
--out (default: target/bench/gpu). Git, a network and a model are not needed. Without --model, `answers` uses
a model of the fixtures, and `tokens` a model with the shape of an 8B model and random weights.
bench/gpu/pack.sh packs the files that a machine without Rust and NVRTC needs.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from load import post_json  # noqa: E402
from machine import facts  # noqa: E402
from servers import Kvasir  # noqa: E402

# Limit of each part in seconds.
LIMITS = {"build": 280, "compiler": 60, "check": 100, "products": 75, "attention": 75, "decode": 75, "oracle": 90,
          "answers": 60, "tokens": 120, "variants": 60, "sanitizer": 240}
MEASURED = list(LIMITS)[2:]
# Seconds. With less time left a part is skipped.
LEAST_S = 10
NVRTC = "nvidia-cuda-nvrtc==13.0.88"
SANITIZER = "nvidia-cuda-sanitizer-api==13.0.85"
QUESTIONS = [("What is the capital of France?", "Paris"), ("What is two plus two?", "4"),
             ("Name a primary colour.", "")]
COMPLETED = ["Hello, world", "The capital of France is", "1 2 3 4 5 6"]
HERE = pathlib.Path(__file__).resolve().parent
SMALL_MODEL = ROOT / "tests/fixtures/tiny/llama/llama-f32.gguf"
# Targets. They hold for products of at least LARGE_BYTES, because the launch limits the speed of smaller
# ones.
LARGE_BYTES = 50e6
LONG_CONTEXT = 4096
PAGED_AT_MOST, OF_COPY_AT_LEAST = 1.02, 0.85


class Failed(Exception):
    """A part failed or is incomplete. Arguments: the reason, and the partial results if there are any."""


class Skipped(Exception):
    """A part does not apply. The argument is the reason."""


def too_long(_signal, _frame):
    raise Failed("its time ran out")


def told_to_end(_signal, _frame):
    # Not an `Exception`: ends the run after the report is written.
    raise KeyboardInterrupt


def command(argv, limit, env=None):
    """Runs a program. Returns its exit code (None after a timeout), its output, and the end of its standard
    error.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([str(a) for a in argv], stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=ROOT,
                                   env={**os.environ, **(env or {})}, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Ends all processes of the group, because they may still use the GPU.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()[-2000:]


def why(code, limit, err):
    return f"more than {limit:.0f} s" if code is None else f"exit code {code}: {err.strip()[-600:]}"


def build(_args, limit):
    code, _, err = command(["cargo", "build", "--locked", "--release"], limit)
    if code != 0:
        raise Failed(why(code, limit, err))
    return {}


def pip(wheel, limit):
    """Installs a wheel into the environment next to Kvasir's executables, where Kvasir searches for
    libraries.
    """
    venv = ROOT / "target/cuda-venv"
    if not (venv / "bin/pip").exists():
        command([sys.executable, "-m", "venv", venv], limit)
    code, _, err = command([venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check",
                            "--retries", "0", "--timeout", "10", "--no-deps", wheel], limit)
    if code != 0:
        raise Failed(why(code, limit, err))


def compiler(args, limit):
    # Without devices gpu-check measures nothing. It only prints which libraries exist.
    _, out, _ = command([args.kvasir, "gpu-check", "--json"], limit, env={"CUDA_VISIBLE_DEVICES": "-1"})
    if '"nvrtc":null' not in out:
        return {"installed": False}
    pip(NVRTC, limit)
    return {"installed": True}


def check(args, limit):
    code, out, err = command([args.kvasir, "gpu-check", "--json"], limit)
    found = json.loads(out) if out.strip() else {}
    if code != 0:
        raise Failed(why(code, limit, err), found)
    return found


def rows(part):
    def run(args, limit):
        # The program ends itself before its limit.
        code, out, err = command([args.kvasir, "gpu-bench", part, "--json", "--seconds", int(limit * 0.8)], limit)
        found = {"rows": [json.loads(line) for line in out.splitlines() if line.endswith("}")]}
        if code != 0:
            raise Failed(why(code, limit, err), found)
        return found
    return run


def script(name, argv, limit):
    """Runs a script of this folder that prints one JSON object a line. Returns the objects. A failure has
    those printed so far.
    """
    code, out, err = command([sys.executable, HERE / name, *argv, "--seconds", int(limit * 0.9)], limit)
    found = {"rows": [json.loads(line) for line in out.splitlines() if line.startswith("{")]}
    if code != 0:
        raise Failed(why(code, limit, err), found)
    return found


def oracle(args, limit):
    return script("oracle.py", ["--kvasir", args.kvasir, "--device", args.device], limit)


def variants(args, limit):
    folder = args.kvasir.parent / "variants"
    if not folder.is_dir():
        raise Skipped("there are no compiled variants beside the executable; bench/gpu/pack.sh makes them")
    return script("ab.py", [folder], limit)


def answers(args, limit):
    found, said = {"answers": []}, {}
    for device in (args.device, "cpu"):
        with tempfile.TemporaryDirectory() as logs:
            server = Kvasir(logs, args.kvasir, args.model or SMALL_MODEL, 4, device)
            try:
                said[device] = []
                for question in [question for question, _ in QUESTIONS] if args.model else COMPLETED:
                    body = {"model": server.model, "max_tokens": 24, "temperature": 0}
                    if args.model:
                        path, body = "chat/completions", body | {"messages": [{"role": "user", "content": question}]}
                    else:
                        path, body = "completions", body | {"prompt": question}
                    choice = post_json(f"http://127.0.0.1:{server.port}/v1/{path}", body, timeout=limit / 2)["choices"][0]
                    text = choice["message"]["content"] if args.model else choice["text"]
                    said[device].append(text)
                    found["answers"].append({"device": device, "question": question, "answer": text})
            finally:
                server.stop()
    if not args.model:
        # The output of a random model is meaningless, but in f32 it is the same on every device.
        if said[args.device] != said["cpu"]:
            raise Failed("the GPU completes otherwise than the CPU", found)
        return found
    wrong = [question for (question, word), answer in zip(QUESTIONS, said[args.device]) if word not in answer or not answer]
    if wrong:
        raise Failed(f"the GPU answers wrongly: {wrong}", found)
    return found


def tokens(args, limit):
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model, shape = args.model, "of --model"
        if not model:
            model, shape = pathlib.Path(folder) / "random.gguf", args.shape
            code, _, err = command([sys.executable, HERE / "random_gguf.py", SMALL_MODEL, model, "--shape", shape], limit / 2)
            if code != 0:
                raise Failed("no random model: " + why(code, limit / 2, err))
        argv = [args.kvasir, "bench", model, "--device", args.device, "-p", "512,2048", "-n", "64", "-b", "1,8,32", "-r", "3", "--json"]
        left = limit - (time.monotonic() - began)
        code, out, err = command(argv, max(left, 1))
        if code != 0:
            raise Failed(why(code, left, err))
        return {"shape": shape, **json.loads(out)}


def sanitizer_program():
    """Path of compute-sanitizer, from a CUDA toolkit or from pip, or None."""
    places = [shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"]
    places += (ROOT / "target/cuda-venv").glob("lib/python3*/site-packages/nvidia/**/compute-sanitizer")
    return next((place for place in places if place and os.access(place, os.X_OK) and pathlib.Path(place).is_file()), None)


def sanitizer(args, limit):
    program, started, found = sanitizer_program(), time.monotonic(), {"tools": {}}
    if program is None:
        try:
            pip(SANITIZER, limit)
        except Failed as error:
            raise Failed(f"there is no compute-sanitizer here, and pip has none: {error}")
        program = sanitizer_program()
        if program is None:
            raise Failed("there is no compute-sanitizer here, and none in pip's wheel")
    for tool in args.tools.split(","):
        left = limit - (time.monotonic() - started)
        argv = [program, "--tool", tool, "--error-exitcode", "99", "--print-limit", "20", args.kvasir, "gpu-check", "--cases-only"]
        code, out, err = command(argv, max(left, 1))
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", out + err)
        found["tools"][tool] = summary[-1] if summary else why(code, left, out + err)
        if code != 0:
            raise Failed(f"{tool}: {found['tools'][tool]}", found)
    return found


PARTS = {"build": build, "compiler": compiler, "check": check, "products": rows("products"), "attention": rows("attention"),
         "decode": rows("decode"), "oracle": oracle, "answers": answers, "tokens": tokens, "variants": variants,
         "sanitizer": sanitizer}


# ---- The table.


def table(head, lines):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(map(str, line)) + " |" for line in lines), ""]


def percent(share):
    return f"{100 * share:.0f} %"


def measured(report, part):
    """Rows of a part that have a result."""
    found = report["parts"].get(part, {}).get("found") or {}
    return [row for row in found.get("rows", []) if row.get("part") == part and "error" not in row]


def product_bytes(row):
    """Bytes of the weights that a product reads: its time multiplied by its rate."""
    return row["us"] * row["gbs"] * 1e3


def device_of(report):
    found = report["parts"].get("check", {}).get("found") or {}
    return (found.get("devices") or [{}])[0]


def verdicts(report):
    """Returns rows of (target, result, whether the target is reached)."""
    parts, lines = report["parts"], []

    def add(what, found, holds):
        lines.append([what, found, "yes" if holds else "no"])

    device = device_of(report)
    cases = device.get("cases", [])
    passed = sum(case["passed"] for case in cases)
    add("every kernel within tolerance of the CPU", f"{passed} of {len(cases)} cases", device.get("correct", False))
    tools = (parts.get("sanitizer", {}).get("found") or {}).get("tools", {})
    clean = parts.get("sanitizer", {}).get("status") == "ok"
    add("compute-sanitizer clean", "; ".join(f"{tool}: {text}" for tool, text in tools.items()) or "not run", clean)
    attention = [row for row in measured(report, "attention") if row["context"] >= LONG_CONTEXT]
    worst = max((row["ratio"] for row in attention), default=None)
    add(f"attention over blocks within 2 % of contiguous, from {LONG_CONTEXT} positions on", "not run" if worst is None else f"at worst {worst:.3f}",
        worst is not None and worst <= PAGED_AT_MOST)
    single = [row for row in measured(report, "products") if row["tokens"] == 1 and product_bytes(row) >= LARGE_BYTES]
    least = min((row["of_copy"] for row in single), default=None)
    good = sum(row["of_copy"] >= OF_COPY_AT_LEAST for row in single)
    add("products of one token at 85 % of copies, from 50 MB on", "not run" if least is None else f"{good} of {len(single)}, the slowest {percent(least)}",
        least is not None and least >= OF_COPY_AT_LEAST)
    step = next((row for row in measured(report, "decode") if row["batch"] == 1 and row["rows"] == 1), None)
    add("8B Q4_K_M step as a graph", "not run" if step is None else
        f"{step['graph_ms']:.2f} ms, {step['tokens_per_second']:.0f} tokens/s, {percent(step['of_floor'])} of the floor", step is not None)
    for name, what in [("oracle", "small models of every layer kind as their references"),
                       ("answers", "answers through `kvasir up` on the GPU")]:
        status = parts.get(name, {}).get("status", "not run")
        add(what, status, status == "ok")
    return lines


def render(report):
    device, machine, parts = device_of(report), report["machine"], report["parts"]
    found = parts.get("check", {}).get("found") or {}
    lines = [f"# {device.get('name', 'No GPU')}, {machine['date']}", ""]
    if report.get("invented"):
        lines += ["**Invented**, to test this table: nothing below was measured.", ""]
    lines += [
             f"By `bench/gpu/run.py` at {report['commit']}. Driver CUDA {found.get('driver')}, NVRTC "
             f"{(found.get('nvrtc') or {}).get('version')}, {device.get('arch', 'no architecture')}, "
             f"{device.get('multiprocessors', 0)} multiprocessors; {machine['cpu']}, {machine['cpus']} CPUs.", ""]
    ceilings = device.get("ceilings")
    if ceilings:
        lines += [f"Copies {ceilings['copy_bytes_per_second'] / 1e9:.0f} GB/s read and written; a launch "
                  f"{ceilings['launch_us']:.2f} us, {ceilings['graph_launch_us']:.2f} us in a graph.", ""]
    lines += table(["wanted", "found", "holds"], verdicts(report))
    lines += table(["part", "outcome", "seconds", ""],
                   [[name, part["status"], f"{part['seconds']:.0f}", part.get("why", "").replace("\n", " ").replace("|", "/")[:300]]
                    for name, part in parts.items()])
    wrong = [case for case in device.get("cases", []) if not case["passed"]]
    if wrong:
        lines += ["## Wrong", ""] + table(["op", "case", "off", "allowed"], [[case["op"], case["what"], f"{case['error']:.1e}", f"{case['tolerance']:.0e}"] for case in wrong])
    if measured(report, "products"):
        shapes = sorted({(row["type"], row["rows"], row["cols"]) for row in measured(report, "products")})
        by = {(row["type"], row["rows"], row["cols"], row["tokens"]): row for row in measured(report, "products")}
        width = sorted({row["tokens"] for row in by.values()})
        lines += ["## Products: us, share of copies", ""]
        cells = [[f"{ty} {rows} x {cols}"] + [f"{by[ty, rows, cols, n]['us']:.1f}, {percent(by[ty, rows, cols, n]['of_copy'])}"
                                              if (ty, rows, cols, n) in by else "" for n in width] for ty, rows, cols in shapes]
        lines += table(["matrix"] + [f"{n} token{'s' if n > 1 else ''}" for n in width], cells)
    if measured(report, "attention"):
        lines += ["## Attention of one row a sequence: us of a layer", ""]
        lines += table(["cache", "heads", "block", "batch", "context", "in order", "in none", "ratio", "of copies", "in common"],
                       [[row["kv_type"], f"{row['heads']}/{row['kv_heads']}", row["block_tokens"], row["batch"], row["context"],
                         f"{row['contiguous_us']:.1f}", f"{row['paged_us']:.1f}", f"{row['ratio']:.3f}", percent(row["of_copy"]),
                         f"{row['shared_us']:.1f}" if row["shared_us"] else ""]
                        for row in measured(report, "attention")])
    if measured(report, "decode"):
        lines += ["## Llama 3.1 8B, Q4_K_M, random weights: a step", ""]
        lines += table(["sequences", "context", "rows each", "eager, ms", "graph, ms", "tokens/s", "of the floor"],
                       [[row["batch"], row["context"], row["rows"], f"{row['eager_ms']:.2f}", f"{row['graph_ms']:.2f}",
                         f"{row['tokens_per_second']:.0f}", percent(row["of_floor"])] for row in measured(report, "decode")])
    smollm = (parts.get("tokens", {}).get("found") or {}).get("rows", [])
    if smollm:
        lines += [f"## `kvasir bench`, a model {parts['tokens']['found'].get('shape', 'of --model')}", ""]
        lines += table(["test", "tokens", "batch", "tokens/s"], [[row["test"], row["tokens"], row["batch"], f"{row['tps']:.0f}"] for row in smollm])
    seen = (parts.get("oracle", {}).get("found") or {}).get("rows", [])
    if seen:
        lines += ["## Small models: relative distance of logits", ""]
        lines += table(["model", "from the reference, f32", "from the CPU, int8", "same tokens", "holds"],
                       [[row["model"], f"{row['reference']:.1e}" if row.get("reference") is not None else "",
                         f"{row['cpu']:.1e}" if row.get("cpu") is not None else "", row.get("same_tokens", ""),
                         "yes" if row["holds"] else "no: " + row.get("why", "too far")] for row in seen])
    compared = (parts.get("variants", {}).get("found") or {}).get("rows", [])
    if compared:
        lines += ["## Products in variants: us, share of copies", ""]
        lines += table(["matrix", "tokens", "kernel", "variant", "us", "of copies", "bits"],
                       [[f"{row['type']} {row['rows']} x {row['cols']}", row["tokens"], row["kernel"], row["variant"],
                         f"{row['us']:.1f}", percent(row["of_copy"]), "the same" if row["same_bits"] else "OTHER"] for row in compared])
    said = (parts.get("answers", {}).get("found") or {}).get("answers", [])
    if said:
        lines += ["## Answers", ""] + table(["device", "question", "answer"], [[row["device"], row["question"], row["answer"].replace("\n", " ").replace("|", "/")] for row in said])
    return "\n".join(lines).rstrip() + "\n"


def write(report, args, earlier):
    """Writes the report and removes the previous version if it has another name. The name has the device's
    name.
    """
    device = device_of(report)
    name = re.sub(r"[^a-z0-9]+", "-", device.get("name", "none").lower()).strip("-")
    path = args.out / f"gpu-{name}-{report['machine']['date']}"
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(report))
    if earlier is not None and earlier != path:
        for suffix in (".json", ".md"):
            earlier.with_suffix(suffix).unlink(missing_ok=True)
    return path


def commit(kvasir):
    """Returns the commit of `kvasir`. A packed executable has a file with its commit, because there may be no
    git there.
    """
    packed = kvasir.parent / "commit"
    if packed.is_file():
        return packed.read_text().strip()
    try:
        found = command(["git", "rev-parse", "--short", "HEAD"], 10)[1].strip()
    except OSError:
        found = ""
    return found or os.environ.get("KVASIR_COMMIT") or "an unknown commit"


def environment(kvasir):
    """Sets the environment of all programs: the folders of packed kernels and of Kvasir's files."""
    cubins = kvasir.parent / "cubins"
    if cubins.is_dir():
        os.environ.setdefault("KVASIR_CUBINS", str(cubins))
    os.environ.setdefault("KVASIR_HOME", str(ROOT / "target/bench/gpu/home") if cubins.is_dir() else
                          str(pathlib.Path.home() / ".cache/kvasir"))


def limits(parser, given):
    chosen = dict(LIMITS)
    for part, _, seconds in (limit.partition("=") for limit in given):
        if part not in LIMITS or not seconds.isdigit() or int(seconds) == 0:
            parser.error(f"--limit {part}={seconds}: it is PART=SECONDS with a part of {', '.join(LIMITS)}")
        chosen[part] = int(seconds)
    return chosen


def run_part(name, args, limit):
    """Runs one part within its limit. Returns its status, its results and the reason of a failure."""
    signal.setitimer(signal.ITIMER_REAL, limit + LEAST_S)  # For waits other than for the end of a program.
    try:
        return {"status": "ok", "found": PARTS[name](args, limit)}
    except Skipped as reason:
        return {"status": "skipped", "why": str(reason)}
    except Failed as error:
        return {"status": "failed", "why": str(error.args[0]), "found": error.args[1] if len(error.args) > 1 else None}
    except Exception as error:  # noqa: BLE001: the other parts still run
        return {"status": "failed", "why": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="parts, by commas: " + ",".join(MEASURED))
    parser.add_argument("--bin", help="folder with a `kvasir` that is built already")
    parser.add_argument("--model", help="a .gguf, or a name of the catalog, which may need a network")
    parser.add_argument("--shape", default="8b", help="what `tokens` makes without --model, see random_gguf.py")
    parser.add_argument("--device", default="cuda", help="cpu for a dry run of oracle, answers and tokens")
    parser.add_argument("--tools", default="memcheck", help="what `sanitizer` runs, by commas: memcheck, racecheck, initcheck")
    parser.add_argument("--seconds", type=float, default=570, help="all parts together")
    parser.add_argument("--limit", action="append", default=[], metavar="PART=SECONDS", help="another limit of a part")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target/bench/gpu", help="folder of the results")
    parser.add_argument("--render", metavar="JSON", help="print the table of a run")
    args = parser.parse_args()
    if args.render:
        print(render(json.loads(pathlib.Path(args.render).read_text())), end="")
        return 0
    chosen = args.only.split(",") if args.only else MEASURED
    unknown = [part for part in chosen if part not in MEASURED]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(MEASURED)}")
    most = limits(parser, args.limit)
    args.kvasir = (pathlib.Path(args.bin) if args.bin else ROOT / "target/release").resolve() / "kvasir"
    if args.bin and not os.access(args.kvasir, os.X_OK):
        parser.error(f"--bin: there is no executable {args.kvasir}")
    environment(args.kvasir)
    signal.signal(signal.SIGALRM, too_long)
    signal.signal(signal.SIGTERM, told_to_end)
    report = {"machine": facts(), "commit": commit(args.kvasir), "parts": {}}
    until = time.monotonic() + args.seconds
    # Fails here, before any measurement, if the folder cannot be written.
    args.out.mkdir(parents=True, exist_ok=True)
    path = write(report, args, None)
    try:
        for name in ([] if args.bin else ["build"]) + ["compiler"] + [part for part in MEASURED if part in chosen]:
            started = time.monotonic()
            limit = min(most[name], until - started)
            print(f"{name:<10} ...", end="", flush=True, file=sys.stderr)
            enough = limit >= min(LEAST_S, most[name])
            part = run_part(name, args, limit) if enough else {"status": "skipped", "why": "no time left"}
            part["seconds"] = round(time.monotonic() - started, 1)
            print(f"\r{name:<10} {part['status']:<8} {part['seconds']:6.1f} s  {part.get('why', '')[:200]}", file=sys.stderr)
            report["parts"][name] = part
            path = write(report, args, path)
    except KeyboardInterrupt:
        report["ended_early"] = True
        path = write(report, args, path)
    print(render(report), end="")
    print(f"written to {path}.json and {path}.md", file=sys.stderr)
    bad = [name for name, part in report["parts"].items() if part["status"] == "failed"]
    return 1 if bad or report.get("ended_early") else 0


if __name__ == "__main__":
    sys.exit(main())
