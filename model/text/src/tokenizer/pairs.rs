//! Two texts as one sequence, for models that compare them.

use super::Tokenizer;

/// A prompt with a place for each of two texts.
#[derive(Debug, PartialEq, Eq)]
pub struct PairTemplate {
    /// Before, between and after the places.
    parts: [Box<str>; 3],
    /// Whether the second text comes first.
    swapped: bool,
}

impl PairTemplate {
    /// Where a prompt has the two texts.
    pub const PLACES: [&'static str; 2] = ["{query}", "{document}"];

    /// `None` unless the source has each place once.
    pub fn new(source: &str) -> Option<Self> {
        let place = |name: &str| {
            let mut found = source.match_indices(name);
            let (at, _) = found.next()?;
            found.next().is_none().then_some((at, at + name.len()))
        };
        let (query, document) = (place(Self::PLACES[0])?, place(Self::PLACES[1])?);
        let (first, last) = (query.min(document), query.max(document));
        let parts = [&source[..first.0], &source[first.1..last.0], &source[last.1..]].map(Into::into);
        Some(Self { parts, swapped: document < query })
    }
}

/// A text that others are compared with.
#[derive(Debug)]
pub struct Pairs<'a> {
    tokenizer: &'a Tokenizer,
    first: &'a str,
    /// Empty if a template has both texts.
    tokens: Vec<u32>,
}

impl<'a> Pairs<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, first: &'a str) -> Self {
        let tokens = match tokenizer.pair_template {
            None => tokenizer.encode(first, false),
            Some(_) => Vec::new(),
        };
        Self { tokenizer, first, tokens }
    }

    /// The tokens of the pair with `second`, and where those of `second` begin if the model's parts have types.
    /// Control tokens are only those of the template, or those around texts.
    pub fn with(&self, second: &str) -> (Vec<u32>, Option<usize>) {
        let Some(PairTemplate { parts: [before, between, after], swapped }) = &self.tokenizer.pair_template
        else {
            let (tokens, begin) =
                self.tokenizer.pair(self.tokens.clone(), &self.tokenizer.encode(second, false));
            return (tokens, Some(begin));
        };
        let [a, b] = if *swapped { [second, self.first] } else { [self.first, second] };
        let prompt = [&**before, a, between, b, after].concat();
        let start = before.len() + a.len() + between.len();
        let quoted = [before.len()..before.len() + a.len(), start..start + b.len()];
        (self.tokenizer.encode_prompt(&prompt, &quoted).0, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_has_each_place_once() {
        for source in ["", "{query}", "{query} {document} {query}", "{document}{document}", "{{ query }}"] {
            assert!(PairTemplate::new(source).is_none(), "{source}");
        }
        let template = PairTemplate::new("a{query}b{document}c").unwrap();
        assert_eq!(
            (template.parts.map(String::from), template.swapped),
            (["a", "b", "c"].map(String::from), false)
        );
        let template = PairTemplate::new("{document}-{query}").unwrap();
        assert_eq!(
            (template.parts.map(String::from), template.swapped),
            (["", "-", ""].map(String::from), true)
        );
    }
}
