//! The arena as bytes: copies of blocks inside it, and reads and writes by the host.

use crate::Error;
use crate::attention::OFFSET_UNIT;
use crate::backend::KvCopy;
use std::ops::Range;

/// See [`crate::backend::Backend::copy_kv`].
pub(super) fn copy(arena: &mut [u8], group_block_bytes: &[usize], copies: &[KvCopy]) -> Result<(), Error> {
    for copy in copies {
        let missing = Error::OutOfRange { what: "KV group", index: copy.group, len: group_block_bytes.len() };
        let bytes = *group_block_bytes.get(copy.group).ok_or(missing)?;
        let (from, to) = (checked_range(arena, copy.from, bytes)?, checked_range(arena, copy.to, bytes)?);
        arena.copy_within(from, to.start);
    }
    Ok(())
}

/// See [`crate::backend::Backend::read_arena`].
pub(super) fn read(arena: &[u8], from: u32, out: &mut [u8]) -> Result<(), Error> {
    out.copy_from_slice(&arena[checked_range(arena, from, out.len())?]);
    Ok(())
}

/// See [`crate::backend::Backend::write_arena`].
pub(super) fn write(arena: &mut [u8], to: u32, bytes: &[u8]) -> Result<(), Error> {
    let to = checked_range(arena, to, bytes.len())?;
    arena[to].copy_from_slice(bytes);
    Ok(())
}

/// The `len` bytes from a block offset (bytes / 64) on.
///
/// # Errors
/// [`Error::OutsideArena`].
pub(super) fn checked_range(arena: &[u8], offset: u32, len: usize) -> Result<Range<usize>, Error> {
    let start = offset as usize * OFFSET_UNIT;
    match start.checked_add(len) {
        Some(end) if end <= arena.len() => Ok(start..end),
        end => {
            let end = end.map_or(u64::MAX, |end| end as u64);
            Err(Error::OutsideArena { end, len: arena.len() })
        }
    }
}
