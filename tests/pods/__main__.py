"""Runs rendered overlays as pods of podman: `python tests/pods WORK LAYOUT MODELS [OVERLAY|guide..]` (root).

LAYOUT is an OCI layout of the image `cpu` with its tag, MODELS has the file of smollm2-135m. Each overlay is installed
from nothing, answers, rolls and drains under load, survives SIGKILL of a coordinator and of a worker, and keeps its
volumes. What podman does not know of a manifest is in convert.py.
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
import sys
import threading
import time
import urllib.error
import urllib.request

import convert
import guide
import podman as podmen

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "manifests"))
import rendered as manifests_of  # noqa: E402
from api_server import ApiServer  # noqa: E402
from rendered import pod_template  # noqa: E402
from rules import created_files  # noqa: E402

IMAGE = "localhost/kvasir:pods"
NETWORK = "kvasir-pods"
# The Sparks' data plane: a worker binds the address that it has in this network.
SUBNET = "192.168.100.0/24"
MODEL = "smollm2-135m"
KEY = "kvasir-pods"
PATIENCE = 90
# A coordinator and a worker end by themselves well within this; podman kills them after it.
GRACE = 120
# Overlay -> further directories that are applied with it, and its nodes.
OVERLAYS = {
    "dev": ((), ("node-1",)),
    "cpu": (("own-ca",), ("node-1", "node-2", "node-3")),
    "dgx-spark": (("own-ca",), ("spark-1", "spark-2", "spark-3")),
}


class Installation:
    def __init__(self, overlay, podman, work, models):
        self.podman, self.work = podman, work / overlay
        self.host = convert.Host(self.work)
        more, self.nodes = OVERLAYS[overlay]
        self.overlay = overlay
        everything = manifests_of.all_of_them()
        self.manifests = [m for name in (overlay, *more) for m in everything[name]]
        for manifest in self.manifests:
            if manifest["kind"] == "ConfigMap" and "model" in manifest["data"]:
                manifest["data"]["model"] = MODEL
        self.objects = convert.Objects(self.manifests)
        self.workloads = {}
        for manifest in self.manifests:
            if pod_template(manifest):
                self.workloads[manifest["kind"], manifest["metadata"]["name"]] = manifest
        self.api_server, self.image = ApiServer(), IMAGE
        self.catalog = models
        self.addresses, self.in_service = {}, []
        # The coordinator that each client is asking, changed under the lock as `in_service` is.
        self.asked, self.lock = {}, threading.Lock()

    # Options of convert.pod.
    def token(self, *claims):
        return self.api_server.token(*claims)

    def rename(self, text):
        return re.sub(r"(kvasir-coordinator-\d)\.kvasir-coordinators(\.kvasir\.svc)?", r"\1", text)

    def address(self, node):
        return "0.0.0.0"

    def path(self, node, path):
        return self.host.owned(f"nodes/{node}{path}")

    def models(self, node):
        """The volume `kvasir-models` with the model that a fetch Job would have written."""
        volume = self.host.owned(f"nodes/{node}/var/lib/kvasir" if self.overlay == "dgx-spark" else "volume")
        for folder in ("models", "downloads"):
            self.host.owned(str((volume / folder).relative_to(self.work)))
        if not any((volume / "models").iterdir()):
            shutil.copytree(self.catalog / MODEL, volume / "models" / MODEL, copy_function=shutil.copyfile)
        return volume

    def make_authority(self):
        """Runs the Job of own-ca. Its `kubectl create` writes into this program's objects."""
        job = self.workloads["Job", "kvasir-ca"]
        space, made = job["metadata"]["namespace"], self.host.owned("made")
        spec = pod_template(job)["spec"]
        for container in spec["initContainers"] + spec["containers"]:
            if container["args"][0] != "create":
                limits = ["--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", f"--user={convert.USER}:{convert.USER}"]
                self.podman("run", "--rm", *limits, "--network=none", f"--volume={made}:/made", IMAGE, *container["args"])
                continue
            args = [arg.replace("/made", str(made)) for arg in container["args"]]
            files = {key: pathlib.Path(file).read_bytes() for key, file in created_files(args).items()}
            kind, name = ("configMap", args[2]) if args[1] == "configmap" else ("secret", args[3])
            self.objects.add(kind, space, name, files)
        shutil.rmtree(made)
        # By hand, as the guide says.
        self.objects.add("configMap", "kvasir", "kvasir-api-server-keys", {"keys.json": self.api_server.keys().encode()})
        roots = self.objects.get("configMap", "kvasir", "kvasir-roots")
        self.objects.add("configMap", "kvasir-spark", "kvasir-roots", roots)
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        keys = f'[[keys]]\nsha256 = "{digest}"\ntenant = "team-a"\nadmin = true\n'
        self.objects.add("secret", "kvasir", "kvasir-api-keys", {"coordinator.toml": keys.encode()})

    def pods(self, component):
        """(workload, pod's name, node) of a component: `coordinator` or `worker`."""
        for (kind, name), workload in self.workloads.items():
            if name != f"kvasir-{component}":
                continue
            if kind == "DaemonSet":
                yield from ((workload, f"{name}-{node}", node) for node in self.nodes)
            else:
                for ordinal in range(workload["spec"]["replicas"]):
                    yield workload, f"{name}-{ordinal}", self.nodes[ordinal % len(self.nodes)]

    def start(self, workload, name, node):
        claims, pod = convert.pod(workload, name, node, self.host, self.objects, self)
        known = self.podman("volume", "ls", "--format", "{{.Name}}").splitlines()
        new = [claim for claim in claims if claim["metadata"]["name"] not in known]
        if new:
            self.podman.play(self.work / f"{name}-claims.yaml", new)
        try:
            self.podman.play(self.work / f"{name}.yaml", [pod], "--network", NETWORK)
        except AssertionError as error:
            logs = [self.podman("logs", f"{name}-{c['name']}", check=False)[-600:] for c in pod["spec"]["initContainers"]]
            raise AssertionError(f"{error}: {logs}") from error
        self.addresses[name] = self.podman.address(name)

    def container(self, name):
        return f"{name}-{'coordinator' if 'coordinator' in name else 'worker'}"

    def pid(self, name):
        return self.podman.inspect(self.container(name))["State"]["Pid"]

    def probe(self, name, path):
        port = 9090 if "coordinator" in name else 9091
        return status(f"http://{self.addresses[name]}:{port}{path}")

    def until_ready(self, name):
        until(f"{name} is ready", lambda: self.probe(name, "/readyz") == 200, lambda: self.podman("logs", "--tail", "5", self.container(name), check=False))

    def ask(self, coordinator):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
        return status(f"http://{self.addresses[coordinator]}:8080/v1/chat/completions", body, KEY)

    def kvasir(self, coordinator, *args):
        return self.podman("exec", self.container(coordinator), "/usr/local/bin/kvasir", *args, "--ops", "127.0.0.1:9090")

    def certificate(self, name):
        return self.identity(name).joinpath("node.crt").read_bytes()

    def identity(self, name):
        """The identity directory of a running pod, as this machine sees it."""
        return pathlib.Path(f"/proc/{self.pid(name)}/root/var/lib/kvasir/identity")


