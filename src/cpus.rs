//! Assigns CPUs to workers.

use std::fmt;
use std::str::FromStr;

/// A set of CPU numbers in the kernel's notation: `0-3,8`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CpuSet(Vec<usize>);

/// Upper bound of a worker's compute threads; more would only contend.
pub(crate) const MAX_THREADS: usize = 1024;
/// Highest supported CPU number.
const MAX_CPU: usize = 4095;

/// Error of a text that is not a CPU set.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a list of CPUs such as 0-3,8")]
pub(crate) struct InvalidCpuSet(String);

impl CpuSet {
    /// CPUs that this process may use; `None` if the kernel does not report them.
    pub(crate) fn usable() -> Option<Self> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().parse().ok()
    }

    /// The CPUs with the lowest numbers.
    pub(crate) fn first(count: usize) -> Self {
        Self((0..count.max(1)).collect())
    }

    pub(crate) fn cpus(&self) -> &[usize] {
        &self.0
    }
}

impl FromStr for CpuSet {
    type Err = InvalidCpuSet;

    fn from_str(text: &str) -> Result<Self, InvalidCpuSet> {
        let refuse = || InvalidCpuSet(text.chars().take(64).collect());
        let mut cpus = Vec::new();
        for range in text.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let number =
                |text: &str| text.parse::<usize>().ok().filter(|cpu| *cpu <= MAX_CPU).ok_or_else(refuse);
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(refuse());
            }
            cpus.extend(first..=last);
        }
        cpus.sort_unstable();
        cpus.dedup();
        if cpus.is_empty() { Err(refuse()) } else { Ok(Self(cpus)) }
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.0.chunk_by(|a, b| a + 1 == *b);
        for (index, run) in runs.enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match run {
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [only] => write!(f, "{comma}{only}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

impl serde::Serialize for CpuSet {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for CpuSet {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Number of threads that can run at once: usable CPUs, reduced by a quota.
pub(crate) fn capacity() -> usize {
    engine::cgroup::cpus().get()
}

/// Threads of each worker and its CPUs. If there are too few CPUs, all workers share them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    pub(crate) threads: usize,
    /// One disjoint set per worker; empty if the workers share all CPUs.
    pub(crate) sets: Vec<CpuSet>,
}

/// Divides `usable` among `workers`. `capacity` is the number of CPUs that a quota allows.
pub(crate) fn share(usable: &CpuSet, capacity: usize, workers: usize, threads: Option<usize>) -> Shares {
    let capacity = capacity.clamp(1, usable.0.len());
    let threads = threads.unwrap_or((capacity / workers.max(1)).max(1));
    let enough = threads.checked_mul(workers).is_some_and(|needed| needed <= capacity);
    let sets = if enough {
        usable.0.chunks_exact(threads).take(workers).map(|cpus| CpuSet(cpus.to_vec())).collect()
    } else {
        Vec::new()
    };
    Shares { threads, sets }
}

/// A worker's GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GpuPlace {
    pub(crate) gpu: u32,
    /// Workers on that GPU.
    pub(crate) workers: usize,
}

/// Distributes `workers` over `gpus` round-robin; empty if there is no GPU.
pub(crate) fn place_on_gpus(workers: usize, gpus: usize) -> Vec<GpuPlace> {
    let place = |worker: usize| {
        let gpu = worker % gpus;
        GpuPlace { gpu: gpu as u32, workers: (workers - gpu).div_ceil(gpus) }
    };
    if gpus == 0 { Vec::new() } else { (0..workers).map(place).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_spread_over_gpus() {
        for (workers, gpus, expected) in [
            (2, 0, vec![]),
            (1, 1, vec![(0, 1)]),
            (2, 1, vec![(0, 2), (0, 2)]),
            (2, 8, vec![(0, 1), (1, 1)]),
            (5, 2, vec![(0, 3), (1, 2), (0, 3), (1, 2), (0, 3)]),
        ] {
            let found: Vec<_> =
                place_on_gpus(workers, gpus).iter().map(|place| (place.gpu, place.workers)).collect();
            assert_eq!(found, expected, "{workers} over {gpus}");
        }
    }

    #[test]
    fn sets_parse_and_print_back() {
        for text in ["0", "0-3", "0-1,4,6-7", "5,7"] {
            assert_eq!(text.parse::<CpuSet>().unwrap().to_string(), text);
        }
        assert_eq!("3,1-2,2".parse::<CpuSet>().unwrap().to_string(), "1-3");
        for bad in ["", "a", "3-1", "0,3-1", "1-", "0-99999999999", ","] {
            assert!(bad.parse::<CpuSet>().is_err(), "{bad}");
        }
    }

    #[test]
    fn workers_get_disjoint_sets_while_there_are_enough_cpus() {
        let table = [
            // usable, capacity, workers, requested, threads, sets
            ("0-1", 2, 2, None, 1, vec!["0", "1"]),
            ("0-7", 8, 2, None, 4, vec!["0-3", "4-7"]),
            ("0-7", 8, 3, None, 2, vec!["0-1", "2-3", "4-5"]),
            ("0-7", 4, 2, None, 2, vec!["0-1", "2-3"]),
            ("0-1", 2, 4, None, 1, vec![]),
            ("0-1", 2, 2, Some(2), 2, vec![]),
            ("4-7", 4, 1, Some(2), 2, vec!["4-5"]),
        ];
        for (usable, capacity, workers, requested, threads, sets) in table {
            let shares = share(&usable.parse().unwrap(), capacity, workers, requested);
            let found: Vec<String> = shares.sets.iter().map(CpuSet::to_string).collect();
            assert_eq!(
                (shares.threads, found),
                (threads, sets.iter().map(|s| (*s).to_owned()).collect()),
                "{usable}"
            );
        }
    }

    #[test]
    fn this_process_may_run_somewhere() {
        assert!(!CpuSet::usable().unwrap().cpus().is_empty());
    }
}
