//! Energy of steps: a thread reads the device's energy counter at regular times, and each step gets the energy of its
//! time, interpolated between readings.
//!
//! The meter belongs to the process, like the device. Without a counter that can be read, nothing is measured, and
//! requests have no energy; a value is never estimated from power or time.

pub mod rapl;

use crate::telemetry::{EnergyMetrics, Work};
use crate::usage::StepTime;
use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Interval between two readings. Counters are updated every 1 to 100 ms.
const READ_EVERY: Duration = Duration::from_millis(200);
/// Readings that are kept: longer steps have no energy.
const MAX_READINGS: usize = 3_000;
/// Most steps that wait for the next reading. Further ones have no energy.
const MAX_STEPS: usize = 1 << 13;

static STEPS: OnceLock<SyncSender<MeteredStep>> = OnceLock::new();

/// Counter of the energy that this process has used of its device.
pub trait EnergySource {
    /// Microjoules since an arbitrary time; `None` if the counter cannot be read.
    fn read(&mut self) -> Option<u64>;
}

/// A completed step.
#[derive(Debug)]
struct MeteredStep {
    began: Instant,
    ended: Instant,
    time: StepTime,
}

/// Starts the meter of this process. `open` runs on the meter's thread, because calls of a driver may hang; if it returns
/// `None`, there is no meter. A second call has no effect.
pub fn start<S: EnergySource>(open: impl FnOnce() -> Option<S> + Send + 'static, metrics: EnergyMetrics) {
    let (sender, steps) = sync_channel(MAX_STEPS);
    let thread = std::thread::Builder::new().name("kvasir-energy".into());
    let run = move || {
        let Some(mut source) = open() else { return };
        // Steps before the first reading have no energy.
        if source.read().is_some() && STEPS.set(sender).is_ok() {
            Meter { source, curve: Curve::default(), waiting: VecDeque::new(), metrics }.run(&steps);
        }
    };
    if let Err(error) = thread.spawn(run) {
        tracing::warn!(%error, "cannot start the thread that reads the energy");
    }
}

/// A step of this process's only device is complete. `time`: its parts.
pub(crate) fn step(began: Instant, ended: Instant, time: StepTime) {
    if let Some(steps) = STEPS.get() {
        // If the meter is behind, the step has no energy.
        let _lost = steps.try_send(MeteredStep { began, ended, time });
    }
}

struct Meter<S> {
    source: S,
    curve: Curve,
    waiting: VecDeque<MeteredStep>,
    metrics: EnergyMetrics,
}

