//! Positions of the parts of a `torch.save` file: a ZIP archive without compression, or since before
//! PyTorch 1.6 a sequence of pickles followed by the storages.

use super::pickle;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Maximum bytes of the directory of an archive.
const MAX_DIRECTORY: u64 = 4 << 20;
/// Bytes of the end of an archive, and the most that its comment adds.
const END_BYTES: u64 = 22;
const MAX_COMMENT: u64 = u16::MAX as u64;
const END: [u8; 4] = *b"PK\x05\x06";
const ENTRY: [u8; 4] = *b"PK\x01\x02";
const LOCAL: [u8; 4] = *b"PK\x03\x04";
/// Bytes of an entry of the directory, and of the header of a member, without names.
const ENTRY_BYTES: usize = 46;
const LOCAL_BYTES: u64 = 30;

/// A range of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) at: u64,
    pub(crate) len: u64,
}

/// The members of an archive by name.
pub(crate) type Members = HashMap<String, Span>;

pub(crate) fn io_fault(error: io::Error) -> String {
    format!("it cannot be read: {error}")
}

/// Reads a range, which must be in the file.
pub(crate) fn read(file: &File, span: Span) -> Result<Vec<u8>, String> {
    let len = usize::try_from(span.len).map_err(|_| "a part is too long".to_owned())?;
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, span.at).map_err(io_fault)?;
    Ok(bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}

/// The members of an archive, or `None` if the file of `len` bytes is none.
pub(crate) fn members(file: &File, len: u64) -> Result<Option<Members>, String> {
    if len < END_BYTES || read(file, Span { at: 0, len: 4 })? != LOCAL {
        return Ok(None);
    }
    let tail = len.min(END_BYTES + MAX_COMMENT);
    let tail = read(file, Span { at: len - tail, len: tail })?;
    let ends = tail.windows(END_BYTES as usize).rposition(|end| end[..4] == END);
    let end = &tail[ends.ok_or("the archive has no directory: it is truncated")?..];
    let directory = Span { at: u64::from(u32_at(end, 16)), len: u64::from(u32_at(end, 12)) };
    if directory.len > MAX_DIRECTORY || directory.at + directory.len > len {
        return Err(format!(
            "its directory has {} bytes at {}, the file has {len}, and a directory at most {MAX_DIRECTORY}",
            directory.len, directory.at
        ));
    }
    let directory = read(file, directory)?;
    let mut rest = directory.as_slice();
    let mut members = Members::new();
    while !rest.is_empty() {
        let truncated = "its directory is truncated";
        let entry = rest.get(..ENTRY_BYTES).filter(|entry| entry[..4] == ENTRY).ok_or(truncated)?;
        let [name, extra, comment] = [28, 30, 32].map(|at| usize::from(u16_at(entry, at)));
        let name_bytes = rest.get(ENTRY_BYTES..ENTRY_BYTES + name).ok_or(truncated)?;
        let name_text = String::from_utf8_lossy(name_bytes).into_owned();
        let [stored, size] = [20, 24].map(|at| u64::from(u32_at(entry, at)));
        if u16_at(entry, 10) != 0 || stored != size {
            return Err(format!("member {name_text} is compressed, which is not supported"));
        }
        let header = u64::from(u32_at(entry, 42));
        members.insert(name_text, Span { at: header, len: size });
        rest = rest.get(ENTRY_BYTES + name + extra + comment..).ok_or(truncated)?;
    }
    Ok(Some(members))
}

/// The bytes of a member, from the position of its header.
pub(crate) fn member(file: &File, len: u64, name: &str, member: Span) -> Result<Span, String> {
    let fault = || format!("member {name} is not in the file's {len} bytes");
    if member.at + LOCAL_BYTES > len {
        return Err(fault());
    }
    let header = read(file, Span { at: member.at, len: LOCAL_BYTES })?;
    if header[..4] != LOCAL {
        return Err(fault());
    }
    let skipped = u64::from(u16_at(&header, 26)) + u64::from(u16_at(&header, 28));
    let span = Span { at: member.at + LOCAL_BYTES + skipped, len: member.len };
    (span.at + span.len <= len).then_some(span).ok_or_else(fault)
}

/// First pickle of a file from before PyTorch 1.6, and the version in the second one.
const MAGIC: [u8; 15] = *b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.";
const VERSION: [u8; 6] = *b"\x80\x02M\xe9\x03.";

/// The pickles of a file from before PyTorch 1.6. Returns the start of the pickle of the object.
pub(super) fn sequence(bytes: &[u8]) -> Result<usize, String> {
    let rest = bytes.strip_prefix(&MAGIC).and_then(|rest| rest.strip_prefix(&VERSION));
    let rest = rest.ok_or("it is not a file of torch.save")?;
    // The system's information: byte order and sizes.
    let info = pickle::read(rest)?;
    Ok(MAGIC.len() + VERSION.len() + info.len)
}
