//! Checks the sizes in an ONNX file against its actual bytes before the runtime reads it, because the runtime
//! allocates as much memory as a field claims.
//!
//! Messages are parsed as protocol buffers. Refused are: a field longer than its message, a tensor with more
//! values than there are bytes, missing external data, and too deeply nested subgraphs.

use std::path::Path;

/// Maximum nesting of subgraphs. Each is four levels of messages.
const MAX_DEPTH: usize = 64;

/// The messages that the runtime reads, by onnx.proto.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    Entry,
    Value,
    Type,
    TensorType,
    Shape,
    Dimension,
}

impl Message {
    /// The message type of a field, or `None`.
    fn of(self, field: u64) -> Option<Self> {
        Some(match (self, field) {
            (Self::Model, 7) | (Self::Attribute, 6 | 11) => Self::Graph,
            (Self::Model, 14) | (Self::Tensor, 13) => Self::Entry,
            (Self::Graph, 1) => Self::Node,
            (Self::Graph, 5) | (Self::Attribute, 5 | 10) => Self::Tensor,
            (Self::Graph, 11..=13) => Self::Value,
            (Self::Node, 5) => Self::Attribute,
            (Self::Value, 2) => Self::Type,
            (Self::Type, 1) => Self::TensorType,
            (Self::TensorType, 2) => Self::Shape,
            (Self::Shape, 1) => Self::Dimension,
            _ => return None,
        })
    }
}

/// Checks a file's bytes. External data files are in `folder`.
pub(super) fn check(bytes: &[u8], folder: &Path) -> Result<(), String> {
    let mut walk = Walk { folder, bytes: bytes.len() as u64 };
    walk.message(Message::Model, bytes, 0)
}

struct Walk<'a> {
    folder: &'a Path,
    bytes: u64,
}

/// The unread rest of a message.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

pub(super) enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Of 4 or 8 bytes.
    Fixed(&'a [u8]),
}

impl<'a> Fields<'a> {
    pub(super) fn number(&mut self) -> Result<u64, String> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first().ok_or("it ends within a number")?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err("a number has more than ten bytes".to_owned())
    }

    fn take(&mut self, bytes: u64, field: u64) -> Result<&'a [u8], String> {
        let there = self.0.len();
        let taken = usize::try_from(bytes).ok().and_then(|bytes| self.0.split_at_checked(bytes));
        let (taken, rest) = taken
            .ok_or_else(|| format!("field {field} says that it has {bytes} bytes, {there} are there"))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn next(&mut self) -> Result<Option<(u64, Value<'a>)>, String> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let tag = self.number()?;
        let field = tag >> 3;
        let value = match tag & 7 {
            0 => Value::Number(self.number()?),
            1 => Value::Fixed(self.take(8, field)?),
            2 => {
                let bytes = self.number()?;
                Value::Bytes(self.take(bytes, field)?)
            }
            5 => Value::Fixed(self.take(4, field)?),
            kind => return Err(format!("field {field} is of wire type {kind}, known are 0, 1, 2 and 5")),
        };
        Ok(Some((field, value)))
    }
}

