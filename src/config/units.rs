//! Quantities with units in settings: `512MiB`, `30s`.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes: `65536`, `512MiB`, `1.5GiB`, `2GB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ByteSize(pub(crate) u64);

/// A length of time: `250ms`, `30s`, `5m`, `1h`, `30d`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Period(pub(crate) Duration);

impl Period {
    /// In milliseconds.
    pub(crate) fn millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }
}

/// Error of a text that is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {kind}")]
pub(crate) struct InvalidQuantity {
    text: String,
    kind: &'static str,
}

const BYTE_UNITS: &[(&str, u64)] = &[
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];
const TIME_UNITS_MS: &[(&str, u64)] =
    &[("ms", 1), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)];
const BYTES_KIND: &str = "size such as 65536, 512MiB or 2GB";
const TIME_KIND: &str = "time such as 250ms, 30s, 5m, 1h or 30d";

/// Parses `number unit` as a count of the smallest unit. A number without a unit is accepted if
/// `bare_allowed`; a fraction needs a unit.
fn parse(
    text: &str,
    units: &[(&str, u64)],
    bare_allowed: bool,
    kind: &'static str,
) -> Result<u64, InvalidQuantity> {
    let refuse = || InvalidQuantity { text: text.chars().take(64).collect(), kind };
    let trimmed = text.trim();
    let with_unit =
        units.iter().find_map(|&(unit, scale)| Some((trimmed.strip_suffix(unit)?.trim_end(), scale)));
    let (number, scale) = match with_unit {
        Some(found) => found,
        None if bare_allowed => (trimmed, 1),
        None => return Err(refuse()),
    };
    let digits = |value: &str| !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
    let (whole, fraction) = number.split_once('.').map_or((number, None), |(w, f)| (w, Some(f)));
    if !digits(whole) || fraction.is_some_and(|f| !digits(f) || f.len() > 9 || scale == 1) {
        return Err(refuse());
    }
    let scaled = whole.parse::<u64>().ok().and_then(|n| n.checked_mul(scale)).ok_or_else(refuse)?;
    let Some(fraction) = fraction else { return Ok(scaled) };
    // Nine digits times 2^40 fit into 128 bits.
    let numerator = fraction.parse::<u128>().map_err(|_| refuse())? * u128::from(scale);
    let scaled_fraction = numerator / 10u128.pow(fraction.len() as u32);
    u64::try_from(scaled_fraction)
        .ok()
        .and_then(|scaled_fraction| scaled.checked_add(scaled_fraction))
        .ok_or_else(refuse)
}

impl FromStr for ByteSize {
    type Err = InvalidQuantity;
    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        parse(text, BYTE_UNITS, true, BYTES_KIND).map(Self)
    }
}

impl FromStr for Period {
    type Err = InvalidQuantity;
    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        parse(text, TIME_UNITS_MS, false, TIME_KIND).map(|ms| Self(Duration::from_millis(ms)))
    }
}

impl fmt::Display for ByteSize {
    /// Uses the largest binary unit that divides the number, so that the text parses to the same value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = &BYTE_UNITS[..4];
        match binary.iter().find(|(_, scale)| self.0 > 0 && self.0.is_multiple_of(*scale)) {
            Some((unit, scale)) => write!(f, "{}{unit}", self.0 / scale),
            None => write!(f, "{}", self.0),
        }
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        if ms.is_multiple_of(1000) { write!(f, "{}s", ms / 1000) } else { write!(f, "{ms}ms") }
    }
}

/// Accepts a quantity in a file as text or as an integer.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(u64),
    Text(String),
}

macro_rules! serde_as_text {
    ($name:ident) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = match Written::deserialize(deserializer)? {
                    Written::Number(number) => number.to_string(),
                    Written::Text(text) => text,
                };
                text.parse().map_err(de::Error::custom)
            }
        }
    };
}
serde_as_text!(ByteSize);
serde_as_text!(Period);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_and_print_back() {
        for (text, bytes) in [
            ("0", 0),
            ("65536", 65_536),
            ("512MiB", 512 << 20),
            ("1.5GiB", 3 << 29),
            ("2GB", 2_000_000_000),
            (" 7 kB ", 7_000),
            ("12B", 12),
        ] {
            let size: ByteSize = text.parse().unwrap();
            assert_eq!(size, ByteSize(bytes), "{text}");
            assert_eq!(size.to_string().parse::<ByteSize>().unwrap(), size);
        }
        assert_eq!(ByteSize(512 << 20).to_string(), "512MiB");
    }

    #[test]
    fn times_parse_and_print_back() {
        for (text, ms) in
            [("250ms", 250), ("30s", 30_000), ("1.5m", 90_000), ("1h", 3_600_000), ("2d", 172_800_000)]
        {
            let period: Period = text.parse().unwrap();
            assert_eq!(period, Period(Duration::from_millis(ms)), "{text}");
            assert_eq!(period.to_string().parse::<Period>().unwrap(), period);
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_text_and_an_example() {
        for text in [
            "",
            "MiB",
            "1.5",
            "-1",
            "1e9",
            "1.2.3MiB",
            "99999999999TiB",
            "18446744073709551616",
            "5 furlongs",
            "1.MiB",
        ] {
            let error = text.parse::<ByteSize>().unwrap_err().to_string();
            assert!(error.contains("512MiB"), "{error}");
        }
        for text in ["30", "s", "1.5ms", "-3s"] {
            assert!(text.parse::<Period>().is_err(), "{text}");
        }
    }
}
