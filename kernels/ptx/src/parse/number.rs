//! Parser of PTX numbers.

use super::Parser;
use crate::PtxError;
use crate::ast::Number;
use crate::lex::Token;

/// Parses a word. Returns `None` if it is not a number.
pub(super) fn read(word: &str) -> Option<Number> {
    if !word.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    if let Some(hex) = word.strip_prefix("0f").or_else(|| word.strip_prefix("0F")) {
        return (hex.len() == 8).then(|| u32::from_str_radix(hex, 16).ok().map(Number::F32))?;
    }
    if let Some(hex) = word.strip_prefix("0d").or_else(|| word.strip_prefix("0D")) {
        let bits = (hex.len() == 16).then(|| u64::from_str_radix(hex, 16).ok())??;
        return Some(Number::F64(f64::from_bits(bits)));
    }
    let digits = word.trim_end_matches('U');
    if let Some(hex) = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        return u64::from_str_radix(hex, 16).ok().map(Number::Int);
    }
    if let Some(binary) = digits.strip_prefix("0b").or_else(|| digits.strip_prefix("0B")) {
        return u64::from_str_radix(binary, 2).ok().map(Number::Int);
    }
    if digits.contains(['.', 'e', 'E']) {
        return digits.parse().ok().map(Number::F64);
    }
    if digits.len() > 1 && digits.starts_with('0') {
        return u64::from_str_radix(digits, 8).ok().map(Number::Int);
    }
    digits.parse().ok().map(Number::Int)
}

/// Returns the negated number.
fn negative(number: Number) -> Number {
    match number {
        Number::Int(value) => Number::Int(value.wrapping_neg()),
        Number::F32(bits) => Number::F32(bits ^ 1 << 31),
        Number::F64(value) => Number::F64(-value),
    }
}

/// Returns the number as data of `bytes` bytes, or `None` if it does not fit.
pub(super) fn bits(number: Number, bytes: u32) -> Option<u64> {
    match (number, bytes) {
        (Number::Int(value), 8) => Some(value),
        (Number::Int(value), _) => {
            let range = 1i64 << (8 * bytes);
            let signed = value.cast_signed();
            (-range / 2..range).contains(&signed).then_some(value & (range - 1).cast_unsigned())
        }
        (Number::F32(bits), 4) => Some(u64::from(bits)),
        (Number::F64(value), 8) => Some(value.to_bits()),
        _ => None,
    }
}

impl Parser<'_> {
    /// Parses a number with its sign.
    pub(super) fn number(&mut self) -> Result<Number, PtxError> {
        match self.next()? {
            Token::Mark('-') => Ok(negative(self.number()?)),
            Token::Word(word) => read(word).ok_or_else(|| self.error(format!("{word} is no number"))),
            other => Err(self.error(format!("{other:?} where a number was expected"))),
        }
    }

    /// Parses a number that is not negative.
    pub(super) fn integer(&mut self) -> Result<u64, PtxError> {
        match self.number()? {
            Number::Int(value) if value < 1 << 40 => Ok(value),
            other => Err(self.error(format!("{other:?} where a count was expected"))),
        }
    }
}
