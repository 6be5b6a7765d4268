"""Checks privileges and network access of pods. Each function is one test."""

import base64
import json

from policies import Outside, Pod, World
from rendered import containers, pod_template, title
from rules import installed, namespaces, projected, workloads


def pods_keep_their_namespaces_level(rendered):
    spaces = namespaces(rendered)
    for manifests in rendered.values():
        for manifest, pod in workloads(manifests):
            labels = spaces[manifest["metadata"]["namespace"]]
            wrong = against_level(pod["spec"], labels["pod-security.kubernetes.io/enforce"])
            assert not wrong, f"{title(manifest)}: {wrong}"
    # Each of these changes to a valid pod must be found.
    good = pod_template(next(m for m in rendered["cpu"] if m["kind"] == "StatefulSet"))["spec"]
    (container,) = good["containers"]
    for bad in (
        {"hostNetwork": True},
        {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]},
        {"securityContext": {}},
        {"containers": [{**container, "securityContext": {**container["securityContext"], "readOnlyRootFilesystem": False}}]},
        {"containers": [{**container, "securityContext": {**container["securityContext"], "capabilities": {}}}]},
        {"containers": [{**container, "resources": {"limits": {}, "requests": {}}}]},
    ):
        assert not against_level(good, "restricted") and against_level({**good, **bad}, "restricted"), bad


