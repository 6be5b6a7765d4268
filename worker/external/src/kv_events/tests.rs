use super::*;
use crate::fake::{EventForm, encode_batch};
use proptest::prelude::*;

fn blocks(salt: Option<&str>) -> StoredBlocks {
    StoredBlocks {
        hashes: vec![EngineHash(5), EngineHash(6)],
        parent: None,
        tokens: vec![1, 2, 300, 100_000],
        block_size: 2,
        medium: EngineMedium::Host,
        adapter: false,
        salt: salt.map(str::to_owned),
        other_inputs: false,
        group: Some(2),
        partial_attention: false,
    }
}

fn kind(form: EventForm) -> EngineKind {
    if form.is_vllm() { EngineKind::Vllm } else { EngineKind::Sglang }
}

#[test]
fn every_form_is_decoded() {
    let removed =
        CacheEvent::Removed { hashes: vec![EngineHash(5)], medium: EngineMedium::Device, group: Some(2) };
    let events = [CacheEvent::Stored(blocks(Some("salt"))), removed, CacheEvent::AllCleared];
    for form in EventForm::ALL {
        let batch = CacheEventBatch::decode(kind(form), &encode_batch(form, 1.5, &events)).unwrap();
        let group = (form == EventForm::VllmMaps).then_some(2);
        let expected = StoredBlocks {
            salt: form.has_salts().then(|| "salt".to_owned()),
            group,
            medium: if form == EventForm::SglangArrays { EngineMedium::Device } else { EngineMedium::Host },
            ..blocks(None)
        };
        let removed =
            CacheEvent::Removed { hashes: vec![EngineHash(5)], medium: EngineMedium::Device, group };
        assert_eq!(batch.events, [CacheEvent::Stored(expected), removed, CacheEvent::AllCleared], "{form:?}");
        assert_eq!(batch.data_parallel_rank, (form != EventForm::SglangArrays).then_some(0));
    }
}

/// An event as msgpack by hand: `\x8N` is a map, `\x9N` an array, `\xaN` a text.
fn decode(engine: EngineKind, event: &[u8]) -> Result<CacheEvent, KvEventError> {
    let payload = [b"\x92\xcb\0\0\0\0\0\0\0\0\x91", event].concat();
    CacheEventBatch::decode(engine, &payload).map(|mut batch| batch.events.remove(0))
}

#[test]
fn a_batch_may_be_a_map_and_have_unknown_fields() {
    let payload = b"\x84\xa2ts\x01\xa6events\x91\x82\xa4type\xb0AllBlocksCleared\xa1x\x93\x01\x02\x03\xb2data_parallel_rank\x03\xa3new\xc0";
    let batch = CacheEventBatch::decode(EngineKind::Vllm, payload).unwrap();
    assert_eq!(batch, CacheEventBatch { events: vec![CacheEvent::AllCleared], data_parallel_rank: Some(3) });
    assert_eq!(
        decode(EngineKind::Vllm, b"\x92\xb0AllBlocksCleared\x91\xc0").unwrap(),
        CacheEvent::AllCleared
    );
}

#[test]
fn hashes_are_integers_of_any_sign_or_bytes() {
    let event = b"\x93\xacBlockRemoved\x93\xff\xc4\x02ab\xc4\x14abcdefghijklmnopqrst\xa3GPU";
    let CacheEvent::Removed { hashes, .. } = decode(EngineKind::Vllm, event).unwrap() else { panic!() };
    let bytes = |text: &[u8; 16]| EngineHash(u128::from_be_bytes(*text));
    assert_eq!(
        hashes,
        [EngineHash(u128::MAX), bytes(b"ab\0\0\0\0\0\0\0\0\0\0\0\0\0\0"), bytes(b"abcdefghijklmnop")]
    );
}

