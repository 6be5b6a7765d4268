//! Tokens of Kubernetes' service accounts (JSON Web Tokens, RFC 7519): which account a pod has, and on which
//! node it runs, checked against the API server's keys (a JSON Web Key Set, RFC 7517). No request is sent.
//!
//! A token names its node from Kubernetes 1.30 on; a token without a node is refused.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey,
};
use serde::Deserialize;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Audience of the tokens by which nodes join.
pub const AUDIENCE: &str = "kvasir";
/// Most by which the clock of the API server may differ.
const LEEWAY: Duration = Duration::from_secs(60);

/// Which tokens are accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// The API server's issuer, as in its tokens.
    pub issuer: String,
    /// Accepted accounts, as (namespace, name).
    pub accounts: Vec<(String, String)>,
}

/// A token's account and place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceAccount {
    /// `system:serviceaccount:NAMESPACE:NAME`.
    pub subject: String,
    /// The node of the pod.
    pub node: String,
    pub pod: String,
}

/// Why a token is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("not a JSON Web Token")]
    Malformed,
    #[error("the key set is not readable: {0}")]
    Keys(String),
    #[error("the key {0:?} is not in the key set")]
    UnknownKey(String),
    #[error("algorithm {0:?} is not RS256 or ES256")]
    Algorithm(String),
    #[error("the signature is wrong")]
    Signature,
    #[error("issuer {found:?}, expected {expected:?}")]
    Issuer { found: String, expected: String },
    #[error("the audience is not {AUDIENCE:?}")]
    Audience,
    #[error("expired, or not valid yet")]
    Time,
    #[error("account {0:?} may not join nodes")]
    Account(String),
    #[error("the token names no node; Kubernetes 1.30 or newer puts it in")]
    NoNode,
}

#[derive(Deserialize)]
struct Head {
    alg: String,
    #[serde(default)]
    kid: String,
}

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<Key>,
}

#[derive(Deserialize)]
struct Key {
    kty: String,
    #[serde(default)]
    kid: String,
    #[serde(default)]
    n: String,
    #[serde(default)]
    e: String,
    #[serde(default)]
    crv: String,
    #[serde(default)]
    x: String,
    #[serde(default)]
    y: String,
}

#[derive(Deserialize)]
struct Claims {
    iss: String,
    sub: String,
    aud: Audience,
    exp: u64,
    #[serde(default)]
    nbf: u64,
    #[serde(rename = "kubernetes.io")]
    kubernetes: Kubernetes,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Several(Vec<String>),
}

#[derive(Deserialize)]
struct Kubernetes {
    node: Option<Named>,
    pod: Option<Named>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

impl Policy {
    /// Checks `token` with the API server's `keys`.
    pub fn check(&self, token: &str, keys: &str, now: SystemTime) -> Result<ServiceAccount, TokenError> {
        let malformed = |_| TokenError::Malformed;
        let (signed, signature) = token.trim().rsplit_once('.').ok_or(TokenError::Malformed)?;
        let (head, claims) = signed.split_once('.').ok_or(TokenError::Malformed)?;
        let decode = |text: &str| URL_SAFE_NO_PAD.decode(text).map_err(|_| TokenError::Malformed);
        let head: Head = serde_json::from_slice(&decode(head)?).map_err(malformed)?;
        let keys: KeySet = serde_json::from_str(keys).map_err(|error| TokenError::Keys(error.to_string()))?;
        let key = keys.keys.iter().find(|key| key.kid == head.kid);
        let key = key.ok_or_else(|| TokenError::UnknownKey(head.kid.chars().take(100).collect()))?;
        key.verify(&head.alg, signed.as_bytes(), &decode(signature)?)?;
        let claims: Claims = serde_json::from_slice(&decode(claims)?).map_err(malformed)?;
        if claims.iss != self.issuer {
            return Err(TokenError::Issuer { found: claims.iss, expected: self.issuer.clone() });
        }
        let ours = match &claims.aud {
            Audience::One(one) => one == AUDIENCE,
            Audience::Several(several) => several.iter().any(|one| one == AUDIENCE),
        };
        if !ours {
            return Err(TokenError::Audience);
        }
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let leeway = LEEWAY.as_secs();
        if claims.exp.saturating_add(leeway) <= now || claims.nbf > now.saturating_add(leeway) {
            return Err(TokenError::Time);
        }
        let subject =
            |(namespace, name): &(String, String)| format!("system:serviceaccount:{namespace}:{name}");
        if !self.accounts.iter().any(|account| subject(account) == claims.sub) {
            return Err(TokenError::Account(claims.sub));
        }
        let node = claims.kubernetes.node.ok_or(TokenError::NoNode)?.name;
        let pod = claims.kubernetes.pod.map_or_else(String::new, |pod| pod.name);
        Ok(ServiceAccount { subject: claims.sub, node, pod })
    }
}

impl Key {
    fn verify(&self, algorithm: &str, signed: &[u8], signature: &[u8]) -> Result<(), TokenError> {
        let bad = || TokenError::Keys(format!("the key {:?} is incomplete", self.kid));
        let part = |text: &str| URL_SAFE_NO_PAD.decode(text).map_err(|_| bad());
        let verified =
            match (algorithm, self.kty.as_str(), self.crv.as_str()) {
                ("RS256", "RSA", _) => RsaPublicKeyComponents { n: part(&self.n)?, e: part(&self.e)? }
                    .verify(&RSA_PKCS1_2048_8192_SHA256, signed, signature),
                ("ES256", "EC", "P-256") => {
                    let point = [vec![4], part(&self.x)?, part(&self.y)?].concat();
                    UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point).verify(signed, signature)
                }
                _ => return Err(TokenError::Algorithm(algorithm.chars().take(20).collect())),
            };
        verified.map_err(|_| TokenError::Signature)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
    use serde_json::{Value, json};

