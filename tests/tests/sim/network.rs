//! A simulated network that delays, loses, duplicates, reorders and partitions.

use kvasir_cluster_tests::random::Random;
use proto::ids::NodeId;
use std::collections::BTreeSet;

#[derive(Debug, Default)]
pub(crate) struct Network {
    /// Blocked directions: (from, to).
    cuts: BTreeSet<(NodeId, NodeId)>,
    loss: u64,
    doubled: u64,
    delayed: u64,
}

impl Network {
    /// Delays in microseconds of each copy of a packet; empty if it is lost.
    pub(crate) fn send(&self, random: &mut Random, from: &NodeId, to: &NodeId) -> Vec<u64> {
        if self.cuts.contains(&(from.clone(), to.clone())) || random.chance(self.loss) {
            return Vec::new();
        }
        let copies = if random.chance(self.doubled) { 2 } else { 1 };
        let delay = |random: &mut Random| {
            let max = if random.chance(self.delayed) { 1_500_000 } else { 8_000 };
            random.within(200, max)
        };
        (0..copies).map(|_| delay(random)).collect()
    }

    /// Changes the network's conditions.
    pub(crate) fn change(&mut self, random: &mut Random) {
        self.loss = *random.pick(&[0, 0, 20, 100, 300]).unwrap_or(&0);
        self.doubled = *random.pick(&[0, 50, 200]).unwrap_or(&0);
        self.delayed = *random.pick(&[0, 10, 100]).unwrap_or(&0);
    }

    /// Isolates some of `nodes`: one way, both ways, or as two partitions.
    pub(crate) fn cut(&mut self, random: &mut Random, nodes: &[NodeId]) {
        let kind = random.below(3);
        let Some(one) = random.pick(nodes).cloned() else { return };
        let side: BTreeSet<&NodeId> = nodes.iter().filter(|_| random.chance(500)).collect();
        for a in nodes {
            for b in nodes {
                let cut = match kind {
                    0 => *a == one && random.chance(700),
                    1 => *a == one || *b == one,
                    _ => side.contains(a) != side.contains(b),
                };
                if cut && a != b {
                    self.cuts.insert((a.clone(), b.clone()));
                }
            }
        }
    }

    /// Removes all partitions.
    pub(crate) fn mend(&mut self) {
        self.cuts.clear();
    }

    /// Removes all faults.
    pub(crate) fn heal(&mut self) {
        *self = Self::default();
    }
}
