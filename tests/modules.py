#!/usr/bin/env python3
"""Module cycles: fails when top-level modules of a crate depend on each other in a larger cycle than is allowed here.

An edge is a path `crate::MODULE` in a file of another top-level module, outside of tests and comments. The limit of a
crate is the number of modules in its largest cycle; 0 is none. A limit is only ever lowered.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Crate, folder of its sources, limit.
CRATES = [
    ("router", "coordinator/router/src", 0),
    ("coordinator", "coordinator/src", 0),
    ("kernels", "kernels/src", 0),
    ("cuda", "kernels/cuda/src", 0),
    ("ptx", "kernels/ptx/src", 0),
    ("proto", "proto/src", 0),
    ("pki", "proto/pki/src", 0),
    ("transport", "proto/transport/src", 0),
    ("metadata", "model/metadata/src", 0),
    ("model", "model/src", 0),
    ("text", "model/text/src", 0),
    ("hub", "model/hub/src", 0),
    ("speech", "worker/speech/src", 0),
    ("worker", "worker/src", 0),
    ("kvasir", "src", 17),
]
TEST_MODULE = re.compile(r"#\[cfg\(test\)\]\s*(?:pub(?:\(\w+\))? )?mod \w+\s*\{.*?^\}", re.S | re.M)


def module_of(path):
    """The top-level module that a file, given from the crate's folder, belongs to."""
    first = path.parts[0]
    return first.removesuffix(".rs")


def dependencies(folder):
    """The modules that each top-level module names, and in which files."""
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
    for crate, folder, limit in CRATES:
        edges = dependencies(ROOT / folder)
        if not edges:
            sys.exit(f"{folder} has no modules: is it still there?")
        found = cycles(edges)
        largest = max(map(len, found), default=0)
        if largest > limit:
            failed = True
            print(f"{crate}: a cycle of {largest} modules, at most {limit} are allowed")
            for component in found:
                for module in component:
                    for other in sorted(edges[module].keys() & set(component)):
                        print(f"  {module} -> {other}: {', '.join(edges[module][other][:3])}")
        elif largest < limit:
            failed = True
            print(f"{crate}: the largest cycle has {largest} modules: lower its limit of {limit} in {Path(__file__).name}")
    sys.exit(failed)


main()