impl Walk<'_> {
    fn message(&mut self, message: Message, bytes: &[u8], depth: usize) -> Result<(), String> {
        if depth > 4 * MAX_DEPTH {
            return Err(format!("more than {MAX_DEPTH} graphs are in each other"));
        }
        if message == Message::Tensor {
            self.tensor(bytes)?;
        }
        let mut fields = Fields(bytes);
        while let Some((field, value)) = fields.next()? {
            if let (Value::Bytes(inner), Some(kind)) = (value, message.of(field)) {
                self.message(kind, inner, depth + 1)?;
            }
        }
        Ok(())
    }

    /// Checks a tensor. A value takes at least one bit, wherever it is stored.
    fn tensor(&self, bytes: &[u8]) -> Result<(), String> {
        let (mut dims, mut data) = (Vec::new(), self.bytes);
        let mut outside = Vec::new();
        let mut fields = Fields(bytes);
        while let Some((field, value)) = fields.next()? {
            match (field, value) {
                (1, Value::Number(dim)) => dims.push(dim),
                (1, Value::Bytes(packed)) => {
                    let mut packed = Fields(packed);
                    while !packed.0.is_empty() {
                        dims.push(packed.number()?);
                    }
                }
                (13, Value::Bytes(entry)) => outside.push(entry),
                _ => {}
            }
        }
        if !outside.is_empty() {
            data = self.outside(&outside)?;
        }
        let values = dims.iter().try_fold(1u64, |all, dim| all.checked_mul(*dim));
        let zero = dims.contains(&0);
        match values.filter(|values| zero || *values / 8 <= data) {
            Some(_) => Ok(()),
            None => Err(format!("a tensor of {dims:?} values has {data} bytes at most")),
        }
    }

    /// Bytes of a tensor in an external file.
    fn outside(&self, entries: &[&[u8]]) -> Result<u64, String> {
        let (mut location, mut offset, mut length) = (None, 0, 0);
        for entry in entries {
            let (mut key, mut content) = (None, None);
            let mut fields = Fields(entry);
            while let Some((field, value)) = fields.next()? {
                let Value::Bytes(text) = value else { continue };
                let text = std::str::from_utf8(text).map_err(|_| "a text is not UTF-8")?;
                match field {
                    1 => key = Some(text),
                    2 => content = Some(text),
                    _ => {}
                }
            }
            let number = |key| {
                let content = content.unwrap_or_default();
                content
                    .parse::<u64>()
                    .map_err(|_| format!("external_data.{key}: {content:?}, must be a number"))
            };
            match key {
                Some("location") => location = content,
                Some(key @ "offset") => offset = number(key)?,
                Some(key @ "length") => length = number(key)?,
                _ => {}
            }
        }
        let location = location.ok_or("data outside has no location")?;
        // The runtime refuses paths outside the folder.
        let there = std::fs::metadata(self.folder.join(location)).map_or(0, |file| file.len());
        match offset.checked_add(length).filter(|end| *end <= there) {
            Some(_) => Ok(length),
            None => Err(format!(
                "external_data: {location} has {there} bytes, and {length} from byte {offset} are needed"
            )),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::onnx) fn number(mut value: u64) -> Vec<u8> {
        let mut out = Vec::new();
        while value > 0x7f {
            out.push(value as u8 | 0x80);
            value >>= 7;
        }
        out.push(value as u8);
        out
    }

    fn sized(field: u64, bytes: u64, value: &[u8]) -> Vec<u8> {
        [number(field << 3 | 2), number(bytes), value.to_vec()].concat()
    }

    pub(in crate::onnx) fn field(field: u64, value: &[u8]) -> Vec<u8> {
        sized(field, value.len() as u64, value)
    }

    fn model(tensor: &[u8]) -> Vec<u8> {
        field(7, &field(5, tensor))
    }

    fn refused(bytes: &[u8]) -> String {
        check(bytes, Path::new("/nonexistent")).unwrap_err()
    }

    #[test]
    fn whole_files_pass() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/operations");
        let mut checked = 0;
        for folder in ["vad", "turn_detection"] {
            for entry in std::fs::read_dir(fixtures.join(folder)).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_some_and(|extension| extension == "onnx") {
                    let bytes = std::fs::read(&path).unwrap();
                    check(&bytes, path.parent().unwrap()).unwrap();
                    for cut in 1..bytes.len() {
                        // A truncated file may pass or fail, but the check must end.
                        let _ = check(&bytes[..cut], path.parent().unwrap());
                    }
                    checked += 1;
                }
            }
        }
        assert_eq!(checked, 2);
    }

    #[test]
    fn lengths_beyond_the_message_are_refused_in_every_field() {
        let huge = 8_400_000_000_000_000_000;
        for (bytes, expected) in [
            (sized(7, huge, &[]), "field 7"),
            (field(7, &sized(5, huge, &[])), "field 5"),
            // Raw data, and the name of a dimension of an input.
            (model(&sized(9, huge, b"1234")), "field 9"),
            (
                field(7, &field(11, &field(2, &field(1, &field(2, &field(1, &sized(2, huge, b"n"))))))),
                "field 2",
            ),
            (field(7, &field(1, &field(5, &field(5, &sized(9, u64::MAX, &[]))))), "field 9"),
            (field(7, &field(1, &sized(4, 3, b"no"))), ""),
        ] {
            // Among a node's strings, only those longer than the file are harmful; all that exceed their
            // message are refused.
            let why = refused(&bytes);
            assert!(why.contains(expected) && why.contains("bytes"), "{why}");
        }
    }

    #[test]
    fn tensors_of_more_values_than_bytes_are_refused() {
        let dims = |dims: &[u64]| -> Vec<u8> {
            dims.iter().flat_map(|dim| [number(8), number(*dim)].concat()).collect()
        };
        let data = field(9, &[0; 64]);
        assert_eq!(check(&model(&[dims(&[4, 4]), data.clone()].concat()), Path::new("")), Ok(()));
        assert_eq!(check(&model(&dims(&[0, 1 << 62])), Path::new("")), Ok(()), "nothing is nothing");
        for wrong in [&[1 << 40][..], &[1 << 32, 1 << 32], &[u64::MAX], &[1 << 20, 1 << 20]] {
            assert!(refused(&model(&[dims(wrong), data.clone()].concat())).contains("a tensor of"));
        }
        let packed = field(1, &[number(1 << 40), number(1 << 20)].concat());
        assert!(refused(&model(&packed)).contains("a tensor of"));
    }

    #[test]
    fn external_data_must_exist() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("w.data"), [0; 100]).unwrap();
        let entry = |key: &str, value: &str| {
            field(13, &[field(1, key.as_bytes()), field(2, value.as_bytes())].concat())
        };
        let tensor = |offset: &str, length: &str, location: &str| {
            model(&[entry("location", location), entry("offset", offset), entry("length", length)].concat())
        };
        assert_eq!(check(&tensor("36", "64", "w.data"), dir.path()), Ok(()));
        for (offset, length, location) in [
            ("0", "8400000000000000000", "w.data"),
            ("90", "11", "w.data"),
            ("18446744073709551615", "1", "w.data"),
            ("0", "1", "other.data"),
            ("0", "-1", "w.data"),
        ] {
            assert!(
                check(&tensor(offset, length, location), dir.path()).is_err(),
                "{offset} {length} {location}"
            );
        }
    }

    #[test]
    fn nested_graphs_have_a_maximum_depth() {
        let nested = |levels: usize| {
            let wrap = |inner: Vec<u8>, _| field(1, &field(5, &field(6, &inner)));
            field(7, &(0..levels).fold(Vec::new(), wrap))
        };
        assert_eq!(check(&nested(60), Path::new("")), Ok(()));
        assert!(refused(&nested(10_000)).contains("in each other"));
    }
}
