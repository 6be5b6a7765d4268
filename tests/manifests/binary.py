"""Facts about the binary, parsed from its sources: settings by variable, routes of its ops ports, flags."""

import re

from rendered import ROOT


def _text(path):
    return (ROOT / path).read_text()


def variables(role):
    """The KVASIR_* variables that `kvasir ROLE` reads as settings."""
    return set(re.findall(r'env = "(KVASIR_\w+)"', _text(f"src/{role}.rs")))


# Variables that every command reads without a flag.
EVERYWHERE = {"KVASIR_HOME", "KVASIR_LOG", "KVASIR_LOG_FORMAT"}


def routes(role):
    """Paths that the ops port of a role serves without a key."""
    if role == "worker":
        return set(re.findall(r'"(/\w+)" =>', _text("worker/src/service/ops.rs")))
    outside = _text("coordinator/ops/src/lib.rs").split("Router::new()")[-1]
    return set(re.findall(r'\.route\("(/\w+)"', outside))


def downloads():
    """Names of the catalog that are downloaded from a URL. The image cannot reach the sources of the others.
    """
    entries = _text("model/hub/src/catalog/entries/list.rs").split("Entry {")[1:]
    return {re.search(r'name: "([^"]+)"', entry)[1] for entry in entries if "Origin::Address" in entry}


def seconds(period):
    """Parses a duration of a setting: 300s, 5m."""
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h|d)", period).groups()
    return int(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit]


def size(text):
    """Parses a size of a setting or of Kubernetes: 2GiB, 6Gi."""
    number, unit = re.fullmatch(r"(\d+)(Ki|Mi|Gi|Ti)B?", text).groups()
    return int(number) << {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[unit]
