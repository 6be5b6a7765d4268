"""Rules between the manifests of a directory, and between manifests and the binary. Each function is one
test.
"""

import itertools
import json
import os
import re
import tomllib

import kubernetes_validate

import binary
from policies import matches
from rendered import ROOT, containers, pod_template, title, with_replicas as rendered_with_replicas

# The oldest version with types in `typed`, and the newest version with schemas in the pinned wheel.
VERSIONS = ("1.33", "1.37")
if os.environ.get("KVASIR_KUBERNETES") == "newest":
    VERSIONS = (".".join(kubernetes_validate.latest_version().split(".")[:2]),)
# API groups of the cluster's extensions, which kinds.py checks.
CUSTOM = ("cert-manager.io", "gateway.networking.k8s.io", "inference.networking.k8s.io", "keda.sh", "monitoring.coreos.com")
# Directories that are installed together in one namespace, with all that can be applied on top.
INSTALLATIONS = {
    "dev": ["dev"],
    "cpu": ["cpu", "own-ca", "fetch", "monitoring", "gateway", "keda"],
    "cpu with cert-manager": ["cpu", "cert-manager", "fetch", "monitoring"],
    "dgx-spark": ["dgx-spark", "dgx-spark/fetch", "own-ca", "monitoring", "gateway"],
    "vllm": ["vllm", "vllm/fetch", "own-ca", "monitoring", "gateway"],
}
# Objects that the operator makes by the guide.
BY_HAND = {
    ("Secret", "kvasir", "kvasir-api-keys"),
    ("Secret", "kvasir", "kvasir-cluster-key"),
    ("ConfigMap", "kvasir", "kvasir-roots"),
    ("ConfigMap", "kvasir-spark", "kvasir-roots"),
}
# Containers with an LLM server of another project, which the pod's worker wraps.
ENGINES = ("vllm",)


def installed(rendered, installation):
    """All manifests of an installation, each object once."""
    objects = {}
    for name in INSTALLATIONS[installation]:
        for manifest in rendered[name]:
            objects[manifest["apiVersion"], title(manifest)] = manifest
    return list(objects.values())


def namespaces(rendered):
    """Labels of all rendered namespaces, by name."""
    found = [m for manifests in rendered.values() for m in manifests if m["kind"] == "Namespace"]
    return {m["metadata"]["name"]: m["metadata"].get("labels", {}) for m in found}


def workloads(manifests):
    for manifest in manifests:
        pod = pod_template(manifest)
        if pod:
            yield manifest, pod


def every_directory_renders_alone(rendered):
    assert len(rendered) >= 15, sorted(rendered)
    for name, manifests in rendered.items():
        assert manifests, f"{name} renders nothing"
    files = (ROOT / "deploy/k8s").rglob("kustomization.yaml")
    assert not [f for f in files if "kind: Component" in f.read_text()]


def schemas_of_two_versions_hold(rendered):
    # Equal manifests of several directories are validated once.
    distinct = {json.dumps(m): m for manifests in rendered.values() for m in manifests}
    for version, manifest in itertools.product(VERSIONS, distinct.values()):
        group = manifest["apiVersion"].split("/")[0]
        if group == "builtin" or group in CUSTOM:
            continue
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise AssertionError(f"{version}: {title(manifest)}: {error}") from error


