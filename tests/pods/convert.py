"""Turns rendered manifests into pods that `podman kube play` knows, and lists what it does not know.

Podman plays Pods, Deployments, ConfigMaps and PersistentVolumeClaims. It has no StatefulSets, DaemonSets, Jobs, Services
or policies, and ignores probes, grace periods, fsGroup and the modes of files. So:

- a StatefulSet becomes a pod for each ordinal, a DaemonSet a pod for each node, with claims of their own;
- Secrets, projected tokens and ConfigMaps of volumes become directories of the host with the kubelet's modes and group;
- `$(NAME)` in arguments and variables is replaced, as the kubelet does; names of Services become names of pods;
- probes are left out and asked over HTTP by the test; grace periods are given to `podman stop`;
- `subPath`, affinity, spreading, priorities, RuntimeClasses, GPUs, budgets and policies are checked by `./test manifests`.
"""

import base64
import copy
import os
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "manifests"))
from rendered import pod_template  # noqa: E402
from rules import environment  # noqa: E402

USER = 65532
# Left out of pods, each with what checks it instead.
LEFT_OUT = {
    "startupProbe": "asked over HTTP", "livenessProbe": "asked over HTTP", "readinessProbe": "asked over HTTP",
    "lifecycle": "preStop only sleeps", "runtimeClassName": "no GPU", "priorityClassName": "./test manifests",
    "affinity": "./test manifests", "topologySpreadConstraints": "./test manifests", "tolerations": "./test manifests",
    "nodeSelector": "./test manifests", "serviceAccountName": "the test signs its token",
    "automountServiceAccountToken": "./test manifests", "enableServiceLinks": "no Services",
    "dnsPolicy": "podman's DNS", "terminationGracePeriodSeconds": "given to podman stop",
}


class Host:
    """Directories of one machine: what a kubelet fills, and hostPath volumes."""

    def __init__(self, root):
        self.root = pathlib.Path(root)

    def kubelet_files(self, pod, volume, files, mode):
        """A volume with files as a kubelet writes them: root's, readable by the pod's group."""
        place = self.root / "kubelet" / pod / volume
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        os.chmod(place, 0o755)
        for name, data in files.items():
            file = place / name
            file.write_bytes(data)
            os.chmod(file, mode)
            os.chown(file, 0, USER)
        return place

    def owned(self, name):
        """A directory of the pods' user."""
        place = self.root / name
        place.mkdir(parents=True, exist_ok=True)
        os.chown(place, USER, USER)
        return place


class Objects:
    """The Secrets and ConfigMaps of an installation by namespace and name, each a dictionary of bytes."""

    def __init__(self, manifests):
        self.known = {}
        for manifest in manifests:
            meta = manifest["metadata"]
            if manifest["kind"] == "ConfigMap":
                self.add("configMap", meta["namespace"], meta["name"], {k: v.encode() for k, v in manifest["data"].items()})
            elif manifest["kind"] == "Secret":
                data = {k: base64.b64decode(v) for k, v in manifest.get("data", {}).items()}
                self.add("secret", meta["namespace"], meta["name"], data)

    def add(self, kind, namespace, name, data):
        self.known[kind, namespace, name] = data

    def get(self, kind, namespace, name):
        return self.known.get((kind, namespace, name))


