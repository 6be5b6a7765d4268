//! Mutations of inputs. A mutation of a known format keeps most of it intact, so that a mutant passes the first
//! check. `other` is another input of the same target.

use kvasir_cluster_tests::random::Random;
use metadata::{Array, Metadata, Value as Entry};
use model::gguf::writer::Writer;
use model::{GgmlType, ModelFile};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

pub(crate) type Mutate = fn(&mut Random, &[u8], &[u8]) -> Vec<u8>;

const EDGES: [u64; 20] = [
    0,
    1,
    2,
    3,
    7,
    32,
    127,
    128,
    255,
    256,
    1023,
    65_535,
    65_536,
    1 << 20,
    1 << 31,
    u32::MAX as u64,
    1 << 53,
    1 << 61,
    i64::MAX as u64,
    u64::MAX,
];
const FLOATS: [f32; 9] = [0.0, -0.0, 1.0, -1.0, f32::NAN, f32::INFINITY, 1e-45, f32::MAX, 1e-10];
const WORDS: [&str; 14] = [
    "",
    "\0",
    "é😀",
    "\u{202e}",
    "true",
    "null",
    "-1",
    "1e999",
    "{",
    "[",
    "\\",
    "\"",
    "<|im_end|>",
    "../../etc/passwd",
];

fn any<T: Copy>(random: &mut Random, items: &[T]) -> T {
    items[random.below(items.len() as u64) as usize]
}

/// A range of at most `len`, mostly a short one.
fn range(random: &mut Random, len: usize) -> Range<usize> {
    let start = random.below(len as u64 + 1) as usize;
    let max = any(random, &[1, 4, 16, 64, 1024, usize::MAX]).min(len - start);
    start..start + random.below(max as u64 + 1) as usize
}

/// Of any form: flips bits, sets lengths to extremes, cuts, repeats and splices.
pub(crate) fn bytes(random: &mut Random, input: &[u8], other: &[u8]) -> Vec<u8> {
    let mut out = input.to_vec();
    let at = random.below(out.len() as u64 + 1) as usize;
    let edge = any(random, &EDGES).to_le_bytes();
    let width = any(random, &[1, 2, 4, 8]);
    let end = (at + width).min(out.len());
    match random.below(8) {
        0 => out.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << random.below(8)),
        1 => drop(out.splice(at..end, edge[..end - at].iter().copied())),
        // The codec's longest form of a number.
        2 => drop(out.splice(at..(at + 1).min(end), [0xfd].into_iter().chain(edge))),
        3 => out.truncate(at),
        4 => drop(out.drain(range(random, input.len()))),
        5 => {
            let repeated = input[range(random, input.len())].repeat(any(random, &[1, 2, 8, 64]));
            out.splice(at..at, repeated);
        }
        6 => drop(out.splice(range(random, input.len()), other[range(random, other.len())].iter().copied())),
        _ => out.splice(at.., other[at.min(other.len())..].iter().copied()).for_each(drop),
    }
    out
}

/// Of texts: deletes, repeats, replaces and moves words and signs.
pub(crate) fn text(random: &mut Random, input: &[u8], other: &[u8]) -> Vec<u8> {
    let (input, other) = (String::from_utf8_lossy(input), String::from_utf8_lossy(other));
    let words = |text: &str| -> Vec<String> {
        let mut words: Vec<String> = Vec::new();
        for c in text.chars() {
            match words.last_mut() {
                Some(word) if c.is_alphanumeric() && word.ends_with(char::is_alphanumeric) => word.push(c),
                _ => words.push(c.into()),
            }
        }
        words
    };
    let (mut out, other) = (words(&input), words(&other));
    let (part, donor) = (range(random, out.len()), range(random, other.len()));
    match random.below(6) {
        0 => drop(out.drain(part)),
        1 => {
            let repeated = vec![out[part.clone()].to_vec(); any(random, &[1, 2, 8, 200])].concat();
            out.splice(part, repeated);
        }
        2 => drop(out.splice(part, other[donor].iter().cloned())),
        3 => drop(out.splice(part.start..part.start, [any(random, &WORDS).to_owned()])),
        4 => drop(out.splice(part.start..part.start, [any(random, &EDGES).to_string()])),
        _ => {
            let moved: Vec<String> = out.drain(part).collect();
            let at = random.below(out.len() as u64 + 1) as usize;
            out.splice(at..at, moved);
        }
    }
    out.concat().into_bytes()
}

