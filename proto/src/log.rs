//! Log of a process. Lines go into a bounded queue, and one thread writes them. A caller that logs never
//! waits for the reader of the log, and never fails when the reader is gone. Lines that do not fit the
//! queue are dropped and counted.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, ErrorKind, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Most bytes of queued lines.
const QUEUE_BYTES: usize = 1 << 20;
/// Longest wait for the last lines when the process ends.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);
/// Wait of the writer after a non-blocking descriptor accepts nothing.
const RETRY_AFTER: Duration = Duration::from_millis(20);
/// Shortest interval between two reports of dropped lines.
const REPORT_EVERY: Duration = Duration::from_secs(10);
/// Shortest interval between two log lines of the same event.
const REPEAT_EVERY: Duration = Duration::from_secs(60);
/// Shortest interval between two removals of old events, once [`MAX_KEYS`] are stored.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// Most events that a [`Repeats`] counts separately.
const MAX_KEYS: usize = 1024;

/// Log of this process; unset until [`start`] is called.
static PROCESS: OnceLock<Log> = OnceLock::new();

/// Starts the log of this process on `out`. A second call returns the log of the first.
pub fn start(out: impl Write + Send + 'static) -> Log {
    PROCESS.get_or_init(|| Log::new(out, QUEUE_BYTES)).clone()
}

/// Returns the number of dropped lines of this process' log. Lines are dropped if the queue is full or
/// writing fails.
pub fn dropped() -> u64 {
    PROCESS.get().map_or(0, Log::dropped)
}

/// Waits until this process' log is written, for at most one second. Call it before the process ends.
pub fn flush() {
    if let Some(log) = PROCESS.get() {
        log.flush_within(FLUSH_LIMIT);
    }
}

/// A queue of lines and the thread that writes them. Each write is one or more whole lines. Clones share
/// the queue.
#[derive(Debug, Clone)]
pub struct Log(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limit: usize,
    queue: Mutex<Queue>,
    filled: Condvar,
    emptied: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    lines: VecDeque<Box<[u8]>>,
    bytes: usize,
    /// Set while the thread holds lines that are not written yet.
    writing: bool,
    dropped: u64,
}

impl Log {
    fn new(out: impl Write + Send + 'static, limit: usize) -> Self {
        let shared = Arc::new(Shared {
            limit,
            queue: Mutex::default(),
            filled: Condvar::new(),
            emptied: Condvar::new(),
        });
        let log = Self(Arc::clone(&shared));
        let thread =
            std::thread::Builder::new().name("kvasir-log".into()).spawn(move || shared.write_to(out));
        if thread.is_err() {
            // Without the thread, lines fill the queue; then each further line is dropped and counted.
            log.0.lock().dropped += 1;
        }
        log
    }

    pub fn dropped(&self) -> u64 {
        self.0.lock().dropped
    }