#[test]
fn extra_keys_are_adapter_images_and_salt() {
    // type, hashes, parent, tokens, size, lora_id, medium, lora_name, extra_keys
    let stored = |lora: &[u8], keys: &[u8]| {
        let head = b"\x99\xabBlockStored\x92\x01\x02\xc0\x92\x05\x06\x01\xc0\xa3GPU";
        let event = [&head[..], lora, keys].concat();
        match decode(EngineKind::Vllm, &event).unwrap() {
            CacheEvent::Stored(blocks) => (blocks.adapter, blocks.salt, blocks.other_inputs),
            event => panic!("{event:?}"),
        }
    };
    let salt = || Some("salt".to_owned());
    assert_eq!(stored(b"\xc0", b"\x92\xc0\xc0"), (false, None, false));
    assert_eq!(stored(b"\xc0", b"\x92\x91\xa4salt\xc0"), (false, salt(), false));
    assert_eq!(stored(b"\xa1l", b"\x92\x92\xa1l\xa4salt\x91\xa1l"), (true, salt(), false));
    assert_eq!(stored(b"\xa1l", b"\x92\x91\xa1l\x91\xa1l"), (true, None, false));
    assert_eq!(stored(b"\xc0", b"\x92\x92\x92\xa3img\x07\xa4salt\xc0"), (false, salt(), true));
    assert_eq!(stored(b"\xc0", b"\x92\xc0\x91\xa3img"), (false, None, true));
    assert_eq!(stored(b"\xc0", b"\x92\x91\xc4\x01x\xc0"), (false, None, true));
}

#[test]
fn what_cannot_be_understood_is_an_error() {
    let error = |event: &[u8]| decode(EngineKind::Sglang, event).unwrap_err();
    assert_eq!(error(b"\x91\xa5Moved"), KvEventError::UnknownEvent("Moved".into()));
    assert_eq!(error(b"\x81\xa1x\x01"), KvEventError::MissingField("type"));
    assert_eq!(error(b"\x90"), KvEventError::MissingField("type"));
    assert_eq!(error(b"\x91\xacBlockRemoved"), KvEventError::MissingField("block_hashes"));
    // Two blocks of two tokens with three tokens.
    let short = b"\x96\xabBlockStored\x92\x01\x02\xc0\x93\x05\x06\x07\x02\xc0";
    assert_eq!(error(short), KvEventError::TokenCount { hashes: 2, block_size: 2, tokens: 3 });
    // SGLang's pairs of tokens under speculative decoding.
    let pairs = b"\x96\xabBlockStored\x91\x01\xc0\x91\x92\x05\x06\x01\xc0";
    assert!(matches!(error(pairs), KvEventError::Msgpack(MsgpackError::Unexpected { .. })));
    assert!(CacheEventBatch::decode(EngineKind::Vllm, b"\xc0").is_err());
    assert!(CacheEventBatch::decode(EngineKind::Vllm, b"\x91\x00").is_err());
}

#[test]
fn a_window_may_leave_out_blocks() {
    let event = b"\x8a\xa4type\xabBlockStored\xacblock_hashes\x91\x01\xb1parent_block_hash\xc0\xa9token_ids\x92\x05\x06\xaablock_size\x01\xa7lora_id\xc0\xa6medium\xa3GPU\xa9lora_name\xc0\xa9group_idx\x01\xb2kv_cache_spec_kind\xaesliding_window";
    let CacheEvent::Stored(blocks) = decode(EngineKind::Vllm, event).unwrap() else { panic!() };
    assert!(blocks.partial_attention && blocks.group == Some(1));
}

proptest! {
    #[test]
    fn any_damage_is_refused_or_read_without_panic(
        form in prop::sample::select(EventForm::ALL.to_vec()),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let removed = CacheEvent::Removed { hashes: vec![EngineHash(5)], medium: EngineMedium::Disk, group: None };
        let mut payload = encode_batch(form, 1.0, &[CacheEvent::Stored(blocks(Some("salt"))), removed]);
        let at = at.index(payload.len());
        payload[at] = byte;
        let _ = CacheEventBatch::decode(kind(form), &payload);
        payload.truncate(cut.index(payload.len()));
        let _ = CacheEventBatch::decode(kind(form), &payload);
    }
}
