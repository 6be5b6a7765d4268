//! KV events as msgpack, in the forms that engines have used.

use crate::kv_events::{CacheEvent, EngineHash, EngineMedium, StoredBlocks};

/// A form of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventForm {
    /// Maps with byte hashes and `extra_keys`: vLLM 0.32.
    VllmMaps,
    /// Arrays with integer hashes, up to the medium: vLLM 0.11.
    VllmArrays,
    /// Maps with integer hashes and `cache_salt`: SGLang 0.5.23.
    SglangMaps,
    /// Arrays with integer hashes, up to `lora_id`: early SGLang.
    SglangArrays,
}

impl EventForm {
    pub const ALL: [Self; 4] = [Self::VllmMaps, Self::VllmArrays, Self::SglangMaps, Self::SglangArrays];

    /// Events have the salts of their requests.
    pub fn has_salts(self) -> bool {
        matches!(self, Self::VllmMaps | Self::SglangMaps)
    }

    pub fn is_vllm(self) -> bool {
        matches!(self, Self::VllmMaps | Self::VllmArrays)
    }
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn array(&mut self, length: usize) {
        self.0.push(0xdd);
        self.0.extend((length as u32).to_be_bytes());
    }

    fn map(&mut self, length: usize) {
        self.0.push(0xde);
        self.0.extend((length as u16).to_be_bytes());
    }

    fn text(&mut self, text: &str) {
        self.0.extend([0xd9, text.len() as u8]);
        self.0.extend(text.as_bytes());
    }

    fn nil(&mut self) {
        self.0.push(0xc0);
    }

    fn u32(&mut self, value: u32) {
        match u8::try_from(value) {
            Ok(small @ 0..0x80) => self.0.push(small),
            _ => {
                self.0.push(0xce);
                self.0.extend(value.to_be_bytes());
            }
        }
    }

    fn float(&mut self, value: f64) {
        self.0.push(0xcb);
        self.0.extend(value.to_be_bytes());
    }

    fn hash(&mut self, form: EventForm, hash: EngineHash) {
        match form {
            EventForm::VllmMaps => {
                self.0.extend([0xc4, 32]);
                self.0.extend(hash.0.to_be_bytes());
                self.0.extend([0xee; 16]);
            }
            _ => {
                self.0.push(0xcf);
                self.0.extend((hash.0 as u64).to_be_bytes());
            }
        }
    }

    fn hashes(&mut self, form: EventForm, hashes: &[EngineHash]) {
        self.array(hashes.len());
        hashes.iter().for_each(|&hash| self.hash(form, hash));
    }

    fn medium(&mut self, medium: EngineMedium) {
        self.text(match medium {
            EngineMedium::Device => "GPU",
            EngineMedium::Host => "CPU",
            EngineMedium::Disk => "STORAGE",
            EngineMedium::Elsewhere => "EXTERNAL",
        });
    }
}

/// A batch as an engine publishes it. `timestamp` makes equal batches of two runs differ.
pub fn encode_batch(form: EventForm, timestamp: f64, events: &[CacheEvent]) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.array(if form == EventForm::SglangArrays { 2 } else { 3 });
    writer.float(timestamp);
    writer.array(events.len());
    for event in events {
        encode_event(&mut writer, form, event);
    }
    if form != EventForm::SglangArrays {
        writer.u32(0);
    }
    writer.0
}

fn encode_event(writer: &mut Writer, form: EventForm, event: &CacheEvent) {
    let maps = form.has_salts();
    match event {
        CacheEvent::Stored(blocks) => encode_stored(writer, form, blocks),
        CacheEvent::Removed { hashes, medium, group } if maps => {
            writer.map(3 + usize::from(form.is_vllm()));
            writer.text("type");
            writer.text("BlockRemoved");
            writer.text("block_hashes");
            writer.hashes(form, hashes);
            writer.text("medium");
            writer.medium(*medium);
            if form.is_vllm() {
                writer.text("group_idx");
                writer.u32(group.unwrap_or(0));
            }
        }
        CacheEvent::Removed { hashes, medium, .. } => {
            writer.array(if form.is_vllm() { 3 } else { 2 });
            writer.text("BlockRemoved");
            writer.hashes(form, hashes);
            if form.is_vllm() {
                writer.medium(*medium);
            }
        }
        CacheEvent::AllCleared if maps => {
            writer.map(1);
            writer.text("type");
            writer.text("AllBlocksCleared");
        }
        CacheEvent::AllCleared => {
            writer.array(1);
            writer.text("AllBlocksCleared");
        }
    }
}

fn encode_stored(writer: &mut Writer, form: EventForm, blocks: &StoredBlocks) {
    let maps = form.has_salts();
    let name = |writer: &mut Writer, name: &str| {
        if maps {
            writer.text(name);
        }
    };
    match form {
        EventForm::VllmMaps => writer.map(11),
        EventForm::VllmArrays => writer.array(7),
        EventForm::SglangMaps => writer.map(7 + usize::from(blocks.salt.is_some())),
        EventForm::SglangArrays => writer.array(6),
    }
    name(writer, "type");
    writer.text("BlockStored");
    name(writer, "block_hashes");
    writer.hashes(form, &blocks.hashes);
    name(writer, "parent_block_hash");
    match blocks.parent {
        Some(parent) => writer.hash(form, parent),
        None => writer.nil(),
    }
    name(writer, "token_ids");
    writer.array(blocks.tokens.len());
    blocks.tokens.iter().for_each(|&token| writer.u32(token));
    name(writer, "block_size");
    writer.u32(blocks.block_size);
    name(writer, "lora_id");
    writer.nil();
    if form == EventForm::SglangArrays {
        return;
    }
    name(writer, "medium");
    writer.medium(blocks.medium);
    match (form, &blocks.salt) {
        (EventForm::VllmMaps, salt) => {
            writer.text("lora_name");
            writer.nil();
            writer.text("extra_keys");
            writer.array(blocks.hashes.len());
            for block in 0..blocks.hashes.len() {
                match salt {
                    Some(salt) if block == 0 && blocks.parent.is_none() => {
                        writer.array(1);
                        writer.text(salt);
                    }
                    _ => writer.nil(),
                }
            }
            writer.text("group_idx");
            writer.u32(blocks.group.unwrap_or(0));
            writer.text("kv_cache_spec_kind");
            writer.text(if blocks.partial_attention { "sliding_window" } else { "full_attention" });
        }
        (EventForm::SglangMaps, Some(salt)) => {
            writer.text("cache_salt");
            writer.text(salt);
        }
        _ => {}
    }
}