    /// Waits until all lines are written, for at most `limit`.
    pub fn flush_within(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let mut queue = self.0.lock();
        while queue.writing || !queue.lines.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            (queue, _) = self.0.emptied.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Write for Log {
    /// Queues the lines, or drops them. Never waits for the reader and never fails.
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        let mut queue = self.0.lock();
        if queue.bytes + lines.len() > self.0.limit {
            queue.dropped += 1;
        } else {
            queue.bytes += lines.len();
            queue.lines.push_back(lines.into());
            drop(queue);
            self.0.filled.notify_one();
        }
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_to(&self, mut out: impl Write) {
        let mut reported = 0;
        let mut report_after = Instant::now();
        loop {
            let lines = {
                let mut queue = self.lock();
                while queue.lines.is_empty() {
                    queue = self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
                queue.writing = true;
                std::mem::take(&mut queue.lines)
            };
            let mut failed = 0;
            for line in &lines {
                failed += u64::from(write_whole(&mut out, line).is_err());
                // Each written line frees its bytes at once.
                self.lock().bytes -= line.len();
            }
            let dropped = {
                let mut queue = self.lock();
                queue.writing = false;
                queue.dropped += failed;
                queue.dropped
            };
            self.emptied.notify_all();
            // The reader accepts lines again, so report the dropped lines.
            if failed == 0 && dropped > reported && Instant::now() >= report_after {
                tracing::warn!(
                    lines = dropped - reported,
                    "log lines were dropped: the reader was too slow or has closed the pipe"
                );
                (reported, report_after) = (dropped, Instant::now() + REPORT_EVERY);
            }
        }
    }
}

fn write_whole(out: &mut impl Write, mut line: &[u8]) -> io::Result<()> {
    while !line.is_empty() {
        match out.write(line) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => line = line.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(RETRY_AFTER),
            Err(error) => return Err(error),
        }
    }
    out.flush()
}

/// Rate limit for events that may repeat without end, such as refusals of a node that keeps retrying. An
/// event is logged at once, and after that once a minute with the number of occurrences that were left out.
#[derive(Debug)]
pub struct Repeats(Mutex<SeenEvents>);

#[derive(Debug)]
struct SeenEvents {
    by_key: BTreeMap<u64, Seen>,
    /// Time of the last removal of old events.
    swept: Option<Instant>,
}

#[derive(Debug)]
struct Seen {
    logged: Instant,
    left_out: u64,
}

impl Default for Repeats {
    fn default() -> Self {
        Self::new()
    }
}

impl Repeats {
    pub const fn new() -> Self {
        Self(Mutex::new(SeenEvents { by_key: BTreeMap::new(), swept: None }))
    }

    /// Returns `Some` if the event with this key must be logged now, with the number of occurrences left
    /// out since the last log line. Returns `None` if it must not be logged.
    pub fn due(&self, key: impl Hash) -> Option<u64> {
        self.due_at(Instant::now(), key)
    }

    fn due_at(&self, now: Instant, key: impl Hash) -> Option<u64> {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let mut key = hasher.finish();
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let SeenEvents { by_key: seen, swept } = &mut *seen;
        if seen.len() >= MAX_KEYS && !seen.contains_key(&key) {
            if swept.is_none_or(|swept| now.saturating_duration_since(swept) >= SWEEP_EVERY) {
                seen.retain(|_, seen| now.saturating_duration_since(seen.logged) < REPEAT_EVERY);
                *swept = Some(now);
            }
            if seen.len() >= MAX_KEYS {
                // Too many keys: all further keys share one entry.
                key = u64::MAX;
            }
        }
        match seen.get_mut(&key) {
            Some(seen) if now.saturating_duration_since(seen.logged) < REPEAT_EVERY => {
                seen.left_out += 1;
                None
            }
            Some(seen) => {
                seen.logged = now;
                Some(std::mem::take(&mut seen.left_out))
            }
            None => {
                seen.insert(key, Seen { logged: now, left_out: 0 });
                Some(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Accepts a line only when the test allows it.
    struct Gate {
        open: mpsc::Receiver<io::Result<()>>,
        out: mpsc::Sender<Vec<u8>>,
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // After the test has ended, accept everything.
            self.open.recv().unwrap_or(Ok(()))?;
            let _ended = self.out.send(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn gated(limit: usize) -> (Log, mpsc::Sender<io::Result<()>>, mpsc::Receiver<Vec<u8>>) {
        let (allow, open) = mpsc::channel();
        let (out, written) = mpsc::channel();
        (Log::new(Gate { open, out }, limit), allow, written)
    }

    #[test]
    fn a_slow_log_reader_drops_lines_and_never_blocks() {
        let (mut log, allow, written) = gated(100);
        for _ in 0..1000 {
            log.write_all(b"ten bytes\n").unwrap();
        }
        assert_eq!(log.dropped(), 990);
        log.flush_within(Duration::from_millis(1));
        for _ in 0..10 {
            allow.send(Ok(())).unwrap();
            assert_eq!(written.recv().unwrap(), b"ten bytes\n");
        }
        log.flush_within(Duration::from_secs(60));
        assert_eq!(log.0.lock().bytes, 0);
        log.write_all(b"again\n").unwrap();
        allow.send(Ok(())).unwrap();
        assert_eq!(written.recv().unwrap(), b"again\n");
    }

    #[test]
    fn a_lost_log_reader_only_drops_lines() {
        let (mut log, allow, written) = gated(100);
        for error in [ErrorKind::BrokenPipe, ErrorKind::StorageFull] {
            log.write_all(b"lost\n").unwrap();
            allow.send(Err(error.into())).unwrap();
        }
        log.flush_within(Duration::from_secs(60));
        assert_eq!(log.dropped(), 2);
        log.write_all(b"kept\n").unwrap();
        // A non-blocking descriptor returns `WouldBlock`, and the write is retried.
        allow.send(Err(ErrorKind::WouldBlock.into())).unwrap();
        allow.send(Ok(())).unwrap();
        assert_eq!(written.recv().unwrap(), b"kept\n");
        assert_eq!(log.dropped(), 2);
    }

    #[test]
    fn repeated_events_are_logged_once_a_minute_with_a_count() {
        let (repeats, start) = (Repeats::new(), Instant::now());
        let at = |second: u64| start + Duration::from_secs(second);
        assert_eq!(repeats.due_at(at(0), "w0"), Some(0));
        assert!((1..60).all(|second| repeats.due_at(at(second), "w0").is_none()));
        assert_eq!(repeats.due_at(at(30), "w1"), Some(0), "another one is not held back");
        assert_eq!(repeats.due_at(at(60), "w0"), Some(59));
        assert_eq!(repeats.due_at(at(61), "w0"), None);
    }

    #[test]
    fn unbounded_keys_use_bounded_memory_and_few_lines() {
        let (repeats, now) = (Repeats::new(), Instant::now());
        let logged = (0..100_000).filter(|key| repeats.due_at(now, key).is_some()).count();
        assert_eq!(logged, MAX_KEYS + 1);
        assert_eq!(repeats.0.lock().unwrap().by_key.len(), MAX_KEYS + 1);
        assert_eq!(repeats.due_at(now + REPEAT_EVERY, "new"), Some(0));
        assert_eq!(repeats.0.lock().unwrap().by_key.len(), 1);
    }
}
