#!/usr/bin/env python3
"""Writes a CycloneDX 1.5 bill of materials of Cargo.lock: every crate, and whether it is in the binary.

`scope` is `required` for what the `kvasir` command is linked from, `excluded` for what only tests, benchmarks and build
scripts use. Without --target both architectures count. --debian adds what else is in an image: glibc, linked or copied.
Reads the lock and `cargo metadata`; asks no network."""

import argparse
import json
import os
import subprocess
import sys
import tomllib
import urllib.parse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def metadata(target):
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    if target:
        command += ["--filter-platform", target]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def linked(tree):
    """Ids of all packages that normal dependencies lead to from the command."""
    nodes = {node["id"]: node for node in tree["resolve"]["nodes"]}
    found, left = set(), [tree["resolve"]["root"]]
    while left:
        package = left.pop()
        if package in found:
            continue
        found.add(package)
        for dependency in nodes[package]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                left.append(dependency["pkg"])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="a Rust target; by default all that the lock has")
    parser.add_argument("--lock", type=Path, default=ROOT / "Cargo.lock")
    parser.add_argument("--debian", action="append", default=[], metavar="PACKAGE=VERSION")
    parser.add_argument("--arch", default="all", help="Debian's name of the architecture of these packages")
    arguments = parser.parse_args()
    tree = metadata(arguments.target)
    required = linked(tree)
    licences, scopes = {}, {}
    for package in tree["packages"]:
        key = (package["name"], package["version"])
        licences[key] = package["license"]
        scopes[key] = "required" if package["id"] in required else "excluded"
    components = []
    with open(arguments.lock, "rb") as file:
        lock = tomllib.load(file)
    for package in lock["package"]:
        key = (package["name"], package["version"])
        component = {
            "type": "library",
            "bom-ref": f"pkg:cargo/{package['name']}@{package['version']}",
            "name": package["name"],
            "version": package["version"],
            "scope": scopes.get(key, "excluded"),
            "purl": f"pkg:cargo/{package['name']}@{package['version']}",
        }
        if "checksum" in package:
            component["hashes"] = [{"alg": "SHA-256", "content": package["checksum"]}]
        if licences.get(key):
            component["licenses"] = [{"expression": licences[key].replace("/", " OR ")}]
        components.append(component)
    for package in arguments.debian:
        name, version = package.split("=", 1)
        purl = f"pkg:deb/debian/{name}@{urllib.parse.quote(version)}?arch={arguments.arch}"
        components.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "scope": "required", "purl": purl})
    root = next(p for p in tree["packages"] if p["id"] == tree["resolve"]["root"])
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "application", "name": root["name"], "version": root["version"]},
        },
        "components": components,
    }
    json.dump(bom, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