def install(it):
    it.make_authority()
    for pod in it.pods("coordinator"):
        it.start(*pod)
    for pod in it.pods("worker"):
        if it.overlay == "dgx-spark":
            # The fetch Job's part.
            it.models(pod[2])
        it.start(*pod)
    names = [name for component in ("coordinator", "worker") for _, name, _ in it.pods(component)]
    for name in names:
        it.until_ready(name)
        for path in ("/livez", "/startupz"):
            assert it.probe(name, path) == 200, f"{name}: {path}"
    it.in_service = [name for name in names if "coordinator" in name]
    if it.overlay == "dgx-spark":
        # Nodes are ready without a model. Requests wait until one of these replicas is.
        replicas = f"{len(it.nodes)}:{len(it.nodes)}"
        it.kvasir(it.in_service[0], "models", "deploy", MODEL, "--from", MODEL, "--replicas", replicas)
    for coordinator in it.in_service:
        assert it.ask(coordinator) == 200, coordinator
    return names


def pods_are_restricted(it, names):
    for name in names:
        state = dict(line.split(":\t", 1) for line in pathlib.Path(f"/proc/{it.pid(name)}/status").read_text().splitlines() if ":\t" in line)
        assert state["Uid"].split() == [str(convert.USER)] * 4, f"{name}: {state['Uid']}"
        assert all(int(state[caps], 16) == 0 for caps in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")), name
        assert (state["NoNewPrivs"], state["Seccomp"]) == ("1", "2"), name
        mounts = [line.split() for line in pathlib.Path(f"/proc/{it.pid(name)}/mountinfo").read_text().splitlines()]
        (root,) = [mount for mount in mounts if mount[4] == "/"]
        assert "ro" in root[5].split(","), f"{name}: the root is writable"


def keys_stay_on_their_nodes(it, names):
    """A node's private key is in its own volume, mode 0600, and in nothing that a kubelet gave to any pod."""
    parts = {}
    for name in names:
        file = it.identity(name) / "node.key"
        assert (file.stat().st_mode & 0o777, file.stat().st_uid) == (0o600, convert.USER), f"{name}: {file.stat()}"
        parts[name] = file.read_bytes().split(b"-----")[2].replace(b"\n", b"")[20:60]
    assert len(set(parts.values())) == len(names)
    for file in [file for file in (it.work / "kubelet").rglob("*") if file.is_file()]:
        text = file.read_bytes().replace(b"\n", b"")
        assert not [name for name, part in parts.items() if part in text], file
    listed = json.loads(it.kvasir(it.in_service[0], "nodes", "list", "--json"))["nodes"]
    joined = {node["id"] for node in listed if node["state"] == "joined" and node["role"] == "worker"}
    workers = [node if it.overlay == "dgx-spark" else name for _, name, node in it.pods("worker")]
    assert joined == set(workers), listed


@contextlib.contextmanager
def load(it):
    """Requests from two clients at the coordinators in service. None may fail."""
    ended, answers = threading.Event(), []

    def client(number):
        turn = number
        while not ended.is_set():
            with it.lock:
                coordinator = it.in_service[turn % len(it.in_service)]
                it.asked[number] = coordinator
            answers.append((coordinator, it.ask(coordinator)))
            turn += 1
        it.asked.pop(number, None)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(2)]
    for each in clients:
        each.start()
    try:
        yield answers
    finally:
        ended.set()
        for each in clients:
            each.join()
    wrong = [answer for answer in answers if answer[1] != 200]
    assert not wrong and len(answers) > 5, f"{len(wrong)} of {len(answers)}: {wrong[:5]}"


