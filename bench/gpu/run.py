#!/usr/bin/env python3
"""Everything that a GPU has to show, by one command in under ten minutes.

    bench/gpu/run.py                          # builds what it needs, then all parts
    bench/gpu/run.py --only check,attention   # some
    bench/gpu/run.py --bin DIR --model FILE   # with executables and a model that are there already: no network
    bench/gpu/run.py --render FILE.json       # the table of a run again

Parts, the most telling first: `check` (every kernel against the CPU), `products` (large matrices, share of the copy
bandwidth), `attention` (blocks in order and in none), `decode` (a step of an 8B model with random weights, as a graph),
`answers` (`kvasir up --device cuda` beside the CPU), `tokens` (`kvasir bench`), `sanitizer` (every kernel under
compute-sanitizer, if there is one). A part that fails or finds no time left is noted and the next one begins. What is
known is written after each part, JSON and a table, to docs/measurements (without a GPU: to target/bench/gpu).

It needs this repository, Rust (unless --bin), Python 3, a driver of the 580 line, and NVRTC, which it installs by pip into
target/cuda-venv if there is none.
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

# Seconds that a part may take.
LIMITS = {"build": 280, "compiler": 60, "check": 100, "products": 75, "attention": 75, "decode": 75, "answers": 75,
          "tokens": 75, "sanitizer": 120}
MEASURED = list(LIMITS)[2:]
# A part is not begun with less time left.
LEAST_S = 10
NVRTC = "nvidia-cuda-nvrtc==13.0.88"
SANITIZER = "nvidia-cuda-sanitizer-api==13.0.85"
QUESTIONS = [("What is the capital of France?", "Paris"), ("What is two plus two?", "4"),
             ("Name a primary colour.", "")]
# What the issue asks for.
PAGED_AT_MOST, OF_COPY_AT_LEAST = 1.02, 0.85


class Failed(Exception):
    """Why a part gave nothing, or not all; what it gave is its second argument."""


def too_long(_signal, _frame):
    raise Failed("its time ran out")


def command(argv, limit, env=None):
    """Runs a program: its exit code (None: its time ran out), what it printed up to then, and the end of its errors."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([str(a) for a in argv], stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=ROOT,
                                   env={**os.environ, **(env or {})})
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
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
    """Installs into the environment in which Kvasir looks, next to its executables."""
    venv = ROOT / "target/cuda-venv"
    if not (venv / "bin/pip").exists():
        command([sys.executable, "-m", "venv", venv], limit)
    code, _, err = command([venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", wheel], limit)
    if code != 0:
        raise Failed(why(code, limit, err))


def compiler(args, limit):
    # Without devices nothing is measured: this only says what is there.
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
        # The program stops by itself a little before it would be stopped.
        code, out, err = command([args.kvasir, "gpu-bench", part, "--json", "--seconds", int(limit * 0.8)], limit)
        found = {"rows": [json.loads(line) for line in out.splitlines() if line.endswith("}")]}
        if code != 0:
            raise Failed(why(code, limit, err), found)
        return found
    return run


def answers(args, limit):
    found = {"answers": []}
    for device in ("cuda", "cpu"):
        with tempfile.TemporaryDirectory() as logs:
            server = Kvasir(logs, args.kvasir, args.model, 4, device)
            try:
                for question, _ in QUESTIONS:
                    body = {"model": server.model, "messages": [{"role": "user", "content": question}], "max_tokens": 24,
                            "temperature": 0}
                    answer = post_json(f"http://127.0.0.1:{server.port}/v1/chat/completions", body, timeout=limit / 2)
                    found["answers"].append({"device": device, "question": question,
                                             "answer": answer["choices"][0]["message"]["content"]})
            finally:
                server.stop()
    by_gpu = [row["answer"] for row in found["answers"] if row["device"] == "cuda"]
    wrong = [question for (question, word), answer in zip(QUESTIONS, by_gpu) if word not in answer or not answer]
    if wrong:
        raise Failed(f"the GPU answers wrongly: {wrong}", found)
    return found


def tokens(args, limit):
    argv = [args.kvasir, "bench", args.model, "--device", "cuda", "-p", "512,2048", "-n", "64", "-b", "1,8,32", "-r", "3", "--json"]
    code, out, err = command(argv, limit)
    if code != 0:
        raise Failed(why(code, limit, err))
    return json.loads(out)


def sanitizer_program():
    """compute-sanitizer of a toolkit or of pip, or None."""
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
    for tool in ("memcheck", "racecheck", "initcheck"):
        left = limit - (time.monotonic() - started)
        argv = [program, "--tool", tool, "--error-exitcode", "99", args.kvasir, "gpu-check", "--cases-only"]
        code, out, err = command(argv, max(left, 1))
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", out + err)
        found["tools"][tool] = summary[-1] if summary else why(code, left, out + err)
        if code != 0:
            raise Failed(f"{tool}: {found['tools'][tool]}", found)
    return found


PARTS = {"build": build, "compiler": compiler, "check": check, "products": rows("products"), "attention": rows("attention"),
         "decode": rows("decode"), "answers": answers, "tokens": tokens, "sanitizer": sanitizer}


# ---- The table.


def table(head, lines):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(map(str, line)) + " |" for line in lines), ""]


def percent(share):
    return f"{100 * share:.0f} %"


