#!/usr/bin/env python3
"""Fails if top-level modules of a crate depend on each other in a cycle.

An edge is a path `crate::MODULE` in a file of another top-level module, outside of tests and comments.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Crate, folder of its sources.
CRATES = [
    ("router", "coordinator/router/src"),
    ("consensus", "coordinator/consensus/src"),
    ("dispatch", "coordinator/dispatch/src"),
    ("api", "coordinator/api/src"),
    ("group", "coordinator/group/src"),
    ("ops", "coordinator/ops/src"),
    ("planner", "coordinator/planner/src"),
    ("usage", "coordinator/usage/src"),
    ("coordinator", "coordinator/src"),
    ("kernels", "kernels/src"),
    ("cuda", "kernels/cuda/src"),
    ("ptx", "kernels/ptx/src"),
    ("proto", "proto/src"),
    ("pki", "proto/pki/src"),
    ("transport", "proto/transport/src"),
    ("metadata", "model/metadata/src"),
    ("model", "model/src"),
    ("text", "model/text/src"),
    ("vision", "model/vision/src"),
    ("sound", "model/sound/src"),
    ("hub", "model/hub/src"),
    ("speech", "worker/speech/src"),
    ("engine", "worker/engine/src"),
    ("external", "worker/external/src"),
    ("pipeline", "worker/pipeline/src"),
    ("worker", "worker/src"),
    ("doctor", "doctor/src"),
    ("kvasir", "src"),
]
TEST_MODULE = re.compile(r"#\[cfg\(test\)\]\s*(?:pub(?:\(\w+\))? )?mod \w+\s*\{.*?^\}", re.S | re.M)


def module_of(path):
    """Top-level module of a file. The path is relative to the crate's folder."""
    first = path.parts[0]
    return first.removesuffix(".rs")


def dependencies(folder):
    """For each top-level module, the modules that it names, with the files."""
    files = [path.relative_to(folder) for path in folder.rglob("*.rs")]
    files = [path for path in files if "tests" not in path.parts and not path.name.endswith("tests.rs")]
    modules = {module_of(path) for path in files} - {"lib", "main"}
    edges = {module: {} for module in modules}
    for path in files:
        module = module_of(path)
        if module not in modules:
            continue
        text = re.sub(r"//[^\n]*", "", TEST_MODULE.sub("", (folder / path).read_text()))
        named = re.findall(r"\bcrate::(\w+)", text)
        for group in re.findall(r"\bcrate::\{([^;]*?)\};", text, re.S):
            named += re.findall(r"(?:^|,)\s*(\w+)", group)
        if len(path.parts) == 1:
            named += re.findall(r"\bsuper::(\w+)", text)
        for other in set(named) & modules - {module}:
            edges[module].setdefault(other, []).append(str(path))
    return edges


def cycles(edges):
    """The strongly connected components of more than one module (Tarjan)."""
    found, index, low, stack = [], {}, {}, []

    def visit(module):
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in edges[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in edges:
        if module not in index:
            visit(module)
    return found


def main():
    failed = False
    for crate, folder in CRATES:
        edges = dependencies(ROOT / folder)
        if not edges:
            sys.exit(f"{folder} has no modules: is it still there?")
        for component in cycles(edges):
            failed = True
            print(f"{crate}: a cycle of {len(component)} modules")
            for module in component:
                for other in sorted(edges[module].keys() & set(component)):
                    print(f"  {module} -> {other}: {', '.join(edges[module][other][:3])}")
    sys.exit(failed)


main()
