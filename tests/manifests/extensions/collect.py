#!/usr/bin/env python3
"""Writes the schemas of this directory again: `collect.py CLONES`.

CLONES has a clone of each project, in a directory of the project's name. Only keywords that decide whether a
manifest is valid are kept, except rules in CEL. There are two versions of each project: the oldest one that
our guides name, and the newest one at the time of the last run.
"""

import json
import pathlib
import subprocess
import sys

import yaml

PROJECTS = {
    "gateway-api": {
        version: ["config/crd/standard/gateway.networking.k8s.io_httproutes.yaml"] for version in ("v1.2.0", "v1.6.1")
    },
    "gateway-api-inference-extension": {
        version: ["config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"] for version in ("v1.0.0", "v1.6.0")
    },
    "keda": {version: ["config/crd/bases/keda.sh_scaledobjects.yaml"] for version in ("v2.14.0", "v2.20.2")},
    "cert-manager": {
        "v1.15.0": ["deploy/crds/crd-certificates.yaml", "deploy/crds/crd-issuers.yaml"],
        "v1.21.1": ["deploy/crds/cert-manager.io_certificates.yaml", "deploy/crds/cert-manager.io_issuers.yaml"],
    },
    "prometheus-operator": {
        version: [
            f"example/prometheus-operator-crd/monitoring.coreos.com_{kind}.yaml"
            for kind in ("servicemonitors", "podmonitors", "prometheusrules")
        ]
        for version in ("v0.70.0", "v0.93.0")
    },
}
LEFT_OUT = ("description", "default", "example", "externalDocs", "title", "x-kubernetes-validations")


def bare(schema):
    """Removes descriptions and all keywords that do not decide whether a manifest is valid."""
    if isinstance(schema, list):
        return [bare(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "properties":
            kept[key] = {name: bare(of) for name, of in value.items() if name != "status"}
        elif key not in LEFT_OUT:
            kept[key] = bare(value)
    return kept


def main(clones):
    here = pathlib.Path(__file__).parent
    for stale in here.glob("*.json"):
        stale.unlink()
    for project, versions in PROJECTS.items():
        for version, files in versions.items():
            for file in files:
                command = ["git", "-C", clones / project, "show", f"{version}:{file}"]
                text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                definition = yaml.safe_load(text)["spec"]
                kind = definition["names"]["kind"]
                schemas = {
                    f"{definition['group']}/{of['name']}": bare(of["schema"]["openAPIV3Schema"])
                    for of in definition["versions"]
                    if of["served"] and of["storage"]
                }
                about = {"project": project, "version": version, "licence": "Apache-2.0", "kind": kind, "schemas": schemas}
                (here / f"{kind}-{version}.json").write_text(json.dumps(about, separators=(",", ":"), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
