//! The most frequent paths of the prefix tree: common prefixes of prompts, found in the hash chains of recent
//! requests. Only a path's length and an irreversible name are published.

use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::ids::{ModelId, NodeId};
use router::balancer::recent::RequestedPrompt;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests count for this long.
const COUNTS: Duration = Duration::from_secs(300);
/// Most paths that are returned.
pub(super) const MAX_PATHS: usize = 20;
/// Paths with less than 1/20 of the requests of the most frequent path are omitted.
const MAX_RATIO: usize = 20;
/// Most tenants named for a path.
const MAX_TENANTS: usize = 4;

/// A common prefix of several requests.
#[derive(Debug, Clone)]
pub(super) struct Path {
    /// A chain that begins with the path.
    pub(super) chain: Arc<[BlockId]>,
    /// Hash units of the chain that belong to the path.
    pub(super) units: usize,
    /// Index of the shorter path that this one extends.
    pub(super) parent: Option<usize>,
    pub(super) requests: usize,
    pub(super) model: ModelId,
    pub(super) tenants: BTreeSet<Arc<str>>,
    pub(super) workers: BTreeMap<NodeId, usize>,
}

impl Path {
    /// The path's length in tokens.
    pub(super) fn tokens(&self) -> usize {
        self.units * HASH_UNIT_TOKENS
    }

    /// The path's name, derived from the id of its last unit.
    pub(super) fn name(&self) -> String {
        let end = self.units.checked_sub(1).and_then(|at| self.chain.get(at));
        end.map(|id| id.0.iter().take(4).map(|byte| format!("{byte:02x}")).collect()).unwrap_or_default()
    }

    pub(super) fn chain(&self) -> &[BlockId] {
        self.chain.get(..self.units).unwrap_or_default()
    }
}

/// Recent requests, and the paths that at least two of them share. A path comes after its parent.
#[derive(Debug, Default)]
pub(super) struct Paths {
    /// The most frequent paths, most frequent first.
    pub(super) all: Vec<Path>,
    /// Examined requests by worker.
    pub(super) requests: BTreeMap<NodeId, usize>,
    /// Examined requests and their prompt tokens by tenant.
    pub(super) tenants: BTreeMap<Arc<str>, (usize, u64)>,
}

impl Paths {
    /// Finds the paths in recent requests.
    pub(super) fn find(now: Instant, prompts: &[RequestedPrompt]) -> Self {
        let mut found = Self::default();
        let counts = |prompt: &&RequestedPrompt| now.saturating_duration_since(prompt.at) <= COUNTS;
        let prompts: Vec<&RequestedPrompt> = prompts.iter().filter(counts).collect();
        for prompt in &prompts {
            if let Some(node) = prompt.names.of(prompt.slot) {
                *found.requests.entry(node.clone()).or_default() += 1;
            }
            let tenant = found.tenants.entry(Arc::clone(&prompt.request.tenant)).or_default();
            *tenant = (tenant.0 + 1, tenant.1 + u64::from(prompt.request.prompt_tokens));
        }
        // Groups of requests with common first units, the number of these units, and the path that ends
        // there.
        let mut open: Vec<(Vec<&RequestedPrompt>, usize, Option<usize>)> = vec![(prompts, 0, None)];
        let mut all: Vec<Path> = Vec::new();
        while let Some((group, from, parent)) = open.pop() {
            let mut branches: HashMap<BlockId, Vec<&RequestedPrompt>> = HashMap::new();
            for prompt in group {
                if let Some(next) = prompt.request.chain.get(from) {
                    branches.entry(*next).or_default().push(prompt);
                }
            }
            for branch in branches.into_values().filter(|branch| branch.len() > 1) {
                let Some(first) = branch.first() else { continue };
                let units = branch
                    .iter()
                    .map(|prompt| common(&first.request.chain, &prompt.request.chain, from))
                    .min();
                let units = units.unwrap_or(from + 1).max(from + 1);
                all.push(path(&branch, units, parent));
                open.push((branch, units, Some(all.len() - 1)));
            }
        }
        found.all = most_frequent(all);
        found
    }
}

fn path(branch: &[&RequestedPrompt], units: usize, parent: Option<usize>) -> Path {
    let request = &branch[0].request;
    let mut workers = BTreeMap::new();
    for node in branch.iter().filter_map(|prompt| prompt.names.of(prompt.slot)) {
        *workers.entry(node.clone()).or_default() += 1;
    }
    let mut tenants: BTreeSet<Arc<str>> =
        branch.iter().map(|prompt| Arc::clone(&prompt.request.tenant)).collect();
    while tenants.len() > MAX_TENANTS {
        tenants.pop_last();
    }
    let (chain, model) = (Arc::clone(&request.chain), request.model.clone());
    Path { chain, units, parent, requests: branch.len(), model, tenants, workers }
}

