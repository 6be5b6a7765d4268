//! Text of an answer that the parser has not emitted yet.

use super::Dialect;

/// Text in which some ranges are mark tokens.
#[derive(Debug, Default)]
pub(super) struct HeldText {
    text: String,
    /// Start of each mark token, ascending.
    tokens: Vec<(usize, &'static str)>,
}

impl HeldText {
    pub(super) fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    pub(super) fn push_token(&mut self, mark: &'static str) {
        self.tokens.push((self.text.len(), mark));
        self.text.push_str(mark);
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Byte position of the first occurrence of a mark: its token, or its text if the vocabulary has no token
    /// for it.
    pub(super) fn find(&self, dialect: &Dialect, mark: &str) -> Option<usize> {
        if dialect.has_token(mark) {
            return self.tokens.iter().find(|(_, token)| *token == mark).map(|(at, _)| *at);
        }
        self.text.find(mark)
    }

    /// Byte position of a suffix that more text could complete to one of `marks`.
    pub(super) fn unfinished(&self, dialect: &Dialect, marks: &[&'static str]) -> Option<usize> {
        let longest = marks.iter().map(|mark| mark.len()).max()?;
        let from = self.text.len().saturating_sub(longest);
        let begins = |at: &usize| {
            let end = &self.text[*at..];
            marks.iter().any(|mark| !dialect.has_token(mark) && mark.starts_with(end))
        };
        (from..self.text.len()).filter(|at| self.text.is_char_boundary(*at)).find(begins)
    }

    /// Removes and returns the first `bytes` bytes.
    pub(super) fn take(&mut self, bytes: usize) -> String {
        self.tokens.retain_mut(|(at, _)| match at.checked_sub(bytes) {
            Some(left) => {
                *at = left;
                true
            }
            None => false,
        });
        self.text.drain(..bytes).collect()
    }

    /// Inserts text at the front.
    pub(super) fn put_back(&mut self, text: &str) {
        self.tokens.iter_mut().for_each(|(at, _)| *at += text.len());
        self.text.insert_str(0, text);
    }

    pub(super) fn take_all(&mut self) -> String {
        self.tokens.clear();
        std::mem::take(&mut self.text)
    }
}