def selectors_find_their_pods(rendered):
    for name in INSTALLATIONS:
        manifests = installed(rendered, name)
        pods = [(m["metadata"]["namespace"], pod["metadata"]["labels"]) for m, pod in workloads(manifests)]
        for manifest in manifests:
            kind, spec = manifest["kind"], manifest.get("spec", {})
            selector = {
                "Service": lambda: {"matchLabels": spec["selector"]},
                "StatefulSet": lambda: spec["selector"],
                "DaemonSet": lambda: spec["selector"],
                "PodDisruptionBudget": lambda: spec["selector"],
                "InferencePool": lambda: spec["selector"],
                "NetworkPolicy": lambda: spec["podSelector"],
            }.get(kind)
            if not selector:
                continue
            own = manifest["metadata"]["namespace"]
            found = [labels for space, labels in pods if space == own and matches(selector(), labels)]
            assert found, f"{name}: {title(manifest)} selects no pod"
            if kind in ("StatefulSet", "DaemonSet"):
                labels = manifest["spec"]["template"]["metadata"]["labels"]
                assert matches(selector(), labels), f"{title(manifest)} does not select its own pods"
        for manifest, pod in workloads(manifests):
            terms = pod["spec"].get("affinity", {}).get("podAntiAffinity", {})
            for term in terms.get("requiredDuringSchedulingIgnoredDuringExecution", []):
                assert matches(term["labelSelector"], pod["metadata"]["labels"]), title(manifest)
            for spread in pod["spec"].get("topologySpreadConstraints", []):
                assert matches(spread["labelSelector"], pod["metadata"]["labels"]), title(manifest)


def ports_lead_to_ports(rendered):
    for name in INSTALLATIONS:
        manifests = installed(rendered, name)
        services = {(m["metadata"]["namespace"], m["metadata"]["name"]): m for m in manifests if m["kind"] == "Service"}
        for manifest in services.values():
            for _, pod in workloads(manifests):
                if not matches({"matchLabels": manifest["spec"]["selector"]}, pod["metadata"]["labels"]):
                    continue
                ports = {(p["name"], p.get("protocol", "TCP")) for c in containers(pod) for p in c.get("ports", [])}
                for port in manifest["spec"]["ports"]:
                    wanted = (port["targetPort"], port.get("protocol", "TCP"))
                    assert wanted in ports, f"{title(manifest)}: {wanted} is not in {ports}"
        for manifest, pod in workloads(manifests):
            for container in containers(pod):
                ports = {p["name"]: p["containerPort"] for p in container.get("ports", [])}
                env = environment(container, config_of(manifests, manifest))
                for port, variable in (("http", "KVASIR_HTTP"), ("ops", "KVASIR_OPS"), ("quic", "KVASIR_QUIC")):
                    listens = int(env[variable].rsplit(":", 1)[1]) if variable in env else None
                    assert ports.get(port) == listens, f"{title(manifest)}: {port} is {ports.get(port)}, {variable} {listens}"
        for manifest in manifests:
            if manifest["kind"] == "HTTPRoute":
                for backend in [b for rule in manifest["spec"]["rules"] for b in rule["backendRefs"] if b["kind"] == "Service"]:
                    service = services[manifest["metadata"]["namespace"], backend["name"]]
                    assert backend["port"] in [p["port"] for p in service["spec"]["ports"]], title(manifest)


def config_of(manifests, workload):
    space = workload["metadata"]["namespace"]
    maps = [m for m in manifests if m["kind"] == "ConfigMap" and m["metadata"]["namespace"] == space]
    return {m["metadata"]["name"]: m["data"] for m in maps}


def environment(container, configs, pod_name="kvasir-coordinator-0"):
    """Environment of a container as the kubelet would set it."""
    env = {}
    for entry in container.get("env", []):
        if "value" in entry:
            value = entry["value"]
            for name, known in env.items():
                value = value.replace(f"$({name})", known)
        else:
            source = entry["valueFrom"]
            if "configMapKeyRef" in source:
                value = configs[source["configMapKeyRef"]["name"]][source["configMapKeyRef"]["key"]]
            elif "fieldRef" in source:
                value = {"metadata.name": pod_name, "spec.nodeName": "spark-1", "status.hostIP": "127.0.0.1"}[source["fieldRef"]["fieldPath"]]
            else:
                value = container["resources"]["requests"]["cpu"]
        env[entry["name"]] = value.strip()
    return env