def measured(report, part):
    """Rows of a part that have a figure."""
    found = report["parts"].get(part, {}).get("found") or {}
    return [row for row in found.get("rows", []) if row.get("part") == part and "error" not in row]


def device_of(report):
    found = report["parts"].get("check", {}).get("found") or {}
    return (found.get("devices") or [{}])[0]


def verdicts(report):
    """What the issue asks for, what was found, and whether it holds."""
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
    attention = measured(report, "attention")
    worst = max((row["ratio"] for row in attention), default=None)
    add("attention over blocks within 2 % of contiguous", "not run" if worst is None else f"at worst {worst:.3f}",
        worst is not None and worst <= PAGED_AT_MOST)
    single = [row for row in measured(report, "products") if row["tokens"] == 1]
    least = min((row["of_copy"] for row in single), default=None)
    good = sum(row["of_copy"] >= OF_COPY_AT_LEAST for row in single)
    add("products of one token at 85 % of copies", "not run" if least is None else f"{good} of {len(single)}, the slowest {percent(least)}",
        least is not None and least >= OF_COPY_AT_LEAST)
    step = next((row for row in measured(report, "decode") if row["batch"] == 1 and row["rows"] == 1), None)
    add("8B Q4_K_M step as a graph", "not run" if step is None else
        f"{step['graph_ms']:.2f} ms, {step['tokens_per_second']:.0f} tokens/s, {percent(step['of_floor'])} of the floor", step is not None)
    add("answers of SmolLM2 through `kvasir up --device cuda`", parts.get("answers", {}).get("status", "not run"),
        parts.get("answers", {}).get("status") == "ok")
    return lines


def render(report):
    device, machine, parts = device_of(report), report["machine"], report["parts"]
    found = parts.get("check", {}).get("found") or {}
    lines = [f"# {device.get('name', 'No GPU')}, {machine['date']}", "",
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
        lines += ["## `kvasir bench` of SmolLM2 135M", ""]
        lines += table(["test", "tokens", "batch", "tokens/s"], [[row["test"], row["tokens"], row["batch"], f"{row['tps']:.0f}"] for row in smollm])
    said = (parts.get("answers", {}).get("found") or {}).get("answers", [])
    if said:
        lines += ["## Answers", ""] + table(["device", "question", "answer"], [[row["device"], row["question"], row["answer"].replace("\n", " ").replace("|", "/")] for row in said])
    return "\n".join(lines).rstrip() + "\n"


def write(report, args):
    device = device_of(report)
    name = re.sub(r"[^a-z0-9]+", "-", device.get("name", "none").lower()).strip("-")
    out = pathlib.Path(args.out) if args.out else ROOT / ("docs/measurements" if device.get("cases") else "target/bench/gpu")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"gpu-{name}-{report['machine']['date']}"
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(report))
    return path


def commit():
    try:
        return command(["git", "rev-parse", "--short", "HEAD"], 10)[1].strip() or "an unknown commit"
    except OSError:
        return "an unknown commit"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="parts, by commas: " + ",".join(MEASURED))
    parser.add_argument("--bin", help="folder with a `kvasir` that is built already")
    parser.add_argument("--model", default="smollm2-135m", help="catalog name or path to a .gguf")
    parser.add_argument("--seconds", type=float, default=570, help="all parts together")
    parser.add_argument("--out", help="folder of the results")
    parser.add_argument("--render", metavar="JSON", help="print the table of a run")
    args = parser.parse_args()
    if args.render:
        print(render(json.loads(pathlib.Path(args.render).read_text())), end="")
        return 0
    chosen = args.only.split(",") if args.only else MEASURED
    unknown = [part for part in chosen if part not in MEASURED]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(MEASURED)}")
    args.kvasir = (pathlib.Path(args.bin) if args.bin else ROOT / "target/release").resolve() / "kvasir"
    _, commit, _ = command(["git", "rev-parse", "--short", "HEAD"], 10)
    signal.signal(signal.SIGALRM, too_long)
    report = {"machine": facts(), "commit": commit.strip() or "an unknown commit", "parts": {}}
    until = time.monotonic() + args.seconds
    path = None
    for name in ([] if args.bin else ["build"]) + ["compiler"] + [part for part in MEASURED if part in chosen]:
        started = time.monotonic()
        limit = min(LIMITS[name], until - started)
        part = {"status": "ok"}
        if limit < LEAST_S:
            part = {"status": "skipped", "why": "no time left"}
        else:
            print(f"{name:<10} ...", end="", flush=True, file=sys.stderr)
            # For what waits for something else than a program's end.
            signal.setitimer(signal.ITIMER_REAL, limit + LEAST_S)
            try:
                part["found"] = PARTS[name](args, limit)
            except Failed as error:
                part = {"status": "failed", "why": str(error.args[0]), "found": error.args[1] if len(error.args) > 1 else None}
            except Exception as error:  # noqa: BLE001: the next part says more than a trace of this one
                part = {"status": "failed", "why": f"{type(error).__name__}: {error}"}
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        part["seconds"] = round(time.monotonic() - started, 1)
        print(f"\r{name:<10} {part['status']:<8} {part['seconds']:6.1f} s  {part.get('why', '')[:200]}", file=sys.stderr)
        report["parts"][name] = part
        path = write(report, args)
    print(render(report), end="")
    print(f"written to {path}.json and {path}.md", file=sys.stderr)
    return 0 if all(part["status"] == "ok" for part in report["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
