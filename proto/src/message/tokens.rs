//! Token ids, packed for the wire.

use serde::de::{Deserialize, Deserializer, Visitor};
use serde::ser::{Error as _, Serialize, Serializer};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Most token ids in one list. At four bytes each they fit a request's frame.
pub const MAX_TOKEN_IDS: usize = 2 << 20;

/// Tokens of a prompt or of generated output. Cheap to clone.
///
/// On the wire a list is one byte string: first the number of bytes per token, the smallest that holds the
/// largest token, then the tokens, little-endian. Packing and unpacking cost about as much as a copy.
/// Vocabularies of up to 65,536 tokens take two bytes per token.
#[derive(Clone, Default)]
pub struct TokenIds(Arc<Inner>);

#[derive(Default)]
struct Inner {
    ids: Vec<u32>,
    parts: Vec<TokenPart>,
}

/// Named run of tokens at the beginning of a list. Within one process, equal names stand for equal tokens
/// after equal earlier parts. Only the code that creates the names can guarantee that. Names are not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenPart {
    pub name: u64,
    /// End of the part: number of tokens from the beginning of the list.
    pub end: usize,
}

impl TokenIds {
    /// Creates a list that begins with `parts`, in order. Drops the parts from the first one on that
    /// exceeds the list or ends before its predecessor.
    pub fn from_parts(ids: Vec<u32>, mut parts: Vec<TokenPart>) -> Self {
        let mut from = 0;
        let fits = parts.iter().take_while(|part| {
            let from = std::mem::replace(&mut from, part.end);
            from <= part.end && part.end <= ids.len()
        });
        parts.truncate(fits.count());
        Self(Arc::new(Inner { ids, parts }))
    }

    /// Returns the named parts that the list begins with.
    pub fn parts(&self) -> &[TokenPart] {
        &self.0.parts
    }

    /// Returns a lower bound of the common prefix's length in tokens, by comparing the names of the parts.
    pub fn shared_parts(&self, other: &Self) -> usize {
        let both = self.parts().iter().zip(other.parts());
        both.take_while(|(ours, theirs)| ours == theirs).last().map_or(0, |(part, _)| part.end)
    }

    fn packed(&self) -> Vec<u8> {
        // The OR of all ids needs as many bits as the largest id.
        let ids = &self.0.ids;
        let width = match ids.iter().fold(0, |all, id| all | id) {
            0..0x100 => 1,
            0x100..0x1_0000 => 2,
            0x1_0000..0x100_0000 => 3,
            _ => 4,
        };
        let mut bytes = Vec::with_capacity(1 + width * ids.len());
        bytes.push(width as u8);
        match width {
            1 => bytes.extend(ids.iter().map(|&id| id as u8)),
            2 => pack::<2>(ids, &mut bytes),
            3 => pack::<3>(ids, &mut bytes),
            _ => pack::<4>(ids, &mut bytes),
        }
        bytes
    }

    /// Returns `None` if `bytes` is not a packed list.
    fn unpacked(bytes: &[u8]) -> Option<Self> {
        let (&width, packed) = bytes.split_first()?;
        let ids = match width {
            1 => packed.iter().copied().map(u32::from).collect(),
            2 => unpack::<2>(packed)?,
            3 => unpack::<3>(packed)?,
            4 => unpack::<4>(packed)?,
            _ => return None,
        };
        Some(Self::from(ids))
    }
}

/// Appends the low `WIDTH` bytes of each id.
fn pack<const WIDTH: usize>(ids: &[u32], bytes: &mut Vec<u8>) {
    let start = bytes.len();
    bytes.resize(start + WIDTH * ids.len(), 0);
    let (chunks, _) = bytes.split_at_mut(start).1.as_chunks_mut::<WIDTH>();
    for (chunk, id) in chunks.iter_mut().zip(ids) {
        chunk.copy_from_slice(&id.to_le_bytes()[..WIDTH]);
    }
}

fn unpack<const WIDTH: usize>(packed: &[u8]) -> Option<Vec<u32>> {
    let (tokens, []) = packed.as_chunks::<WIDTH>() else { return None };
    let id = |token: &[u8; WIDTH]| {
        let mut id = [0; 4];
        id[..WIDTH].copy_from_slice(token);
        u32::from_le_bytes(id)
    };
    Some(tokens.iter().map(id).collect())
}

impl Deref for TokenIds {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.0.ids
    }
}

impl PartialEq for TokenIds {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for TokenIds {}

impl fmt::Debug for TokenIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.ids.fmt(f)
    }
}

impl From<Vec<u32>> for TokenIds {
    fn from(ids: Vec<u32>) -> Self {
        Self::from_parts(ids, Vec::new())
    }
}

impl From<&[u32]> for TokenIds {
    fn from(ids: &[u32]) -> Self {
        ids.to_vec().into()
    }
}