def probes_ask_what_the_binary_answers(rendered):
    for manifests in rendered.values():
        for manifest, pod in workloads(manifests):
            for container in containers(pod):
                probes = {kind: container[kind] for kind in ("startupProbe", "livenessProbe", "readinessProbe") if kind in container}
                role = container["name"]
                assert (len(probes) == 3) == (role in ("coordinator", "worker", *ENGINES)), title(manifest)
                if role in ENGINES:
                    # It listens on loopback only, where the kubelet does not reach it.
                    assert all("exec" in probe for probe in probes.values()), title(manifest)
                    continue
                for kind, probe in probes.items():
                    assert probe["httpGet"]["port"] == "ops", f"{title(manifest)}: {kind}"
                    assert probe["httpGet"]["path"] in binary.routes(role), f"{title(manifest)}: {kind}"


def settings_are_the_binarys(rendered):
    """The binary silently ignores variables that it does not read."""
    for manifests in rendered.values():
        for manifest, pod in workloads(manifests):
            for container in containers(pod):
                known = container["name"] in ("coordinator", "worker", "join")
                read = binary.EVERYWHERE | (binary.variables(container["name"]) if known else set())
                named = {e["name"] for e in container.get("env", []) if e["name"].startswith("KVASIR_")}
                assert named <= read, f"{title(manifest)}: {named - read} is read by nobody"
                assert pod["spec"]["enableServiceLinks"] is False, f"{title(manifest)}: Services would set KVASIR_* variables"


def what_is_referred_to_exists(rendered):
    """Keys of ConfigMaps and Secrets, volumes, claims, accounts, classes."""
    for name in INSTALLATIONS:
        manifests = installed(rendered, name)
        there = {(m["kind"], m["metadata"].get("namespace"), m["metadata"]["name"]) for m in manifests}
        secrets = made_secrets(manifests)
        for manifest, pod in workloads(manifests):
            space, spec = manifest["metadata"]["namespace"], pod["spec"]
            assert ("ServiceAccount", space, spec["serviceAccountName"]) in there, title(manifest)
            if "priorityClassName" in spec:
                assert ("PriorityClass", None, spec["priorityClassName"]) in there, title(manifest)
            if manifest["kind"] == "StatefulSet":
                assert ("Service", space, manifest["spec"]["serviceName"]) in there, title(manifest)
            configs = config_of(manifests, manifest)
            volumes = {v["name"] for v in spec.get("volumes", [])} | {
                v["metadata"]["name"] for v in manifest["spec"].get("volumeClaimTemplates", [])
            }
            for container in containers(pod):
                environment(container, configs)
                mounted = {m["name"] for m in container.get("volumeMounts", [])}
                assert mounted <= volumes, f"{title(manifest)}: {mounted - volumes}"
            for volume in spec.get("volumes", []):
                if "persistentVolumeClaim" in volume:
                    assert ("PersistentVolumeClaim", space, volume["persistentVolumeClaim"]["claimName"]) in there, title(manifest)
                sources = [{"name": s["secretName"], **s} for s in [volume.get("secret")] if s]
                for source in [volume["configMap"]] if "configMap" in volume else []:
                    data = configs.get(source["name"], dict.fromkeys(made_config_maps(manifests).get((space, source["name"]), ())) or None)
                    by_hand = ("ConfigMap", space, source["name"]) in BY_HAND
                    assert data is not None or by_hand or source.get("optional"), f"{name}: {title(manifest)}: nobody makes {source['name']}"
                    wanted = {item["key"] for item in source.get("items", [])} if data is not None else set()
                    assert wanted <= set(data or {}), f"{title(manifest)}: {source['name']} lacks {wanted - set(data)}"
                for source in sources:
                    made = secrets.get((space, source["name"]))
                    if made is None:
                        by_hand = ("Secret", space, source["name"]) in BY_HAND
                        assert by_hand or source.get("optional"), f"{name}: {title(manifest)}: nobody makes {source['name']}"
                        continue
                    wanted = {item["key"] for item in source.get("items", [])}
                    assert wanted <= made, f"{title(manifest)}: {source['name']} lacks {wanted - made}"