impl<S: EnergySource> Meter<S> {
    fn run(mut self, steps: &Receiver<MeteredStep>) {
        loop {
            self.read(Instant::now());
            let next = Instant::now() + READ_EVERY;
            loop {
                match steps.recv_timeout(next.saturating_duration_since(Instant::now())) {
                    Ok(step) if self.waiting.len() < MAX_STEPS => self.waiting.push_back(step),
                    Ok(_) => {}
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        }
    }

    /// Reads the counter, and gives the steps up to now their energy.
    fn read(&mut self, now: Instant) {
        match self.source.read() {
            Some(energy) => {
                if let Some(more) = self.curve.push(now, energy) {
                    self.metrics.measured(more);
                }
            }
            None => self.curve.clear(),
        }
        while let Some(step) = self.waiting.pop_front_if(|step| step.ended <= now) {
            if let Some(energy) = self.curve.between(step.began, step.ended) {
                let requests = step.time.divide_energy(energy);
                self.metrics.step(Work::requests, requests);
                self.metrics.step(Work::other, energy - requests);
            }
        }
    }
}

/// Readings of the counter.
#[derive(Debug, Default)]
struct Curve(VecDeque<(Instant, u64)>);

impl Curve {
    /// Adds a reading. Returns the energy since the last one.
    fn push(&mut self, at: Instant, energy: u64) -> Option<u64> {
        let last = self.0.back().map(|(_, last)| *last);
        if last.is_some_and(|last| energy < last) {
            // The counter was reset.
            self.0.clear();
        }
        if self.0.len() >= MAX_READINGS {
            self.0.pop_front();
        }
        self.0.push_back((at, energy));
        last.and_then(|last| energy.checked_sub(last))
    }

    /// The counter cannot be read: energy across this time is unknown.
    fn clear(&mut self) {
        self.0.clear();
    }

    /// The energy between two times; `None` if the readings do not enclose them.
    fn between(&self, began: Instant, ended: Instant) -> Option<u64> {
        let (from, to) = (self.at(began)?, self.at(ended)?);
        Some((to - from).max(0.0) as u64)
    }

    fn at(&self, time: Instant) -> Option<f64> {
        let after = self.0.partition_point(|(at, _)| *at < time);
        let (at, energy) = self.0.get(after)?;
        if *at == time {
            return Some(*energy as f64);
        }
        let (before, start) = self.0.get(after.checked_sub(1)?)?;
        let part = (time - *before).as_secs_f64() / (*at - *before).as_secs_f64();
        Some(*start as f64 + part * (*energy - *start) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage::{RequestUsage, RowKind, StepShare, divide_step};
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_step_gets_the_energy_of_its_time() {
        let (mut curve, start) = (Curve::default(), Instant::now());
        assert_eq!(curve.push(start, 1_000), None);
        assert_eq!(curve.push(start + SECOND, 3_000), Some(2_000));
        assert_eq!(curve.push(start + 2 * SECOND, 3_000), Some(0));
        assert_eq!(curve.between(start + SECOND / 4, start + SECOND / 2), Some(500));
        assert_eq!(curve.between(start + SECOND / 2, start + 2 * SECOND), Some(1_000));
        assert_eq!(curve.between(start, start + 3 * SECOND), None, "it is not read yet");
        assert_eq!(curve.push(start + 3 * SECOND, 10), None, "the counter was reset");
        assert_eq!(curve.between(start + 2 * SECOND, start + 3 * SECOND), None);
    }

    /// A counter with planted values.
    struct Planted(VecDeque<Option<u64>>);

    impl EnergySource for Planted {
        fn read(&mut self) -> Option<u64> {
            self.0.pop_front().flatten()
        }
    }

    #[test]
    fn the_parts_of_a_steps_energy_sum_to_it_and_an_unknown_energy_is_absent() {
        let (report, reports) = channel();
        let usage = |name: &'static str| {
            let report = report.clone();
            RequestUsage::new(move |used| report.send((name, used.energy_ns, used.energy_uj)).unwrap())
        };
        let share = |rows, usage: &Arc<RequestUsage>| StepShare {
            rows,
            kind: RowKind::Output,
            usage: Some(Arc::clone(usage)),
        };
        let readings = [Some(0), Some(1_000), None, Some(5_000), Some(6_000)];
        let mut meter = Meter {
            source: Planted(readings.into()),
            curve: Curve::default(),
            waiting: VecDeque::new(),
            metrics: EnergyMetrics::default(),
        };
        let start = Instant::now();
        meter.read(start);
        let [a, b, c] = ["a", "b", "c"].map(usage);
        let step = |meter: &mut Meter<Planted>, second: u32, shares: &[StepShare]| {
            let time = divide_step(SECOND, 3, shares);
            let (began, ended) = (start + second * SECOND, start + (second + 1) * SECOND);
            meter.waiting.push_back(MeteredStep { began, ended, time });
            meter.read(ended);
        };
        step(&mut meter, 0, &[share(0..1, &a), share(1..3, &b)]);
        // The counter cannot be read at the end of this one.
        step(&mut meter, 1, &[share(0..3, &c)]);
        drop((a, b, c));
        let mut reported: Vec<_> = reports.try_iter().collect();
        reported.sort_unstable();
        assert_eq!(reported, [("a", 333_333_333, 333), ("b", 666_666_667, 667), ("c", 0, 0),]);
    }
}
