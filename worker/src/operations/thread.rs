//! The thread that computes for all sessions of one model, one piece after the other. A segment that takes long is done in
//! turns: between two of them come those of all other sessions, and one that nobody waits for any more ends.

use super::session::Session;
use crate::Error;
use crate::telemetry::OperationMetrics;
use proto::operation::{Operation, OperationOutput};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;
use tokio::sync::oneshot;

/// What a session is asked.
enum Ask {
    Hear(Vec<f32>),
    Segment { last: bool },
    GoOn,
    Reset,
}

/// A session, lent to the thread with what is asked of it.
struct Job {
    session: Box<dyn Session>,
    ask: Ask,
    rate: u32,
    /// What has followed so far.
    out: Vec<OperationOutput>,
    done: oneshot::Sender<Done>,
}

/// The session, back, and what followed.
struct Done {
    session: Box<dyn Session>,
    answer: Result<Vec<OperationOutput>, Error>,
}

/// See the module. The thread ends when this and all sessions are gone.
pub(super) struct ModelThread {
    jobs: Sender<Job>,
}

/// A session, wherever it is. A piece is computed before the next is taken, so no more waits than there are sessions.
pub struct SessionHandle {
    /// None while it is lent, and after it was lost.
    session: Option<Box<dyn Session>>,
    jobs: Sender<Job>,
    rate: u32,
}

impl ModelThread {
    pub(super) fn start(operation: Operation, metrics: OperationMetrics) -> Result<Self, Error> {
        let (jobs, inbox) = channel();
        let name = format!("kvasir-{operation}");
        let run = move || run(&inbox, operation, &metrics);
        let spawned = std::thread::Builder::new().name(name.clone()).spawn(run);
        spawned.map_err(|source| Error::Io { what: format!("cannot start {name}"), source })?;
        Ok(Self { jobs })
    }

    pub(super) fn session(&self, session: Box<dyn Session>, rate: u32) -> SessionHandle {
        SessionHandle { session: Some(session), jobs: self.jobs.clone(), rate }
    }
}

fn run(inbox: &Receiver<Job>, operation: Operation, metrics: &OperationMetrics) {
    // Those that are not done yet, in the order of their turns.
    let mut begun: VecDeque<Job> = VecDeque::new();
    let mut fresh = false;
    loop {
        // One that has come meanwhile, then one that has begun: neither keeps the other waiting.
        fresh = !fresh;
        let job = match begun.is_empty() {
            true => inbox.recv().ok(),
            false if fresh => inbox.try_recv().ok().or_else(|| begun.pop_front()),
            false => begun.pop_front(),
        };
        let Some(Job { mut session, ask, rate, mut out, done }) = job else { return };
        // Whoever asked has left meanwhile.
        if done.is_closed() {
            continue;
        }
        let start = Instant::now();
        let heard = match &ask {
            Ask::Hear(samples) => samples.len(),
            Ask::Segment { .. } | Ask::GoOn | Ask::Reset => 0,
        };
        // A runtime that panics ends the session, not those that share its thread: `done` is dropped unsent.
        let computed = catch_unwind(AssertUnwindSafe(|| computed(session.as_mut(), ask, &mut out)));
        let Ok(more) = computed else { continue };
        metrics.computed(operation, start.elapsed(), heard as f64 / f64::from(rate));
        let answer = match more {
            Ok(true) => {
                begun.push_back(Job { session, ask: Ask::GoOn, rate, out, done });
                continue;
            }
            Ok(false) => Ok(out),
            Err(error) => Err(error),
        };
        // Nobody waits for it any more: the session ends with what is sent.
        let _ = done.send(Done { session, answer });
    }
}

/// Whether there is more to do.
fn computed(session: &mut dyn Session, ask: Ask, out: &mut Vec<OperationOutput>) -> Result<bool, Error> {
    match ask {
        Ask::Hear(samples) => session.hear(&samples, out)?,
        Ask::Segment { last } => {
            session.segment(last, out)?;
            return session.go_on(out);
        }
        Ask::GoOn => return session.go_on(out),
        Ask::Reset => session.reset(),
    }
    Ok(false)
}

