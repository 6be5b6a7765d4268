//! The approximate text tree of routers without tokens: the workers that received each prefix.

use std::collections::HashMap;
use std::sync::Arc;

/// A radix tree over bytes. Each node lists the workers that received a text through it, the latest last.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    nodes: Vec<Node>,
    /// Bytes of all nodes, counted once per worker.
    size: usize,
}

#[derive(Debug, Default)]
struct Node {
    text: Piece,
    children: HashMap<u8, usize>,
    workers: Vec<usize>,
}

/// Part of a text.
#[derive(Debug, Clone)]
struct Piece {
    whole: Arc<str>,
    from: usize,
    to: usize,
}

impl Default for Piece {
    fn default() -> Self {
        Self { whole: "".into(), from: 0, to: 0 }
    }
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        &self.whole.as_bytes()[self.from..self.to]
    }
}

impl Tree {
    /// An empty tree.
    pub(crate) fn new() -> Self {
        Self { nodes: vec![Node::default()], size: 0 }
    }

    /// Bytes stored, counted once per worker.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Length of the longest known prefix of `text`, and the worker that received it last.
    pub(crate) fn matched(&self, text: &str) -> (usize, Option<usize>) {
        let bytes = text.as_bytes();
        let (mut node, mut at) = (0, 0);
        while let Some(&next) = bytes.get(at).and_then(|first| self.nodes[node].children.get(first)) {
            let common = common(self.nodes[next].text.bytes(), &bytes[at..]);
            node = next;
            at += common;
            if common < self.nodes[next].text.bytes().len() {
                break;
            }
        }
        (at, self.nodes[node].workers.last().copied())
    }

    /// Records that `worker` received `text`.
    pub(crate) fn insert(&mut self, text: &Arc<str>, worker: usize) {
        let bytes = text.as_bytes();
        let (mut node, mut at) = (0, 0);
        self.touch(0, worker);
        while at < bytes.len() {
            let Some(&next) = self.nodes[node].children.get(&bytes[at]) else {
                let leaf = self.nodes.len();
                let text = Piece { whole: Arc::clone(text), from: at, to: bytes.len() };
                self.nodes.push(Node { text, ..Node::default() });
                self.nodes[node].children.insert(bytes[at], leaf);
                self.touch(leaf, worker);
                return;
            };
            let common = common(self.nodes[next].text.bytes(), &bytes[at..]);
            node = if common < self.nodes[next].text.bytes().len() {
                self.split(node, next, common)
            } else {
                next
            };
            at += common;
            self.touch(node, worker);
        }
    }

    /// Inserts a node for the first `len` bytes between `parent` and `child`.
    fn split(&mut self, parent: usize, child: usize, len: usize) -> usize {
        let middle = self.nodes.len();
        let text = self.nodes[child].text.clone();
        let (first, second) = (text.bytes()[0], text.bytes()[len]);
        let cut = text.from + len;
        let upper = Piece { to: cut, ..text };
        self.nodes[child].text.from = cut;
        let workers = self.nodes[child].workers.clone();
        self.nodes.push(Node { text: upper, children: HashMap::from([(second, child)]), workers });
        self.nodes[parent].children.insert(first, middle);
        middle
    }

    fn touch(&mut self, node: usize, worker: usize) {
        let Node { text, workers, .. } = &mut self.nodes[node];
        let before = workers.len();
        workers.retain(|other| *other != worker);
        if workers.len() == before {
            self.size += text.bytes().len();
        }
        workers.push(worker);
    }
}

fn common(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_known_prefix_and_its_last_receiver() {
        let mut tree = Tree::new();
        assert_eq!(tree.matched("abc"), (0, None));
        for (text, worker) in [("abcdef", 0), ("abcxyz", 1), ("abcdeq", 2)] {
            tree.insert(&text.into(), worker);
        }
        assert_eq!(tree.matched("abcdefgh"), (6, Some(0)));
        assert_eq!(tree.matched("abcdZ"), (4, Some(2)));
        assert_eq!(tree.matched("abQ"), (2, Some(2)));
        assert_eq!(tree.matched("abcx"), (4, Some(1)));
        tree.insert(&"abcd".into(), 1);
        assert_eq!(tree.matched("abcdZ"), (4, Some(1)));
        // 3 workers have "abc", 3 "d", 2 "e", and one each "f", "q", "xyz".
        assert_eq!(tree.size(), 9 + 3 + 2 + 1 + 1 + 3);
    }
}
