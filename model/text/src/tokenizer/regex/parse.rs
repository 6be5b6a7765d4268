//! Parses and compiles expressions.

use regex_syntax::hir::{Class, HirKind};

use super::{Assertion, CharSet, Inst, Regex};

/// Longest expression in bytes.
const MAX_BYTES: usize = 16 << 10;
/// Maximum depth of groups.
const MAX_DEPTH: usize = 32;
/// Maximum number of instructions.
const MAX_PROGRAM: usize = 8192;
/// Maximum number of branches: what is remembered for each byte of a text, in bits.
const MAX_BRANCHES: usize = 512;
/// Maximum count of a repetition.
const MAX_COUNT: usize = 1000;

/// `\w` in a class: letters, marks, numbers and connectors.
const WORD: &str = r"\p{Alphabetic}\p{M}\p{N}\p{Pc}";

/// Error of an expression that is not valid or not supported.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason} at byte {at} of the expression")]
pub(in super::super) struct RegexError {
    at: usize,
    reason: String,
}

/// An expression.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Node {
    Empty,
    Char(char),
    Set(CharSet),
    Concat(Vec<Self>),
    Alt(Vec<Self>),
    Repeat { child: Box<Self>, min: usize, max: usize, kind: RepeatKind },
    Assert(Assertion),
    Look { child: Box<Self>, negated: bool, behind: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RepeatKind {
    Greedy,
    Lazy,
    Possessive,
}

pub(super) fn compile(pattern: &str) -> Result<Regex, RegexError> {
    if pattern.len() > MAX_BYTES {
        return Err(RegexError { at: MAX_BYTES, reason: format!("more than {MAX_BYTES} bytes") });
    }
    let mut parser = Parser { pattern, at: 0, depth: 0, flags: Flags { any_case: false, dot_all: false } };
    let node = parser.alternatives()?;
    if parser.at < pattern.len() {
        return Err(parser.error("a `)` without `(`"));
    }
    let mut compiler = Compiler { program: Vec::new(), sets: Vec::new(), branches: 0 };
    let compiled = compiler.node(&node).and_then(|()| compiler.push(Inst::Accept));
    compiled.map_err(|reason| RegexError { at: 0, reason: reason.to_owned() })?;
    Ok(Regex { program: compiler.program, sets: compiler.sets, branches: compiler.branches })
}

#[derive(Clone, Copy)]
struct Flags {
    any_case: bool,
    dot_all: bool,
}

struct Parser<'p> {
    pattern: &'p str,
    at: usize,
    depth: usize,
    flags: Flags,
}

impl<'p> Parser<'p> {
    fn error(&self, reason: impl Into<String>) -> RegexError {
        RegexError { at: self.at, reason: reason.into() }
    }

    fn rest(&self) -> &'p str {
        self.pattern.get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    /// Skips `text` if it comes next.
    fn eat(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        if found {
            self.at += text.len();
        }
        found
    }

    /// Up to `)` or the end.
    fn alternatives(&mut self) -> Result<Node, RegexError> {
        // Flags that are set inside last to the end of the group.
        let flags = self.flags;
        let mut branches = vec![self.sequence()?];
        while self.eat("|") {
            branches.push(self.sequence()?);
        }
        self.flags = flags;
        Ok(if branches.len() == 1 { branches.remove(0) } else { Node::Alt(branches) })
    }

    fn sequence(&mut self) -> Result<Node, RegexError> {
        let mut nodes = Vec::new();
        while let Some(c) = self.peek().filter(|c| !matches!(c, '|' | ')')) {
            let node = match c {
                '(' => self.group()?,
                '*' | '+' | '?' => return Err(self.error("a repetition of nothing")),
                _ => self.atom(c)?,
            };
            nodes.push(self.repeated(node)?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Concat(nodes) })
    }

