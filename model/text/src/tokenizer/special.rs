//! Finds special tokens in a text before anything is merged.
//!
//! In [`Precedence::Longest`], longer tokens take precedence over shorter ones anywhere in the text, and among
//! equal lengths the leftmost one: `ab` and `bcd` on `abcd` give `a`, `bcd`. llama.cpp also matches longer tokens
//! first, but tokens of equal length one after the other. The difference is only visible if two tokens of equal
//! length overlap in the text.

use std::collections::BTreeMap;
use std::ops::Range;

use super::classes::is_word;

/// Ranges of a text in which control tokens' texts are ordinary text. Ascending, not overlapping, with
/// offsets in a longer text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quoted<'a> {
    ranges: &'a [Range<usize>],
    /// Offset of this text in the longer one.
    base: usize,
}

impl<'a> Quoted<'a> {
    pub(super) const NONE: Quoted<'static> = Quoted { ranges: &[], base: 0 };

    pub(super) fn new(ranges: &'a [Range<usize>]) -> Self {
        Self { ranges, base: 0 }
    }

    /// The ranges for the part of the text from `start` to `end`.
    pub(super) fn within(self, start: usize, end: usize) -> Self {
        let (start, end) = (self.base + start, self.base + end);
        let from = self.ranges.partition_point(|range| range.end <= start);
        let to = self.ranges.partition_point(|range| range.start < end);
        Self { ranges: self.ranges.get(from..to).unwrap_or_default(), base: start }
    }

    pub(super) fn is_empty(self) -> bool {
        self.ranges.is_empty()
    }

    /// The first quoted range that ends after `start`, cut at `start`.
    pub(super) fn next(self, start: usize) -> Option<Range<usize>> {
        let start = self.base + start;
        let next = self.ranges.get(self.ranges.partition_point(|range| range.end <= start))?;
        Some(next.start.max(start) - self.base..next.end - self.base)
    }
}

/// Which of two tokens that overlap in a text is matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Precedence {
    /// The longer one.
    Longest,
    /// The one that begins first, and of two that begin together the longer one, as in Transformers.
    Leftmost,
}

/// A special token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Special {
    pub(super) id: u32,
    /// True: matched even if special tokens are not requested.
    pub(super) always: bool,
    /// White space before or after the text belongs to the token. Only with [`Precedence::Leftmost`].
    pub(super) takes_space: (bool, bool),
    /// Not matched next to a character of a word. Only with [`Precedence::Leftmost`].
    pub(super) whole_word: bool,
}

impl Special {
    pub(super) fn new(id: u32, always: bool) -> Self {
        Self { id, always, takes_space: (false, false), whole_word: false }
    }
}

/// Texts of special tokens as a byte trie.
#[derive(Debug)]
pub(super) struct Specials {
    nodes: Vec<Node>,
    precedence: Precedence,
    /// First bytes of all tokens.
    first: First,
    /// First bytes of the tokens that are always matched.
    first_always: First,
    /// First bytes of the tokens that are not always matched.
    first_control: First,
    /// Length in bytes of the longest token that is not always matched.
    longest_control: usize,
}

/// A set of bytes to search for.
#[derive(Debug)]
struct First {
    bytes: [bool; 256],
    /// The same as a list.
    list: Vec<u8>,
}

impl First {
    fn none() -> Self {
        Self { bytes: [false; 256], list: Vec::new() }
    }

    fn add(&mut self, byte: u8) {
        let seen = std::mem::replace(&mut self.bytes[usize::from(byte)], true);
        if !seen {
            self.list.push(byte);
        }
    }

    /// Calls `at` with every position in `text` of a byte of the set, in order.
    fn each(&self, text: &[u8], mut at: impl FnMut(usize)) {
        match self.list[..] {
            [] => {}
            [a] => memchr::memchr_iter(a, text).for_each(at),
            [a, b] => memchr::memchr2_iter(a, b, text).for_each(at),
            [a, b, c] => memchr::memchr3_iter(a, b, c, text).for_each(at),
            _ => {
                for (start, &byte) in text.iter().enumerate() {
                    if self.bytes[usize::from(byte)] {
                        at(start);
                    }
                }
            }
        }
    }
}

