"""The part of Kubernetes' API server that makes tokens of service accounts: an RSA key, the key set, signed tokens."""

import base64
import hashlib
import json
import secrets
import time

ISSUER = "https://kubernetes.default.svc.cluster.local"
# DigestInfo of SHA-256 (RFC 8017, section 9.2).
SHA256 = bytes.fromhex("3031300d060960864801650304020105000420")


def _prime(bits):
    while True:
        candidate = secrets.randbits(bits) | 3 << bits - 2 | 1
        if all(candidate % small for small in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31)) and all(
            pow(secrets.randbelow(candidate - 3) + 2, candidate - 1, candidate) == 1 for _ in range(8)
        ):
            return candidate


def _text(raw):
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


class ApiServer:
    def __init__(self):
        p, q = _prime(1024), _prime(1024)
        self.modulus, self.exponent = p * q, pow(65537, -1, (p - 1) * (q - 1))

    def keys(self):
        """The body of /openid/v1/jwks."""
        modulus = _text(self.modulus.to_bytes(256, "big"))
        return json.dumps({"keys": [{"kty": "RSA", "kid": "k", "alg": "RS256", "use": "sig", "n": modulus, "e": "AQAB"}]})

    def token(self, namespace, account, pod, node, audience):
        now = int(time.time())
        claims = {
            "iss": ISSUER, "aud": [audience], "sub": f"system:serviceaccount:{namespace}:{account}",
            "iat": now, "nbf": now, "exp": now + 600,
            "kubernetes.io": {"namespace": namespace, "pod": {"name": pod}, "node": {"name": node}},
        }
        signed = ".".join(_text(json.dumps(part).encode()) for part in ({"alg": "RS256", "kid": "k"}, claims))
        digest = SHA256 + hashlib.sha256(signed.encode()).digest()
        padded = b"\0\1" + b"\xff" * (256 - 3 - len(digest)) + b"\0" + digest
        signature = pow(int.from_bytes(padded, "big"), self.exponent, self.modulus)
        return f"{signed}.{_text(signature.to_bytes(256, 'big'))}"