impl Serialize for TokenIds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.len() > MAX_TOKEN_IDS {
            let text = format_args!("{} tokens, the limit is {MAX_TOKEN_IDS}", self.len());
            return Err(S::Error::custom(text));
        }
        serializer.serialize_bytes(&self.packed())
    }
}

impl<'de> Deserialize<'de> for TokenIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Packed;

        impl Visitor<'_> for Packed {
            type Value = TokenIds;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_TOKEN_IDS} packed tokens")
            }

            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<TokenIds, E> {
                let width = usize::from(bytes.first().copied().unwrap_or(1)).max(1);
                let claimed = bytes.len() / width;
                if claimed > MAX_TOKEN_IDS {
                    return Err(E::custom(format_args!("{claimed} tokens, the limit is {MAX_TOKEN_IDS}")));
                }
                TokenIds::unpacked(bytes).ok_or_else(|| E::custom("not a packed list of tokens"))
            }
        }

        deserializer.deserialize_bytes(Packed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{self, Cap, CodecError};
    use proptest::prelude::*;

    fn lists() -> impl Strategy<Value = Vec<u32>> {
        let below = |bits: u32| prop::collection::vec(0..(1u64 << bits) as u32, 0..200);
        let all = prop::collection::vec(any::<u32>(), 0..200);
        prop_oneof![below(8), below(16), below(24), all]
    }

    proptest! {
        #[test]
        fn packed_tokens_unpack_to_the_same_tokens(ids in lists()) {
            let tokens = TokenIds::from(ids.clone());
            let bytes = codec::encode(&tokens, Cap::GenerateRequest).unwrap();
            let max_id = ids.iter().max().copied().unwrap_or(0);
            let width = (1..4).find(|width| u64::from(max_id) < 1 << (8 * width)).unwrap_or(4);
            // The length prefix takes one byte up to 250, and three for the larger lengths here.
            let head = if 1 + width * ids.len() > 250 { 3 } else { 1 };
            prop_assert_eq!(bytes.len(), head + 1 + width * ids.len());
            prop_assert_eq!(codec::decode::<TokenIds>(&bytes, Cap::GenerateRequest).unwrap(), tokens);
        }

        #[test]
        fn any_bytes_decode_to_a_list_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let width = bytes.first().copied().unwrap_or(0);
            let good = (1..=4).contains(&width) && (bytes.len() - 1) % usize::from(width) == 0;
            let framed = codec::encode(&serde_bytes(&bytes), Cap::GenerateRequest).unwrap();
            let decoded = codec::decode::<TokenIds>(&framed, Cap::GenerateRequest);
            prop_assert_eq!(decoded.is_ok(), good);
            if let Ok(tokens) = decoded {
                prop_assert_eq!(tokens.len(), (bytes.len() - 1) / usize::from(width));
            }
        }
    }

    /// A byte string has the same wire form as a list of bytes.
    fn serde_bytes(bytes: &[u8]) -> Vec<u8> {
        bytes.to_vec()
    }

    #[test]
    fn lists_share_their_leading_equal_parts() {
        let list = |parts: &[(u64, usize)]| {
            let parts = parts.iter().map(|&(name, end)| TokenPart { name, end }).collect();
            TokenIds::from_parts(vec![7; 100], parts)
        };
        let one = list(&[(1, 30), (2, 60), (3, 90)]);
        assert_eq!(one.shared_parts(&list(&[(1, 30), (2, 60), (4, 90)])), 60);
        assert_eq!(one.shared_parts(&list(&[(2, 30), (1, 60)])), 0);
        assert_eq!(one.shared_parts(&list(&[(1, 31), (2, 60)])), 0, "a name is of so many tokens");
        assert_eq!(one.shared_parts(&TokenIds::from(vec![7; 100])), 0);
        assert_eq!(one, TokenIds::from(vec![7; 100]), "lists are their tokens");
        // Impossible parts are dropped.
        assert_eq!(list(&[(1, 30), (2, 101)]).parts().len(), 1);
        assert_eq!(list(&[(1, 30), (2, 20)]).parts().len(), 1);
    }

    #[test]
    fn more_tokens_than_the_limit_are_refused_on_both_sides() {
        let many = TokenIds::from(vec![0; MAX_TOKEN_IDS + 1]);
        assert!(matches!(codec::encode(&many, Cap::GenerateRequest), Err(CodecError::Invalid { .. })));
        let mut packed = vec![1];
        packed.resize(MAX_TOKEN_IDS + 2, 7);
        let framed = codec::encode(&serde_bytes(&packed), Cap::GenerateRequest).unwrap();
        let refused = codec::decode::<TokenIds>(&framed, Cap::GenerateRequest);
        assert!(matches!(refused, Err(CodecError::Invalid { .. })), "{refused:?}");
    }
}
