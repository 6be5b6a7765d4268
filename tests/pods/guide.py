"""Runs the commands of docs/guides/containers.md for three nodes on this machine."""

import os
import pathlib
import re
import shutil
import subprocess
import time

GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs/guides/containers.md"
NETWORK = "kvasir-guide"
MODEL = "smollm2-135m"
PATIENCE = 90


class Node:
    def __init__(self, number, podman, work, image):
        self.name, self.address = f"node-{number}", f"10.0.0.{number}"
        self.podman, self.image = podman, image
        self.directory = work / self.name
        self.directory.mkdir(parents=True)
        # The host's name, for `$(hostname)`.
        (self.directory / "bin").mkdir()
        (self.directory / "bin/hostname").write_text(f"#!/bin/sh\necho {self.name}\n")
        os.chmod(self.directory / "bin/hostname", 0o755)

    def run(self, commands, token):
        """Runs a block of the guide as root's shell of this node, and returns its output."""
        state = self.directory / "var/lib/kvasir"
        for guides, here in (
            ("--network host", f"--network {NETWORK}:ip={self.address}"),
            ("/var/lib/kvasir:/var/lib/kvasir", f"{state}:/var/lib/kvasir"),
            ("-m 700 /var/lib/kvasir", f"-m 700 {state}"),
            ("> /var/lib/kvasir/keys.toml", f"> {state}/keys.toml"),
            ("chmod 644 /var/lib/kvasir/", f"chmod 644 {state}/"),
            ("--name kvasir-", f"--name {self.name}-kvasir-"),
            ("podman exec kvasir-", f"podman exec {self.name}-kvasir-"),
            ("kvasir-join-...", token),
        ):
            commands = commands.replace(guides, here)
        # Two containers of a node share its address in the guide; here the worker of the first node gets another one.
        if "-kvasir-worker" in commands or " join " in commands:
            commands = commands.replace(f"ip={self.address} ", f"ip={self.address.replace('.0.0.', '.0.1.')} ")
        env = {**self.podman.env, "IMAGE": self.image, "PATH": f"{self.directory}/bin:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-euo", "pipefail"], input=commands, cwd=self.directory, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{self.name}: {commands}: {done.stderr} {done.stdout}"
        return done.stdout


def run(podman, work, image, catalog):
    # The gateway has the first address if none is named.
    podman("network", "create", "--subnet", "10.0.0.0/23", "--gateway", "10.0.1.254", NETWORK)
    nodes = [Node(number, podman, work, image) for number in (1, 2, 3)]
    token = ""
    for kind, commands in re.findall(r"^```containers-(\w+)\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL):
        for node in nodes if kind == "node" else nodes[:1]:
            output = _until_it_works(node, commands, token) if kind != "node" else node.run(commands, token)
            if kind == "token":
                token = output.strip()
            models = node.directory / "var/lib/kvasir/models"
            if not models.exists():
                shutil.copytree(catalog / MODEL, models / MODEL, copy_function=shutil.copyfile)
                for file in [models, *models.rglob("*")]:
                    os.chown(file, 65532, 65532)
    deadline = time.monotonic() + PATIENCE
    while True:
        listed = nodes[0].run("podman exec kvasir-coordinator /usr/local/bin/kvasir nodes list --ops 127.0.0.1:9090", token)
        if re.findall(r"^(node-\d) +worker +joined +yes", listed, re.MULTILINE) == [node.name for node in nodes]:
            break
        assert time.monotonic() < deadline, listed
        time.sleep(0.5)
    keys = [(node.directory / "var/lib/kvasir/identity/node.key").read_bytes() for node in nodes]
    assert len(set(keys)) == 3


def _until_it_works(node, commands, token):
    """An operator repeats a command that asks a node which has not started yet."""
    deadline = time.monotonic() + PATIENCE
    repeatable = all(line.startswith(("podman exec", "curl")) for line in commands.strip().splitlines())
    while True:
        try:
            return node.run(commands, token)
        except AssertionError:
            if not repeatable or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
