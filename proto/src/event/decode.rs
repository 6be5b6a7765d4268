//! Hand-written decoder of KV events. The wire form is that of every other message. The events consist
//! mostly of ids, which serde would decode byte by byte, and a coordinator reads dozens of them for each
//! prompt that a worker has computed.

use super::{KvEvent, KvEventBatch, KvFrame, MAX_EVENTS_PER_BATCH, Medium};
use crate::block::BlockId;
use crate::codec::{Cap, CodecError, config, explain};
use crate::ids::Epoch;
use bincode::BorrowDecode;
use bincode::de::read::BorrowReader;
use bincode::de::{BorrowDecoder, Decode};
use bincode::error::{AllowedEnumVariants, DecodeError};

const ID_BYTES: usize = size_of::<BlockId>();

/// Returns the same result as [`decode`](crate::codec::decode) for the same bytes.
pub fn decode_kv_frame(bytes: &[u8]) -> Result<KvFrame, CodecError> {
    const CAP: Cap = Cap::Events;
    let message = std::any::type_name::<KvFrame>();
    if bytes.len() > CAP.bytes() {
        return Err(CodecError::TooLong { message, len: bytes.len(), cap: CAP.bytes() });
    }
    let read = bincode::borrow_decode_from_slice::<ByHand, _>(bytes, config::<{ CAP.bytes() }>());
    let (ByHand(frame), used) = read.map_err(|error| match error {
        DecodeError::UnexpectedVariant { found, .. } => {
            CodecError::UnknownVariant { message, index: found.into() }
        }
        other => explain(message, CAP, other),
    })?;
    match bytes.len().saturating_sub(used) {
        0 => Ok(frame),
        extra => Err(CodecError::Trailing { message, extra }),
    }
}

struct ByHand(KvFrame);

impl<'de, C> BorrowDecode<'de, C> for ByHand {
    fn borrow_decode<D: BorrowDecoder<'de, Context = C>>(from: &mut D) -> Result<Self, DecodeError> {
        match u32::decode(from)? {
            0 => batch(from).map(KvFrame::Events).map(Self),
            found => Err(unknown("KvFrame", found)),
        }
    }
}

fn batch<'de, D: BorrowDecoder<'de>>(from: &mut D) -> Result<KvEventBatch, DecodeError> {
    let (epoch, first_sequence) = (Epoch(u64::decode(from)?), u64::decode(from)?);
    let claimed = length(from)?;
    if claimed > MAX_EVENTS_PER_BATCH {
        let text = format!("{claimed} elements, the limit is {MAX_EVENTS_PER_BATCH}");
        return Err(DecodeError::OtherString(text));
    }
    let mut events = Vec::with_capacity(claimed);
    for _ in 0..claimed {
        events.push(event(from)?);
    }
    Ok(KvEventBatch { epoch, first_sequence, events })
}

fn event<'de, D: BorrowDecoder<'de>>(from: &mut D) -> Result<KvEvent, DecodeError> {
    Ok(match u32::decode(from)? {
        0 => KvEvent::Stored { parent: id(from)?, units: ids(from)?, medium: medium(from)? },
        1 => KvEvent::Removed { units: ids(from)?, medium: medium(from)? },
        2 => KvEvent::Cleared,
        3 => KvEvent::ResumePoint { unit: id(from)?, position: u32::decode(from)?, medium: medium(from)? },
        found => return Err(unknown("KvEvent", found)),
    })
}

fn medium<'de, D: BorrowDecoder<'de>>(from: &mut D) -> Result<Medium, DecodeError> {
    Ok(match u32::decode(from)? {
        0 => Medium::Device,
        1 => Medium::Host,
        2 => Medium::Disk,
        found => return Err(unknown("Medium", found)),
    })
}

fn id<'de, D: BorrowDecoder<'de>>(from: &mut D) -> Result<BlockId, DecodeError> {
    <[u8; ID_BYTES]>::decode(from).map(BlockId)
}

