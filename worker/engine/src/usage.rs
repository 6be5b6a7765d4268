//! Device time of each request: the time of a step is divided among its sequences by rows, and the parts sum to it.

use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Usage of one request at this worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestUsed {
    /// Computed input tokens, again computed ones included.
    pub input_tokens: u64,
    /// Input tokens from a cache.
    pub cached_tokens: u64,
    /// Drawn tokens.
    pub output_tokens: u64,
    /// Device time of the input's rows, nanoseconds.
    pub input_ns: u64,
    /// Device time of the output's rows, nanoseconds.
    pub output_ns: u64,
    /// Energy of the time for which it is known, microjoules.
    pub energy_uj: u64,
    /// Device time for which the energy is known, nanoseconds.
    pub energy_ns: u64,
}

/// Kind of the rows of a sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    Input,
    Output,
}

type Ended = Box<dyn FnOnce(RequestUsed) + Send>;

/// Counts what a request uses. When the last clone of its `Arc` is dropped, which may be after a step that was in
/// flight at the request's end, the counts are reported.
pub struct RequestUsage {
    counts: Mutex<RequestUsed>,
    ended: Mutex<Option<Ended>>,
}

impl RequestUsage {
    /// `ended` gets the counts. It is called on the engine's thread, so it must not block.
    pub fn new(ended: impl FnOnce(RequestUsed) + Send + 'static) -> Arc<Self> {
        Arc::new(Self { counts: Mutex::default(), ended: Mutex::new(Some(Box::new(ended))) })
    }

    /// Reports nothing: the engine cannot tell what the request uses.
    pub fn is_unknown(&self) {
        *self.ended.lock() = None;
    }

    /// Adds the rows of a step.
    pub fn computed(&self, kind: RowKind, rows: u64, ns: u64) {
        let used = &mut self.counts.lock();
        match kind {
            RowKind::Input => {
                used.input_tokens += rows;
                used.input_ns += ns;
            }
            RowKind::Output => used.output_ns += ns,
        }
    }

    /// Adds time of an operation without tokens.
    pub fn took(&self, time: Duration) {
        self.computed(RowKind::Input, 0, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds the energy of `ns` of the device time.
    fn powered(&self, energy_uj: u64, ns: u64) {
        let mut counts = self.counts.lock();
        counts.energy_uj += energy_uj;
        counts.energy_ns += ns;
    }

    pub(crate) fn cached(&self, tokens: u64) {
        self.counts.lock().cached_tokens = tokens;
    }

    pub(crate) fn drawn(&self, tokens: u64) {
        self.counts.lock().output_tokens += tokens;
    }
}

impl std::fmt::Debug for RequestUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.counts.lock().fmt(f)
    }
}

impl Drop for RequestUsage {
    fn drop(&mut self) {
        if let Some(ended) = self.ended.get_mut().take() {
            ended(*self.counts.get_mut());
        }
    }
}

/// The rows of a sequence in a step.
#[derive(Debug)]
pub(crate) struct StepShare {
    /// Of the step's rows.
    pub(crate) rows: Range<usize>,
    pub(crate) kind: RowKind,
    /// `None`: the sequence belongs to no request.
    pub(crate) usage: Option<Arc<RequestUsage>>,
}

/// The time of a step, in parts.
#[derive(Debug, Default)]
pub(crate) struct StepTime {
    /// Of all rows.
    all_ns: u64,
    requests: Vec<(Arc<RequestUsage>, u64)>,
}

impl StepTime {
    /// The part that belongs to requests.
    pub(crate) fn of_requests(&self) -> Duration {
        Duration::from_nanos(self.requests.iter().map(|(_, ns)| ns).sum())
    }

    /// Divides the step's energy, microjoules, as its time. Returns the part that belongs to requests.
    pub(crate) fn divide_energy(&self, energy_uj: u64) -> u64 {
        let until =
            |ns: u64| (u128::from(energy_uj) * u128::from(ns) / u128::from(self.all_ns.max(1))) as u64;
        let mut end = 0;
        for (usage, ns) in &self.requests {
            let start = end;
            end += ns;
            usage.powered(until(end) - until(start), *ns);
        }
        until(end)
    }
}

/// Divides the time of a step with `rows` rows.
pub(crate) fn divide_step(took: Duration, rows: usize, shares: &[StepShare]) -> StepTime {
    let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    // Time up to a row, so that the differences sum to the whole.
    let until = |row: usize| match rows {
        0 => 0,
        rows => (u128::from(took) * row.min(rows) as u128 / rows as u128) as u64,
    };
    let mut requests = Vec::new();
    for StepShare { rows, kind, usage } in shares {
        let Some(usage) = usage else { continue };
        let ns = until(rows.end).saturating_sub(until(rows.start));
        usage.computed(*kind, rows.len() as u64, ns);
        requests.push((Arc::clone(usage), ns));
    }
    StepTime { all_ns: took, requests }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn the_parts_of_a_step_sum_to_its_time() {
        let (report, reports) = channel();
        let usage = |name: &'static str| {
            let report = report.clone();
            RequestUsage::new(move |used| report.send((name, used)).unwrap())
        };
        let share = |rows: Range<usize>, kind, usage: Option<&Arc<RequestUsage>>| StepShare {
            rows,
            kind,
            usage: usage.cloned(),
        };
        let (a, b) = (usage("a"), usage("b"));
        let shares = [
            share(0..5, RowKind::Input, Some(&a)),
            share(5..6, RowKind::Output, Some(&b)),
            share(6..7, RowKind::Output, None),
        ];
        let time = divide_step(Duration::from_nanos(100), 7, &shares);
        assert_eq!(time.of_requests(), Duration::from_nanos(85));
        drop(time);
        a.cached(3);
        b.drawn(2);
        drop((a, b));
        assert!(reports.try_recv().is_err(), "a step in flight still holds them");
        drop(shares);
        let mut reported: Vec<_> = reports.try_iter().collect();
        reported.sort_by_key(|(name, _)| *name);
        let first = RequestUsed { input_tokens: 5, cached_tokens: 3, input_ns: 71, ..Default::default() };
        let second = RequestUsed { output_tokens: 2, output_ns: 14, ..Default::default() };
        assert_eq!(reported, [("a", first), ("b", second)]);
        assert_eq!(divide_step(Duration::from_secs(1), 0, &[]).of_requests(), Duration::ZERO);
    }

    #[test]
    fn an_unknown_use_is_not_reported() {
        let (report, reports) = channel();
        let usage = RequestUsage::new(move |used| report.send(used).unwrap());
        usage.is_unknown();
        drop(usage);
        assert!(reports.try_recv().is_err());
    }
}
