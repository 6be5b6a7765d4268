"""Tests of deploy/k8s: `python tests/manifests OUT BINARY MODELS`.

Renders every directory into OUT and checks the rules. Runs the development installation and the Sparks' as processes of
BINARY, with SmolLM2 from the directory MODELS.
"""

import copy
import functools
import pathlib
import sys
import time
import traceback

import kinds
import processes
import rendered
import rules
import security


def main(out, binary, models):
    manifests = rendered.all_of_them()
    rendered.write(manifests, out)
    tests = {test.__name__: functools.partial(test, manifests) for test in rules.TESTS + kinds.TESTS + security.TESTS}
    tests["the_installation_for_development_serves"] = functools.partial(
        processes.run, copy.deepcopy(manifests["dev"]), binary, models
    )
    sparks = copy.deepcopy(rules.installed(manifests, "dgx-spark"))
    tests["the_installation_for_sparks_serves_what_is_deployed"] = functools.partial(processes.run_sparks, sparks, binary, models)
    failed = 0
    for name, test in tests.items():
        started = time.monotonic()
        try:
            test()
            verdict = "ok"
        except Exception:  # noqa: BLE001 an unexpected exception is a failed test
            traceback.print_exc()
            verdict, failed = "FAILED", failed + 1
        print(f"test {name} ... {verdict} ({time.monotonic() - started:.1f} s)")
    print(f"{len(tests) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*map(pathlib.Path, sys.argv[1:])))
