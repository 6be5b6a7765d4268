"""Podman with storage, network and settings of its own, so that nothing is left on the machine."""

import json
import os
import pathlib
import resource
import subprocess

SETTINGS = """[containers]
default_ulimits = ["nofile={files}:{files}", "nproc=4096:4096"]
[engine]
# Not systemd: the test also runs where none is.
cgroup_manager = "cgroupfs"
# crun refuses hybrid cgroups.
runtime = "runc"
events_logger = "file"
[network]
network_backend = "netavark"
"""
STORAGE = """[storage]
driver = "overlay"
graphroot = "{root}/storage"
runroot = "{root}/run"
"""


class Podman:
    def __init__(self, root):
        root = pathlib.Path(root)
        root.mkdir(parents=True)
        files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 20)
        (root / "containers.conf").write_text(SETTINGS.format(files=files))
        (root / "storage.conf").write_text(STORAGE.format(root=root))
        self.env = {**os.environ, "CONTAINERS_CONF": str(root / "containers.conf"), "CONTAINERS_STORAGE_CONF": str(root / "storage.conf")}

    def __call__(self, *args, check=True, **options):
        """Runs a command and returns its stdout."""
        # A container's log comes on both.
        errors = subprocess.STDOUT if args[0] == "logs" else subprocess.PIPE
        command = ["podman", *map(str, args)]
        done = subprocess.run(command, env=self.env, stdout=subprocess.PIPE, stderr=errors, text=True, check=False, **options)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def image(self, layout, name):
        """Loads an image of an OCI layout under a name of this machine."""
        self("tag", self("pull", "--quiet", f"oci:{layout}"), name)

    def play(self, file, objects, *flags):
        """Plays objects; the text of their file is kept in `file`."""
        file.write_text("\n---\n".join(json.dumps(each, indent=1) for each in objects))
        self("kube", "play", *flags, file)

    def inspect(self, name):
        return json.loads(self("inspect", name))[0]

    def address(self, pod):
        infra = json.loads(self("pod", "inspect", pod))["InfraContainerID"]
        (network,) = self.inspect(infra)["NetworkSettings"]["Networks"].values()
        return network["IPAddress"]

    def clear(self):
        """Removes all pods, volumes and networks."""
        self("pod", "rm", "--force", "--all", "--time", "0", check=False)
        self("rm", "--force", "--all", "--time", "0", check=False)
        self("volume", "rm", "--force", "--all", check=False)
        self("network", "prune", "--force", check=False)