def roll(it, workload, name, node, lose_volume=False):
    """Stops a pod as a kubelet does and starts its next one."""
    coordinator = "coordinator" in name
    alone = coordinator and len(it.in_service) == 1
    if coordinator and not alone:
        # What preStop is for: the Service sends no new request there when the coordinator is stopped.
        with it.lock:
            it.in_service.remove(name)
        until(f"no new request goes to {name}", lambda: name not in it.asked.values())
    it.podman("stop", "--time", GRACE, it.container(name))
    code = it.podman.inspect(it.container(name))["State"]["ExitCode"]
    assert code == 0, f"{name} ended with {code}: {it.podman('logs', '--tail', '5', it.container(name))}"
    it.podman("pod", "rm", "--force", name)
    if lose_volume:
        it.podman("volume", "rm", f"home-{name}")
    it.start(workload, name, node)
    it.until_ready(name)
    if coordinator and not alone:
        with it.lock:
            it.in_service.append(name)


def pods_roll_and_drain(it):
    before = {name: it.certificate(name) for component in ("coordinator", "worker") for _, name, _ in it.pods(component)}
    with load(it):
        for pod in it.pods("worker"):
            roll(it, *pod)
        if len(it.in_service) > 1:
            for pod in it.pods("coordinator"):
                roll(it, *pod)
    after = {name: it.certificate(name) for name in before}
    assert after == before, "a pod with its volume joined again"


