"""Checks every Cargo.lock against published advisories (RustSec). `python tests/advisories.py`

Uses the committed extract advisories.toml, or with KVASIR_ADVISORY_DB=DIR a whole database, which is a
checkout of github.com/rustsec/advisory-db. With --extract it also writes the extract again from that
database. Do so after a crate was added or when advisories were published. Every exception in deny.toml must
have a reason and match an advisory.
"""

import json
import os
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXTRACT = ROOT / "tests/advisories.toml"
AGAIN = "KVASIR_ADVISORY_DB=DIR python3 tests/advisories.py --extract"


def locks():
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in ("target", ".git", "node_modules")]
        if "Cargo.lock" in files:
            yield pathlib.Path(folder, "Cargo.lock")


def packages(lock):
    """Names and versions of the packages that come from a registry."""
    found = tomllib.loads(lock.read_text()).get("package", [])
    return {(package["name"], package["version"]) for package in found if "source" in package}


def order(version):
    """Sort key of a version by semver.org. A pre-release sorts before its release."""
    core, _, pre = version.split("+")[0].partition("-")
    numbers = [int(part) for part in core.split(".")]
    parts = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in pre.split(".")] if pre else [(2,)]
    return (*numbers, *([0] * (3 - len(numbers)))), parts


def bounds(requirement):
    """Parses one comparison of a Cargo requirement into (operator, version) pairs that must all hold."""
    operator, version = re.fullmatch(r"\s*(>=|<=|>|<|=|\^|~)?\s*([\w.+*-]+)\s*", requirement).groups()
    if version == "*":
        return []
    numbers = [int(part) for part in version.split("-")[0].split("+")[0].split(".") if part != "*"]
    last = len(numbers) - 1

    def above(at):
        return ".".join(map(str, [*numbers[:at], numbers[at] + 1] + [0] * (2 - at)))

    if operator in (">=", ">", "<=", "<") or (operator == "=" and last == 2):
        if operator == ">" and last < 2:
            return [(">=", above(last))]
        if operator == "<=" and last < 2:
            return [("<", above(last))]
        return [(operator, version)]
    if operator == "=" or "*" in version:
        end = above(last)
    elif operator == "~":
        end = above(min(last, 1))
    else:
        end = above(next((at for at, number in enumerate(numbers) if number), last))
    return [(">=", version.replace(".*", "")), ("<", end)]


def matches(version, requirement):
    found = order(version)
    compare = {
        ">=": lambda other: found >= other,
        ">": lambda other: found > other,
        "<=": lambda other: found <= other,
        "<": lambda other: found < other,
        "=": lambda other: found == other,
    }
    parts = [bound for part in requirement.split(",") for bound in bounds(part)]
    return all(compare[operator](order(other)) for operator, other in parts)


def is_hit(advisory, version):
    return not any(matches(version, safe) for safe in advisory["patched"] + advisory["unaffected"])


def read_database(folder):
    """Advisories of a whole database, by crate."""
    crates = pathlib.Path(folder, "crates")
    assert crates.is_dir(), f"{folder} is no advisory database: it has no folder crates"
    found = {}
    for path in sorted(crates.glob("*/*.md")):
        head = tomllib.loads(re.search(r"```toml\n(.*?)\n```", path.read_text(), re.DOTALL)[1])
        advisory, versions = head["advisory"], head.get("versions", {})
        if "withdrawn" in advisory:
            continue
        found.setdefault(advisory["package"], []).append(
            {
                "id": advisory["id"],
                "kind": advisory.get("informational", "vulnerability"),
                "title": re.search(r"^# +(.*)$", path.read_text(), re.MULTILINE)[1].strip(),
                "patched": versions.get("patched", []),
                "unaffected": versions.get("unaffected", []),
            }
        )
    assert found, f"{folder} has no advisories"
    return found


def write_extract(database, names):
    lines = [
        "# What the RustSec advisory database (github.com/rustsec/advisory-db, CC0-1.0; imported advisories CC-BY-4.0) says of the",
        f"# crates in our lock files. Made by `{AGAIN}`.",
        f"crates = {json.dumps(sorted(names))}",
    ]
    for name in sorted(names & set(database)):
        for advisory in database[name]:
            # JSON strings and lists are valid TOML.
            lines += ["", "[[advisory]]", f"package = {json.dumps(name)}"]
            lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in advisory.items()]
    EXTRACT.write_text("\n".join(lines) + "\n")