#[derive(Debug, Default)]
struct Node {
    /// Sorted by byte.
    children: Vec<(u8, usize)>,
    token: Option<Special>,
}

/// A part of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpecialPart<'a> {
    /// Text between special tokens; never empty.
    Text(&'a str),
    /// A special token.
    Token(u32),
}

/// An occurrence of a token's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Found {
    start: usize,
    len: usize,
    id: u32,
    /// The token's place in the trie.
    node: usize,
}

impl Specials {
    /// Takes texts and tokens. Of two tokens with the same text the first one counts.
    pub(super) fn new<'a>(
        precedence: Precedence,
        tokens: impl IntoIterator<Item = (&'a [u8], Special)>,
    ) -> Self {
        let mut tree = Self {
            nodes: vec![Node::default()],
            precedence,
            first: First::none(),
            first_always: First::none(),
            first_control: First::none(),
            longest_control: 0,
        };
        for (text, token) in tokens {
            let Some(&first) = text.first() else { continue };
            tree.first.add(first);
            match token.always {
                true => tree.first_always.add(first),
                false => {
                    tree.first_control.add(first);
                    tree.longest_control = tree.longest_control.max(text.len());
                }
            }
            let mut at = 0;
            for &byte in text {
                at = match tree.nodes[at].children.binary_search_by_key(&byte, |c| c.0) {
                    Ok(child) => tree.nodes[at].children[child].1,
                    Err(index) => {
                        let child = tree.nodes.len();
                        tree.nodes.push(Node::default());
                        tree.nodes[at].children.insert(index, (byte, child));
                        child
                    }
                };
            }
            tree.nodes[at].token.get_or_insert(token);
        }
        tree
    }

    /// Makes the token with this text one that is not always matched.
    pub(super) fn control(&mut self, text: &[u8]) {
        let step = |at: Option<usize>, byte: &u8| {
            let children = &self.nodes.get(at?)?.children;
            children.binary_search_by_key(byte, |child| child.0).ok().map(|child| children[child].1)
        };
        let at = text.iter().fold(Some(0), step);
        let Some(token) = at.and_then(|at| self.nodes[at].token.as_mut()) else { return };
        token.always = false;
        if let Some(&first) = text.first() {
            self.first_control.add(first);
        }
        self.longest_control = self.longest_control.max(text.len());
    }

    /// Whether there are no tokens.
    pub(super) fn is_empty(&self) -> bool {
        self.first.list.is_empty()
    }

    /// Whether there are tokens that are not always matched.
    pub(super) fn has_controls(&self) -> bool {
        !self.first_control.list.is_empty()
    }

    /// The parts of `quoted` that overlap a control token's text. The other ranges have no effect.
    pub(super) fn relevant_ranges(&self, text: &str, quoted: &[Range<usize>]) -> Vec<Range<usize>> {
        let all = Quoted::new(quoted);
        let mut matter: Vec<Range<usize>> = Vec::new();
        let mut done = 0;
        for range in quoted {
            // A token's text may begin before the range.
            let from = range.start.saturating_sub(self.longest_control.saturating_sub(1)).max(done);
            done = range.end;
            let Some(window) = text.as_bytes().get(from..range.end.min(text.len())) else { continue };
            self.first_control.each(window, |at| {
                let start = from + at;
                let Some(end) =
                    self.longest(text.as_bytes(), start, text.len(), true).map(|found| start + found.len)
                else {
                    return;
                };
                if let Some(mut quoted) = all.next(start).filter(|quoted| quoted.start < end) {
                    quoted.end = quoted.end.min(end);
                    match matter.last_mut() {
                        Some(last) if last.end >= quoted.start => last.end = last.end.max(quoted.end),
                        _ => matter.push(quoted),
                    }
                }
            });
        }
        matter
    }