    fn group(&mut self) -> Result<Node, RegexError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.error(format!("more than {MAX_DEPTH} groups in each other")));
        }
        let flags = self.flags;
        self.eat("(");
        let mut look = None;
        if self.eat("?") {
            look = [("<=", (false, true)), ("<!", (true, true)), ("=", (false, false)), ("!", (true, false))]
                .into_iter()
                .find(|(mark, _)| self.eat(mark))
                .map(|(_, look)| look);
            if look.is_none() && !self.eat(":") && self.set_flags()? {
                // `(?i)`: for the rest of the enclosing group.
                self.depth -= 1;
                return Ok(Node::Empty);
            }
        }
        let child = self.alternatives()?;
        if !self.eat(")") {
            return Err(self.error("a `(` without `)`"));
        }
        self.flags = flags;
        self.depth -= 1;
        Ok(match look {
            Some((negated, behind)) => Node::Look { child: child.into(), negated, behind },
            None => child,
        })
    }

    /// Reads flags up to `:` or `)`; true if `)` ends them.
    fn set_flags(&mut self) -> Result<bool, RegexError> {
        let mut on = true;
        loop {
            let Some(c) = self.peek() else { return Err(self.error("a `(` without `)`")) };
            match c {
                '-' => on = false,
                'i' => self.flags.any_case = on,
                'm' => self.flags.dot_all = on,
                ':' | ')' => {
                    self.at += 1;
                    return Ok(c == ')');
                }
                _ => return Err(self.error(format!("`(?{c}` is not supported"))),
            }
            self.at += 1;
        }
    }

    fn atom(&mut self, c: char) -> Result<Node, RegexError> {
        let start = self.at;
        self.at += c.len_utf8();
        match c {
            '.' if self.flags.dot_all => Ok(Node::Set(self.set(r"[\x{0}-\x{10FFFF}]")?)),
            '.' => Ok(Node::Set(self.set(r"[^\n]")?)),
            '^' => Ok(Node::Assert(Assertion::LineStart)),
            '$' => Ok(Node::Assert(Assertion::LineEnd)),
            '[' => {
                self.class()?;
                let class = self.pattern.get(start..self.at).unwrap_or_default();
                Ok(Node::Set(self.set(&class.replace(r"\w", WORD))?))
            }
            '\\' => self.escape(start),
            _ => self.literal(c),
        }
    }

    fn literal(&self, c: char) -> Result<Node, RegexError> {
        if self.flags.any_case && c.is_alphabetic() {
            return Ok(Node::Set(self.set(&c.to_string())?));
        }
        Ok(Node::Char(c))
    }

    /// Moves to the end of a class that begins one byte before.
    fn class(&mut self) -> Result<(), RegexError> {
        let mut depth = 1;
        let mut first = true;
        while let Some(c) = self.peek() {
            let rest = self.rest();
            if let Some(found) =
                ["[:", "--", "~~", r"\\w", r"\W"].iter().find(|text| rest.starts_with(**text))
            {
                return Err(self.error(format!("`{found}` in a class is not supported")));
            }
            self.at += c.len_utf8();
            match c {
                '\\' => self.at += self.peek().map_or(0, char::len_utf8),
                '[' => {
                    depth += 1;
                    if depth > MAX_DEPTH {
                        return Err(self.error(format!("more than {MAX_DEPTH} classes in each other")));
                    }
                    first = true;
                    continue;
                }
                ']' if first => return Err(self.error("an empty class")),
                ']' => {
                    depth -= 1;
                    if depth == 0 {
                        return Ok(());
                    }
                }
                '^' if first => continue,
                _ => {}
            }
            first = false;
        }
        Err(self.error("a `[` without `]`"))
    }

    /// An escape whose backslash is at `start`.
    fn escape(&mut self, start: usize) -> Result<Node, RegexError> {
        let Some(c) = self.peek() else { return Err(self.error("a `\\` at the end")) };
        self.at += c.len_utf8();
        Ok(match c {
            'n' => Node::Char('\n'),
            'r' => Node::Char('\r'),
            't' => Node::Char('\t'),
            'f' => Node::Char('\u{c}'),
            'v' => Node::Char('\u{b}'),
            'a' => Node::Char('\u{7}'),
            'e' => Node::Char('\u{1b}'),
            'A' => Node::Assert(Assertion::TextStart),
            'z' => Node::Assert(Assertion::TextEnd),
            'Z' => Node::Assert(Assertion::LastLineEnd),
            'b' => Node::Assert(Assertion::WordBoundary),
            'B' => Node::Assert(Assertion::NoWordBoundary),
            'w' => Node::Set(self.set(&format!("[{WORD}]"))?),
            'W' => Node::Set(self.set(&format!("[^{WORD}]"))?),
            'h' => Node::Set(self.set("[0-9a-fA-F]")?),
            'H' => Node::Set(self.set("[^0-9a-fA-F]")?),
            's' | 'S' | 'd' | 'D' => {
                Node::Set(self.set(self.pattern.get(start..self.at).unwrap_or_default())?)
            }
            'p' | 'P' | 'x' | 'u' => {
                let braced = self.peek() == Some('{');
                let length = match (c, braced) {
                    (_, true) => self.rest().find('}').map(|at| at + 1),
                    ('x', _) => Some(2),
                    ('u', _) => Some(4),
                    _ => None,
                };
                let end = length.map(|length| self.at + length);
                let Some(escape) = end.and_then(|end| self.pattern.get(start..end)) else {
                    return Err(self.error(format!("`\\{c}` is not complete")));
                };
                self.at = end.unwrap_or(self.at);
                Node::Set(self.set(escape)?)
            }
            _ if !c.is_alphanumeric() => return self.literal(c),
            _ => return Err(self.error(format!("`\\{c}` is not supported"))),
        })
    }

    /// The characters of a class or escape, in the syntax of the crate `regex-syntax`.
    fn set(&self, class: &str) -> Result<CharSet, RegexError> {
        let hir = regex_syntax::ParserBuilder::new()
            .case_insensitive(self.flags.any_case)
            .nest_limit(MAX_DEPTH as u32)
            .build()
            .parse(class)
            .map_err(|_| self.error(format!("`{class}` is not a valid class")))?;
        let ranges = match hir.kind() {
            HirKind::Class(Class::Unicode(class)) => class.iter().map(|r| (r.start(), r.end())).collect(),
            HirKind::Literal(literal) => {
                let text = std::str::from_utf8(&literal.0).unwrap_or_default();
                text.chars().map(|c| (c, c)).collect()
            }
            _ => return Err(self.error(format!("`{class}` is not a class"))),
        };
        Ok(CharSet::new(ranges))
    }

    fn repeated(&mut self, mut node: Node) -> Result<Node, RegexError> {
        let mut levels = 0;
        loop {
            let bounded = |(min, max)| (min, max, true);
            let range = match self.peek() {
                Some('*') => Some((0, usize::MAX, false)),
                Some('+') => Some((1, usize::MAX, false)),
                Some('?') => Some((0, 1, false)),
                Some('{') => self.counts()?.map(bounded),
                _ => None,
            };
            let Some((min, max, braces)) = range else {
                // A brace that is no repetition is a character.
                return Ok(node);
            };
            levels += 1;
            if levels > 4 {
                return Err(self.error("more than 4 repetitions of each other"));
            }
            if !braces {
                self.at += 1;
            }
            let kind = if self.eat("?") {
                RepeatKind::Lazy
            } else if !braces && self.eat("+") {
                RepeatKind::Possessive
            } else {
                RepeatKind::Greedy
            };
            if kind == RepeatKind::Possessive && !matches!(node, Node::Set(_) | Node::Char(_)) {
                return Err(self.error("a possessive repetition of a group is not supported"));
            }
            if matches!(node, Node::Assert(_) | Node::Look { .. }) {
                return Err(self.error("a repetition of a place is not supported"));
            }
            if kind == RepeatKind::Lazy && braces && min == max {
                return Err(self.error("`{n}?` is not supported"));
            }
            if max == usize::MAX && may_be_empty(&node) {
                return Err(self.error("an unbounded repetition of what may be empty is not supported"));
            }
            node = Node::Repeat { child: node.into(), min, max, kind };
        }
    }

    /// `{2}`, `{2,}`, `{,2}`, `{1,2}`; moves behind it.
    fn counts(&mut self) -> Result<Option<(usize, usize)>, RegexError> {
        let Some(length) = self.rest().find('}') else { return Ok(None) };
        let inside = self.rest().get(1..length).unwrap_or_default();
        let (low, high) = inside.split_once(',').unwrap_or((inside, inside));
        let number = |text: &str, default: usize| match text {
            "" => Some(default),
            _ if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok(),
            _ => None,
        };
        if inside.is_empty() || inside == "," {
            return Ok(None);
        }
        let (Some(min), Some(max)) = (number(low, 0), number(high, usize::MAX)) else { return Ok(None) };
        if min > MAX_COUNT || (max > MAX_COUNT && max != usize::MAX) || min > max {
            return Err(self.error(format!("a repetition above {MAX_COUNT}, or from more to less")));
        }
        self.at += length + 1;
        Ok(Some((min, max)))
    }
}