def pods_survive_sigkill(it):
    made = json.loads(it.kvasir(it.in_service[0], "keys", "create", "--tenant", "team-b", "--json"))
    victim = next(name for _, name, _ in it.pods("worker"))
    certificate, pid = it.certificate(victim), it.pid(victim)
    with load(it) as answers:
        seen = len(answers)
        os.kill(pid, signal.SIGKILL)
        until("podman starts it again", lambda: it.pid(victim) not in (0, pid))
        it.until_ready(victim)
        until("requests go on", lambda: len(answers) > seen + 6)
    assert it.certificate(victim) == certificate
    victim = it.in_service[-1]
    certificate, pid = it.certificate(victim), it.pid(victim)
    os.kill(pid, signal.SIGKILL)
    until("podman starts it again", lambda: it.pid(victim) not in (0, pid))
    it.until_ready(victim)
    assert it.certificate(victim) == certificate and it.ask(victim) == 200
    listed = json.loads(it.kvasir(victim, "keys", "list", "--json"))["keys"]
    assert made["id"] in [key["id"] for key in listed], "the coordinator has lost its volume"


def a_worker_that_lost_its_volume_joins_again(it):
    pod = list(it.pods("worker"))[-1]
    before = it.certificate(pod[1])
    if it.overlay == "dgx-spark":
        shutil.rmtree(it.path(pod[2], "/var/lib/kvasir/home") / "identity")
    with load(it):
        roll(it, *pod, lose_volume=it.overlay != "dgx-spark")
    assert it.certificate(pod[1]) != before
    nodes = json.loads(it.kvasir(it.in_service[0], "nodes", "list", "--json"))
    assert nodes["revoked"] >= 1, nodes


def a_further_node_restarts_no_other(it, names):
    started = {name: it.podman.inspect(it.container(name))["State"]["StartedAt"] for name in names}
    if it.overlay == "dgx-spark":
        it.nodes = (*it.nodes, "spark-4")
        # The fetch Job's part.
        it.models("spark-4")
    else:
        it.workloads["StatefulSet", "kvasir-worker"]["spec"]["replicas"] += 1
    pod = list(it.pods("worker"))[-1]
    assert pod[1] not in names
    it.start(*pod)
    it.until_ready(pod[1])
    assert {name: it.podman.inspect(it.container(name))["State"]["StartedAt"] for name in names} == started


def until(what, probe, log=None):
    deadline = time.monotonic() + PATIENCE
    while not probe():
        assert time.monotonic() < deadline, f"{what}: not in {PATIENCE} s: {log() if log else ''}"
        time.sleep(0.1)


def status(url, body=None, key=None):
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return str(error)


def main(work, layout, models, *overlays):
    work = pathlib.Path(work)
    shutil.rmtree(work, ignore_errors=True)
    podman = podmen.Podman(work / "podman")
    try:
        podman.image(layout, IMAGE)
        if not overlays or "guide" in overlays:
            guide.run(podman, work / "guide", IMAGE, pathlib.Path(models))
            print("guide: three nodes by docs/guides/containers.md ... ok", flush=True)
            podman.clear()
        for overlay in [name for name in OVERLAYS if not overlays or name in overlays]:
            started = time.monotonic()
            podman("network", "create", "--subnet", SUBNET, NETWORK)
            it = Installation(overlay, podman, work, pathlib.Path(models))
            names = install(it)
            print(f"{overlay}: {len(names)} pods answer after {time.monotonic() - started:.0f} s", flush=True)
            for test in (pods_are_restricted, keys_stay_on_their_nodes):
                test(it, names)
                print(f"{overlay}: {test.__name__} ... ok", flush=True)
            for test in (pods_roll_and_drain, pods_survive_sigkill, a_worker_that_lost_its_volume_joins_again):
                test(it)
                print(f"{overlay}: {test.__name__} ... ok ({time.monotonic() - started:.0f} s)", flush=True)
            a_further_node_restarts_no_other(it, names)
            print(f"{overlay}: a_further_node_restarts_no_other ... ok ({time.monotonic() - started:.0f} s)", flush=True)
            podman.clear()
    finally:
        podman.clear()
        podman("system", "reset", "--force", check=False)
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
