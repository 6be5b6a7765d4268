//! A reader of MessagePack over a byte slice. It allocates nothing and copies nothing: a length in the input
//! is used only after that many bytes were found, so no input can claim more memory than it has bytes.
//!
//! Format: <https://github.com/msgpack/msgpack/blob/master/spec.md>.

/// Deepest nesting that is skipped.
const MAX_DEPTH: u32 = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MsgpackError {
    #[error("the input ends early")]
    Truncated,
    #[error("{expected} expected, found the marker {marker:#04x}")]
    Unexpected { expected: &'static str, marker: u8 },
    #[error("nested deeper than {MAX_DEPTH}")]
    TooDeep,
    #[error("a text is not UTF-8")]
    NotUtf8,
    #[error("a number is out of range")]
    OutOfRange,
}

/// The next value's kind, and its value or number of entries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Item<'a> {
    Nil,
    Bool(bool),
    /// Every integer of the format.
    Int(i128),
    Float(f64),
    Bytes(&'a [u8]),
    Text(&'a str),
    /// That many values follow.
    Array(usize),
    /// That many pairs of values follow.
    Map(usize),
    Extension,
}

#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(input: &'a [u8]) -> Self {
        Self { rest: input }
    }

    /// Reads one value. Of an array or a map it reads the number of entries alone.
    pub(crate) fn item(&mut self) -> Result<Item<'a>, MsgpackError> {
        let marker = self.take::<1>()?[0];
        Ok(match marker {
            0x00..=0x7f => Item::Int(marker.into()),
            0xe0..=0xff => Item::Int(i8::from_be_bytes([marker]).into()),
            0x80..=0x8f => self.map(usize::from(marker & 0x0f))?,
            0x90..=0x9f => self.array(usize::from(marker & 0x0f))?,
            0xa0..=0xbf => self.text(usize::from(marker & 0x1f))?,
            0xc0 => Item::Nil,
            0xc2 => Item::Bool(false),
            0xc3 => Item::Bool(true),
            0xc4 => self.bytes(1)?,
            0xc5 => self.bytes(2)?,
            0xc6 => self.bytes(4)?,
            0xc7 => self.extension_of_length(1)?,
            0xc8 => self.extension_of_length(2)?,
            0xc9 => self.extension_of_length(4)?,
            0xca => Item::Float(f32::from_be_bytes(self.take()?).into()),
            0xcb => Item::Float(f64::from_be_bytes(self.take()?)),
            0xcc => Item::Int(u8::from_be_bytes(self.take()?).into()),
            0xcd => Item::Int(u16::from_be_bytes(self.take()?).into()),
            0xce => Item::Int(u32::from_be_bytes(self.take()?).into()),
            0xcf => Item::Int(u64::from_be_bytes(self.take()?).into()),
            0xd0 => Item::Int(i8::from_be_bytes(self.take()?).into()),
            0xd1 => Item::Int(i16::from_be_bytes(self.take()?).into()),
            0xd2 => Item::Int(i32::from_be_bytes(self.take()?).into()),
            0xd3 => Item::Int(i64::from_be_bytes(self.take()?).into()),
            0xd4..=0xd8 => self.extension(1 << (marker - 0xd4))?,
            0xd9 => self.text_of_length(1)?,
            0xda => self.text_of_length(2)?,
            0xdb => self.text_of_length(4)?,
            0xdc => {
                let length = self.length(2)?;
                self.array(length)?
            }
            0xdd => {
                let length = self.length(4)?;
                self.array(length)?
            }
            0xde => {
                let length = self.length(2)?;
                self.map(length)?
            }
            0xdf => {
                let length = self.length(4)?;
                self.map(length)?
            }
            0xc1 => return Err(MsgpackError::Unexpected { expected: "a value", marker }),
        })
    }

    /// Skips one value with all its entries.
    pub(crate) fn skip(&mut self) -> Result<(), MsgpackError> {
        // Entries that are left at each depth.
        let mut left = vec![1usize];
        while let Some(entries) = left.last_mut() {
            let Some(fewer) = entries.checked_sub(1) else {
                left.pop();
                continue;
            };
            *entries = fewer;
            match self.item()? {
                Item::Array(entries) => left.push(entries),
                Item::Map(pairs) => left.push(pairs.saturating_mul(2)),
                _ => {}
            }
            if left.len() > MAX_DEPTH as usize {
                return Err(MsgpackError::TooDeep);
            }
        }
        Ok(())
    }

    /// The marker of the next value, without reading it.
    fn marker(&self) -> u8 {
        self.rest.first().copied().unwrap_or(0)
    }

    fn expect<T>(
        &mut self,
        expected: &'static str,
        convert: impl FnOnce(Item<'a>) -> Option<T>,
    ) -> Result<T, MsgpackError> {
        let marker = self.marker();
        convert(self.item()?).ok_or(MsgpackError::Unexpected { expected, marker })
    }

    pub(crate) fn array_length(&mut self) -> Result<usize, MsgpackError> {
        self.expect("an array", |item| if let Item::Array(length) = item { Some(length) } else { None })
    }

    pub(crate) fn float(&mut self) -> Result<f64, MsgpackError> {
        self.expect("a number", |item| match item {
            Item::Float(value) => Some(value),
            Item::Int(value) => Some(value as f64),
            _ => None,
        })
    }

    pub(crate) fn text_item(&mut self) -> Result<&'a str, MsgpackError> {
        self.expect("a text", |item| if let Item::Text(text) = item { Some(text) } else { None })
    }

    pub(crate) fn u32(&mut self) -> Result<u32, MsgpackError> {
        let value =
            self.expect("an integer", |item| if let Item::Int(value) = item { Some(value) } else { None })?;
        u32::try_from(value).map_err(|_| MsgpackError::OutOfRange)
    }

    /// The next value, or `None` for nil.
    pub(crate) fn option<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, MsgpackError>,
    ) -> Result<Option<T>, MsgpackError> {
        if self.marker() == 0xc0 && !self.rest.is_empty() {
            self.item()?;
            return Ok(None);
        }
        read(self).map(Some)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], MsgpackError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(MsgpackError::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn slice(&mut self, length: usize) -> Result<&'a [u8], MsgpackError> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(MsgpackError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    /// A big-endian length of 1, 2 or 4 bytes.
    fn length(&mut self, bytes: usize) -> Result<usize, MsgpackError> {
        Ok(self.slice(bytes)?.iter().fold(0, |length, &byte| length << 8 | usize::from(byte)))
    }

    /// Every entry has at least one byte, so a longer array or map cannot be in the input.
    fn array(&self, length: usize) -> Result<Item<'a>, MsgpackError> {
        if length > self.rest.len() { Err(MsgpackError::Truncated) } else { Ok(Item::Array(length)) }
    }

    fn map(&self, length: usize) -> Result<Item<'a>, MsgpackError> {
        if length > self.rest.len() / 2 { Err(MsgpackError::Truncated) } else { Ok(Item::Map(length)) }
    }

    fn bytes(&mut self, length_bytes: usize) -> Result<Item<'a>, MsgpackError> {
        let length = self.length(length_bytes)?;
        self.slice(length).map(Item::Bytes)
    }

    fn text_of_length(&mut self, length_bytes: usize) -> Result<Item<'a>, MsgpackError> {
        let length = self.length(length_bytes)?;
        self.text(length)
    }

    fn text(&mut self, length: usize) -> Result<Item<'a>, MsgpackError> {
        std::str::from_utf8(self.slice(length)?).map(Item::Text).map_err(|_| MsgpackError::NotUtf8)
    }

    fn extension_of_length(&mut self, length_bytes: usize) -> Result<Item<'a>, MsgpackError> {
        let length = self.length(length_bytes)?;
        self.extension(length)
    }

    fn extension(&mut self, length: usize) -> Result<Item<'a>, MsgpackError> {
        self.slice(length.saturating_add(1))?;
        Ok(Item::Extension)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn items(input: &[u8]) -> Vec<Item<'_>> {
        let mut reader = Reader::new(input);
        let mut items = Vec::new();
        while !reader.rest.is_empty() {
            items.push(reader.item().unwrap());
        }
        items
    }

    #[test]
    fn every_kind_of_value_is_read() {
        assert_eq!(
            items(b"\xc0\xc2\xc3\x7f\xe0"),
            [Item::Nil, Item::Bool(false), Item::Bool(true), Item::Int(127), Item::Int(-32)]
        );
        assert_eq!(
            items(b"\xcc\xff\xcd\x01\x00\xce\0\0\x01\0\xcf\xff\xff\xff\xff\xff\xff\xff\xff"),
            [Item::Int(255), Item::Int(256), Item::Int(256), Item::Int(u64::MAX.into())]
        );
        assert_eq!(
            items(b"\xd0\x80\xd1\xff\xff\xd2\xff\xff\xff\xfe\xd3\xff\xff\xff\xff\xff\xff\xff\xfd"),
            [Item::Int(-128), Item::Int(-1), Item::Int(-2), Item::Int(-3)]
        );
        assert_eq!(items(b"\xca\x3f\x80\0\0\xcb\xbf\xf0\0\0\0\0\0\0"), [Item::Float(1.0), Item::Float(-1.0)]);
        assert_eq!(
            items(b"\xa2ab\xd9\x01c\xda\0\x01d\xdb\0\0\0\x01e"),
            [Item::Text("ab"), Item::Text("c"), Item::Text("d"), Item::Text("e")]
        );
        assert_eq!(
            items(b"\xc4\x01x\xc5\0\x01y\xc6\0\0\0\x01z"),
            [Item::Bytes(b"x"), Item::Bytes(b"y"), Item::Bytes(b"z")]
        );
        assert_eq!(
            items(b"\x91\xc0\xdc\0\x01\xc0\x81\xc0\xc0"),
            [Item::Array(1), Item::Nil, Item::Array(1), Item::Nil, Item::Map(1), Item::Nil, Item::Nil]
        );
        assert_eq!(items(b"\xd4\x01a\xc7\x02\x01ab"), [Item::Extension, Item::Extension]);
    }

    #[test]
    fn a_length_beyond_the_input_is_refused_before_anything_is_allocated() {
        for input in [
            &b"\xdd\xff\xff\xff\xff\xc0"[..],
            b"\xdf\x7f\xff\xff\xff\xc0",
            b"\xc6\xff\xff\xff\xff",
            b"\x92\xc0",
        ] {
            let mut reader = Reader::new(input);
            assert_eq!(reader.skip(), Err(MsgpackError::Truncated), "{input:x?}");
        }
    }

    #[test]
    fn deep_nesting_is_refused() {
        assert_eq!(Reader::new(&[0x91; 1000]).skip(), Err(MsgpackError::TooDeep));
    }

    proptest! {
        #[test]
        fn any_input_is_skipped_without_panic(input in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut reader = Reader::new(&input);
            while reader.skip().is_ok() {}
        }
    }
}