/// The node at which `n`, counted down from the root, is 0.
fn node<'a>(value: &'a mut Value, n: &mut u64) -> Option<&'a mut Value> {
    if *n == 0 {
        return Some(value);
    }
    *n -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| node(item, n)),
        Value::Object(members) => members.values_mut().find_map(|member| node(member, n)),
        _ => None,
    }
}

fn any_node<'a>(random: &mut Random, value: &'a mut Value) -> &'a mut Value {
    fn count(value: &Value) -> u64 {
        match value {
            Value::Array(items) => 1 + items.iter().map(count).sum::<u64>(),
            Value::Object(members) => 1 + members.values().map(count).sum::<u64>(),
            _ => 1,
        }
    }
    let mut n = random.below(count(value));
    node(value, &mut n).expect("there are that many")
}

/// Of JSON: replaces, wraps, removes and adds values; now and then as a text.
pub(crate) fn json(random: &mut Random, input: &[u8], other: &[u8]) -> Vec<u8> {
    let parsed = (serde_json::from_slice::<Value>(input), serde_json::from_slice::<Value>(other));
    let (Ok(mut root), Ok(mut other)) = parsed else { return text(random, input, other) };
    if random.chance(100) {
        return text(random, input, other.to_string().as_bytes());
    }
    let donor = any_node(random, &mut other).clone();
    let same = any_node(random, &mut root).clone();
    let at = any_node(random, &mut root);
    let old = at.take();
    *at = match (random.below(7), old) {
        (0, _) => match random.below(4) {
            0 => any(random, &EDGES).into(),
            1 => any(random, &WORDS).into(),
            2 => any(random, &[json!(-1), json!(0.5), json!(1e300), json!(true)].each_ref()).clone(),
            _ => Value::Null,
        },
        (1, _) => donor,
        (2, _) => same,
        (3, old) => (0..any(random, &[1, 3, 40, 120])).fold(old, |inner, level| match level % 2 {
            0 => json!([inner]),
            _ => Map::from_iter([("items".to_owned(), inner)]).into(),
        }),
        (4, Value::Array(items)) => vec![items; any(random, &[0, 2, 20])].concat().into(),
        (4, Value::String(text)) => text.repeat(any(random, &[0, 2, 1000])).into(),
        (5, Value::Object(mut members)) if !members.is_empty() => {
            let key = members.keys().nth(random.below(members.len() as u64) as usize).cloned();
            key.and_then(|key| members.shift_remove(&key));
            members.into()
        }
        (_, Value::Object(mut members)) => {
            let key = match other.as_object().filter(|donors| !donors.is_empty()) {
                Some(donors) => donors.keys().nth(random.below(donors.len() as u64) as usize).cloned(),
                None => None,
            };
            members.insert(key.unwrap_or_default(), donor);
            members.into()
        }
        (_, old) => old,
    };
    root.to_string().into_bytes()
}

/// Of safetensors: its header as JSON, with the right length before it.
pub(crate) fn safetensors(random: &mut Random, input: &[u8], other: &[u8]) -> Vec<u8> {
    fn header(file: &[u8]) -> Option<(&[u8], &[u8])> {
        let (length, rest) = file.split_first_chunk()?;
        rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)
    }
    let (Some((header, data)), Some((other, _)), false) = (header(input), header(other), random.chance(150))
    else {
        return bytes(random, input, other);
    };
    let header = json(random, header, other);
    [&(header.len() as u64).to_le_bytes(), &header[..], data].concat()
}

/// Writes `header` to `path`, as a GGUF file whose weights are zeros, and opens it.
pub(crate) fn open_gguf(path: &Path, header: &[u8]) -> Result<ModelFile, model::Error> {
    // New, since the file of an earlier input may still be mapped.
    drop(std::fs::remove_file(path));
    let mut file = File::create(path).unwrap();
    file.write_all(header).and_then(|()| file.set_len(header.len() as u64 + (4 << 20))).unwrap();
    ModelFile::open(path)
}