def projected(volume):
    """Sources of a projected volume."""
    return volume.get("projected", {}).get("sources", [])


def made_config_maps(manifests):
    """ConfigMaps that a job's `kubectl create configmap` makes, and their keys."""
    return {
        (manifest["metadata"].get("namespace"), container["args"][2]): set(created_files(container["args"]))
        for manifest in manifests
        if manifest["kind"] == "Job"
        for container in containers(pod_template(manifest))
        if container["args"][:2] == ["create", "configmap"]
    }


def made_secrets(manifests):
    """Secrets and their keys: rendered, made by a job's `kubectl create secret`, or made by cert-manager."""
    secrets = {}
    for manifest in manifests:
        space = manifest["metadata"].get("namespace")
        if manifest["kind"] == "Secret":
            secrets[space, manifest["metadata"]["name"]] = set(manifest.get("data", {}))
        elif manifest["kind"] == "Certificate":
            secrets[space, manifest["spec"]["secretName"]] = {"tls.crt", "tls.key", "ca.crt"}
        elif manifest["kind"] == "Job":
            for container in containers(pod_template(manifest)):
                if container["args"][:3] == ["create", "secret", "generic"]:
                    secrets[space, container["args"][3]] = set(created_files(container["args"]))
    return secrets


def created_files(args):
    """Keys of `kubectl create secret` or `configmap` with the files of their values."""
    files = [arg.removeprefix("--from-file=") for arg in args if arg.startswith("--from-file=")]
    pairs = [file.split("=", 1) if "=" in file else (file.rsplit("/", 1)[1], file) for file in files]
    return dict(pairs)


def grace_covers_prestop_and_drain(rendered):
    for name in INSTALLATIONS:
        manifests = installed(rendered, name)
        for manifest, pod in workloads(manifests):
            if manifest["kind"] == "Job":
                continue
            (container,) = pod["spec"]["containers"]
            pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            env = environment(container, config_of(manifests, manifest))
            drain = binary.seconds(env["KVASIR_DRAIN_TIMEOUT"])
            grace = pod["spec"]["terminationGracePeriodSeconds"]
            assert grace >= 1.2 * (pause + drain), f"{name}: {title(manifest)}: {grace} s for {pause} + {drain} s and a fifth"
            if container["name"] == "coordinator":
                assert pause > 0, f"{title(manifest)}: clients' connections come until endpoints are updated"
                assert drain >= binary.seconds(env["KVASIR_REQUEST_TIMEOUT"]), f"{title(manifest)}: streams would be cut"


def a_majority_survives_what_budgets_allow(rendered):
    for name in INSTALLATIONS:
        manifests = installed(rendered, name)
        sets = [m for m in manifests if m["kind"] == "StatefulSet" and m["metadata"]["name"] == "kvasir-coordinator"]
        (coordinators,) = sets
        replicas = coordinators["spec"]["replicas"]
        assert replicas % 2 == 1 and replicas <= 5, f"{name}: {replicas} coordinators"
        assert coordinators["spec"]["podManagementPolicy"] == "Parallel", "founders wait for each other"
        (container,) = coordinators["spec"]["template"]["spec"]["containers"]
        env = environment(container, config_of(manifests, coordinators))
        service, names = coordinators["spec"]["serviceName"], [f"kvasir-coordinator-{i}" for i in range(replicas)]
        peers = [f"{pod}={pod}.{service}:7000" for pod in names]
        assert env["KVASIR_PEERS"].split(",") == peers, f"{name}: peers are {env['KVASIR_PEERS']}"
        for manifest, pod in workloads(manifests):
            if pod["spec"]["containers"][0]["name"] == "worker":
                dialed = environment(pod["spec"]["containers"][0], config_of(manifests, manifest))["KVASIR_COORDINATORS"].split(",")
                space = "" if manifest["metadata"]["namespace"] == coordinators["metadata"]["namespace"] else ".kvasir.svc"
                assert dialed == [f"{pod}.{service}{space}:7000" for pod in names], f"{name}: workers dial {dialed}"
        budgets = [m for m in manifests if m["kind"] == "PodDisruptionBudget" and m["metadata"]["name"] == "kvasir-coordinator"]
        assert len(budgets) == (replicas > 1), f"{name}: a budget for {replicas}"
        for budget in budgets:
            left = replicas - budget["spec"]["maxUnavailable"]
            assert left > replicas / 2, f"{name}: {left} of {replicas} are no majority"
        for budget in [m for m in manifests if m["kind"] == "PodDisruptionBudget"]:
            assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow", title(budget)


