"""Runs the development installation as processes of this machine.

Its job makes the Secrets. The containers of its pods run with their own arguments, variables and files. A
request must be answered. Only paths and ports are replaced.
"""

import base64
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

from rendered import pod_template
from rules import REVOKED, config_of, environment, projected, secret_files

PATIENCE = 60
KEY = "kvasir-dev"
MODEL = "smollm2-135m"


def run(manifests, issue, binary, models):
    """Raises if a step fails. `issue` has the Job that issues one more identity."""
    root = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-dev-"))
    try:
        with contextlib.ExitStack() as ends:
            _Installation(manifests, issue, binary, models, root, ends).check()
    finally:
        shutil.rmtree(root)


class _Installation:
    def __init__(self, manifests, issue, binary, models, root, ends):
        self.manifests, self.binary, self.root, self.ends = manifests, binary, root, ends
        (self.issue,) = [m for m in issue if m["kind"] == "Job"]
        # A smaller local model replaces the overlay's model, a download of half a gigabyte.
        for manifest in manifests:
            if manifest["kind"] == "ConfigMap":
                manifest["data"]["model"] = MODEL
        # Files that the fetch job would have written.
        self.volume = root / "volume"
        (self.volume / "downloads").mkdir(parents=True)
        (self.volume / "models").symlink_to(models)
        self.workloads = {m["metadata"]["name"]: m for m in manifests if pod_template(m)}
        self.secrets = {
            m["metadata"]["name"]: {key: base64.b64decode(value) for key, value in m["data"].items()}
            for m in manifests
            if m["kind"] == "Secret"
        }
        self.config_maps = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] == "ConfigMap"}
        # Directories that the kubelet fills, with their volumes.
        self.mounted = []
        self.ports = {}

    def check(self):
        self.make_secrets(self.workloads["kvasir-ca"])
        self.finish(self.workloads["kvasir-fetch"])
        pods = [self.start(self.workloads["kvasir-coordinator"], 0)]
        pods += [self.start(self.workloads["kvasir-worker"], ordinal) for ordinal in (0, 1)]
        for process, probes in pods:
            for url in probes:
                _until(f"200 from {url}", process, lambda: _status(url) == 200)
        api = f"http://127.0.0.1:{self.ports['kvasir-coordinator-0', 'http']}/v1/chat/completions"
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        assert _status(api, body) == 401, "a request without a key was let in"
        assert _status(api, body, KEY) == 200, "a request with the key of the overlay was not answered"
        self.take_back(pods[0][0], "kvasir-worker-1")
        assert _status(api, body, KEY) == 200, "a request was not answered after a certificate was taken back"
        for process, _ in pods:
            process.send_signal(signal.SIGTERM)
        for process, _ in pods:
            assert process.wait(PATIENCE) == 0, f"{process.args[:2]} ended with {process.returncode}"

    def take_back(self, coordinator, node):
        """Revokes a worker's certificate as the guide does, with files from Secrets. Then the Job issues
        another one.
        """
        self.until_ready(coordinator, 2)
        authority = self.root / "revoking"
        self.write_authority(authority)
        (self.root / "node.crt").write_bytes(self.secrets[f"{node}-identity"]["tls.crt"])
        revoke = ["ca", "revoke", "--dir", authority, "--certificate", self.root / "node.crt"]
        subprocess.run([self.binary, *revoke], check=True, stdout=subprocess.DEVNULL)
        self.config_maps[REVOKED] = {"ca.crl": (authority / "ca.crl").read_text()}
        self.fill()
        self.until_ready(coordinator, 1)
        # The authority's Secret is mounted, and a job cannot write to it.
        mounted = self.root / "mounted-authority"
        self.write_authority(mounted)
        before = {file.name: file.read_bytes() for file in mounted.iterdir()}
        del self.secrets[f"{node}-identity"]
        self.make_secrets(self.issue, {"/etc/kvasir/ca": mounted, "kvasir-worker-4": node})
        assert {file.name: file.read_bytes() for file in mounted.iterdir()} == before, "the job wrote to its Secret"
        self.fill()
        self.until_ready(coordinator, 2)

    def write_authority(self, directory):
        directory.mkdir()
        for key, value in self.secrets["kvasir-ca"].items():
            (directory / key).write_bytes(value)

    def until_ready(self, coordinator, count):
        """Waits until the coordinator reports `count` ready workers."""
        url = f"http://127.0.0.1:{self.ports['kvasir-coordinator-0', 'ops']}/admin/v1/cluster"

        def ready():
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                return [w["state"] for w in json.load(answer)["workers"]].count("ready") == count

        _until(f"{count} workers at {url}", coordinator, ready)

    def make_secrets(self, job, places=None):
        """Runs the job's steps. Of `kubectl create secret` only the resulting Secret is recorded."""
        work = self.root / job["metadata"]["name"]
        work.mkdir()
        spec = pod_template(job)["spec"]
        for container in spec["initContainers"] + spec["containers"]:
            args = container["args"]
            for there, here in {"/made": work, **(places or {})}.items():
                args = [arg.replace(there, str(here)) for arg in args]
            if args[:3] == ["create", "secret", "generic"]:
                files = secret_files(args)
                self.secrets[args[3]] = {key: pathlib.Path(file).read_bytes() for key, file in files.items()}
            else:
                subprocess.run([self.binary, *args], check=True, stdout=subprocess.DEVNULL)

    def finish(self, job):
        command, env, log = self.container(job, "fetch")
        with log:
            subprocess.run(command, env=env, check=True, stdout=log, stderr=log, timeout=PATIENCE)

    def start(self, workload, ordinal):
        """Starts a pod's process. Returns it and the URLs of its probes."""
        name = f"{workload['metadata']['name']}-{ordinal}"
        command, env, log = self.container(workload, name)
        process = self.ends.enter_context(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        self.ends.callback(process.kill)
        (container,) = pod_template(workload)["spec"]["containers"]
        kinds = ("startupProbe", "livenessProbe", "readinessProbe")
        paths = [container[kind]["httpGet"]["path"] for kind in kinds]
        return process, [f"http://127.0.0.1:{self.ports[name, 'ops']}{path}" for path in paths]

    def container(self, workload, name):
        """Command, environment and log of a workload's container in the pod `name`."""
        spec = pod_template(workload)["spec"]
        (container,) = spec["containers"]
        places = self.mounts(workload, container, name)
        env = environment(container, config_of(self.manifests, workload), name)
        here = {variable: self.here(value, places, variable, name) for variable, value in env.items()}
        args = [self.here(arg, places, None, name) for arg in container["args"]]
        for variable, value in env.items():
            args = [arg.replace(f"$({variable})", value) for arg in args]
        log = self.ends.enter_context(open(self.root / f"{name}.log", "wb"))
        return [self.binary, *args], {"PATH": os.environ["PATH"], **here}, log

    def mounts(self, workload, container, name):
        """The directory of each mount path, with the files that the kubelet would put there."""
        volumes = {v["name"]: v for v in pod_template(workload)["spec"].get("volumes", [])}
        places = {}
        for mount in sorted(container["volumeMounts"], key=lambda mount: mount["mountPath"]):
            volume = volumes.get(mount["name"], {})
            place = self.root / name / mount["name"]
            if volume.get("persistentVolumeClaim", {}).get("claimName") == "kvasir-models":
                place = self.volume / mount["subPath"]
            else:
                place.mkdir(parents=True)
                self.mounted.append((place, volume))
                self.fill_one(place, volume)
            above = [path for path in places if mount["mountPath"].startswith(path + "/")]
            if above:
                (places[above[0]] / mount["mountPath"].removeprefix(above[0] + "/")).symlink_to(place)
            places[mount["mountPath"]] = place
        return places

    def fill(self):
        """Updates the pods' directories from the current Secrets and ConfigMaps."""
        for place, volume in self.mounted:
            self.fill_one(place, volume)

    def fill_one(self, place, volume):
        sources = [(self.secrets, s["secret"]) for s in projected(volume) if "secret" in s]
        sources += [(self.config_maps, s["configMap"]) for s in projected(volume) if "configMap" in s]
        sources += [(self.secrets, {**s, "name": s["secretName"]}) for s in [volume.get("secret")] if s]
        for known, source in sources:
            data = known.get(source["name"])
            assert data or source.get("optional"), f"{place}: there is no {source['name']}"
            items = source.get("items") or [{"key": key, "path": key} for key in data or {}]
            for item in items if data else []:
                value = data[item["key"]]
                file = place / item["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                new = file.with_name(file.name + ".new")
                new.write_bytes(value if isinstance(value, bytes) else value.encode())
                new.rename(file)

    def here(self, value, places, variable, name):
        if value.startswith("/"):
            best = max((path for path in places if value.startswith(path)), key=len)
            return str(places[best]) + value.removeprefix(best)
        if variable in ("KVASIR_HTTP", "KVASIR_OPS", "KVASIR_QUIC"):
            port = self.port(name, variable.removeprefix("KVASIR_").lower())
            return f"127.0.0.1:{port}"
        service = "kvasir-coordinator-0.kvasir-coordinators:7000"
        return value.replace(service, f"127.0.0.1:{self.port('kvasir-coordinator-0', 'quic')}")

    def port(self, name, what):
        """A free port, the same on each call."""
        if (name, what) not in self.ports:
            kind = socket.SOCK_DGRAM if what == "quic" else socket.SOCK_STREAM
            with socket.socket(socket.AF_INET, kind) as free:
                free.bind(("127.0.0.1", 0))
                self.ports[name, what] = free.getsockname()[1]
        return self.ports[name, what]


def _until(what, process, probe):
    deadline = time.monotonic() + PATIENCE
    while not probe():
        assert process.poll() is None, f"waiting for {what}: {process.args[:2]} ended with {process.returncode}"
        assert time.monotonic() < deadline, f"no {what} in {PATIENCE} s"
        time.sleep(0.05)


def _status(url, body=None, key=None):
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