/// The most frequent paths. Ties go to the shorter path, so that no path comes without its parent.
fn most_frequent(all: Vec<Path>) -> Vec<Path> {
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by_key(|&at| (std::cmp::Reverse(all[at].requests), all[at].units, at));
    order.truncate(MAX_PATHS);
    let max_requests = order.first().map_or(0, |&at| all[at].requests);
    order.retain(|&at| all[at].requests * MAX_RATIO >= max_requests);
    let new_index: HashMap<usize, usize> = order.iter().enumerate().map(|(new, &old)| (old, new)).collect();
    let moved = |old: &usize| {
        let path = all[*old].clone();
        Path { parent: path.parent.and_then(|parent| new_index.get(&parent).copied()), ..path }
    };
    order.iter().map(moved).collect()
}

/// The number of leading units that two chains share; they share more than `from`. A unit's id commits to all
/// units before it, so a binary search suffices.
fn common(left: &[BlockId], right: &[BlockId], from: usize) -> usize {
    let (mut low, mut high) = (from, left.len().min(right.len()));
    while low < high {
        let middle = low.midpoint(high);
        if left.get(middle) == right.get(middle) { low = middle + 1 } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::ids::RequestId;
    use router::balancer::recent::Names;
    use router::balancer::{Output, RouteRequest};
    use router::slot::Slot;

    fn requested(now: Instant, tenant: &str, chain: impl IntoIterator<Item = u128>) -> RequestedPrompt {
        let chain: Arc<[BlockId]> = chain.into_iter().map(|n| BlockId(n.to_be_bytes())).collect();
        let request = RouteRequest {
            request_id: RequestId::new("r").unwrap(),
            tenant: tenant.into(),
            model: ModelId::new("m").unwrap(),
            operation: None,
            prompt_tokens: 16 * chain.len() as u32 + 3,
            chain,
            output: Output::default(),
            images: false,
            group: None,
            trace: None,
            priority: 0,
            submitted: now,
            deadline: now,
        };
        RequestedPrompt {
            request: Arc::new(request),
            at: now,
            slot: Slot::new(0).unwrap(),
            names: Arc::new(Names::default()),
        }
    }

    #[test]
    fn paths_fork_where_prompts_diverge() {
        let now = Instant::now();
        // A trunk of 8 units, followed by two documents; one of them is followed by two questions, each asked
        // twice.
        let document = |n: u128| (0..8).chain(100 * n..100 * n + 4);
        let mut requests = vec![
            requested(now, "a", 0..8),
            requested(now, "a", document(1)),
            requested(now, "b", document(1)),
        ];
        for question in [7000, 7000, 8000, 8000] {
            requests.push(requested(now, "c", document(2).chain([question])));
        }
        requests.push(requested(now, "d", 900..905));
        let found = Paths::find(now, &requests);
        let shape: Vec<_> =
            found.all.iter().map(|path| (path.requests, path.tokens(), path.parent)).collect();
        assert_eq!(shape[..2], [(7, 128, None), (4, 192, Some(0))]);
        let mut rest = shape[2..].to_vec();
        rest.sort();
        assert_eq!(rest, [(2, 192, Some(0)), (2, 208, Some(1)), (2, 208, Some(1))]);
        assert_eq!(found.all[0].tenants.len(), 3, "who asked alone shares no path");
        assert_eq!(found.tenants.get("c"), Some(&(4, 4 * (16 * 13 + 3))));
        assert_eq!(found.all[0].name(), "00000000");
        assert_eq!(found.all[0].chain().len(), 8);
    }

    #[test]
    fn old_requests_do_not_count_and_paths_are_bounded() {
        let start = Instant::now();
        let mut requests = vec![requested(start, "a", 0..4), requested(start, "a", 0..4)];
        let now = start + COUNTS + Duration::from_secs(1);
        for n in 1..60 {
            requests.extend([
                requested(now, "a", 100 * n..100 * n + 3),
                requested(now, "a", 100 * n..100 * n + 3),
            ]);
        }
        let found = Paths::find(now, &requests);
        assert_eq!(found.all.len(), MAX_PATHS);
        assert!(found.all.iter().all(|path| path.requests == 2 && path.units == 3));
        assert!(Paths::find(now, &[]).all.is_empty());
        requests.extend((0..60).map(|_| requested(now, "a", 9_000..9_001)));
        let found = Paths::find(now, &requests);
        assert_eq!(found.all.len(), 1, "what two have in common is nothing beside what sixty have");
    }
}
