//! A sequence's caches as bytes: every layer kind, only what a continuation can read, with digests over
//! everything.
//!
//! Layout: magic, length of the header (u32 LE), header, digest of the header, then the bytes of all pieces.
//! The header is a closed enum of versions and contains the digest of every piece, so every change is
//! detected. Digests detect damage but are no signature: a snapshot is as trustworthy as the clients that may
//! restore it.

use proto::codec::{self, Cap, CodecError};
use serde::{Deserialize, Serialize};
use std::ops::Range;

pub mod store;

const MAGIC: &[u8; 8] = b"kvasirs1";
const DIGEST_BYTES: usize = 32;
/// Upper limit of the bytes of one piece, far above every block and state slot.
const MAX_PIECE_BYTES: u64 = 1 << 32;

/// The fields that must agree between snapshot and worker: the origin of the caches, and their layout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Digest of the model's file.
    pub model_digest: [u8; 32],
    pub tokenizer_digest: [u8; 32],
    /// Within a class the same tokens give the same bits.
    pub numeric_class: String,
    /// Tokens of a KV block.
    pub block_tokens: u32,
    /// Bytes of a block, or of a state, for each group.
    pub block_bytes: Vec<u64>,
}

/// A block or a recurrent state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    pub group: u32,
    /// Its first token. For a state, the number of tokens before it.
    pub token: u32,
    /// BLAKE3 of its bytes.
    digest: [u8; DIGEST_BYTES],
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Header {
    origin: Origin,
    /// All tokens of the sequence; the first `position` of them are in the caches.
    tokens: Vec<u32>,
    position: u32,
    pieces: Vec<Piece>,
}

/// A sequence at a resume point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    header: Header,
    bytes: Vec<u8>,
}