    const NOW: u64 = 2_000_000_000;
    /// A token that OpenSSL signed with an RSA key of 2,048 bits, and that key.
    const RSA: &str = include_str!("service_account_rs256.json");

    struct Server(EcdsaKeyPair, ring::rand::SystemRandom);

    impl Server {
        fn new() -> Self {
            let random = ring::rand::SystemRandom::new();
            let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
            let pkcs8 = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
            Self(EcdsaKeyPair::from_pkcs8(algorithm, pkcs8.as_ref(), &random).unwrap(), random)
        }

        fn keys(&self) -> String {
            let point = self.0.public_key().as_ref();
            let part = |range| URL_SAFE_NO_PAD.encode(&point[range]);
            let key = json!({"kty": "EC", "kid": "k1", "crv": "P-256", "x": part(1..33), "y": part(33..65)});
            json!({"keys": [{"kty": "RSA", "kid": "k0"}, key]}).to_string()
        }

        fn sign(&self, head: &Value, claims: &Value) -> String {
            let part = |json: &Value| URL_SAFE_NO_PAD.encode(json.to_string());
            let signed = format!("{}.{}", part(head), part(claims));
            let signature = self.0.sign(&self.1, signed.as_bytes()).unwrap();
            format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
        }
    }

    fn claims() -> Value {
        json!({
            "iss": "https://kubernetes.default.svc", "sub": "system:serviceaccount:kvasir:kvasir-worker",
            "aud": ["kvasir"], "exp": NOW + 600, "nbf": NOW, "iat": NOW,
            "kubernetes.io": {
                "namespace": "kvasir", "node": {"name": "spark-1", "uid": "u"},
                "pod": {"name": "kvasir-worker-abcde", "uid": "u"},
                "serviceaccount": {"name": "kvasir-worker", "uid": "u"},
            },
        })
    }

    fn policy() -> Policy {
        let accounts = vec![("kvasir".to_owned(), "kvasir-worker".to_owned())];
        Policy { issuer: "https://kubernetes.default.svc".into(), accounts }
    }

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(NOW)
    }

    #[test]
    fn a_token_of_the_api_server_names_the_pods_node() {
        let server = Server::new();
        let token = server.sign(&json!({"alg": "ES256", "kid": "k1"}), &claims());
        let account = policy().check(&token, &server.keys(), now()).unwrap();
        assert_eq!((account.node.as_str(), account.pod.as_str()), ("spark-1", "kvasir-worker-abcde"));
        let rsa: Value = serde_json::from_str(RSA).unwrap();
        let (token, keys) = (rsa["token"].as_str().unwrap(), rsa["keys"].to_string());
        assert_eq!(policy().check(token, &keys, now()).unwrap(), account);
    }

    #[test]
    fn sec_a_token_of_another_server_account_audience_time_or_algorithm_is_refused() {
        let (server, head) = (Server::new(), json!({"alg": "ES256", "kid": "k1"}));
        let check = |token: &str| policy().check(token, &server.keys(), now());
        let with = |name: &str, value: Value| {
            let mut claims = claims();
            claims[name] = value;
            server.sign(&head, &claims)
        };
        assert_eq!(check(&Server::new().sign(&head, &claims())), Err(TokenError::Signature));
        assert!(matches!(check(&with("iss", json!("https://other"))), Err(TokenError::Issuer { .. })));
        assert_eq!(check(&with("aud", json!("https://kubernetes.default.svc"))), Err(TokenError::Audience));
        assert_eq!(check(&with("exp", json!(NOW - 60))), Err(TokenError::Time));
        assert_eq!(check(&with("nbf", json!(NOW + 61))), Err(TokenError::Time));
        let other = "system:serviceaccount:other:kvasir-worker";
        assert_eq!(check(&with("sub", json!(other))), Err(TokenError::Account(other.into())));
        assert_eq!(check(&with("kubernetes.io", json!({"pod": {"name": "p"}}))), Err(TokenError::NoNode));
        let none = json!({"alg": "none", "kid": "k1"});
        assert_eq!(check(&server.sign(&none, &claims())), Err(TokenError::Algorithm("none".into())));
        let confused = json!({"alg": "HS256", "kid": "k1"});
        assert_eq!(check(&server.sign(&confused, &claims())), Err(TokenError::Algorithm("HS256".into())));
        let unknown = json!({"alg": "ES256", "kid": "k9"});
        assert_eq!(check(&server.sign(&unknown, &claims())), Err(TokenError::UnknownKey("k9".into())));
        let incomplete = json!({"alg": "RS256", "kid": "k0"});
        check(&server.sign(&incomplete, &claims())).unwrap_err();
        let token = server.sign(&head, &claims());
        for text in ["", ".", "..", "a.b.c", token.rsplit_once('.').unwrap().0] {
            check(text).unwrap_err();
        }
        let (signed, _) = token.rsplit_once('.').unwrap();
        assert_eq!(check(&format!("{signed}.")), Err(TokenError::Signature));
    }
}
