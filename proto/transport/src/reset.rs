//! QUIC stateless resets (RFC 9000, section 10.3). A node that was killed and restarted resets the
//! connections of its earlier run, so that peers dial again without waiting for the idle timeout. For that,
//! the reset tokens must be the same in all runs of a node.

use super::local::MAX_DATAGRAM;
use crate::Error;
use pki::Identity;
use quinn::crypto::{CryptoError, HmacKey};
use quinn::{ConnectionId, ConnectionIdGenerator};
use std::sync::Arc;
use std::time::Duration;

const ID_BYTES: usize = 8;

/// Returns QUIC's settings for an endpoint of this node.
pub(super) fn endpoint_config(identity: &Identity) -> Result<quinn::EndpointConfig, Error> {
    let secret = identity.derive_secret("kvasir 2026 quic stateless reset");
    let mut config = quinn::EndpointConfig::new(Arc::new(ResetKey(secret)));
    let mut seed = [0; blake3::KEY_LEN];
    pki::tls::fill_random(&mut seed)?;
    // quinn's own connection id generator silently drops packets for ids of an earlier run, so it is
    // replaced below. The call fails only below the size that every path carries.
    let _ = config.max_udp_payload_size(MAX_DATAGRAM);
    config.cid_generator(move || Box::new(Ids { seed, drawn: 0 }));
    Ok(config)
}

/// Creates and checks the tokens. This requires the node's private key.
struct ResetKey([u8; blake3::KEY_LEN]);

impl HmacKey for ResetKey {
    fn sign(&self, data: &[u8], signature_out: &mut [u8]) {
        blake3::Hasher::new_keyed(&self.0).update(data).finalize_xof().fill(signature_out);
    }

    fn signature_len(&self) -> usize {
        blake3::OUT_LEN
    }

    fn verify(&self, data: &[u8], signature: &[u8]) -> Result<(), CryptoError> {
        let expected = blake3::keyed_hash(&self.0, data);
        // Compared in constant time.
        if expected == *signature { Ok(()) } else { Err(CryptoError) }
    }
}

/// Connection ids: random, and every id is accepted as one of an earlier run.
struct Ids {
    seed: [u8; blake3::KEY_LEN],
    drawn: u64,
}

impl ConnectionIdGenerator for Ids {
    fn generate_cid(&mut self) -> ConnectionId {
        self.drawn += 1;
        let mut id = [0; ID_BYTES];
        blake3::Hasher::new_keyed(&self.seed).update(&self.drawn.to_le_bytes()).finalize_xof().fill(&mut id);
        ConnectionId::new(&id)
    }

    fn cid_len(&self) -> usize {
        ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reset_tokens_survive_a_restart_and_connection_ids_do_not() {
        let sign = |key: u8, id: &ConnectionId| {
            let mut token = [0; blake3::OUT_LEN];
            ResetKey([key; blake3::KEY_LEN]).sign(id, &mut token);
            token
        };
        let mut first = Ids { seed: [1; blake3::KEY_LEN], drawn: 0 };
        let mut next = Ids { seed: [2; blake3::KEY_LEN], drawn: 0 };
        let (a, b, c) = (first.generate_cid(), first.generate_cid(), next.generate_cid());
        assert!(a != b && a != c && b != c);
        assert_eq!(sign(7, &a), sign(7, &a));
        assert_ne!(sign(7, &a), sign(8, &a));
        assert!(ResetKey([7; blake3::KEY_LEN]).verify(&a, &sign(7, &a)).is_ok());
        assert!(ResetKey([7; blake3::KEY_LEN]).verify(&b, &sign(7, &a)).is_err());
    }
}
