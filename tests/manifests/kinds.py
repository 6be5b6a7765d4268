"""Checks the kinds of the cluster's extensions against the schemas of their projects (extensions/README.md).
Each function is one test.
"""

import copy
import functools
import itertools
import json
import pathlib

import jsonschema

from rendered import title

SCHEMAS = pathlib.Path(__file__).parent / "extensions"


@functools.cache
def validators():
    """(API version, kind) -> list of (version of the project, validator)."""
    found = {}
    for file in sorted(SCHEMAS.glob("*.json")):
        about = json.loads(file.read_text())
        for api, schema in about["schemas"].items():
            # The API server validates `metadata`, which every object has.
            schema["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            validator = jsonschema.Draft202012Validator(strict(schema))
            found.setdefault((api, about["kind"]), []).append((about["version"], validator))
    return found


def strict(schema):
    """Makes a schema reject unknown fields, because the API server would drop them silently."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: ({name: strict(of) for name, of in value.items()} if key == "properties" else strict(value)) for key, value in schema.items()}
    open_to_all = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("type") == "object" and "properties" in schema and not open_to_all:
        schema["additionalProperties"] = False
    if schema.pop("nullable", False):
        schema = {"anyOf": [{"type": "null"}, schema]}
    return schema


def wrong(manifest):
    """Returns the violations of all schemas of the manifest's kind, or None if the kind has no schema here.
    """
    of_kind = validators().get((manifest["apiVersion"], manifest["kind"]))
    if of_kind is None:
        return None
    return [f"{version}: {error.json_path}: {error.message}" for version, validator in of_kind for error in validator.iter_errors(manifest)]


def extensions_are_what_their_projects_say(rendered):
    kinds = set()
    for manifest in itertools.chain(*rendered.values()):
        found = wrong(manifest)
        if found is not None:
            kinds.add((manifest["apiVersion"], manifest["kind"]))
            assert not found, f"{title(manifest)}: {found}"
    assert kinds == set(validators()), kinds ^ set(validators())
    assert all(len(of_kind) == 2 for of_kind in validators().values()), "the oldest and the newest"


def what_extensions_do_not_know_is_found(rendered):
    """Breaks a valid manifest of each kind in three ways."""
    for api, kind in validators():
        manifest = next(m for m in itertools.chain(*rendered.values()) if (m["apiVersion"], m["kind"]) == (api, kind))

        def broken(change):
            changed = copy.deepcopy(manifest)
            change(changed["spec"])
            return wrong(changed)

        assert broken(lambda spec: spec.update(kvasir=1)), f"{kind}: a field that nobody knows"
        field = next(iter(manifest["spec"]))
        assert broken(lambda spec: spec.update({field: 7.5})), f"{kind}: {field} of another type"
        for required in needed(api, kind):
            assert broken(lambda spec: spec.pop(required)), f"{kind}: without {required}"


def needed(api, kind):
    """Fields of a spec that are required in both versions."""
    specs = [validator.schema["properties"]["spec"] for _, validator in validators()[api, kind]]
    return sorted(set.intersection(*(set(spec.get("required", [])) for spec in specs)))


TESTS = [extensions_are_what_their_projects_say, what_extensions_do_not_know_is_found]