    /// Calls `emit` with the parts of `text` in order. `all` includes tokens without `always`, unless a part
    /// of their text is quoted.
    pub(super) fn split<'a>(
        &self,
        text: &'a str,
        all: bool,
        quoted: Quoted<'_>,
        mut emit: impl FnMut(SpecialPart<'a>),
    ) {
        let mut at = 0;
        let chosen = match self.precedence {
            Precedence::Longest => self.choose(text.as_bytes(), all, quoted),
            Precedence::Leftmost => self.choose_leftmost(text, all, quoted),
        };
        for found in chosen {
            if found.start > at {
                emit(SpecialPart::Text(&text[at..found.start]));
            }
            emit(SpecialPart::Token(found.id));
            at = found.start + found.len;
        }
        if at < text.len() {
            emit(SpecialPart::Text(&text[at..]));
        }
    }

    /// The matched tokens, in the order of the text.
    fn choose(&self, text: &[u8], all: bool, quoted: Quoted<'_>) -> Vec<Found> {
        let first = if all { &self.first } else { &self.first_always };
        // By length, starting with the longest token at each position.
        let mut by_len: BTreeMap<usize, Vec<Found>> = BTreeMap::new();
        first.each(text, |start| {
            if let Some(found) = self.longest_outside(text, start, text.len(), all, quoted) {
                by_len.entry(found.len).or_default().push(found);
            }
        });
        let mut chosen = Vec::new();
        if by_len.is_empty() {
            return chosen;
        }
        let mut taken = vec![false; text.len()];
        while let Some((_, mut ranges)) = by_len.pop_last() {
            ranges.sort_unstable();
            for found in ranges {
                let bytes = &mut taken[found.start..found.start + found.len];
                match bytes.iter().position(|t| *t) {
                    None => {
                        bytes.fill(true);
                        chosen.push(found);
                    }
                    Some(0) => {}
                    // A shorter token may still fit before the one already chosen.
                    Some(room) => {
                        if let Some(shorter) =
                            self.longest_outside(text, found.start, found.start + room, all, quoted)
                        {
                            by_len.entry(shorter.len).or_default().push(shorter);
                        }
                    }
                }
            }
        }
        chosen.sort_unstable();
        chosen
    }

    /// Like [`choose`](Self::choose). White space that belongs to a token is part of its occurrence, so
    /// occurrences overlap if a token takes space that contains another one.
    fn choose_leftmost(&self, text: &str, all: bool, quoted: Quoted<'_>) -> Vec<Found> {
        let bytes = text.as_bytes();
        let first = if all { &self.first } else { &self.first_always };
        let (mut scanned, mut taken, mut space_end) = (0, 0, 0);
        let mut chosen: Vec<Found> = Vec::new();
        first.each(bytes, |start| {
            if start < scanned {
                return;
            }
            let Some(mut found) = self.longest_outside(bytes, start, bytes.len(), all, quoted) else {
                return;
            };
            let end = start + found.len;
            let Some(token) = self.nodes.get(found.node).and_then(|node| node.token) else { return };
            scanned = end;
            let (before, after) =
                (text.get(..start).unwrap_or_default(), text.get(end..).unwrap_or_default());
            if token.whole_word
                && (before.chars().next_back().is_some_and(is_word)
                    || after.chars().next().is_some_and(is_word))
            {
                return;
            }
            let mut stop = end;
            if token.takes_space.1 {
                // A run of white space is read once, also if tokens within it take it.
                if end >= space_end {
                    space_end = text.len() - after.trim_start().len();
                }
                stop = stop.max(space_end);
            }
            if token.takes_space.0 {
                let free = text.get(taken.min(start)..start).unwrap_or_default();
                found.start = start - (free.len() - free.trim_end().len());
            }
            found.len = stop - found.start;
            taken = stop;
            chosen.push(found);
        });
        chosen
    }

    /// The longest token at `start` that ends at or before `end`. A token that overlaps a quoted range counts
    /// only if it is always matched.
    fn longest_outside(
        &self,
        text: &[u8],
        start: usize,
        end: usize,
        all: bool,
        quoted: Quoted<'_>,
    ) -> Option<Found> {
        match quoted.next(start).filter(|quoted| all && quoted.start < end) {
            None => self.longest(text, start, end, all),
            Some(quoted) => {
                let outside = self.longest(text, start, quoted.start, true);
                [self.longest(text, start, end, false), outside]
                    .into_iter()
                    .flatten()
                    .max_by_key(|found| found.len)
            }
        }
    }

