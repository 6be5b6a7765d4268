//! Finds stop strings in a text that comes in pieces.

use std::sync::Arc;

/// Stop strings, and the text that may still become one of them. No string may be empty.
#[derive(Debug, Clone)]
pub struct StopStrings {
    strings: Arc<[String]>,
    /// Held-back text, shorter than the longest string.
    held: String,
}

impl StopStrings {
    pub fn new(strings: Vec<String>) -> Self {
        Self { strings: strings.into(), held: String::new() }
    }

    /// Adds text. Returns the text that is now certain, and the stop string that follows it, if found. After
    /// a match nothing is held back. `matches`: whether a string that is complete now counts.
    pub fn push(&mut self, text: &str, matches: bool) -> (String, Option<String>) {
        self.held.push_str(text);
        if matches && let Some((at, found)) = self.earliest() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), Some(found));
        }
        let rest = self.held.split_off(self.held.len() - self.possible());
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// Ends the text and returns the held-back part.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn earliest(&self) -> Option<(usize, String)> {
        let found = self.strings.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        found.min_by_key(|(at, _)| *at).map(|(at, stop)| (at, stop.clone()))
    }

    /// Length of the longest suffix of the held-back text that begins a stop string.
    fn possible(&self) -> usize {
        let longest = |stop: &String| {
            let max_len = self.held.len().min(stop.len().saturating_sub(1));
            (1..=max_len).rev().find(|&len| {
                let from = self.held.len() - len;
                self.held.is_char_boundary(from) && stop.as_bytes().starts_with(&self.held.as_bytes()[from..])
            })
        };
        self.strings.iter().filter_map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_string_ends_the_text_however_it_comes() {
        let text = "one, two; three";
        for size in 1..=text.len() {
            let mut stops = StopStrings::new(vec!["three".into(), "; ".into(), "four".into()]);
            let (mut all, mut found) = (String::new(), None);
            for piece in text.as_bytes().chunks(size) {
                if found.is_none() {
                    let (text, matched) = stops.push(std::str::from_utf8(piece).unwrap(), true);
                    all += &text;
                    found = matched;
                }
            }
            assert_eq!((all.as_str(), found.as_deref()), ("one, two", Some("; ")), "by {size}");
            assert_eq!(stops.finish(), "");
        }
    }

    #[test]
    fn a_partial_stop_string_is_output() {
        let mut stops = StopStrings::new(vec!["END".into()]);
        assert_eq!(stops.push("the EN", true), ("the ".into(), None));
        assert_eq!(stops.push("d E", true), ("ENd ".into(), None));
        assert_eq!(stops.finish(), "E");
        // Too early to count.
        assert_eq!(stops.push("END", false), ("END".into(), None));
    }
}
