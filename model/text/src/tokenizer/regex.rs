//! Regular expressions of tokenizer files, matched in time linear in the text.
//!
//! The syntax is that of Oniguruma's Ruby mode, as far as tokenizers use it: `$` is the end of a line, and
//! look-around is allowed. A matcher that backtracks takes exponential time on some expressions. This one
//! remembers from which branch and position no match was found, for all matches of a text together. That is
//! exact because expressions have neither captures nor references, and it bounds the work by the number of
//! branches times the length of the text.

use std::collections::HashMap;

mod parse;

pub(super) use parse::RegexError;

/// Positions per page of [`Failures`].
const PAGE: usize = 4096;

/// A compiled expression. Immutable.
#[derive(Debug)]
pub(super) struct Regex {
    program: Vec<Inst>,
    sets: Vec<CharSet>,
    /// Number of branches.
    branches: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Inst {
    Char(char),
    /// One character of the set.
    Set(usize),
    /// As many characters of the set as possible, at most `max`, and never fewer.
    Run {
        set: usize,
        min: usize,
        max: usize,
    },
    /// Continues at `first`; if that fails, at `second`. `branch` numbers the branches.
    Split {
        first: usize,
        second: usize,
        branch: usize,
    },
    Jump(usize),
    Assert(Assertion),
    /// Runs the instructions after this one up to their `Accept`, `back` characters before the position,
    /// then continues at `next`. The branch remembers positions where they match.
    Look {
        negated: bool,
        back: usize,
        next: usize,
    },
    Accept,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Assertion {
    LineStart,
    LineEnd,
    TextStart,
    TextEnd,
    /// End of the text, or before a newline there.
    LastLineEnd,
    WordBoundary,
    NoWordBoundary,
}

/// Characters as sorted ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CharSet {
    ascii: u128,
    ranges: Box<[(char, char)]>,
}

impl CharSet {
    fn new(ranges: Vec<(char, char)>) -> Self {
        let within = |code: u8| ranges.iter().any(|(low, high)| (*low..=*high).contains(&char::from(code)));
        let ascii = (0..128).filter(|code| within(*code)).fold(0, |bits, code| bits | 1 << code);
        Self { ascii, ranges: ranges.into() }
    }

    fn contains(&self, c: char) -> bool {
        if c.is_ascii() {
            return self.ascii >> (c as u32) & 1 == 1;
        }
        let at = self.ranges.partition_point(|(_, high)| *high < c);
        self.ranges.get(at).is_some_and(|(low, _)| *low <= c)
    }
}

/// Branches and positions from which no match exists, as bits by position, in pages.
struct Failures {
    branches: usize,
    pages: HashMap<usize, Box<[u64]>>,
    /// First page that may still be read.
    from: usize,
}

impl Failures {
    fn new(branches: usize) -> Self {
        Self { branches, pages: HashMap::new(), from: 0 }
    }

    /// Index of a word in its page, and the bit in it.
    fn slot(&self, branch: usize, at: usize) -> (usize, u64) {
        let bit = (at % PAGE) * self.branches + branch;
        (bit / 64, 1 << (bit % 64))
    }

    /// Sets the mark; false if it was set.
    fn mark(&mut self, branch: usize, at: usize) -> bool {
        let (word, bit) = self.slot(branch, at);
        let words = (PAGE * self.branches).div_ceil(64);
        let page = self.pages.entry(at / PAGE).or_insert_with(|| vec![0; words].into());
        let unset = page[word] & bit == 0;
        page[word] |= bit;
        unset
    }

    fn unmark(&mut self, branch: usize, at: usize) {
        let (word, bit) = self.slot(branch, at);
        if let Some(page) = self.pages.get_mut(&(at / PAGE)) {
            page[word] &= !bit;
        }
    }

    /// Frees the pages before the one of `at`.
    fn forget_before(&mut self, at: usize) {
        for page in self.from..at / PAGE {
            self.pages.remove(&page);
        }
        self.from = self.from.max(at / PAGE);
    }
}

/// An alternative to continue with when the current one fails.
struct Alternative {
    pc: usize,
    at: usize,
    /// Length of the trail when it was left open.
    trail: usize,
}

/// The matches in one text.
pub(super) struct Matches<'r, 't> {
    regex: &'r Regex,
    text: &'t str,
    failures: Failures,
    /// The latest run of each set, as start and end.
    runs: Vec<(usize, usize)>,
    /// Results of look-around, by instruction and position.
    looks: HashMap<(usize, usize), bool>,
    alternatives: Vec<Alternative>,
    trail: Vec<(usize, usize)>,
    /// Where the next match may begin; `None` after the last one.
    next: Option<usize>,
}

impl Regex {
    /// Compiles `pattern`.
    ///
    /// # Errors
    /// [`RegexError`] if the pattern is malformed, too long, or uses a feature that is not supported.
    pub(super) fn new(pattern: &str) -> Result<Self, RegexError> {
        parse::compile(pattern)
    }

    /// The matches in `text`, from left to right, not overlapping. An empty match is followed by one at a
    /// later position.
    pub(super) fn matches<'r, 't>(&'r self, text: &'t str) -> Matches<'r, 't> {
        Matches {
            regex: self,
            text,
            failures: Failures::new(self.branches),
            runs: vec![(0, 0); self.sets.len()],
            looks: HashMap::new(),
            alternatives: Vec::new(),
            trail: Vec::new(),
            next: Some(0),
        }
    }
}

impl Iterator for Matches<'_, '_> {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<(usize, usize)> {
        let mut start = self.next?;
        self.failures.forget_before(start);
        loop {
            let after = self.char_at(start).map(|c| start + c.len_utf8());
            if let Some(end) = self.run(0, start) {
                self.next = if end > start { Some(end) } else { after };
                return Some((start, end));
            }
            match after {
                Some(after) => start = after,
                None => {
                    self.next = None;
                    return None;
                }
            }
        }
    }
}

impl Matches<'_, '_> {
    fn char_at(&self, at: usize) -> Option<char> {
        self.text.get(at..)?.chars().next()
    }

