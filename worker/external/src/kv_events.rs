//! KV events of vLLM and SGLang: one msgpack value a batch.
//!
//! Read in vLLM 0.32.0 (`vllm/distributed/kv_events.py`, `vllm/v1/core/{block_pool,kv_cache_utils}.py`) and
//! SGLang 0.5.23 (`sglang/srt/disaggregation/kv_events.py`, `sglang/srt/mem_cache/events.py`). A batch is
//! `[timestamp, events, data-parallel rank]`, or a map of these in some builds of vLLM. An event is a map with
//! `type`, or in older versions of both an array with the type first and the fields in the order of
//! [`STORED_FIELDS`]. Fields that this version does not know are skipped. An unknown type is an error, because
//! nobody can tell what it did to the cache.

use crate::arguments::EngineKind;
use crate::msgpack::{Item, MsgpackError, Reader};

/// Most block hashes or tokens in one batch.
const MAX_ENTRIES: usize = 8 << 20;

/// An engine's name of a block, which depends on all tokens before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineHash(
    /// An integer hash as it is, or the first 16 bytes of a longer one.
    pub u128,
);

/// Medium of a stored block, as the engine names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EngineMedium {
    Device,
    Host,
    Disk,
    /// Storage that other engines share, or a name that this version does not know.
    Elsewhere,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheEvent {
    Stored(StoredBlocks),
    Removed { hashes: Vec<EngineHash>, medium: EngineMedium, group: Option<u32> },
    AllCleared,
}