def pod(workload, name, node, host, objects, options):
    """The objects of a pod for `podman kube play`, as (claims, pod). `options` has the functions `models(node)`, `path(node,
    hostPath)`, `token(namespace, account, pod, node, audience)`, `rename(text)` and the image.
    """
    space = workload["metadata"]["namespace"]
    spec = copy.deepcopy(pod_template(workload)["spec"])
    configs = {key[2]: {k: v.decode() for k, v in data.items()} for key, data in objects.known.items() if key[:2] == ("configMap", space)}
    claims = []
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    for template in workload["spec"].get("volumeClaimTemplates", []):
        claim = f"{template['metadata']['name']}-{name}"
        claims.append({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim}, "spec": template["spec"]})
        volumes[template["metadata"]["name"]] = {"persistentVolumeClaim": {"claimName": claim}}
    made, mounts_of = [], {}
    for volume_name, volume in volumes.items():
        place = None
        if "secret" in volume or "configMap" in volume:
            kind = "secret" if "secret" in volume else "configMap"
            source = volume[kind]
            data = objects.get(kind, space, source.get("secretName") or source["name"])
            assert data is not None or source.get("optional"), f"{name}: nobody makes {source}"
            items = source.get("items") or [{"key": key, "path": key} for key in data or {}]
            files = {item["path"]: data[item["key"]] for item in items} if data else {}
            place = host.kubelet_files(name, volume_name, files, source.get("defaultMode", 0o644))
        elif "projected" in volume:
            files = {}
            for source in volume["projected"]["sources"]:
                token = source["serviceAccountToken"]
                signed = options.token(space, spec["serviceAccountName"], name, node, token["audience"])
                files[token["path"]] = signed.encode()
            place = host.kubelet_files(name, volume_name, files, volume["projected"]["defaultMode"])
        elif "hostPath" in volume:
            place = options.path(node, volume["hostPath"]["path"])
        elif volume.get("persistentVolumeClaim", {}).get("claimName") == "kvasir-models":
            place = options.models(node)
        if place is not None:
            made.append({"name": volume_name, "hostPath": {"path": str(place)}})
            mounts_of[volume_name] = place
        elif "emptyDir" in volume:
            # Podman names the volume as here, in one namespace for all pods. It stays when the pod is stopped, and goes
            # with `podman pod rm` and `podman volume rm`.
            claim = f"{volume_name}-{name}"
            claims.append(
                {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}
            )
            made.append({"name": volume_name, "persistentVolumeClaim": {"claimName": claim}})
        else:
            made.append({"name": volume_name, **{k: v for k, v in volume.items() if k != "name"}})
    containers = {}
    for kind in ("initContainers", "containers"):
        containers[kind] = [_container(c, configs, name, node, mounts_of, made, options) for c in spec.get(kind, [])]
    context = spec["securityContext"]
    played = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "labels": pod_template(workload)["metadata"]["labels"],
            # Otherwise podman removes them after the first start, at times before it knows that they have ended.
            "annotations": {"io.podman.annotations.init.container.type": "always"},
        },
        "spec": {
            # Podman applies `Always` to first containers too, and starts them again for as long as the pod lives.
            "restartPolicy": "OnFailure", "hostname": name, "volumes": made,
            "securityContext": {k: v for k, v in context.items() if k not in ("fsGroup", "fsGroupChangePolicy")},
            **containers,
        },
    }
    unknown = set(spec) - set(LEFT_OUT) - {"securityContext", "containers", "initContainers", "volumes", "hostNetwork"}
    assert not unknown, f"{name}: {unknown} is neither converted nor listed"
    return claims, played


def _container(container, configs, name, node, places, volumes, options):
    env = environment(container, configs, name)
    for entry in container.get("env", []):
        source = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if source == "spec.nodeName":
            env[entry["name"]] = node
        elif source == "status.hostIP":
            env[entry["name"]] = options.address(node)
    values = {key: _expand(value, env) for key, value in env.items()}
    if "KVASIR_OPS" in values:
        # The test asks from the host.
        values["KVASIR_OPS"] = "0.0.0.0:" + values["KVASIR_OPS"].rsplit(":", 1)[1]
    mounts = []
    for mount in container.get("volumeMounts", []):
        kept = {k: v for k, v in mount.items() if k != "subPath"}
        if "subPath" in mount:
            # Podman 4.3 ignores it: a directory of its own.
            own = f"{mount['name']}-{mount['subPath']}"
            if own not in [volume["name"] for volume in volumes]:
                volumes.append({"name": own, "hostPath": {"path": str(places[mount["name"]] / mount["subPath"])}})
            kept["name"] = own
        mounts.append(kept)
    resources = copy.deepcopy(container.get("resources", {}))
    for part in resources.values():
        part.pop("nvidia.com/gpu", None)
    # No host has these CPUs; podman would read them as a limit of nothing.
    resources.get("requests", {}).pop("cpu", None)
    unknown = set(container) - set(LEFT_OUT) - {"name", "image", "args", "env", "volumeMounts", "resources", "securityContext", "ports"}
    assert not unknown, f"{name}: {unknown} is neither converted nor listed"
    return {
        "name": container["name"], "image": options.image, "imagePullPolicy": "Never",
        "args": [options.rename(_expand(arg, values)) for arg in container.get("args", [])],
        "env": [{"name": key, "value": options.rename(value)} for key, value in values.items()],
        "volumeMounts": mounts, "resources": resources, "securityContext": container["securityContext"],
    }


def _expand(text, values):
    for key, value in values.items():
        text = text.replace(f"$({key})", value)
    return text
