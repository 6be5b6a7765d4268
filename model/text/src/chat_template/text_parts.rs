//! Splitting and replacing in strings.

use std::ops::Range;

use super::budget::{Budget, VISIT};
use super::value::{Fallible, Text, Value, Writer, failed, is_space};

/// `split` and `rsplit`; the parts are charged.
pub(super) fn split(
    budget: &Budget,
    text: &Text,
    separator: Option<&Text>,
    limit: usize,
    from_end: bool,
) -> Fallible<Vec<Value>> {
    let all = text.as_str();
    let mut parts = Vec::new();
    let mut add = |range: Range<usize>| -> Fallible<()> {
        budget.charge(VISIT)?;
        parts.push(Value::Str(text.slice(budget, range)?));
        Ok(())
    };
    match (separator.map(Text::as_str), from_end) {
        (Some(""), _) => return failed("empty separator"),
        (Some(separator), false) => {
            let mut start = 0;
            for (at, found) in all.match_indices(separator).take(limit) {
                add(start..at)?;
                start = at + found.len();
            }
            add(start..all.len())?;
        }
        (Some(separator), true) => {
            let mut end = all.len();
            for (at, found) in all.rmatch_indices(separator).take(limit) {
                add(at + found.len()..end)?;
                end = at;
            }
            add(0..end)?;
        }
        (None, false) => {
            let mut at = all.len() - all.trim_start_matches(is_space).len();
            let mut count = 0;
            while let Some(rest) = all.get(at..).filter(|rest| !rest.is_empty()) {
                if count == limit {
                    add(at..all.len())?;
                    break;
                }
                let end = at + rest.find(is_space).unwrap_or(rest.len());
                add(at..end)?;
                count += 1;
                let rest = all.get(end..).unwrap_or_default();
                at = all.len() - rest.trim_start_matches(is_space).len();
            }
        }
        (None, true) => {
            let mut end = all.trim_end_matches(is_space).len();
            let mut count = 0;
            while let Some(rest) = all.get(..end).filter(|rest| !rest.is_empty()) {
                if count == limit {
                    add(0..end)?;
                    break;
                }
                let word = rest.trim_end_matches(|c| !is_space(c)).len();
                add(word..end)?;
                count += 1;
                end = all.get(..word).unwrap_or_default().trim_end_matches(is_space).len();
            }
        }
    }
    if from_end {
        parts.reverse();
    }
    Ok(parts)
}

/// The lines of a text: range without the line end, and position after the line end.
pub(super) fn lines(text: &str) -> impl Iterator<Item = (Range<usize>, usize)> {
    let breaks = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = text.get(at..).filter(|rest| !rest.is_empty())?;
        let start = at;
        let length = rest.find(breaks).unwrap_or(rest.len());
        let ending = rest.get(length..).unwrap_or_default();
        let ending = match ending.strip_prefix("\r\n") {
            Some(_) => 2,
            None => ending.chars().next().map_or(0, char::len_utf8),
        };
        at = start + length + ending;
        Some((start..start + length, at))
    })
}

/// `replace`, at most `limit` times.
pub(super) fn replace(budget: &Budget, text: &Text, old: &str, new: &Text, limit: usize) -> Fallible<Text> {
    let all = text.as_str();
    budget.charge_len(all.len() + old.len())?;
    let mut replaced = Writer::new(budget);
    let mut start = 0;
    for (at, found) in all.match_indices(old).take(limit) {
        budget.charge(8)?;
        replaced.push_range(text, start..at)?;
        replaced.push_text(new)?;
        start = at + found.len();
    }
    if start == 0 && replaced.len() == 0 {
        return Ok(text.clone());
    }
    replaced.push_range(text, start..all.len())?;
    Ok(replaced.finish())
}
