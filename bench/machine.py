"""Facts about the machine of a measurement, and the CPU use of other processes during it."""
import datetime
import os
import pathlib
import platform
import subprocess
import time

TICKS = os.sysconf("SC_CLK_TCK")
TELLING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "asimddp", "i8mm", "sve")


def facts():
    """Describes the machine in words that do not identify it."""
    info = dict(line.split(":", 1) for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    info = {key.strip(): value.strip() for key, value in info.items()}
    flags = set((info.get("flags") or info.get("Features") or "").split())
    memory = next(line for line in pathlib.Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": info.get("model name", platform.machine()),
        "family": f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        "cpus": len(os.sched_getaffinity(0)),
        "isa": " ".join(flag for flag in TELLING_FLAGS if flag in flags),
        "memory_gib": round(int(memory.split()[1]) / 2**20, 1),
        "kernel": platform.release(),
    }


def output_of(argv):
    """First line of a command's output, or the reason why there is none."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    except OSError as error:
        return str(error)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0] if lines else f"exit code {done.returncode}"


def busy_seconds():
    """CPU seconds that the whole machine has used. The share of guests counts once."""
    fields = [int(field) for field in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, _steal = fields
    return (user + nice + system + irq + softirq) / TICKS


def stolen_seconds():
    """CPU seconds that the host gave to other machines."""
    return int(pathlib.Path("/proc/stat").read_text().split()[8]) / TICKS


def family_seconds(roots):
    """CPU seconds of some live processes and all their live descendants, also in other groups or sessions."""
    spent, children = {}, {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # The process has ended.
        process = int(stat.parent.name)
        spent[process] = (int(fields[11]) + int(fields[12])) / TICKS
        children.setdefault(int(fields[1]), []).append(process)
    total, left = 0.0, [root for root in roots if root in spent]
    while left:
        process = left.pop()
        total += spent[process]
        left += children.get(process, [])
    return total


class Watch:
    """Measures wall time, and the CPU use of all other processes as a share of all CPUs."""

    def __init__(self, roots=()):
        self.roots = tuple(roots)

    def _own(self):
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system + family_seconds(self.roots)

    def __enter__(self):
        self.start, self.busy, self.own, self.stolen = time.monotonic(), busy_seconds(), self._own(), stolen_seconds()
        return self

    def __exit__(self, *_):
        self.wall = time.monotonic() - self.start
        room = max(self.wall, 1e-3) * (os.cpu_count() or 1)
        others = (busy_seconds() - self.busy) - (self._own() - self.own)
        self.others_cpu = max(0.0, others / room)
        self.stolen_cpu = max(0.0, (stolen_seconds() - self.stolen) / room)