def against_level(spec, level):
    """Returns the violations of a pod's spec of its namespace's level and of our own rules.

    At the level `privileged` a pod may use the host network and host directories. Its containers must still
    satisfy `restricted`.
    """
    wrong = [host for host in ("hostPID", "hostIPC") if spec.get(host)]
    if level != "privileged":
        wrong += [level] * (level != "restricted") + ["hostNetwork"] * bool(spec.get("hostNetwork"))
        allowed = {"name", "configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
        wrong += [kind for volume in spec.get("volumes", []) for kind in set(volume) - allowed]
    context = spec["securityContext"]
    expected = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    wrong += [name for name, value in expected.items() if context.get(name) != value]
    for container in spec.get("initContainers", []) + spec["containers"]:
        context = container["securityContext"]
        expected = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        wrong += [name for name, value in expected.items() if context.get(name) != value]
        wrong += ["privileged"] * bool(context.get("privileged"))
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        wrong += ["memory"] * (not limits.get("memory") or limits["memory"] != requests.get("memory"))
    return wrong


def k8s_rbac_free(rendered):
    """The only role is that of the job that makes Secrets. Other pods have no token that the API server accepts."""
    for manifests in rendered.values():
        for manifest in manifests:
            assert manifest["kind"] not in ("ClusterRole", "ClusterRoleBinding"), title(manifest)
            if manifest["kind"] == "Role":
                assert manifest["metadata"]["name"] == "kvasir-ca", title(manifest)
                assert manifest["rules"] == [{"apiGroups": [""], "resources": ["configmaps", "secrets"], "verbs": ["create"]}], manifest["rules"]
            if manifest["kind"] == "RoleBinding":
                assert [s["name"] for s in manifest["subjects"]] == ["kvasir-ca"], title(manifest)
            if manifest["kind"] == "ServiceAccount":
                assert manifest["automountServiceAccountToken"] is False, title(manifest)
        for manifest, pod in workloads(manifests):
            has_token = pod["spec"].get("automountServiceAccountToken") is not False
            assert has_token == (pod["spec"]["serviceAccountName"] == "kvasir-ca"), f"{title(manifest)}: token"
            tokens = {v["name"]: s["serviceAccountToken"] for v in pod["spec"].get("volumes", []) for s in projected(v) if "serviceAccountToken" in s}
            assert all(token["audience"] == "kvasir" and token["expirationSeconds"] <= 600 for token in tokens.values()), title(manifest)
            holders = [c["name"] for c in containers(pod) for m in c.get("volumeMounts", []) if m["name"] in tokens]
            assert holders == ["join"] * len(tokens), f"{title(manifest)}: {holders} have the token for coordinators"


def k8s_no_private_keys(rendered):
    """No manifest has a node's private key, or a place for one. The authority's key is mounted by coordinators alone."""
    for name, manifests in rendered.items():
        text = json.dumps(manifests)
        assert "PRIVATE KEY" not in text and "node.key" not in text and "-identity" not in text, name
        for manifest in manifests:
            if manifest["kind"] == "Secret":
                values = [base64.b64decode(value) for value in manifest.get("data", {}).values()]
                assert not any(b"PRIVATE" in value for value in values), title(manifest)
            if manifest["kind"] == "Certificate":
                assert manifest["spec"].get("isCA"), f"{title(manifest)}: cert-manager would keep a node's key in a Secret"
        for manifest, pod in workloads(manifests):
            text = json.dumps(pod["spec"].get("volumes", []))
            coordinator = pod["spec"]["containers"][0]["name"] == "coordinator"
            assert ('"kvasir-ca"' in text) == coordinator, f"{title(manifest)}: the authority's key"


def k8s_network_policy(rendered):
    """Allowed connections in the installations for CPUs, for vLLM and for DGX Spark, each with all its policies.
    """

    def pods_of(name):
        found = {}
        for manifest, pod in workloads(installed(rendered, name)):
            labels = pod["metadata"]["labels"]
            host = pod["spec"].get("hostNetwork", False)
            address = "192.168.100.11" if host else "10.42.0.9"
            found[labels["app.kubernetes.io/component"]] = Pod(manifest["metadata"]["namespace"], tuple(labels.items()), address, host)
        return found

    extra = {
        "kube-system": {}, "monitoring": {}, "gateway": {}, "elsewhere": {},
        "apps": {"kvasir.dev/clients": "true"},
    }
    spaces = {**namespaces(rendered), **extra}
    others = {
        "dns": Pod("kube-system", (("k8s-app", "kube-dns"),), "10.42.0.2"),
        "prometheus": Pod("monitoring", (), "10.42.0.3"),
        "gateway": Pod("gateway", (), "10.42.0.4"),
        "client": Pod("apps", (), "10.42.0.5"),
        "stranger": Pod("elsewhere", (), "10.42.0.6"),
        "impostor": Pod("elsewhere", (("app.kubernetes.io/name", "kvasir"), ("app.kubernetes.io/component", "worker")), "10.42.0.7"),
        "unlabelled": Pod("kvasir", (), "10.42.0.8"),
        "internet": Outside("93.184.216.34"),
        "api-server": Outside("10.43.0.1"),
        "metadata": Outside("169.254.169.254"),
        "lan": Outside("192.168.7.7"),
    }
    yes, no = True, False
    table = [
        ("coordinator", "coordinator", "UDP", 7000, yes),
        ("worker", "coordinator", "UDP", 7000, yes),
        ("worker", "worker", "UDP", 7000, yes),
        ("coordinator", "worker", "UDP", 7000, no),
        ("worker", "coordinator", "TCP", 8080, no),
        ("worker", "coordinator", "TCP", 9090, no),
        ("coordinator", "coordinator", "TCP", 9090, no),
        ("client", "coordinator", "TCP", 8080, yes),
        ("client", "coordinator", "TCP", 9090, no),
        ("client", "coordinator", "UDP", 7000, no),
        ("client", "worker", "UDP", 7000, no),
        ("stranger", "coordinator", "TCP", 8080, no),
        ("impostor", "coordinator", "UDP", 7000, no),
        ("impostor", "worker", "UDP", 7000, no),
        ("unlabelled", "coordinator", "TCP", 8080, no),
        ("gateway", "coordinator", "TCP", 8080, yes),
        ("gateway", "coordinator", "TCP", 9090, no),
        ("prometheus", "coordinator", "TCP", 9090, yes),
        ("prometheus", "worker", "TCP", 9091, yes),
        ("prometheus", "coordinator", "TCP", 8080, no),
        ("coordinator", "dns", "UDP", 53, yes),
        ("worker", "dns", "TCP", 53, yes),
        ("fetch", "dns", "UDP", 53, yes),
        ("unlabelled", "dns", "UDP", 53, no),
        ("coordinator", "internet", "TCP", 443, no),
        ("worker", "internet", "TCP", 443, no),
        ("fetch", "internet", "TCP", 443, yes),
        ("fetch", "internet", "TCP", 80, no),
        ("fetch", "metadata", "TCP", 443, no),
        ("fetch", "lan", "TCP", 443, no),
        ("fetch", "api-server", "TCP", 443, no),
        ("fetch", "coordinator", "UDP", 7000, no),
        ("ca", "api-server", "TCP", 443, yes),
        ("ca", "coordinator", "UDP", 7000, no),
        ("worker", "api-server", "TCP", 443, no),
    ]
    world = World(installed(rendered, "cpu"), spaces)
    check_table("cpu", world, {**others, **pods_of("cpu")}, table)
    # Workers on DGX Spark use the host network, so policies can only protect coordinators.
    spark = [
        ("worker", "coordinator", "UDP", 7000, yes),
        ("worker", "coordinator", "TCP", 8080, no),
        ("worker", "coordinator", "TCP", 9090, no),
        ("lan", "coordinator", "UDP", 7000, no),
        ("coordinator", "coordinator", "UDP", 7000, yes),
        ("coordinator", "internet", "TCP", 443, no),
        ("fetch", "internet", "TCP", 443, yes),
        ("fetch", "lan", "TCP", 443, no),
        ("fetch", "dns", "UDP", 53, yes),
    ]
    # An engine's ports are open to its own pod alone. vLLM's event port listens on all addresses.
    pods = {**others, **pods_of("vllm")}
    engine = [(source, "worker", "TCP", port, no) for source in pods for port in (8000, 5557, 5558)]
    check_table("vllm", World(installed(rendered, "vllm"), spaces), pods, table + engine)
    world = World(installed(rendered, "dgx-spark"), spaces)
    check_table("dgx-spark", world, {**others, **pods_of("dgx-spark")}, spark)


def check_table(name, world, pods, table):
    for source, target, protocol, port, expected in table:
        found = world.allows(pods[source], pods[target], protocol, port)
        verdict = "is" if found else "is not"
        assert found == expected, f"{name}: {source} {verdict} let through to {target} at {protocol} {port}"


TESTS = [pods_keep_their_namespaces_level, k8s_rbac_free, k8s_no_private_keys, k8s_network_policy]