def read_extract():
    extract = tomllib.loads(EXTRACT.read_text())
    found = {}
    for advisory in extract["advisory"]:
        found.setdefault(advisory["package"], []).append(advisory)
    return set(extract["crates"]), found


def exceptions(text):
    ignored = tomllib.loads(text)["advisories"]["ignore"]
    for exception in ignored:
        assert isinstance(exception, dict) and exception.get("reason"), f"deny.toml: {exception} has no reason"
    return {exception["id"]: exception["reason"] for exception in ignored}


def check(found, database, passed_over):
    """Returns the errors of (name, version, lock file) triples."""
    wrong, of_use = [], set()
    for name, version, lock in sorted(found):
        for advisory in database.get(name, []):
            if not is_hit(advisory, version):
                continue
            if advisory["id"] in passed_over:
                of_use.add(advisory["id"])
                continue
            safe = ", ".join(advisory["patched"]) or "in no version"
            wrong.append(f"{lock}: {name} {version}: {advisory['id']} ({advisory['kind']}): {advisory['title']}; mended: {safe}")
    wrong += [f"deny.toml passes over {id}, which nothing here has" for id in sorted(set(passed_over) - of_use)]
    return wrong


def check_this():
    """Tests the rules on versions with known results."""
    for version, requirement, expected in [
        ("0.11.7", ">= 0.11.7", True),
        ("0.11.6", ">= 0.11.7", False),
        ("0.9.6", "^0.9.5", True),
        ("0.10.0", "^0.9.5", False),
        ("1.9.0", "^1.2", True),
        ("2.0.0", "^1.2", False),
        ("0.0.4", "^0.0.3", False),
        ("1.2.9", "~1.2.3", True),
        ("1.3.0", "~1.2.3", False),
        ("1.2.5", "=1.2", True),
        ("1.2.5", "= 1.2.4", False),
        ("1.0.0-rc.2", "< 1.0.0", True),
        ("1.0.0-rc.10", "> 1.0.0-rc.9", True),
        ("0.5.0", ">= 0.4, < 0.6", True),
        ("0.6.0", ">= 0.4, < 0.6", False),
        ("0.6.1", "> 0.6", False),
        ("0.6.1", "<= 0.6", True),
        ("3.1.4", "3.*", True),
        ("4.0.0", "3.*", False),
        ("7.0.0", "*", True),
        ("1.2.3+build.5", "=1.2.3", True),
    ]:
        assert matches(version, requirement) == expected, (version, requirement)
    advisory = {"id": "A-1", "kind": "vulnerability", "title": "t", "patched": [">=1.2"], "unaffected": ["<1.0"]}
    hits = {version for version in ("0.9.0", "1.0.0", "1.1.9", "1.2.0") if is_hit(advisory, version)}
    assert hits == {"1.0.0", "1.1.9"}, hits
    package = {("c", "1.1.0", "Cargo.lock")}
    assert "A-1" in check(package, {"c": [advisory]}, {})[0]
    assert check(package, {"c": [advisory]}, {"A-1": "why"}) == []
    assert "nothing here" in check(package, {}, {"A-1": "why"})[0]
    try:
        exceptions('[advisories]\nignore = ["A-1"]')
    except AssertionError:
        return
    raise AssertionError("an exception without a reason was taken")


def main():
    check_this()
    found = {(name, version, lock.relative_to(ROOT)) for lock in locks() for name, version in packages(lock)}
    names = {name for name, _, _ in found}
    assert len(names) > 100, f"only {len(names)} crates were found in lock files"
    folder = os.environ.get("KVASIR_ADVISORY_DB")
    if folder:
        database = read_database(folder)
        if "--extract" in sys.argv[1:]:
            write_extract(database, names)
    else:
        assert "--extract" not in sys.argv[1:], f"of which database? {AGAIN}"
        known, database = read_extract()
        missing = sorted(names - known)
        assert not missing, f"{EXTRACT.name} was made without {', '.join(missing)}: {AGAIN}"
    wrong = check(found, database, exceptions((ROOT / "deny.toml").read_text()))
    for line in wrong:
        print(line, file=sys.stderr)
    advisories = sum(len(advisories) for advisories in database.values())
    print(f"{len(names)} crates of lock files against {advisories} advisories of {folder or EXTRACT.name}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