def caches_fit_into_the_memory_limit(rendered):
    for name in INSTALLATIONS:
        manifests = installed(rendered, name)
        for manifest, pod in workloads(manifests):
            container = pod["spec"]["containers"][0]
            env = environment(container, config_of(manifests, manifest))
            if "KVASIR_KV_BYTES" in env:
                left = binary.size(container["resources"]["limits"]["memory"]) - binary.size(env["KVASIR_KV_BYTES"])
                assert left >= 1 << 30, f"{name}: {title(manifest)}: {left} bytes are left for weights and all else"


def the_models_named_can_be_fetched(rendered):
    for manifests in rendered.values():
        for manifest in manifests:
            if manifest["kind"] == "ConfigMap" and "model" in manifest["data"]:
                model = manifest["data"]["model"]
                if "checkpoint" in manifest["data"]:
                    # A repository's folder, not a file: overlays/vllm/fetch.
                    assert re.fullmatch(r"[\w.-]+/[\w.-]+", manifest["data"]["repository"]), title(manifest)
                    continue
                assert model in binary.downloads(), f"{title(manifest)}: {model} is nothing that the image can fetch"


def the_sparks_fleet_can_be_deployed(rendered):
    """The example for `kvasir apply`: its models can be downloaded, and the workers have its labels. No node starts with
    a model.
    """
    fleet = tomllib.loads((ROOT / "deploy/k8s/overlays/dgx-spark/fleet.toml").read_text())
    assert fleet.keys() == {"models"} and len(fleet["models"]) > 1, fleet
    sparks = installed(rendered, "dgx-spark")
    labels = set()
    for manifest, pod in workloads(sparks):
        node = pod["spec"]["containers"][0]
        env = environment(node, config_of(sparks, manifest))
        assert not {"KVASIR_MODEL", "KVASIR_MODELS"} & env.keys(), title(manifest)
        labels.update(env.get("KVASIR_LABELS", "").split(","))
    assert "node=spark-1" in labels, labels
    for name, entry in fleet["models"].items():
        assert entry["from"] in binary.downloads(), f"{name}: nothing that the image can fetch"
        assert set(entry.get("nodes", [])) <= labels, f"{name}: no worker has {entry['nodes']}"


