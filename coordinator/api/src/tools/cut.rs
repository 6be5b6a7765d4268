//! Completes JSON that was cut off.

use serde_json::Value;

/// The object that the incomplete `text` begins, with its last member as far as it goes. `None` if `text` is
/// not the beginning of an object.
pub(super) fn completed(text: &str) -> Option<Value> {
    if !text.starts_with('{') {
        return None;
    }
    let mut open = Vec::new();
    let (mut quoted, mut escaped) = (false, false);
    // Positions at which the text can be cut so that closing the open brackets gives valid JSON, with the
    // number of open brackets there.
    let mut cut_points: Vec<(usize, usize)> = Vec::new();
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if quoted => match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => quoted = false,
                _ => {}
            },
            b'"' => quoted = true,
            b'{' => open.push('}'),
            b'[' => open.push(']'),
            b'}' | b']' => drop(open.pop()?),
            // The member after the comma is missing.
            b',' => cut_points.push((at, open.len())),
            _ => {}
        }
        if matches!(byte, b'{' | b'[') && !quoted {
            cut_points.push((at + 1, open.len()));
        }
    }
    let close = |text: &str, quote: &str, depth: usize| {
        let closing: String = open.get(..depth)?.iter().rev().collect();
        serde_json::from_str(&format!("{text}{quote}{closing}")).ok()
    };
    // An incomplete escape has at most 11 bytes: a surrogate pair.
    let max_cut = if quoted { 12.min(text.len()) } else { 0 };
    let shorter = (0..=max_cut).filter_map(|cut| text.get(..text.len() - cut));
    let quote = if quoted { "\"" } else { "" };
    let mut whole = shorter.filter_map(|text| close(text, quote, open.len()));
    if let Some(value) = whole.next() {
        return Some(value);
    }
    // Ends with a name without a value, or with part of a number or word: keep the members before it. Closed
    // brackets come after those positions.
    let mut depths = cut_points.into_iter().rev().take(3);
    depths.find_map(|(at, depth)| close(text.get(..at)?, "", depth))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_prefix_of_an_object_is_completed_to_an_object() {
        let text =
            r#"{"a": "x\"\u00e9\ud83d\ude00y", "b": [1, {"c": -2.5e3}, [true, null]], "d": {}, "e": "}{"}"#;
        let whole: Value = serde_json::from_str(text).unwrap();
        for end in 1..text.len() {
            let value = completed(&text[..end]).unwrap_or_else(|| panic!("{}", &text[..end]));
            let members = value.as_object().unwrap();
            // Complete members are unchanged; only the last one may be shorter.
            let last = members.len().saturating_sub(1);
            for (name, member) in members.iter().take(last) {
                assert_eq!(member, &whole[name], "{}", &text[..end]);
            }
        }
        assert_eq!(completed(r#"{"city": "Os"#), Some(json!({"city": "Os"})));
        assert_eq!(completed(r#"{"city": "Os", "da"#), Some(json!({"city": "Os"})));
        assert_eq!(completed(r#"{"city": "Os", "days": "#), Some(json!({"city": "Os"})));
        assert_eq!(completed(r#"{"a": [1, {"b": tr"#), Some(json!({"a": [1, {}]})));
        for other in ["", "[1", "hello", "}", "{]", r#"{"a" 1"#] {
            assert!(completed(other).is_none_or(|value| value == json!({})), "{other}");
        }
    }
}
