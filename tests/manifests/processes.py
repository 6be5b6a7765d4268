"""Runs installations as processes of this machine: the one for development, and the Sparks' without their GPUs.

Their job makes the Secrets. The containers of their pods run with their own arguments, variables and files, the first
containers too: nodes make their keys and join by tokens of their service accounts. A request must be answered. Only
paths and ports are replaced, and of the Sparks' three coordinators one runs.
"""

import base64
import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

from api_server import ApiServer
from rendered import K8S, pod_template
from rules import config_of, created_files, environment, projected

PATIENCE = 60
KEY = "kvasir-dev"
MODEL = "smollm2-135m"
# The node of all pods.
NODE = "spark-1"


def run(manifests, binary, models):
    """Runs the installation for development. Raises if a step fails."""
    _run(manifests, binary, models, _Installation.check)


def run_sparks(manifests, binary, models):
    """Runs the Sparks' installation and deploys a model. Raises if a step fails."""
    _run(manifests, binary, models, _Installation.check_sparks)


def _run(manifests, binary, models, check):
    root = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-dev-"))
    try:
        with contextlib.ExitStack() as ends:
            check(_Installation(manifests, binary, models, root, ends))
    finally:
        shutil.rmtree(root)


class _Installation:
    def __init__(self, manifests, binary, models, root, ends):
        self.manifests, self.binary, self.root, self.ends = manifests, binary, root, ends
        self.api_server = ApiServer()
        # A smaller local model replaces the overlay's model, a download of half a gigabyte.
        for manifest in manifests:
            if manifest["kind"] == "ConfigMap" and "model" in manifest["data"]:
                manifest["data"]["model"] = MODEL
            for key in {"peers", "coordinators"} & manifest.get("data", {}).keys():
                manifest["data"][key] = manifest["data"][key].split(",")[0]
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
        self.ports = {}

    def check(self):
        self.make_secrets(self.workloads["kvasir-ca"])
        self.config_maps["kvasir-api-server-keys"] = {"keys.json": self.api_server.keys()}
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
        self.keys_stay()
        pods[2] = self.take_back(pods[0][0], pods[2][0])
        assert _status(api, body, KEY) == 200, "a request was not answered after a certificate was taken back"
        for process, _ in pods:
            process.send_signal(signal.SIGTERM)
        for process, _ in pods:
            assert process.wait(PATIENCE) == 0, f"{process.args[:2]} ended with {process.returncode}"

    def check_sparks(self):
        """Nodes are ready without a model. One that is deployed by the overlay's fleet.toml answers."""
        self.make_secrets(self.workloads["kvasir-ca"])
        self.config_maps["kvasir-api-server-keys"] = {"keys.json": self.api_server.keys()}
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        self.secrets["kvasir-api-keys"] = {"coordinator.toml": f'[[keys]]\nsha256 = "{digest}"\ntenant = "a"\nadmin = true\n'}
        pods = [self.start(self.workloads[name], 0) for name in ("kvasir-coordinator", "kvasir-worker")]
        for process, probes in pods:
            for url in probes:
                _until(f"200 from {url}", process, lambda: _status(url) == 200)
        # The model that this machine has, in place of the overlay's. All else is the overlay's.
        fleet = (K8S / "overlays/dgx-spark/fleet.toml").read_text()
        names = re.findall(r"^\[models\.([\w-]+)\]$", fleet, re.MULTILINE)
        fleet = re.sub(r"^from = .*$", f'from = "{MODEL}"', fleet, flags=re.MULTILINE)
        ops = f"127.0.0.1:{self.ports['kvasir-coordinator-0', 'ops']}"
        apply = [self.binary, "apply", "-f", "/dev/stdin", "--prune", "--ops", ops]
        for expected in (len(names), 0):
            made = subprocess.run(apply, input=fleet, check=True, capture_output=True, text=True)
            assert made.stdout.count("+ ") == expected, made.stdout
        api = f"http://127.0.0.1:{self.ports['kvasir-coordinator-0', 'http']}/v1/chat/completions"
        for name in names:
            body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
            assert _status(api, body, KEY) == 200, f"{name} did not answer"
        for process, _ in pods:
            process.send_signal(signal.SIGTERM)
        for process, _ in pods:
            assert process.wait(PATIENCE) == 0, f"{process.args[:2]} ended with {process.returncode}"

    def take_back(self, coordinator, removed):
        """Removes a worker as the guide does. A new pod of its name joins again."""
        self.until_ready(coordinator, 2)
        ops = f"127.0.0.1:{self.ports['kvasir-coordinator-0', 'ops']}"
        subprocess.run([self.binary, "nodes", "remove", "kvasir-worker-1", "--ops", ops], check=True, stdout=subprocess.DEVNULL)
        self.until_ready(coordinator, 1)
        removed.send_signal(signal.SIGTERM)
        removed.wait(PATIENCE)
        shutil.rmtree(self.root / "kvasir-worker-1")
        again = self.start(self.workloads["kvasir-worker"], 1)
        self.until_ready(coordinator, 2)
        return again

    def keys_stay(self):
        """Each pod's private key is in its own volume only."""
        keys = {}
        for file in self.root.rglob("node.key"):
            keys.setdefault(file.resolve(), file.read_bytes())
        assert len(keys) == 3, sorted(keys)
        secret = {file: data.split(b"-----")[2].replace(b"\n", b"")[20:60] for file, data in keys.items()}
        for file in [file for file in self.root.rglob("*") if file.is_file() and file.stat().st_size < 64 << 20]:
            text = file.read_bytes().replace(b"\n", b"")
            holds = [key for key, part in secret.items() if part in text and key != file.resolve()]
            assert not holds, f"{file} has the key {holds}"

    def until_ready(self, coordinator, count):
        """Waits until the coordinator reports `count` ready workers."""
        url = f"http://127.0.0.1:{self.ports['kvasir-coordinator-0', 'ops']}/admin/v1/cluster"

        def ready():
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                return [w["state"] for w in json.load(answer)["workers"]].count("ready") == count

        _until(f"{count} workers at {url}", coordinator, ready)

    def make_secrets(self, job):
        """Runs the job's steps. Of `kubectl create` only the resulting Secret or ConfigMap is recorded."""
        work = self.root / job["metadata"]["name"]
        work.mkdir()
        spec = pod_template(job)["spec"]
        for container in spec["initContainers"] + spec["containers"]:
            args = [arg.replace("/made", str(work)) for arg in container["args"]]
            if args[0] == "create":
                made = {key: pathlib.Path(file).read_bytes() for key, file in created_files(args).items()}
                known, name = (self.config_maps, args[2]) if args[1] == "configmap" else (self.secrets, args[3])
                known[name] = made
            else:
                subprocess.run([self.binary, *args], check=True, stdout=subprocess.DEVNULL)
        # Its directory was in memory.
        shutil.rmtree(work)

    def finish(self, job):
        (container,) = pod_template(job)["spec"]["containers"]
        self.run_to_the_end(job, container, "fetch", self.mounts(job, container, "fetch"))

    def run_to_the_end(self, workload, container, name, places):
        command, env, log = self.container(workload, container, name, places)
        with log:
            ended = subprocess.run(command, env=env, check=False, stdout=log, stderr=log, timeout=PATIENCE)
        assert ended.returncode == 0, f"{command}: {pathlib.Path(log.name).read_text()}"

    def start(self, workload, ordinal):
        """Runs a pod's first containers and starts its last. Returns its process and the URLs of its probes."""
        name = f"{workload['metadata']['name']}-{ordinal}"
        spec = pod_template(workload)["spec"]
        (container,) = spec["containers"]
        for first in spec["initContainers"]:
            self.run_to_the_end(workload, first, name, self.mounts(workload, first, name))
        command, env, log = self.container(workload, container, name, self.mounts(workload, container, name))
        process = self.ends.enter_context(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        self.ends.callback(process.kill)
        kinds = ("startupProbe", "livenessProbe", "readinessProbe")
        paths = [container[kind]["httpGet"]["path"] for kind in kinds]
        return process, [f"http://127.0.0.1:{self.ports[name, 'ops']}{path}" for path in paths]

    def container(self, workload, container, name, places):
        """Command, environment and log of a workload's container in the pod `name`."""
        env = environment(container, config_of(self.manifests, workload), name)
        here = {variable: self.here(value, places, variable, name) for variable, value in env.items()}
        args = container["args"]
        for variable, value in env.items():
            args = [arg.replace(f"$({variable})", value) for arg in args]
        flags = [arg.partition("=") for arg in args]
        args = [flag + equals + self.here(value, places, None, name) if equals else self.here(flag, places, None, name) for flag, equals, value in flags]
        log = self.ends.enter_context(open(self.root / f"{name}.log", "ab"))
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
            elif "hostPath" in volume and mount["name"] in ("models", "downloads"):
                place = self.volume / mount["name"]
            else:
                place.mkdir(parents=True, exist_ok=True)
                self.fill(place, volume, workload, name)
            above = [path for path in places if mount["mountPath"].startswith(path + "/")]
            if above:
                (places[above[0]] / mount["mountPath"].removeprefix(above[0] + "/")).symlink_to(place)
            places[mount["mountPath"]] = place
        return places

    def fill(self, place, volume, workload, pod):
        """Writes the files that the kubelet would put into the volume."""
        sources = [(self.config_maps, s) for s in [volume.get("configMap")] if s]
        sources += [(self.secrets, {**s, "name": s["secretName"]}) for s in [volume.get("secret")] if s]
        for known, source in sources:
            data = known.get(source["name"])
            assert data or source.get("optional"), f"{place}: there is no {source['name']}"
            items = source.get("items") or [{"key": key, "path": key} for key in data or {}]
            for item in items if data else []:
                value = data[item["key"]]
                (place / item["path"]).write_bytes(value if isinstance(value, bytes) else value.encode())
        for token in [s["serviceAccountToken"] for s in projected(volume) if "serviceAccountToken" in s]:
            account = pod_template(workload)["spec"]["serviceAccountName"]
            namespace = workload["metadata"]["namespace"]
            signed = self.api_server.token(namespace, account, pod, NODE, token["audience"])
            (place / token["path"]).write_text(signed)

    def here(self, value, places, variable, name):
        if value.startswith("/"):
            best = max((path for path in places if value.startswith(path)), key=len)
            return str(places[best]) + value.removeprefix(best)
        if variable in ("KVASIR_HTTP", "KVASIR_OPS", "KVASIR_QUIC"):
            port = self.port(name, variable.removeprefix("KVASIR_").lower())
            return f"127.0.0.1:{port}"
        service = r"kvasir-coordinator-0\.kvasir-coordinators(\.kvasir\.svc)?:7000"
        return re.sub(service, f"127.0.0.1:{self.port('kvasir-coordinator-0', 'quic')}", value)

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