    /// The longest token at `start` that ends at or before `end`.
    fn longest(&self, text: &[u8], start: usize, end: usize, all: bool) -> Option<Found> {
        let mut best = None;
        let mut at = 0;
        for (depth, byte) in text.get(start..end)?.iter().enumerate() {
            let node = &self.nodes[at];
            match node.children.binary_search_by_key(byte, |c| c.0) {
                Ok(child) => at = node.children[child].1,
                Err(_) => break,
            }
            if let Some(token) = self.nodes[at].token
                && (all || token.always)
            {
                best = Some(Found { start, len: depth + 1, id: token.id, node: at });
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition: for each token, longest first, match it in every remaining piece of text.
    fn by_definition<'a>(tokens: &[(&str, bool)], text: &'a str, all: bool) -> Vec<SpecialPart<'a>> {
        let mut order: Vec<usize> =
            (0..tokens.len()).filter(|&i| (all || tokens[i].1) && !tokens[i].0.is_empty()).collect();
        order.sort_by_key(|&i| (std::cmp::Reverse(tokens[i].0.len()), i));
        let mut parts = if text.is_empty() { vec![] } else { vec![SpecialPart::Text(text)] };
        for i in order {
            let mut next = Vec::new();
            for part in parts {
                let SpecialPart::Text(mut rest) = part else {
                    next.push(part);
                    continue;
                };
                while let Some(at) = rest.find(tokens[i].0) {
                    if at > 0 {
                        next.push(SpecialPart::Text(&rest[..at]));
                    }
                    next.push(SpecialPart::Token(i as u32));
                    rest = &rest[at + tokens[i].0.len()..];
                }
                if !rest.is_empty() {
                    next.push(SpecialPart::Text(rest));
                }
            }
            parts = next;
        }
        parts
    }

    fn specials_of(tokens: &[(&str, bool)]) -> Specials {
        let tokens = tokens.iter().zip(0..);
        Specials::new(
            Precedence::Longest,
            tokens.map(|((text, always), id)| (text.as_bytes(), Special::new(id, *always))),
        )
    }

    fn split<'a>(tokens: &[(&str, bool)], text: &'a str, all: bool) -> Vec<SpecialPart<'a>> {
        let specials = specials_of(tokens);
        let mut parts = Vec::new();
        specials.split(text, all, Quoted::NONE, |part| parts.push(part));
        parts
    }

    #[test]
    fn longer_tokens_win_wherever_they_stand() {
        let tokens = [("ab", false), ("bcd", false)];
        assert_eq!(split(&tokens, "abcd", true), [SpecialPart::Text("a"), SpecialPart::Token(1)]);
        assert_eq!(split(&tokens, "abcd", false), [SpecialPart::Text("abcd")]);
        assert_eq!(split(&tokens, "", true), []);
    }

    fn outside<'a>(tokens: &[(&str, bool)], text: &'a str, quoted: &[Range<usize>]) -> Vec<SpecialPart<'a>> {
        let specials = specials_of(tokens);
        let mut parts = Vec::new();
        let matter = specials.relevant_ranges(text, quoted);
        specials.split(text, true, Quoted::new(&matter), |part| parts.push(part));
        parts
    }

    #[test]
    fn quoted_texts_are_no_control_tokens() {
        let tokens = [("<e>", false), ("<e>x", false), ("<u>", true), ("<", false)];
        let outside = |text, quoted| outside(&tokens, text, std::slice::from_ref(&quoted));
        assert_eq!(outside("a<e>b", 0..100), [SpecialPart::Text("a<e>b")]);
        // Only one of the two is quoted, or only a part of one.
        assert_eq!(outside("<e><e>", 0..3), [SpecialPart::Text("<e>"), SpecialPart::Token(0)]);
        assert_eq!(outside("<e><e>", 3..6), [SpecialPart::Token(0), SpecialPart::Text("<e>")]);
        assert_eq!(outside("<e>", 1..2), [SpecialPart::Token(3), SpecialPart::Text("e>")]);
        // A shorter token before quoted text is matched, as are tokens that are always matched.
        assert_eq!(outside("<e>x", 3..4), [SpecialPart::Token(0), SpecialPart::Text("x")]);
        assert_eq!(outside("<u><e>", 0..100), [SpecialPart::Token(2), SpecialPart::Text("<e>")]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(800))]
        /// No token overlaps quoted text unless it is always matched. Quoted ranges elsewhere have no effect.
        #[test]
        fn quoted_texts_stay_texts(
            tokens in prop::collection::btree_set("[ab]{1,4}", 0..6),
            flags in prop::collection::vec(any::<bool>(), 6),
            text in "[abc]{0,24}",
            marks in prop::collection::vec(any::<bool>(), 24),
        ) {
            let tokens: Vec<(&str, bool)> = tokens.iter().zip(flags).map(|(t, f)| (t.as_str(), f)).collect();
            let quoted: Vec<Range<usize>> = (0..text.len()).filter(|at| marks[*at]).map(|at| at..at + 1).collect();
            let parts = outside(&tokens, &text, &quoted);
            let mut at = 0;
            for part in &parts {
                let len = match part { SpecialPart::Text(text) => text.len(), SpecialPart::Token(id) => tokens[*id as usize].0.len() };
                if let SpecialPart::Token(id) = part {
                    let clear = (at..at + len).all(|at| !marks[at]);
                    prop_assert!(tokens[*id as usize].1 || clear, "{parts:?}");
                }
                at += len;
            }
            prop_assert_eq!(at, text.len());
            let plain: Vec<(&str, bool)> = tokens.iter().filter(|(_, always)| *always).copied().collect();
            let all = std::slice::from_ref(&(0..24)).to_vec();
            let ids = |parts: &[SpecialPart<'_>], tokens: &[(&str, bool)]| parts.iter().map(|part| match part {
                SpecialPart::Text(text) => (*text).to_owned(), SpecialPart::Token(id) => format!("<{}>", tokens[*id as usize].0)
            }).collect::<Vec<_>>();
            prop_assert_eq!(ids(&outside(&tokens, &text, &all), &tokens), ids(&split(&plain, &text, false), &plain));
            prop_assert_eq!(outside(&tokens, &text, &[]), split(&tokens, &text, true));
        }

        #[test]
        fn splits_by_the_rule(
            tokens in prop::collection::btree_set("[ab\n]{0,4}", 0..6),
            flags in prop::collection::vec(any::<bool>(), 6),
            text in "[abc\né]{0,24}",
            all in any::<bool>(),
        ) {
            // The two methods differ for tokens of equal length, so use one token per length.
            let mut lens = std::collections::BTreeSet::new();
            let tokens: Vec<(&str, bool)> =
                tokens.iter().filter(|t| lens.insert(t.len())).zip(flags).map(|(t, f)| (t.as_str(), f)).collect();
            prop_assert_eq!(split(&tokens, &text, all), by_definition(&tokens, &text, all));
        }
    }

    #[test]
    fn a_token_becomes_one_that_quoted_text_does_not_have() {
        let tokens = [(&b"<image>"[..], Special::new(0, true)), (b"<im>", Special::new(1, true))];
        let mut specials = Specials::new(Precedence::Longest, tokens);
        specials.control(b"<image>");
        specials.control(b"<none>");
        let text = "<image><im><image>";
        let ranges = specials.relevant_ranges(text, std::slice::from_ref(&(7..18)));
        let mut parts = Vec::new();
        specials.split(text, true, Quoted::new(&ranges), |part| parts.push(part));
        let (token, quoted) = (SpecialPart::Token, SpecialPart::Text("<image>"));
        assert_eq!(parts, [token(0), token(1), quoted]);
    }

    #[test]
    fn many_overlapping_tokens_take_linear_time() {
        let lines: Vec<String> = (1..=31).map(|n| "\n".repeat(n)).collect();
        let tokens: Vec<(&str, bool)> = lines.iter().map(|l| (l.as_str(), true)).collect();
        let started = std::time::Instant::now();
        let text = "\n".repeat(1 << 18);
        assert_eq!(split(&tokens, &text, false).len(), (1usize << 18).div_ceil(31));
        assert!(started.elapsed() < std::time::Duration::from_secs(20), "{:?}", started.elapsed());
    }
}
