"""Evaluates the rendered NetworkPolicies by the rules of the API.

If no policy of a direction selects a pod, all connections in that direction are allowed. Otherwise a
connection is allowed if any of the selecting policies allows it.
"""

import dataclasses
import ipaddress


@dataclasses.dataclass(frozen=True)
class Pod:
    namespace: str
    labels: tuple
    address: str
    """Matters for ipBlock only. Policies identify pods on the host network by their address alone."""
    host: bool = False

    def label(self, name):
        return dict(self.labels).get(name)


@dataclasses.dataclass(frozen=True)
class Outside:
    """An address that is not a pod's."""

    address: str


class World:
    def __init__(self, manifests, namespaces):
        self.policies = [m for m in manifests if m["kind"] == "NetworkPolicy"]
        self.namespaces = {name: {"kubernetes.io/metadata.name": name, **labels} for name, labels in namespaces.items()}

    def allows(self, source, target, protocol, port):
        return self._open(source, "Egress", target, protocol, port) and self._open(
            target, "Ingress", source, protocol, port
        )

    def _open(self, pod, direction, other, protocol, port):
        if isinstance(pod, Outside) or pod.host:
            return True
        mine = [policy for policy in self.policies if self._selects(policy, pod, direction)]
        if not mine:
            return True
        side, peers = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
        return any(
            self._ports(rule, protocol, port) and self._peers(rule.get(peers), other, policy["metadata"]["namespace"])
            for policy in mine
            for rule in policy["spec"].get(side, [])
        )

    def _selects(self, policy, pod, direction):
        spec = policy["spec"]
        return (
            policy["metadata"]["namespace"] == pod.namespace
            and direction in spec["policyTypes"]
            and matches(spec["podSelector"], dict(pod.labels))
        )

    @staticmethod
    def _ports(rule, protocol, port):
        ports = rule.get("ports")
        return not ports or any(p.get("protocol", "TCP") == protocol and p.get("port") in (None, port) for p in ports)

    def _peers(self, peers, other, namespace):
        return not peers or any(self._peer(peer, other, namespace) for peer in peers)

    def _peer(self, peer, other, namespace):
        if "ipBlock" in peer:
            block, address = peer["ipBlock"], ipaddress.ip_address(other.address)
            inside = lambda network: address in ipaddress.ip_network(network)
            return inside(block["cidr"]) and not any(map(inside, block.get("except", [])))
        if isinstance(other, Outside) or other.host:
            return False
        space = peer.get("namespaceSelector")
        there = (
            other.namespace == namespace
            if space is None
            else matches(space, self.namespaces.get(other.namespace, {"kubernetes.io/metadata.name": other.namespace}))
        )
        return there and matches(peer.get("podSelector", {}), dict(other.labels))


def matches(selector, labels):
    unknown = set(selector) - {"matchLabels"}
    assert not unknown, f"{unknown} of a selector are not evaluated here"
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