/// Why bytes are not a snapshot, or not one for this worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    #[error("not a snapshot of this version: it does not begin with kvasirs1")]
    Magic,
    /// The file is too short or too long.
    #[error("damaged snapshot: {found} bytes, its header says {expected}")]
    Length { expected: u64, found: u64 },
    /// Bytes whose digest differs from the stored one.
    #[error("damaged snapshot: {section} has a wrong digest")]
    Digest { section: String },
    /// The header cannot be decoded.
    #[error("damaged snapshot: {0}")]
    Header(#[from] CodecError),
    /// A piece has an impossible group or token.
    #[error("damaged snapshot: piece {piece} {reason}")]
    Piece { piece: usize, reason: &'static str },
    /// The snapshot is of another origin.
    #[error("the snapshot's {field} is {found}, this worker has {expected}")]
    Other {
        /// Name of the field that differs: model, tokenizer, numeric class, block size or cache layout.
        field: &'static str,
        found: String,
        expected: String,
    },
}

impl Snapshot {
    /// Builds a snapshot. `pieces` are (group, token, bytes), with the lengths that `origin` prescribes.
    pub fn new(
        origin: Origin,
        tokens: Vec<u32>,
        position: u32,
        pieces: impl IntoIterator<Item = (u32, u32, Vec<u8>)>,
    ) -> Self {
        let mut bytes = Vec::new();
        let mut piece = |(group, token, data): (u32, u32, Vec<u8>)| {
            bytes.extend_from_slice(&data);
            Piece { group, token, digest: *blake3::hash(&data).as_bytes() }
        };
        let pieces = pieces.into_iter().map(&mut piece).collect();
        Self { header: Header { origin, tokens, position, pieces }, bytes }
    }

    pub fn tokens(&self) -> &[u32] {
        &self.header.tokens
    }

    /// Number of tokens that the caches cover.
    pub fn position(&self) -> u32 {
        self.header.position
    }

    /// The pieces with their bytes.
    pub fn pieces(&self) -> impl Iterator<Item = (&Piece, &[u8])> {
        self.header.pieces.iter().scan(0usize, |at, piece| {
            let start = *at;
            *at += self.header.origin.block_bytes[piece.group as usize] as usize;
            Some((piece, &self.bytes[start..*at]))
        })
    }

    /// Bytes of all pieces.
    pub fn cache_bytes(&self) -> usize {
        self.bytes.len()
    }

    pub fn to_bytes(&self) -> Result<Vec<u8>, SnapshotError> {
        let header = codec::encode(&self.header.clone(), Cap::Control)?;
        let mut file = Vec::with_capacity(MAGIC.len() + 4 + header.len() + DIGEST_BYTES + self.bytes.len());
        file.extend_from_slice(MAGIC);
        // The length is at most the cap, far below the limit of 32 bits.
        file.extend_from_slice(&(header.len() as u32).to_le_bytes());
        file.extend_from_slice(&header);
        file.extend_from_slice(blake3::hash(&header).as_bytes());
        file.extend_from_slice(&self.bytes);
        Ok(file)
    }

    /// Parses an untrusted file for a worker of this origin.
    pub fn from_bytes(file: &[u8], here: &Origin) -> Result<Self, SnapshotError> {
        let rest = file.strip_prefix(MAGIC).ok_or(SnapshotError::Magic)?;
        let short = |expected: u64| SnapshotError::Length { expected, found: file.len() as u64 };
        let (length, rest) = rest.split_first_chunk::<4>().ok_or_else(|| short(12))?;
        let length = u32::from_le_bytes(*length) as usize;
        let min = (MAGIC.len() + 4 + DIGEST_BYTES) as u64 + length as u64;
        let (encoded, rest) = rest.split_at_checked(length).ok_or_else(|| short(min))?;
        let (digest, bytes) = rest.split_first_chunk::<DIGEST_BYTES>().ok_or_else(|| short(min))?;
        if blake3::hash(encoded).as_bytes() != digest {
            return Err(SnapshotError::Digest { section: "its header".to_owned() });
        }
        let header: Header = codec::decode(encoded, Cap::Control)?;
        header.origin.expect(here)?;
        let mut at = 0u64;
        let mut ranges: Vec<Range<u64>> = Vec::with_capacity(header.pieces.len());
        for (index, piece) in header.pieces.iter().enumerate() {
            let wrong = |reason| SnapshotError::Piece { piece: index, reason };
            let group = header.origin.block_bytes.get(piece.group as usize);
            let length = *group.ok_or_else(|| wrong("is of a group that does not exist"))?;
            if length > MAX_PIECE_BYTES {
                return Err(wrong("is longer than any block"));
            }
            if piece.token > header.position {
                return Err(wrong("is after the sequence's end"));
            }
            ranges.push(at..at + length);
            at += length;
        }
        if header.position as usize > header.tokens.len() {
            return Err(SnapshotError::Piece { piece: 0, reason: "more positions than tokens" });
        }
        if at != bytes.len() as u64 {
            return Err(short(min + at));
        }
        for (index, (piece, range)) in header.pieces.iter().zip(ranges).enumerate() {
            // No overflow: the ranges add up to a length that is in memory.
            let data = &bytes[range.start as usize..range.end as usize];
            if *blake3::hash(data).as_bytes() != piece.digest {
                return Err(SnapshotError::Digest { section: format!("piece {index}") });
            }
        }
        Ok(Self { header, bytes: bytes.to_vec() })
    }
}

impl Origin {
    /// Refuses a snapshot of another origin.
    fn expect(&self, here: &Self) -> Result<(), SnapshotError> {
        let differ =
            |field, found: String, expected: String| Err(SnapshotError::Other { field, found, expected });
        let short = |digest: &[u8; 32]| blake3::Hash::from_bytes(*digest).to_hex()[..16].to_owned();
        if self.model_digest != here.model_digest {
            return differ("model", short(&self.model_digest), short(&here.model_digest));
        }
        if self.tokenizer_digest != here.tokenizer_digest {
            return differ("tokenizer", short(&self.tokenizer_digest), short(&here.tokenizer_digest));
        }
        if self.numeric_class != here.numeric_class {
            return differ("numeric class", self.numeric_class.clone(), here.numeric_class.clone());
        }
        if self.block_tokens != here.block_tokens {
            return differ("block size", self.block_tokens.to_string(), here.block_tokens.to_string());
        }
        if self.block_bytes != here.block_bytes {
            let list = |bytes: &[u64]| format!("{bytes:?} bytes");
            return differ("cache layout", list(&self.block_bytes), list(&here.block_bytes));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin() -> Origin {
        Origin {
            model_digest: [1; 32],
            tokenizer_digest: [2; 32],
            numeric_class: "m/cpu/avx512/int8/kv-f16".to_owned(),
            block_tokens: 16,
            block_bytes: vec![64, 128],
        }
    }

    fn snapshot() -> Snapshot {
        let pieces = [(0, 0, vec![3; 64]), (0, 16, vec![4; 64]), (1, 32, vec![5; 128])];
        Snapshot::new(origin(), (0..40).collect(), 32, pieces)
    }

    #[test]
    fn a_snapshot_survives_encoding_and_decoding() {
        let snapshot = snapshot();
        let read = Snapshot::from_bytes(&snapshot.to_bytes().unwrap(), &origin()).unwrap();
        assert_eq!(read, snapshot);
        let pieces: Vec<(u32, u32, u8, usize)> =
            read.pieces().map(|(piece, bytes)| (piece.group, piece.token, bytes[0], bytes.len())).collect();
        assert_eq!(pieces, [(0, 0, 3, 64), (0, 16, 4, 64), (1, 32, 5, 128)]);
        assert_eq!((read.position(), read.tokens().len(), read.cache_bytes()), (32, 40, 256));
    }

    #[test]
    fn every_damaged_byte_and_every_truncation_is_detected() {
        let file = snapshot().to_bytes().unwrap();
        for at in 0..file.len() {
            let mut damaged = file.clone();
            damaged[at] ^= 0x10;
            assert!(Snapshot::from_bytes(&damaged, &origin()).is_err(), "byte {at}");
            assert!(Snapshot::from_bytes(&file[..at], &origin()).is_err(), "cut at {at}");
        }
        let longer = [file.as_slice(), &[0]].concat();
        assert!(matches!(Snapshot::from_bytes(&longer, &origin()), Err(SnapshotError::Length { .. })));
    }

    #[test]
    fn another_origin_is_refused_by_name() {
        let file = snapshot().to_bytes().unwrap();
        let cases: [(&str, Origin); 5] = [
            ("model", Origin { model_digest: [9; 32], ..origin() }),
            ("tokenizer", Origin { tokenizer_digest: [9; 32], ..origin() }),
            ("numeric class", Origin { numeric_class: "other".to_owned(), ..origin() }),
            ("block size", Origin { block_tokens: 32, ..origin() }),
            ("cache layout", Origin { block_bytes: vec![64, 64], ..origin() }),
        ];
        for (name, here) in cases {
            match Snapshot::from_bytes(&file, &here) {
                Err(SnapshotError::Other { field, .. }) => assert_eq!(field, name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[test]
    fn an_inconsistent_header_is_refused() {
        let far = Snapshot::new(origin(), vec![1; 16], 16, [(0, 17, vec![0; 64])]).to_bytes().unwrap();
        assert!(matches!(Snapshot::from_bytes(&far, &origin()), Err(SnapshotError::Piece { .. })));
        let long = Snapshot::new(origin(), vec![1; 8], 16, []).to_bytes().unwrap();
        assert!(matches!(Snapshot::from_bytes(&long, &origin()), Err(SnapshotError::Piece { .. })));
        let unknown = Snapshot::new(origin(), vec![1; 16], 16, [(2, 0, vec![0; 64])]).to_bytes().unwrap();
        assert!(matches!(Snapshot::from_bytes(&unknown, &origin()), Err(SnapshotError::Piece { .. })));
    }
}