/// Consecutive blocks that were stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBlocks {
    pub hashes: Vec<EngineHash>,
    /// `None`: the first block begins a prompt.
    pub parent: Option<EngineHash>,
    /// The tokens of all blocks.
    pub tokens: Vec<u32>,
    /// Tokens of a block.
    pub block_size: u32,
    pub medium: EngineMedium,
    /// The blocks were computed with an adapter.
    pub adapter: bool,
    /// The salt of the request, if the event has one.
    pub salt: Option<String>,
    /// Blocks whose KV depends on more than tokens, salt and adapter: images, embeddings.
    pub other_inputs: bool,
    /// The cache group of a model with several kinds of attention.
    pub group: Option<u32>,
    /// The group's attention is not full attention.
    pub partial_attention: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheEventBatch {
    pub events: Vec<CacheEvent>,
    pub data_parallel_rank: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KvEventError {
    #[error(transparent)]
    Msgpack(#[from] MsgpackError),
    #[error("unknown event {0:?}")]
    UnknownEvent(String),
    #[error("{0}: missing")]
    MissingField(&'static str),
    #[error("{hashes} blocks of {block_size} tokens with {tokens} tokens")]
    TokenCount { hashes: usize, block_size: u32, tokens: usize },
    #[error("more than {MAX_ENTRIES} hashes and tokens in one batch")]
    TooLong,
}

/// Order of the fields of a stored block in an array. SGLang's arrays end with the medium.
const STORED_FIELDS: [&str; 14] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
];
/// Number of leading [`STORED_FIELDS`] that mean the same in arrays of every engine.
const COMMON_STORED_FIELDS: usize = 6;
const REMOVED_FIELDS: [&str; 5] = ["block_hashes", "medium", "group_idx", "locality", "ownership"];
const COMMON_REMOVED_FIELDS: usize = 2;

/// Kinds of attention that need the KV of every earlier token.
const FULL_ATTENTION: [&str; 2] = ["full_attention", "mla_attention"];

impl CacheEventBatch {
    /// # Errors
    ///
    /// If the payload has another form, or an event of an unknown type.
    pub fn decode(engine: EngineKind, payload: &[u8]) -> Result<Self, KvEventError> {
        let mut reader = Reader::new(payload);
        let mut room = MAX_ENTRIES;
        let mut batch = Self { events: Vec::new(), data_parallel_rank: None };
        let fields = ["ts", "events", "data_parallel_rank"];
        let mut has_events = false;
        for_each_field(&mut reader, &fields, fields.len(), None, |field, reader| {
            match field {
                "ts" => drop(reader.float()?),
                "events" => {
                    has_events = true;
                    for _ in 0..reader.array_length()? {
                        batch.events.push(decode_event(engine, reader, &mut room)?);
                    }
                }
                "data_parallel_rank" => batch.data_parallel_rank = reader.option(Reader::u32)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        if has_events { Ok(batch) } else { Err(KvEventError::MissingField("events")) }
    }
}

/// Calls `read` with the name of each field of a map, or of an array whose positions are named by `order`.
/// Positions from `known` on are skipped. `array` is the number of entries of an array whose beginning was
/// already read.
fn for_each_field<'a>(
    reader: &mut Reader<'a>,
    order: &[&'static str],
    known: usize,
    array: Option<usize>,
    mut read: impl FnMut(&str, &mut Reader<'a>) -> Result<(), KvEventError>,
) -> Result<(), KvEventError> {
    let head = match array {
        Some(length) => Item::Array(length),
        None => reader.item()?,
    };
    match head {
        Item::Array(length) => {
            for position in 0..length {
                match order.get(position).filter(|_| position < known) {
                    Some(field) => read(field, reader)?,
                    None => reader.skip()?,
                }
            }
        }
        Item::Map(pairs) => {
            for _ in 0..pairs {
                let field = reader.text_item()?;
                read(field, reader)?;
            }
        }
        _ => return Err(MsgpackError::Unexpected { expected: "an array or a map", marker: 0 }.into()),
    }
    Ok(())
}

fn decode_event(
    engine: EngineKind,
    reader: &mut Reader<'_>,
    room: &mut usize,
) -> Result<CacheEvent, KvEventError> {
    // The type is the first entry of an array, and any key of a map.
    let mut ahead = reader.clone();
    let (kind, fields) = match ahead.item()? {
        Item::Array(0) => return Err(KvEventError::MissingField("type")),
        Item::Array(length) => {
            let kind = ahead.text_item()?;
            *reader = ahead;
            (kind, Some(length - 1))
        }
        Item::Map(pairs) => {
            let mut kind = None;
            for _ in 0..pairs {
                match ahead.text_item()? {
                    "type" => kind = Some(ahead.text_item()?),
                    _ => ahead.skip()?,
                }
            }
            (kind.ok_or(KvEventError::MissingField("type"))?, None)
        }
        _ => return Err(MsgpackError::Unexpected { expected: "an event", marker: 0 }.into()),
    };
    match kind {
        "BlockStored" => decode_stored(engine, reader, fields, room).map(CacheEvent::Stored),
        "BlockRemoved" => decode_removed(engine, reader, fields, room),
        "AllBlocksCleared" => {
            for_each_field(reader, &[], 0, fields, |_, reader| Ok(reader.skip()?))?;
            Ok(CacheEvent::AllCleared)
        }
        unknown => Err(KvEventError::UnknownEvent(unknown.chars().take(64).collect())),
    }
}

/// Most distinct texts that are kept of extra keys. A salt and an adapter are two.
const MAX_EXTRA_TEXTS: usize = 4;

/// Salt and other inputs of the blocks, from their extra keys.
#[derive(Default)]
struct ExtraKeys {
    /// Distinct texts of the first block, in order: the adapter's name, the salt.
    first: Vec<String>,
    /// Distinct texts of later blocks.
    later: Vec<String>,
    other_inputs: bool,
}

fn decode_stored(
    engine: EngineKind,
    reader: &mut Reader<'_>,
    fields: Option<usize>,
    room: &mut usize,
) -> Result<StoredBlocks, KvEventError> {
    let known = if engine == EngineKind::Sglang { COMMON_STORED_FIELDS } else { STORED_FIELDS.len() };
    let (mut hashes, mut tokens, mut block_size) = (None, None, None);
    let (mut parent, mut medium, mut remote) = (None, EngineMedium::Device, false);
    let (mut lora_id, mut lora_name) = (None, None);
    let (mut salt, mut group, mut kind) = (None, None, None);
    let mut extra = ExtraKeys::default();
    for_each_field(reader, &STORED_FIELDS, known, fields, |field, reader| {
        match field {
            "block_hashes" => hashes = Some(read_hashes(reader, room)?),
            "parent_block_hash" => parent = reader.option(read_hash)?,
            "token_ids" => tokens = Some(read_tokens(reader, room)?),
            "block_size" => block_size = Some(reader.u32()?),
            "lora_id" => lora_id = read_presence(reader)?,
            "lora_name" => lora_name = reader.option(Reader::text_item)?.map(str::to_owned),
            "medium" => medium = medium_of(reader.option(Reader::text_item)?),
            "cache_salt" => salt = reader.option(Reader::text_item)?.map(str::to_owned),
            "extra_keys" => extra = reader.option(read_extra_keys)?.unwrap_or_default(),
            "group_idx" => group = reader.option(Reader::u32)?,
            "kv_cache_spec_kind" => kind = reader.option(Reader::text_item)?.map(str::to_owned),
            "locality" => remote = reader.option(Reader::text_item)? == Some("REMOTE"),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let hashes = hashes.ok_or(KvEventError::MissingField("block_hashes"))?;
    let tokens = tokens.ok_or(KvEventError::MissingField("token_ids"))?;
    let block_size = block_size.ok_or(KvEventError::MissingField("block_size"))?;
    let partial_attention = kind.is_some_and(|kind| !FULL_ATTENTION.contains(&kind.as_str()));
    // Groups with other attention may leave out blocks.
    if !partial_attention && Some(tokens.len()) != hashes.len().checked_mul(block_size as usize) {
        return Err(KvEventError::TokenCount { hashes: hashes.len(), block_size, tokens: tokens.len() });
    }
    // A text that is neither the adapter's name nor the first block's salt is another input.
    let is_adapter = |text: &String| Some(text) == lora_name.as_ref();
    extra.first.retain(|text| !is_adapter(text));
    extra.later.retain(|text| !is_adapter(text));
    let salt = salt.or_else(|| extra.first.pop());
    Ok(StoredBlocks {
        hashes,
        parent,
        tokens,
        block_size,
        medium: if remote { EngineMedium::Elsewhere } else { medium },
        adapter: lora_id.is_some() || lora_name.is_some(),
        salt,
        other_inputs: extra.other_inputs || !extra.first.is_empty() || !extra.later.is_empty(),
        group,
        partial_attention,
    })
}

fn decode_removed(
    engine: EngineKind,
    reader: &mut Reader<'_>,
    fields: Option<usize>,
    room: &mut usize,
) -> Result<CacheEvent, KvEventError> {
    let known = if engine == EngineKind::Sglang { COMMON_REMOVED_FIELDS } else { REMOVED_FIELDS.len() };
    let (mut hashes, mut medium, mut group, mut remote) = (None, EngineMedium::Device, None, false);
    for_each_field(reader, &REMOVED_FIELDS, known, fields, |field, reader| {
        match field {
            "block_hashes" => hashes = Some(read_hashes(reader, room)?),
            "medium" => medium = medium_of(reader.option(Reader::text_item)?),
            "group_idx" => group = reader.option(Reader::u32)?,
            "locality" => remote = reader.option(Reader::text_item)? == Some("REMOTE"),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let hashes = hashes.ok_or(KvEventError::MissingField("block_hashes"))?;
    Ok(CacheEvent::Removed { hashes, medium: if remote { EngineMedium::Elsewhere } else { medium }, group })
}

fn medium_of(name: Option<&str>) -> EngineMedium {
    match name {
        None | Some("GPU") => EngineMedium::Device,
        Some("CPU" | "CPU_PINNED") => EngineMedium::Host,
        Some("DISK" | "STORAGE") => EngineMedium::Disk,
        Some(_) => EngineMedium::Elsewhere,
    }
}

fn read_hash(reader: &mut Reader<'_>) -> Result<EngineHash, MsgpackError> {
    match reader.item()? {
        Item::Int(hash) => Ok(EngineHash(hash.cast_unsigned())),
        Item::Bytes(hash) => {
            let mut first = [0; 16];
            let length = hash.len().min(first.len());
            first[..length].copy_from_slice(&hash[..length]);
            Ok(EngineHash(u128::from_be_bytes(first)))
        }
        _ => Err(MsgpackError::Unexpected { expected: "a block hash", marker: 0 }),
    }
}

fn take_room(room: &mut usize, entries: usize) -> Result<(), KvEventError> {
    *room = room.checked_sub(entries).ok_or(KvEventError::TooLong)?;
    Ok(())
}

fn read_hashes(reader: &mut Reader<'_>, room: &mut usize) -> Result<Vec<EngineHash>, KvEventError> {
    let length = reader.array_length()?;
    take_room(room, length)?;
    Ok((0..length).map(|_| read_hash(reader)).collect::<Result<_, _>>()?)
}

fn read_tokens(reader: &mut Reader<'_>, room: &mut usize) -> Result<Vec<u32>, KvEventError> {
    let length = reader.array_length()?;
    take_room(room, length)?;
    Ok((0..length).map(|_| reader.u32()).collect::<Result<_, _>>()?)
}

/// `Some` if the value is not nil.
fn read_presence(reader: &mut Reader<'_>) -> Result<Option<()>, MsgpackError> {
    reader.option(Reader::skip)
}

/// One entry a block: nil, or an array of texts (adapter, salt), pairs (images) and digests.
fn read_extra_keys(reader: &mut Reader<'_>) -> Result<ExtraKeys, MsgpackError> {
    let mut extra = ExtraKeys::default();
    for block in 0..reader.array_length()? {
        let keys = reader.option(Reader::array_length)?.unwrap_or(0);
        for _ in 0..keys {
            let mut ahead = reader.clone();
            match ahead.item()? {
                Item::Text(text) => {
                    let texts = if block == 0 { &mut extra.first } else { &mut extra.later };
                    if !texts.iter().any(|known| known == text) {
                        if texts.len() < MAX_EXTRA_TEXTS {
                            texts.push(text.to_owned());
                        } else {
                            extra.other_inputs = true;
                        }
                    }
                }
                Item::Nil => {}
                _ => extra.other_inputs = true,
            }
            reader.skip()?;
        }
    }
    Ok(extra)
}

#[cfg(test)]
mod tests;