impl SessionHandle {
    /// More is heard; what follows of it.
    ///
    /// # Errors
    /// The model's, after which the session is of no use; [`Error::EngineStopped`] where it is lost.
    pub async fn hear(&mut self, samples: Vec<f32>) -> Result<Vec<OperationOutput>, Error> {
        self.ask(Ask::Hear(samples)).await
    }

    /// What it is, as far as heard.
    ///
    /// # Errors
    /// As [`Self::hear`].
    pub async fn segment(&mut self, last: bool) -> Result<Vec<OperationOutput>, Error> {
        self.ask(Ask::Segment { last }).await
    }

    /// As just opened.
    ///
    /// # Errors
    /// As [`Self::hear`].
    pub async fn reset(&mut self) -> Result<(), Error> {
        self.ask(Ask::Reset).await.map(drop)
    }

    /// Dropping the future loses the session.
    async fn ask(&mut self, ask: Ask) -> Result<Vec<OperationOutput>, Error> {
        let session = self.session.take().ok_or(Error::EngineStopped)?;
        let (done, answer) = oneshot::channel();
        let job = Job { session, ask, rate: self.rate, out: Vec::new(), done };
        self.jobs.send(job).map_err(|_| Error::EngineStopped)?;
        // The model has panicked.
        let Done { session, answer } = answer.await.map_err(|_| Error::EngineStopped)?;
        self.session = Some(session);
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fragile;

    impl Session for Fragile {
        fn window(&self) -> u32 {
            0
        }

        fn hear(&mut self, samples: &[f32], _: &mut Vec<OperationOutput>) -> Result<(), Error> {
            assert!(samples.iter().all(|sample| *sample < 1.0), "too loud");
            Ok(())
        }

        fn segment(&mut self, _: bool, out: &mut Vec<OperationOutput>) -> Result<(), Error> {
            out.push(OperationOutput::SpeechEnded { at: 7 });
            Ok(())
        }

        fn reset(&mut self) {}
    }

    /// Takes so many turns for a segment, and tells of each.
    struct Slow {
        name: u64,
        left: u64,
    }

    impl Session for Slow {
        fn window(&self) -> u32 {
            0
        }

        fn hear(&mut self, _: &[f32], _: &mut Vec<OperationOutput>) -> Result<(), Error> {
            Ok(())
        }

        fn segment(&mut self, _: bool, _: &mut Vec<OperationOutput>) -> Result<(), Error> {
            Ok(())
        }

        fn go_on(&mut self, out: &mut Vec<OperationOutput>) -> Result<bool, Error> {
            out.push(OperationOutput::SpeechEnded { at: self.name });
            self.left -= 1;
            Ok(self.left > 0)
        }

        fn reset(&mut self) {}
    }

    #[tokio::test]
    async fn a_long_segment_lets_others_through_and_ends_when_nobody_waits() {
        let thread = ModelThread::start(Operation::Asr, OperationMetrics::default()).unwrap();
        let endless = || Box::new(Slow { name: 1, left: u64::MAX });
        let mut waits = thread.session(endless(), 16_000);
        let waiting = tokio::spawn(async move { waits.segment(true).await.map(drop) });
        // Served although the other one never ends, and with all of its own turns.
        let mut other = thread.session(Box::new(Slow { name: 2, left: 3 }), 16_000);
        let told = other.segment(true).await.unwrap();
        assert_eq!(told, vec![OperationOutput::SpeechEnded { at: 2 }; 3]);
        assert!(!waiting.is_finished());
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        // The thread ends with its sessions: it does not go on with what nobody waits for.
        let alone = other.segment(true);
        drop(alone);
        drop((thread, other));
    }

    #[tokio::test]
    async fn a_session_that_panics_is_lost_and_others_are_not() {
        let thread = ModelThread::start(Operation::Vad, OperationMetrics::default()).unwrap();
        let mut lost = thread.session(Box::new(Fragile), 16_000);
        let mut other = thread.session(Box::new(Fragile), 16_000);
        assert!(matches!(lost.hear(vec![1.0]).await, Err(Error::EngineStopped)));
        assert!(matches!(lost.segment(true).await, Err(Error::EngineStopped)), "it is gone");
        assert_eq!(other.hear(vec![0.5]).await.unwrap(), []);
        assert_eq!(other.segment(true).await.unwrap(), [OperationOutput::SpeechEnded { at: 7 }]);
    }
}
