//! The table of replacements in tokenizers of SentencePiece: a double array of characters' bytes (that of the library
//! darts-clone), and the texts that replace them.

use super::classes::is_mark;

/// Longest run of characters that is looked up as one, in bytes.
const LONGEST_RUN: usize = 5;
/// Longest replacement in bytes.
const LONGEST_TEXT: usize = 256;

/// Bytes of a table, read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Charsmap {
    units: Box<[u32]>,
    /// The texts, each ended by a zero byte.
    texts: Box<str>,
}

impl Charsmap {
    /// Reads a table: the size of the double array in bytes, the array, the texts; numbers are little-endian.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, &'static str> {
        let (size, rest) = bytes.split_first_chunk().ok_or("is shorter than a number")?;
        let size = u32::from_le_bytes(*size) as usize;
        let (units, texts) = rest.split_at_checked(size).ok_or("is shorter than its array")?;
        let (units, []) = units.as_chunks() else { return Err("has a part of a number") };
        let texts = std::str::from_utf8(texts).map_err(|_| "has texts that are not UTF-8")?;
        if texts.split('\0').any(|text| text.len() > LONGEST_TEXT) {
            return Err("has a text of more than 256 bytes");
        }
        Ok(Self { units: units.iter().map(|unit| u32::from_le_bytes(*unit)).collect(), texts: texts.into() })
    }

    /// Replaces what the table has. A character and the marks on it are looked up together if they are short, as the
    /// library `tokenizers` does.
    pub(super) fn replace(&self, text: &str) -> String {
        let mut changed = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let (run, behind) = rest.split_at(run(rest, first));
            rest = behind;
            if run.len() <= LONGEST_RUN
                && let Some(found) = self.find(run)
            {
                changed.push_str(found);
                continue;
            }
            for (at, c) in run.char_indices() {
                let c = run.get(at..at + c.len_utf8()).unwrap_or_default();
                changed.push_str(self.find(c).unwrap_or(c));
            }
        }
        changed
    }

    /// What replaces the shortest beginning of `text` that the table has.
    fn find(&self, text: &str) -> Option<&str> {
        let mut at = offset(*self.units.first()?);
        for byte in text.bytes().map(u32::from).take_while(|byte| *byte != 0) {
            at ^= byte;
            let unit = *self.units.get(at as usize)?;
            if unit & (1 << 31 | 0xff) != byte {
                return None;
            }
            at ^= offset(unit);
            if unit & 1 << 8 != 0 {
                let start = self.units.get(at as usize)? & !(1 << 31);
                return self.texts.get(start as usize..)?.split('\0').next();
            }
        }
        None
    }
}

/// Distance to a unit's children.
const fn offset(unit: u32) -> u32 {
    (unit >> 10) << ((unit & 1 << 9) >> 6)
}

/// Bytes of the first character and the marks on it.
fn run(text: &str, first: char) -> usize {
    if text.starts_with("\r\n") {
        return 2;
    }
    let joins = |c: char| is_mark(c) || matches!(c, '\u{200c}' | '\u{200d}' | '\u{ff9e}' | '\u{ff9f}');
    let marks = text.chars().skip(1).take_while(|c| !first.is_control() && joins(*c));
    first.len_utf8() + marks.map(char::len_utf8).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of single bytes: `keys` and their replacements, which must not share units.
    fn table(entries: &[(u8, &str)]) -> Vec<u8> {
        // The root's children are at 256 ^ byte; a child's value is at 512 + byte.
        let mut units = vec![0_u32; 1024];
        units[0] = 256 << 10;
        let mut texts = String::new();
        for &(byte, text) in entries {
            let at = 256 ^ usize::from(byte);
            let value = 512 + usize::from(byte);
            units[at] = ((at ^ value) as u32) << 10 | 1 << 8 | u32::from(byte);
            units[value] = 1 << 31 | texts.len() as u32;
            texts.push_str(text);
            texts.push('\0');
        }
        let size = 4 * units.len() as u32;
        let units = units.iter().flat_map(|unit| unit.to_le_bytes());
        size.to_le_bytes().into_iter().chain(units).chain(texts.into_bytes()).collect()
    }

    #[test]
    fn replacements() {
        let map = Charsmap::read(&table(&[(b'a', "xy"), (b'\t', " "), (b'z', "")])).unwrap();
        assert_eq!(map.replace("banana\tz!é"), "bxynxynxy !é");
        // A short character with a mark is replaced as the character alone, a longer one is not.
        assert_eq!(map.replace("a\u{301}b\u{301}"), "xyb\u{301}");
        assert_eq!(map.replace("a\u{301}\u{301}\u{301}"), "xy\u{301}\u{301}\u{301}");
    }

    #[test]
    fn broken_tables() {
        let good = table(&[(b'a', "xy")]);
        for (bytes, reason) in [
            (&good[..3], "is shorter than a number"),
            (&good[..40], "is shorter than its array"),
            (&[1, 0, 0, 0, 9][..], "has a part of a number"),
            (&[0, 0, 0, 0, 255], "has texts that are not UTF-8"),
            (&[&[0; 4][..], &[b'a'; 257]].concat(), "has a text of more than 256 bytes"),
        ] {
            assert_eq!(Charsmap::read(bytes), Err(reason));
        }
        assert_eq!(Charsmap::read(&[0; 4]).unwrap().replace("ab"), "ab");
        // Units that point anywhere.
        let mut state = 1_u32;
        let mut noise = good;
        for byte in &mut noise[4..4100] {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8;
        }
        Charsmap::read(&noise).unwrap().replace("The quick brown fox\u{301}");
    }
}