    fn char_before(&self, at: usize) -> Option<char> {
        self.text.get(..at)?.chars().next_back()
    }

    /// The end of the match of the program at `pc` that begins at `at`.
    fn run(&mut self, pc: usize, at: usize) -> Option<usize> {
        let (floor, trail) = (self.alternatives.len(), self.trail.len());
        let (mut pc, mut at) = (pc, at);
        loop {
            if let Some((next, moved)) = match self.follow(pc, at) {
                Transition::To(next, moved) => Some((next, moved)),
                Transition::Accepted => {
                    // Only branches that failed stay marked.
                    self.alternatives.truncate(floor);
                    while self.trail.len() > trail {
                        if let Some((branch, at)) = self.trail.pop() {
                            self.failures.unmark(branch, at);
                        }
                    }
                    return Some(at);
                }
                Transition::Failed => None,
            } {
                (pc, at) = (next, moved);
                continue;
            }
            if self.alternatives.len() == floor {
                self.trail.truncate(trail);
                return None;
            }
            let alternative = self.alternatives.pop()?;
            self.trail.truncate(alternative.trail);
            (pc, at) = (alternative.pc, alternative.at);
        }
    }

    fn follow(&mut self, pc: usize, at: usize) -> Transition {
        let regex = self.regex;
        let Some(inst) = regex.program.get(pc) else { return Transition::Failed };
        match *inst {
            Inst::Char(expected) => match self.char_at(at) {
                Some(c) if c == expected => Transition::To(pc + 1, at + c.len_utf8()),
                _ => Transition::Failed,
            },
            Inst::Set(set) => match self.char_at(at) {
                Some(c) if regex.sets.get(set).is_some_and(|set| set.contains(c)) => {
                    Transition::To(pc + 1, at + c.len_utf8())
                }
                _ => Transition::Failed,
            },
            Inst::Run { set, min, max } => match self.run_end(set, min, max, at) {
                Some(end) => Transition::To(pc + 1, end),
                None => Transition::Failed,
            },
            Inst::Split { first, second, branch } => {
                if !self.failures.mark(branch, at) {
                    return Transition::Failed;
                }
                self.trail.push((branch, at));
                self.alternatives.push(Alternative { pc: second, at, trail: self.trail.len() });
                Transition::To(first, at)
            }
            Inst::Jump(to) => Transition::To(to, at),
            Inst::Assert(assertion) if self.holds(assertion, at) => Transition::To(pc + 1, at),
            Inst::Assert(_) => Transition::Failed,
            Inst::Look { negated, back, next } => {
                if self.look(pc, back, at) == negated {
                    Transition::Failed
                } else {
                    Transition::To(next, at)
                }
            }
            Inst::Accept => Transition::Accepted,
        }
    }

    /// Whether the instructions after `pc` match, `back` characters before `at`.
    fn look(&mut self, pc: usize, back: usize, at: usize) -> bool {
        if let Some(found) = self.looks.get(&(pc, at)) {
            return *found;
        }
        let mut from = Some(at);
        for _ in 0..back {
            from = from.and_then(|from| Some(from - self.char_before(from)?.len_utf8()));
        }
        let found = from.is_some_and(|from| self.run(pc + 1, from).is_some());
        // One character ahead is read faster than remembered.
        if !matches!(self.regex.program.get(pc + 2), Some(Inst::Accept)) {
            self.looks.insert((pc, at), found);
        }
        found
    }

    fn run_end(&mut self, set: usize, min: usize, max: usize, at: usize) -> Option<usize> {
        let chars = self.regex.sets.get(set)?;
        if max != usize::MAX || min > 1 {
            let run = self.text.get(at..)?.chars().take(max).take_while(|c| chars.contains(*c));
            let (count, bytes) = run.fold((0, 0), |(count, bytes), c| (count + 1, bytes + c.len_utf8()));
            return (count >= min).then_some(at + bytes);
        }
        let (start, end) = self.runs[set];
        let end = if (start..end).contains(&at) {
            end
        } else {
            let rest = self.text.get(at..)?;
            at + rest.char_indices().find(|(_, c)| !chars.contains(*c)).map_or(rest.len(), |(at, _)| at)
        };
        self.runs[set] = (at, end);
        (min == 0 || end > at).then_some(end)
    }

    fn holds(&self, assertion: Assertion, at: usize) -> bool {
        let (start, end) = (at == 0, at == self.text.len());
        match assertion {
            Assertion::TextStart => start,
            Assertion::TextEnd => end,
            Assertion::LineStart => start || (!end && self.char_before(at) == Some('\n')),
            Assertion::LineEnd => end || self.char_at(at) == Some('\n'),
            Assertion::LastLineEnd => end || self.text.get(at..) == Some("\n"),
            Assertion::WordBoundary | Assertion::NoWordBoundary => {
                let [before, after] =
                    [self.char_before(at), self.char_at(at)].map(|c| c.is_some_and(super::classes::is_word));
                (before != after) == (assertion == Assertion::WordBoundary)
            }
        }
    }
}

/// What an instruction leads to.
enum Transition {
    /// Continue at this instruction and position.
    To(usize, usize),
    Accepted,
    Failed,
}

#[cfg(test)]
mod tests;
