//! An answer as a sequence of blocks: reasoning, text and tool calls. Streaming APIs report the start, the
//! growth and the end of each block.

use super::shape::DeltaPart;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) kind: Kind,
    /// The text so far; for a tool call, its arguments.
    pub(super) text: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Thought,
    Text,
    Call { id: String, name: String },
}

/// A change of the block at this index.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step<'a> {
    Begins(usize, &'a Block),
    Grows(usize, &'a Block, &'a str),
    Ends(usize, &'a Block),
}

#[derive(Debug, Default)]
pub(super) struct Blocks {
    all: Vec<Block>,
    /// Whether the last block may still grow.
    open: bool,
}

impl Blocks {
    /// Adds parts of the answer and passes every change to `step`.
    pub(super) fn add(&mut self, parts: Vec<DeltaPart>, mut step: impl FnMut(Step<'_>)) {
        for part in parts {
            let (kind, text) = match part {
                DeltaPart::Text(text) => (Some(Kind::Text), text),
                DeltaPart::Thought(text) => (Some(Kind::Thought), text),
                DeltaPart::Call(part) => {
                    (part.begins.map(|(id, name)| Kind::Call { id, name }), part.arguments)
                }
            };
            // Arguments belong to the current tool call.
            let continues = self.open
                && self.all.last().is_some_and(|last| match &kind {
                    None => matches!(last.kind, Kind::Call { .. }),
                    Some(Kind::Call { .. }) => false,
                    Some(kind) => last.kind == *kind,
                });
            if let (Some(kind), false) = (kind, continues) {
                self.end(&mut step);
                self.all.push(Block { kind, text: String::new() });
                self.open = true;
                self.last(|at, block| step(Step::Begins(at, block)));
            }
            if text.is_empty() {
                continue;
            }
            if let Some(last) = self.all.last_mut().filter(|_| self.open) {
                last.text.push_str(&text);
            }
            self.last(|at, block| step(Step::Grows(at, block, &text)));
        }
    }

    /// Ends the last block.
    pub(super) fn end(&mut self, mut step: impl FnMut(Step<'_>)) {
        if std::mem::take(&mut self.open) {
            self.last(|at, block| step(Step::Ends(at, block)));
        }
    }

    pub(super) fn all(&self) -> &[Block] {
        &self.all
    }

    fn last(&self, visit: impl FnOnce(usize, &Block)) {
        if let [.., last] = self.all.as_slice() {
            visit(self.all.len() - 1, last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::CallPart;
    use super::*;

    fn call(index: usize, begins: Option<&str>, arguments: &str) -> DeltaPart {
        let begins = begins.map(|name| (format!("id-{name}"), name.to_owned()));
        DeltaPart::Call(CallPart { index, begins, arguments: arguments.to_owned() })
    }

    #[test]
    fn consecutive_parts_of_a_kind_are_one_block_and_each_call_is_its_own() {
        let text = |text: &str| DeltaPart::Text(text.to_owned());
        let rounds = [
            vec![DeltaPart::Thought("h".into())],
            vec![DeltaPart::Thought("m".into()), text("a")],
            vec![text("b"), call(0, Some("f"), "")],
            vec![call(0, None, "{}"), call(1, Some("f"), "{"), call(1, None, "}"), text("c")],
        ];
        let mut blocks = Blocks::default();
        let mut steps = Vec::new();
        let mut record = |step: Step<'_>| {
            steps.push(match step {
                Step::Begins(at, _) => format!("+{at}"),
                Step::Grows(at, _, text) => format!("{at}:{text}"),
                Step::Ends(at, block) => format!("-{at}={}", block.text),
            });
        };
        for parts in rounds {
            blocks.add(parts, &mut record);
        }
        blocks.end(&mut record);
        blocks.end(&mut record);
        let expected = "+0 0:h 0:m -0=hm +1 1:a 1:b -1=ab +2 2:{} -2={} +3 3:{ 3:} -3={} +4 4:c -4=c";
        assert_eq!(steps.join(" "), expected);
        let kinds: Vec<bool> = blocks.all().iter().map(|b| matches!(b.kind, Kind::Call { .. })).collect();
        assert_eq!(kinds, [false, false, true, true, false]);
    }
}