struct Compiler {
    program: Vec<Inst>,
    sets: Vec<CharSet>,
    branches: usize,
}

type Compiled<T> = Result<T, &'static str>;

impl Compiler {
    fn push(&mut self, inst: Inst) -> Compiled<()> {
        if self.program.len() >= MAX_PROGRAM {
            return Err("more than 8192 instructions");
        }
        self.program.push(inst);
        Ok(())
    }

    /// Appends a branch whose targets are set later, and returns its place.
    fn split(&mut self) -> Compiled<usize> {
        if self.branches >= MAX_BRANCHES {
            return Err("more than 512 branches");
        }
        let at = self.program.len();
        self.push(Inst::Split { first: at + 1, second: at + 1, branch: self.branches })?;
        self.branches += 1;
        Ok(at)
    }

    fn set_second(&mut self, at: usize, to: usize) {
        if let Some(Inst::Split { second, .. }) = self.program.get_mut(at) {
            *second = to;
        }
    }

    /// Prefers the other target.
    fn swap(&mut self, at: usize) {
        if let Some(Inst::Split { first, second, .. }) = self.program.get_mut(at) {
            std::mem::swap(first, second);
        }
    }

    fn set(&mut self, set: &CharSet) -> usize {
        self.sets.iter().position(|known| known == set).unwrap_or_else(|| {
            self.sets.push(set.clone());
            self.sets.len() - 1
        })
    }