/// Reads a list of ids with one copy. Fails if the input has too few bytes.
fn ids<'de, D: BorrowDecoder<'de>>(from: &mut D) -> Result<Vec<BlockId>, DecodeError> {
    let bytes = length(from)?.checked_mul(ID_BYTES).ok_or(DecodeError::LimitExceeded)?;
    from.claim_bytes_read(bytes)?;
    let (ids, _) = from.borrow_reader().take_bytes(bytes)?.as_chunks::<ID_BYTES>();
    Ok(ids.iter().copied().map(BlockId).collect())
}

fn length<'de, D: BorrowDecoder<'de>>(from: &mut D) -> Result<usize, DecodeError> {
    let length = u64::decode(from)?;
    usize::try_from(length).map_err(|_| DecodeError::OutsideUsizeRange(length))
}

fn unknown(type_name: &'static str, found: u32) -> DecodeError {
    DecodeError::UnexpectedVariant { type_name, allowed: &AllowedEnumVariants::Allowed(&[]), found }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;
    use proptest::prelude::*;

    fn media() -> impl Strategy<Value = Medium> {
        prop_oneof![Just(Medium::Device), Just(Medium::Host), Just(Medium::Disk)]
    }

    fn events() -> impl Strategy<Value = KvEvent> {
        let id = || any::<[u8; 16]>().prop_map(BlockId);
        let units = || prop::collection::vec(id(), 0..20);
        prop_oneof![
            (id(), units(), media()).prop_map(|(parent, units, medium)| KvEvent::Stored {
                parent,
                units,
                medium
            }),
            (units(), media()).prop_map(|(units, medium)| KvEvent::Removed { units, medium }),
            Just(KvEvent::Cleared),
            (id(), any::<u32>(), media()).prop_map(|(unit, position, medium)| KvEvent::ResumePoint {
                unit,
                position,
                medium
            }),
        ]
    }

    fn encoded() -> impl Strategy<Value = Vec<u8>> {
        let batch = (any::<u64>(), any::<u64>(), prop::collection::vec(events(), 0..6));
        batch.prop_map(|(epoch, first_sequence, events)| {
            let batch = KvEventBatch { epoch: Epoch(epoch), first_sequence, events };
            codec::encode(&KvFrame::Events(batch), Cap::Events).unwrap()
        })
    }

    /// Both decoders return the same frame, and report the same error for a variant of a later version.
    fn check(bytes: &[u8]) -> Result<bool, TestCaseError> {
        let (by_hand, by_serde) = (decode_kv_frame(bytes), codec::decode::<KvFrame>(bytes, Cap::Events));
        let unknown_variant = |frame: &Result<KvFrame, CodecError>| match frame {
            Err(error @ CodecError::UnknownVariant { .. }) => Some(error.clone()),
            _ => None,
        };
        prop_assert_eq!(unknown_variant(&by_hand), unknown_variant(&by_serde));
        prop_assert_eq!(by_hand.clone().ok(), by_serde.ok());
        Ok(by_hand.is_ok())
    }

    proptest! {
        #[test]
        fn sent_frames_are_read(bytes in encoded()) {
            prop_assert!(check(&bytes)?);
        }

        #[test]
        fn cut_or_changed_frames_decode_as_with_serde(
            bytes in encoded(),
            at in any::<prop::sample::Index>(),
            value in any::<u8>(),
            len in any::<prop::sample::Index>(),
        ) {
            let mut changed = bytes.clone();
            changed[at.index(bytes.len())] = value;
            check(&changed)?;
            changed.truncate(len.index(bytes.len()));
            check(&changed)?;
            let more = [bytes.as_slice(), &[value]].concat();
            prop_assert!(!check(&more)?);
        }
    }

    #[test]
    fn claimed_lengths_are_not_trusted() {
        let list = |head: &[u8], len: u64| {
            let mut bytes = head.to_vec();
            bytes.push(253);
            bytes.extend(len.to_le_bytes());
            bytes
        };
        for len in [1, 32_769, 262_145, u64::MAX / 16 + 2, u64::MAX] {
            // First a batch of that many events, then one event of that many units.
            assert!(decode_kv_frame(&list(&[0, 0, 0], len)).is_err(), "{len}");
            assert!(decode_kv_frame(&list(&[0, 0, 0, 1, 1], len)).is_err(), "{len}");
        }
    }
}
