//! Prefix lookup: how much of a prompt the cache serves, and why it stops there.

use super::prefix::{BoundaryNeed, Child};
use super::{KvCache, SequenceCache};
use proto::block::{BlockId, HASH_UNIT_TOKENS};

/// Why a prefix lookup stopped where it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HitStop {
    /// No lookup: prefix caching is off, or the layout does not share blocks.
    Disabled,
    /// No lookup: the sequence is a fork of another one and computes nothing of its prompt.
    Forked,
    /// Every token that may be served is served. The last token of a prompt is always computed.
    PromptEnd,
    /// A group that needs every unit lacks one.
    NotCached {
        group: usize,
        /// First token of the missing unit.
        token: u32,
    },
    /// A longer prefix is cached, but this group no longer has the window before the prefix's end.
    WindowGone {
        group: usize,
        /// The boundary at which the window is missing.
        token: u32,
    },
    /// The KV of a longer prefix is cached, but there is no recurrent state at its end.
    StateGone {
        /// The boundary at which the state is missing.
        token: u32,
    },
    /// The id of the next unit is in use for other tokens.
    Collision {
        /// First token of the unit.
        token: u32,
    },
    /// The rest is in part of a block, and no block was free to copy it to.
    PoolFull {
        /// First token that is not served.
        token: u32,
    },
}

impl HitStop {
    /// The reason alone, as metrics label it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::Forked => "forked",
            Self::PromptEnd => "prompt_end",
            Self::NotCached { .. } => "not_cached",
            Self::WindowGone { .. } => "window_gone",
            Self::StateGone { .. } => "state_gone",
            Self::Collision { .. } => "collision",
            Self::PoolFull { .. } => "pool_full",
        }
    }
}

impl std::fmt::Display for HitStop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Disabled | Self::Forked | Self::PromptEnd => Ok(()),
            Self::NotCached { group, token } | Self::WindowGone { group, token } => {
                write!(f, " group={group} token={token}")
            }
            Self::StateGone { token } | Self::Collision { token } | Self::PoolFull { token } => {
                write!(f, " token={token}")
            }
        }
    }
}

/// Result of a lookup beyond the tokens that a sequence already has.
#[derive(Debug)]
pub(crate) struct Hit {
    pub(super) from: usize,
    /// Nodes of the served units, from unit `from`.
    pub(super) path: Vec<u32>,
    /// With recurrent layers, units from the prompt's start whose KV is present in every group that needs all
    /// units. It exceeds the served units if only a state or a window is missing. Without recurrent layers,
    /// the units found in the tree.
    pub(crate) kv_units: usize,
    pub(crate) stop: HitStop,
}

impl Hit {
    /// Units served from the prompt's start, including those that the sequence already has.
    pub(crate) fn end(&self) -> usize {
        self.from + self.path.len()
    }

    /// First unit served beyond those that the sequence already has.
    pub(crate) fn from(&self) -> usize {
        self.from
    }

    /// Whether the lookup serves nothing new.
    pub(crate) fn is_empty(&self) -> bool {
        self.path.is_empty()
    }

    pub(super) fn node(&self, unit: usize) -> u32 {
        self.path[unit - self.from]
    }
}

impl KvCache {
    /// The longest prefix of at most `cap` units that every group can serve to a sequence which already has
    /// `sequence.len()` tokens. `ids` and `tokens` are those of the whole sequence. Scheduled units count as
    /// cached. The result is a monotone fixed point: groups shorten the candidate until none of them does.
    /// `last` returns the last position up to one, in tokens, at which the hit may end.
    pub(crate) fn find(
        &self,
        sequence: &SequenceCache,
        ids: &[BlockId],
        tokens: &[u32],
        cap: usize,
        last: &dyn Fn(u32) -> u32,
    ) -> Hit {
        let from = sequence.len() as usize / HASH_UNIT_TOKENS;
        let (units, _) = tokens.as_chunks::<HASH_UNIT_TOKENS>();
        let at_boundary = (sequence.len() as usize).is_multiple_of(HASH_UNIT_TOKENS);
        let Some(cursor) = sequence.cursor.filter(|_| at_boundary) else {
            return Hit { from, path: Vec::new(), kv_units: from, stop: HitStop::Disabled };
        };
        let mut path = Vec::new();
        let mut stop = HitStop::PromptEnd;
        let mut parent = cursor;
        let end = cap.min(units.len()).min(ids.len());
        for at in from..end {
            let (id, unit) = (ids[at], &units[at]);
            let token = (at * HASH_UNIT_TOKENS) as u32;
            match self.tree.child(parent, id, unit) {
                Child::Node(node) => {
                    path.push(node);
                    parent = node;
                }
                Child::Missing => {
                    stop = HitStop::NotCached { group: 0, token };
                    break;
                }
                Child::Collision => {
                    stop = HitStop::Collision { token };
                    break;
                }
            }
        }
        let kv_units = if self.has_states() { self.kv_units(&path) } else { path.len() };
        let mut end = path.len();
        loop {
            let before = end;
            let found = ((from + end) * HASH_UNIT_TOKENS) as u32;
            let allowed = last(found);
            if end > 0 && allowed < found {
                stop = HitStop::NotCached { group: 0, token: allowed };
                end = (allowed as usize / HASH_UNIT_TOKENS).saturating_sub(from);
            }
            for (group, &need) in self.tree.needs().iter().enumerate() {
                let served = self.served(group, need, &path[..end]);
                if served < end {
                    stop = if self.state_group() == Some(group) {
                        HitStop::StateGone { token: ((from + end.min(kv_units)) * HASH_UNIT_TOKENS) as u32 }
                    } else {
                        self.stop_reason(group, need, &path, served, end, from)
                    };
                    end = served;
                }
            }
            if end == before {
                break;
            }
        }
        path.truncate(end);
        Hit { from, path, kv_units: from + kv_units, stop }
    }

    /// Leading units of `path` that are present in every group which needs all units.
    fn kv_units(&self, path: &[u32]) -> usize {
        let all = |&&node: &&u32| {
            let mut needs = self.tree.needs().iter().enumerate();
            needs.all(|(group, &need)| need != BoundaryNeed::All || self.tree.has(node, group))
        };
        path.iter().take_while(all).count()
    }

    /// The longest start of `path` after which `group` lets a sequence continue.
    fn served(&self, group: usize, need: BoundaryNeed, path: &[u32]) -> usize {
        let (mut run, mut served) = (need.start(), 0);
        for (at, &node) in path.iter().enumerate() {
            run = if self.tree.has(node, group) { need.run(run) } else { 0 };
            if need.met(run) {
                served = at + 1;
            } else if need == BoundaryNeed::All {
                break;
            }
        }
        served
    }

    fn stop_reason(
        &self,
        group: usize,
        need: BoundaryNeed,
        path: &[u32],
        served: usize,
        end: usize,
        from: usize,
    ) -> HitStop {
        let token = |unit: usize| ((from + unit) * HASH_UNIT_TOKENS) as u32;
        match need {
            BoundaryNeed::Window(_) if self.tree.has(path[end - 1], group) => {
                HitStop::WindowGone { group, token: token(end) }
            }
            _ => HitStop::NotCached { group, token: token(served) },
        }
    }
}