    fn node(&mut self, node: &Node) -> Compiled<()> {
        match node {
            Node::Empty => Ok(()),
            Node::Char(c) => self.push(Inst::Char(*c)),
            Node::Set(set) => {
                let set = self.set(set);
                self.push(Inst::Set(set))
            }
            Node::Concat(nodes) => nodes.iter().try_for_each(|node| self.node(node)),
            Node::Alt(nodes) => {
                let mut ends = Vec::new();
                for (i, node) in nodes.iter().enumerate() {
                    if i + 1 == nodes.len() {
                        self.node(node)?;
                        break;
                    }
                    let split = self.split()?;
                    self.node(node)?;
                    ends.push(self.program.len());
                    self.push(Inst::Jump(0))?;
                    self.set_second(split, self.program.len());
                }
                let end = self.program.len();
                for jump in ends {
                    if let Some(inst) = self.program.get_mut(jump) {
                        *inst = Inst::Jump(end);
                    }
                }
                Ok(())
            }
            Node::Repeat { child, min, max, kind: RepeatKind::Possessive } => {
                let set = match child.as_ref() {
                    Node::Set(set) => self.set(set),
                    Node::Char(c) => self.set(&CharSet::new(vec![(*c, *c)])),
                    _ => return Err("a possessive repetition of a group"),
                };
                self.push(Inst::Run { set, min: *min, max: *max })
            }
            Node::Repeat { child, min, max, kind } => self.repeat(child, *min, *max, *kind),
            Node::Assert(assertion) => self.push(Inst::Assert(*assertion)),
            Node::Look { child, negated, behind } => {
                let back = match behind {
                    true => length(child).ok_or("look-behind without a fixed length")?,
                    false => 0,
                };
                let at = self.program.len();
                self.push(Inst::Look { negated: *negated, back, next: 0 })?;
                self.node(child)?;
                self.push(Inst::Accept)?;
                let end = self.program.len();
                if let Some(Inst::Look { next, .. }) = self.program.get_mut(at) {
                    *next = end;
                }
                Ok(())
            }
        }
    }

    fn repeat(&mut self, child: &Node, min: usize, max: usize, kind: RepeatKind) -> Compiled<()> {
        let lazy = kind == RepeatKind::Lazy;
        for _ in 0..min {
            self.node(child)?;
        }
        if max == usize::MAX {
            let split = self.split()?;
            self.node(child)?;
            self.push(Inst::Jump(split))?;
            self.set_second(split, self.program.len());
            if lazy {
                self.swap(split);
            }
            return Ok(());
        }
        let mut splits = Vec::new();
        for _ in min..max {
            splits.push(self.split()?);
            self.node(child)?;
        }
        let end = self.program.len();
        for split in splits {
            self.set_second(split, end);
            if lazy {
                self.swap(split);
            }
        }
        Ok(())
    }
}

/// Whether `node` may match an empty text.
fn may_be_empty(node: &Node) -> bool {
    match node {
        Node::Empty | Node::Assert(_) | Node::Look { .. } => true,
        Node::Char(_) | Node::Set(_) => false,
        Node::Concat(nodes) => nodes.iter().all(may_be_empty),
        Node::Alt(nodes) => nodes.iter().any(may_be_empty),
        Node::Repeat { child, min, .. } => *min == 0 || may_be_empty(child),
    }
}

/// Number of characters that every match of `node` has; `None` if they differ.
fn length(node: &Node) -> Option<usize> {
    match node {
        Node::Empty | Node::Assert(_) | Node::Look { .. } => Some(0),
        Node::Char(_) | Node::Set(_) => Some(1),
        Node::Concat(nodes) => nodes.iter().map(length).sum(),
        Node::Alt(nodes) => {
            let mut lengths = nodes.iter().map(length);
            let first = lengths.next()??;
            lengths.all(|other| other == Some(first)).then_some(first)
        }
        Node::Repeat { child, min, max, .. } if min == max => length(child)?.checked_mul(*min),
        Node::Repeat { .. } => None,
    }
}
