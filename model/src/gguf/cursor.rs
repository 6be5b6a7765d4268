//! Bounds-checked little-endian reading of a byte string.

use std::fmt;

use super::Malformed;

/// Name of the field being read, for errors.
#[derive(Clone, Copy)]
pub(super) struct Field<'a> {
    name: &'static str,
    owner: Option<&'a str>,
}

impl<'a> Field<'a> {
    /// A field of the file itself.
    pub(super) const fn of_file(name: &'static str) -> Self {
        Self { name, owner: None }
    }

    /// A field of the key or tensor `owner`.
    pub(super) const fn of(name: &'static str, owner: &'a str) -> Self {
        Self { name, owner: Some(owner) }
    }
}

impl fmt::Display for Field<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.owner {
            Some(owner) => write!(f, "{} of {owner}", self.name),
            None => f.write_str(self.name),
        }
    }
}

/// A position in a byte string.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Cursor<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }

    /// Bytes read so far.
    pub(super) const fn offset(&self) -> u64 {
        self.offset as u64
    }

    /// Bytes left.
    pub(super) const fn left(&self) -> u64 {
        self.bytes.len().saturating_sub(self.offset) as u64
    }

    /// The next `len` bytes.
    pub(super) fn take(&mut self, len: u64, field: Field<'_>) -> Result<&'a [u8], Malformed> {
        let end = usize::try_from(len).ok().and_then(|len| self.offset.checked_add(len));
        match end.and_then(|end| Some((end, self.bytes.get(self.offset..end)?))) {
            Some((end, bytes)) => {
                self.offset = end;
                Ok(bytes)
            }
            None => Err(Malformed::Truncated {
                field: field.to_string(),
                offset: self.offset(),
                need: len,
                have: self.left(),
            }),
        }
    }

    pub(super) fn array<const N: usize>(&mut self, field: Field<'_>) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, field)?);
        Ok(array)
    }

    pub(super) fn u8(&mut self, field: Field<'_>) -> Result<u8, Malformed> {
        self.array(field).map(u8::from_le_bytes)
    }

    pub(super) fn u32(&mut self, field: Field<'_>) -> Result<u32, Malformed> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, field: Field<'_>) -> Result<u64, Malformed> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A `u64` of at most `limit`.
    pub(super) fn count(&mut self, limit: u64, field: Field<'_>) -> Result<u64, Malformed> {
        let found = self.u64(field)?;
        if found > limit {
            return Err(Malformed::OverLimit { field: field.to_string(), found, limit });
        }
        Ok(found)
    }

    /// A string with its length, of at most `limit` bytes.
    pub(super) fn string(&mut self, limit: u64, field: Field<'_>) -> Result<&'a str, Malformed> {
        let len = self.count(limit, field)?;
        let offset = self.offset();
        std::str::from_utf8(self.take(len, field)?)
            .map_err(|_| Malformed::NotUtf8 { field: field.to_string(), offset })
    }

    /// `count` elements of `N` bytes each.
    pub(super) fn list<const N: usize, T>(
        &mut self,
        count: u64,
        read: fn([u8; N]) -> T,
        field: Field<'_>,
    ) -> Result<Vec<T>, Malformed> {
        // `count` is capped by the caller, so the product does not saturate.
        let bytes = self.take(count.saturating_mul(N as u64), field)?;
        let (chunks, _) = bytes.as_chunks::<N>();
        Ok(chunks.iter().map(|chunk| read(*chunk)).collect())
    }
}