def engines_are_where_their_workers_connect(rendered):
    """A pod's worker has the addresses and the model of the engine beside it. The engine's API listens on
    loopback, and the worker stops first, because an engine is a sidecar.
    """
    engines = 0
    for name in INSTALLATIONS:
        manifests = installed(rendered, name)
        for manifest, pod in workloads(manifests):
            configs = config_of(manifests, manifest)
            for engine in [c for c in containers(pod) if c["name"] in ENGINES]:
                engines += 1
                is_sidecar = engine in pod["spec"]["initContainers"] and engine.get("restartPolicy") == "Always"
                assert is_sidecar, f"{title(manifest)}: the engine would end before the worker has drained"
                assert "ports" not in engine, f"{title(manifest)}: a port that others may connect to"
                (worker,) = pod["spec"]["containers"]
                env = environment(worker, configs)
                assert env["KVASIR_LLM_BACKEND"] == engine["name"], title(manifest)
                model, *options = engine["args"]
                given = dict(itertools.pairwise(options))
                assert env["KVASIR_ENGINE_URL"] == f"http://{given['--host']}:{given['--port']}", title(manifest)
                assert given["--host"] == "127.0.0.1", title(manifest)
                assert {"--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(options), title(manifest)
                events = json.loads(given["--kv-events-config"])
                assert (events.pop("enable_kv_cache_events"), events.pop("publisher")) == (True, "zmq"), title(manifest)
                endpoints = {
                    # vLLM connects to an endpoint without `*` instead of binding it.
                    "endpoint": env["KVASIR_KV_EVENTS"].replace("127.0.0.1", "tcp://*"),
                    "replay_endpoint": f"tcp://{env['KVASIR_KV_EVENTS_REPLAY']}",
                    "topic": env.get("KVASIR_KV_EVENTS_TOPIC", ""),
                }
                assert events == endpoints, f"{title(manifest)}: {events}"
                folder = environment(engine, configs)[model.removeprefix("$(").removesuffix(")")]
                assert env["KVASIR_MODEL"].split("=", 1)[1] == folder, title(manifest)
    assert engines, "no engines"


def folders_of_checkpoints_are_mounted(rendered):
    """Every container with a checkpoint's folder in its settings mounts it, from one place of one claim. Only the
    Job that downloads it may write there.
    """
    for name in INSTALLATIONS:
        manifests = installed(rendered, name)
        mounted = {}
        for manifest, pod in workloads(manifests):
            volumes = {v["name"]: v for v in pod["spec"].get("volumes", [])}
            configs = config_of(manifests, manifest)
            for container in containers(pod):
                env = environment(container, configs)
                values = [env.get(variable, "") for variable in ("CHECKPOINT", "KVASIR_MODEL", "KVASIR_MODELS")]
                for folder in [value.split("=", 1)[-1] for value in values if "/" in value]:
                    above = [m for m in container["volumeMounts"] if folder.startswith(m["mountPath"] + "/")]
                    assert above, f"{name}: {title(manifest)} does not mount {folder}"
                    mount = max(above, key=lambda mount: len(mount["mountPath"]))
                    claim = volumes[mount["name"]]["persistentVolumeClaim"]["claimName"]
                    place = (folder, claim, mount["subPath"], mount["mountPath"])
                    mounted.setdefault(place, set()).add((container["name"], mount.get("readOnly", False)))
        assert len(mounted) == (name == "vllm"), f"{name}: {mounted}"
        for containers_of_place in mounted.values():
            expected = {("coordinator", True), ("vllm", True), ("worker", True), ("fetch", False)}
            assert containers_of_place == expected, f"{name}: {containers_of_place}"


def nodes_make_their_own_keys(rendered):
    """Each node's first container makes its identity in the node's own volume, where the node reads it."""
    nodes = 0
    for name in INSTALLATIONS:
        for manifest, pod in workloads(installed(rendered, name)):
            node = pod["spec"]["containers"][0]
            if node["name"] not in ("coordinator", "worker"):
                continue
            maker = "issue" if node["name"] == "coordinator" else "join"
            (first,) = [c for c in pod["spec"]["initContainers"] if c["name"] == maker]
            (out,) = [arg.removeprefix("--out=") for arg in first["args"] if arg.startswith("--out=")]
            own = {m["mountPath"]: m["name"] for m in node["volumeMounts"]}
            assert environment(node, config_of(installed(rendered, name), manifest))["KVASIR_IDENTITY"] == out, title(manifest)
            folder = out.rsplit("/", 1)[0]
            assert {m["mountPath"]: m["name"] for m in first["volumeMounts"]}[folder] == own[folder], title(manifest)
            volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
            kind = volumes.get(own[folder], {"persistentVolumeClaim": {}})
            assert kind.keys() & {"emptyDir", "hostPath", "persistentVolumeClaim"}, f"{title(manifest)}: {kind}"
            nodes += 1
    assert nodes >= 10, nodes


def a_further_node_changes_one_object(rendered):
    """No manifest of the Sparks names a node: a Spark that is added, removed or renamed changes no pod template. A
    further worker of the other installations changes the replicas of one object.
    """
    sparks = json.dumps([m for name in ("dgx-spark", "dgx-spark/fetch") for m in rendered[name]])
    assert not re.search(r"spark-[0-9]", sparks), re.findall(r".{60}spark-[0-9].{20}", sparks)
    for name in ("cpu", "vllm", "dev"):
        before = {title(m): json.dumps(m, sort_keys=True) for m in rendered[name]}
        with_more = rendered_with_replicas(name, 7)
        after = {title(m): json.dumps(m, sort_keys=True) for m in with_more}
        changed = [title for title in before if before[title] != after.get(title)]
        assert changed == ["StatefulSet kvasir/kvasir-worker"] and before.keys() == after.keys(), f"{name}: {changed}"
        (old,), (new,) = ([m for m in ms if title(m) == changed[0]] for ms in (rendered[name], with_more))
        assert json.dumps(pod_template(old)) == json.dumps(pod_template(new)), f"{name}: its pods restart"


def monitors_find_ports(rendered):
    for name in ("cpu", "vllm"):
        monitors_find_ports_of(installed(rendered, name))


def monitors_find_ports_of(manifests):
    for monitor in [m for m in manifests if m["kind"] in ("ServiceMonitor", "PodMonitor")]:
        services = monitor["kind"] == "ServiceMonitor"
        candidates = (
            [(m["metadata"]["labels"], {p["name"] for p in m["spec"]["ports"]}) for m in manifests if m["kind"] == "Service"]
            if services
            else [(pod["metadata"]["labels"], {p["name"] for c in containers(pod) for p in c.get("ports", [])}) for _, pod in workloads(manifests)]
        )
        found = [ports for labels, ports in candidates if matches(monitor["spec"]["selector"], labels)]
        for endpoint in monitor["spec"]["endpoints" if services else "podMetricsEndpoints"]:
            assert any(endpoint["port"] in ports for ports in found), f"{title(monitor)}: no port {endpoint['port']}"


def images_are_named_in_one_place(rendered):
    """No manifest names a registry, and every rendered image has a tag."""
    files = [f for f in (ROOT / "deploy/k8s").rglob("*.yaml") if f.name != "images.yaml"]
    for file in files:
        named = [line.split("image:")[1].strip() for line in file.read_text().splitlines() if " image: " in line]
        assert all(name in ("kvasir", "kvasir-cuda", "kubectl", "vllm") for name in named), f"{file}: {named}"
    for manifests in rendered.values():
        for manifest, pod in workloads(manifests):
            for container in containers(pod):
                assert ":" in container["image"] and "/" in container["image"], f"{title(manifest)}: {container['image']}"
                assert not container["image"].endswith(":latest"), title(manifest)


TESTS = [
    every_directory_renders_alone,
    schemas_of_two_versions_hold,
    selectors_find_their_pods,
    ports_lead_to_ports,
    probes_ask_what_the_binary_answers,
    settings_are_the_binarys,
    what_is_referred_to_exists,
    grace_covers_prestop_and_drain,
    a_majority_survives_what_budgets_allow,
    caches_fit_into_the_memory_limit,
    the_models_named_can_be_fetched,
    the_sparks_fleet_can_be_deployed,
    engines_are_where_their_workers_connect,
    folders_of_checkpoints_are_mounted,
    nodes_make_their_own_keys,
    a_further_node_changes_one_object,
    monitors_find_ports,
    images_are_named_in_one_place,
]