/// Of the header of a GGUF file: changes entries of its metadata, and tensors; now and then as bytes.
pub(crate) fn gguf(random: &mut Random, input: &[u8], other: &[u8]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let open = |header| open_gguf(&folder.path().join("model.gguf"), header);
    let (Ok(file), Ok(donor), false) = (open(input), open(other), random.chance(300)) else {
        return bytes(random, input, other);
    };
    let owned = |metadata: &Metadata| -> Vec<(String, Entry)> {
        metadata.iter().map(|(key, value)| (key.to_owned(), value.clone())).collect()
    };
    let (mut entries, donors) = (owned(file.metadata()), owned(donor.metadata()));
    let mut tensors: Vec<(String, GgmlType, Vec<u64>)> = file
        .tensors()
        .map(|tensor| (tensor.name().to_owned(), tensor.ty(), tensor.dims().to_vec()))
        .collect();
    let at = random.below(entries.len().max(1) as u64) as usize;
    match (random.below(8), entries.get_mut(at), random.pick(&donors)) {
        (0, Some(_), _) => drop(entries.remove(at)),
        (1, Some((_, value)), Some((_, donor))) => *value = donor.clone(),
        (2, _, Some(donor)) => entries.push(donor.clone()),
        (3..=5, Some((_, value)), _) => *value = changed(random, value, other),
        _ if !tensors.is_empty() => {
            let at = random.below(tensors.len() as u64) as usize;
            let (name, ty, _) = random.pick(&tensors).cloned().expect("there is one");
            match random.below(6) {
                0 => drop(tensors.remove(at)),
                1 => tensors[at].1 = GgmlType::from_id(random.below(42) as u32).unwrap_or(ty),
                2 => tensors[at].2.reverse(),
                3 => tensors[at].2.push(any(random, &EDGES)),
                4 => tensors[at].0 = name + any(random, &["", "2"]),
                _ => tensors[at].2.iter_mut().take(1).for_each(|dim| *dim = any(random, &EDGES)),
            }
        }
        _ => {}
    }
    let mut out = Vec::new();
    let Ok(mut writer) = Writer::new(Metadata::from_iter(entries)) else {
        return bytes(random, input, other);
    };
    // The writer refuses what the reader would refuse; such tensors are left out.
    tensors.iter().for_each(|(name, ty, dims)| drop(writer.tensor(name, *ty, dims)));
    // Ends with an error at the first tensor: only the header is wanted.
    drop(writer.write(&mut out, |_| Vec::new()));
    out
}

fn changed(random: &mut Random, value: &Entry, other: &[u8]) -> Entry {
    let edge = any(random, &EDGES);
    match value {
        Entry::String(old) => {
            String::from_utf8_lossy(&text(random, old.as_bytes(), other)).into_owned().into()
        }
        Entry::F32(_) | Entry::F64(_) => Entry::F32(any(random, &FLOATS)),
        Entry::Array(Array::String(list)) => {
            let mut list: Vec<&str> = list.iter().collect();
            match random.pick(&list).copied().filter(|_| random.chance(700)) {
                Some(word) => {
                    let at = random.below(list.len() as u64) as usize;
                    list[at] = any(random, &[word, "", "\u{2581}", "<0x41>", "<0xZZ>", "a b c", "</s>"]);
                }
                None => list.truncate(edge as usize),
            }
            Entry::Array(Array::String(list.into_iter().collect()))
        }
        Entry::Array(Array::I32(list)) => {
            let mut list = list.clone();
            match random.pick(&list).copied() {
                Some(_) if random.chance(700) => {
                    let at = random.below(list.len() as u64) as usize;
                    list[at] = edge as i32;
                }
                _ => list.truncate(edge as usize),
            }
            Entry::Array(Array::I32(list))
        }
        Entry::U32(old) if random.chance(300) => Entry::U32(old.saturating_mul(2)),
        Entry::U32(old) if random.chance(300) => Entry::U32(old.saturating_add(1)),
        Entry::U32(_) => Entry::U32(edge as u32),
        Entry::Bool(old) => Entry::Bool(!old),
        _ => Entry::U64(edge),
    }
}
