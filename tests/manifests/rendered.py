"""Renders every directory of deploy/k8s with a kustomization by itself, with `kubectl kustomize`."""

import concurrent.futures
import json
import pathlib
import subprocess
import tempfile

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy/k8s"


def directories():
    """All directories with a kustomization, sorted."""
    return sorted(path.parent for path in K8S.rglob("kustomization.yaml"))


def name_of(directory):
    return str(directory.relative_to(K8S)).removeprefix("overlays/")


def _render(directory):
    done = subprocess.run(["kubectl", "kustomize", directory], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{directory}: {done.stderr}")
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def all_of_them():
    """The manifests of each directory, by its name below deploy/k8s without `overlays/`."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        rendered = pool.map(_render, directories())
        return dict(zip(map(name_of, directories()), rendered))


def with_replicas(name, count):
    """The manifests of an overlay whose workers are scaled to `count`."""
    with tempfile.TemporaryDirectory(dir=K8S / "overlays") as directory:
        overlay = pathlib.Path(directory)
        (overlay / "kustomization.yaml").write_text(
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
            f"resources: [../{name}]\nreplicas: [{{name: kvasir-worker, count: {count}}}]\n"
        )
        return _render(overlay)


def write(rendered, directory):
    """Writes one JSON and one YAML file per directory, for checks that read files."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in [*directory.glob("*.json"), *directory.glob("*.yaml")]:
        stale.unlink()
    for name, manifests in rendered.items():
        file = directory / (name.replace("/", "-") + ".json")
        file.write_text(json.dumps(manifests))
        if name != "images":
            file.with_suffix(".yaml").write_text(yaml.safe_dump_all(manifests))


def pod_template(manifest):
    """The pod template of a workload, or None for other kinds."""
    if manifest["kind"] in ("StatefulSet", "DaemonSet", "Job", "Deployment"):
        return manifest["spec"]["template"]
    return None


def containers(pod):
    return pod["spec"].get("initContainers", []) + pod["spec"]["containers"]


def title(manifest):
    meta = manifest["metadata"]
    return f'{manifest["kind"]} {meta.get("namespace", "-")}/{meta["name"]}'
