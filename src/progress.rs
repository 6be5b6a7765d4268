//! Progress bar on stderr. If stderr is not a terminal, writes a log line now and then.

use hub::catalog::{Progress, Step};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

const WIDTH: u64 = 30;
const REDRAW: Duration = Duration::from_millis(100);
/// Interval of log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// Shows the progress of a pull or a check. Clears its line when dropped.
#[derive(Debug)]
pub(crate) struct Bar {
    terminal: bool,
    label: String,
    total: Option<u64>,
    drawn: Option<Instant>,
}

impl Bar {
    pub(crate) fn new() -> Self {
        Self { terminal: std::io::stderr().is_terminal(), label: String::new(), total: None, drawn: None }
    }

    /// Begins a step with this label. `total` is its size in bytes.
    pub(crate) fn step(&mut self, label: String, total: Option<u64>) {
        (self.label, self.total, self.drawn) = (label, total, None);
        self.draw(0);
    }

    fn draw(&mut self, bytes: u64) {
        if !self.terminal {
            let last = *self.drawn.get_or_insert_with(Instant::now);
            if last.elapsed() >= LOG_INTERVAL {
                self.drawn = Some(Instant::now());
                tracing::info!("{}", plain(&self.label, bytes, self.total));
            }
            return;
        }
        if self.drawn.is_some_and(|drawn| drawn.elapsed() < REDRAW) {
            return;
        }
        self.drawn = Some(Instant::now());
        // A failure to draw must not stop the work.
        let _ = write!(std::io::stderr(), "\r\x1b[K{}", line(&self.label, bytes, self.total));
    }
}

/// Progress as a log line.
fn plain(label: &str, bytes: u64, total: Option<u64>) -> String {
    let of = total.map_or(String::new(), |total| format!(" of {}", total >> 20));
    format!("{label}: {}{of} MiB", bytes >> 20)
}

fn line(label: &str, bytes: u64, total: Option<u64>) -> String {
    let mib = |bytes: u64| bytes >> 20;
    let Some(total) = total.filter(|total| *total > 0) else {
        return if bytes == 0 { label.to_owned() } else { format!("{label} {} MiB", mib(bytes)) };
    };
    let done = bytes.min(total);
    let filled = (done.saturating_mul(WIDTH) / total) as usize;
    let bar = "#".repeat(filled) + &"-".repeat(WIDTH as usize - filled);
    format!("{label} [{bar}] {} of {} MiB", mib(done), mib(total))
}

impl Progress for Bar {
    fn begin(&mut self, step: Step<'_>, total: Option<u64>) {
        let label = match step {
            Step::Waiting => "waiting for another process that is pulling the same model".into(),
            Step::Downloading { requirement, of: 1, .. } => format!("downloading {requirement}"),
            Step::Downloading { requirement, number, of } => {
                format!("downloading {requirement} ({number}/{of})")
            }
            Step::Unpacking { requirement } => format!("unpacking {requirement}"),
            Step::Checking => "checking".into(),
            _ => String::new(),
        };
        self.step(label, total);
    }

    fn at(&mut self, bytes: u64) {
        self.draw(bytes);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if self.terminal && self.drawn.is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_fills_and_never_overflows() {
        assert_eq!(line("a", 0, Some(30 << 20)), format!("a [{}] 0 of 30 MiB", "-".repeat(30)));
        assert_eq!(
            line("a", 10 << 20, Some(30 << 20)),
            format!("a [{}{}] 10 of 30 MiB", "#".repeat(10), "-".repeat(20))
        );
        assert_eq!(line("a", 99 << 20, Some(30 << 20)), format!("a [{}] 30 of 30 MiB", "#".repeat(30)));
        assert_eq!(line("a", 5 << 20, None), "a 5 MiB");
        assert_eq!(line("a", 0, Some(0)), "a");
        assert_eq!(plain("a", 5 << 20, Some(9 << 20)), "a: 5 of 9 MiB");
        assert_eq!(plain("a", 5 << 20, None), "a: 5 MiB");
    }
}
