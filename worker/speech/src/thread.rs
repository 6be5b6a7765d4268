//! The thread that computes for all sessions of one model, one piece after the other. A long segment is
//! computed in turns, alternating with other sessions, and ends when its caller is gone.

use crate::Error;
use crate::metrics::OperationMetrics;
use crate::session::Session;
use proto::operation::{Operation, OperationOutput};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;
use tokio::sync::oneshot;

/// A request to a session.
enum Ask {
    Hear(Vec<f32>),
    Segment { last: bool },
    GoOn,
    Reset,
}

/// A session on its way to the thread, with a request.
struct Job {
    session: Box<dyn Session>,
    ask: Ask,
    rate: u32,
    /// Outputs so far.
    out: Vec<OperationOutput>,
    done: oneshot::Sender<Done>,
}

/// The returned session, with its outputs.
struct Done {
    session: Box<dyn Session>,
    answer: Result<Vec<OperationOutput>, Error>,
}

/// Handle of the thread, which ends when this and all sessions are dropped.
pub(crate) struct ModelThread {
    jobs: Sender<Job>,
}

/// A session. A piece is computed before the next one is sent, so at most one job of each session waits.
pub struct SessionHandle {
    /// `None` while the thread has it, and after it was lost.
    session: Option<Box<dyn Session>>,
    jobs: Sender<Job>,
    rate: u32,
}

impl ModelThread {
    pub(crate) fn start(operation: Operation, metrics: OperationMetrics) -> Result<Self, Error> {
        let (jobs, inbox) = channel();
        let name = format!("kvasir-{operation}");
        let run = move || run(&inbox, operation, &metrics);
        let spawned = std::thread::Builder::new().name(name.clone()).spawn(run);
        spawned.map_err(|source| Error::Io { what: format!("cannot start {name}"), source })?;
        Ok(Self { jobs })
    }

    pub(crate) fn session(&self, session: Box<dyn Session>, rate: u32) -> SessionHandle {
        SessionHandle { session: Some(session), jobs: self.jobs.clone(), rate }
    }
}

fn run(inbox: &Receiver<Job>, operation: Operation, metrics: &OperationMetrics) {
    // Unfinished jobs, in the order of their turns.
    let mut begun: VecDeque<Job> = VecDeque::new();
    let mut fresh = false;
    loop {
        // Alternate between new and unfinished jobs, so that neither starves.
        fresh = !fresh;
        let job = match begun.is_empty() {
            true => inbox.recv().ok(),
            false if fresh => inbox.try_recv().ok().or_else(|| begun.pop_front()),
            false => begun.pop_front(),
        };
        let Some(Job { mut session, ask, rate, mut out, done }) = job else { return };
        // The caller is gone.
        if done.is_closed() {
            continue;
        }
        let start = Instant::now();
        let heard = match &ask {
            Ask::Hear(samples) => samples.len(),
            Ask::Segment { .. } | Ask::GoOn | Ask::Reset => 0,
        };
        // A panic ends only this session: `done` is dropped without a result.
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
        // The send fails if the caller is gone; the session is dropped with it.
        let _ = done.send(Done { session, answer });
    }
}

/// Runs a request. Returns whether more work is left.
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
    /// Takes more samples; returns the resulting outputs.
    ///
    /// # Errors
    /// Errors of the model, after which the session must not be used; [`Error::SessionLost`] if the session
    /// is lost.
    pub async fn hear(&mut self, samples: Vec<f32>) -> Result<Vec<OperationOutput>, Error> {
        self.ask(Ask::Hear(samples)).await
    }

    /// Returns the outputs for the audio so far.
    ///
    /// # Errors
    /// As [`Self::hear`].
    pub async fn segment(&mut self, last: bool) -> Result<Vec<OperationOutput>, Error> {
        self.ask(Ask::Segment { last }).await
    }

    /// Resets the session to its initial state.
    ///
    /// # Errors
    /// As [`Self::hear`].
    pub async fn reset(&mut self) -> Result<(), Error> {
        self.ask(Ask::Reset).await.map(drop)
    }

    /// Sends a request to the thread. Dropping the future loses the session.
    async fn ask(&mut self, ask: Ask) -> Result<Vec<OperationOutput>, Error> {
        let session = self.session.take().ok_or(Error::SessionLost)?;
        let (done, answer) = oneshot::channel();
        let job = Job { session, ask, rate: self.rate, out: Vec::new(), done };
        self.jobs.send(job).map_err(|_| Error::SessionLost)?;
        // The receive fails if the model panicked.
        let Done { session, answer } = answer.await.map_err(|_| Error::SessionLost)?;
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

    /// Takes `left` turns for a segment, with an output for each.
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
    async fn a_long_segment_takes_turns_and_ends_when_its_caller_is_gone() {
        let thread = ModelThread::start(Operation::Asr, OperationMetrics::default()).unwrap();
        let endless = || Box::new(Slow { name: 1, left: u64::MAX });
        let mut waits = thread.session(endless(), 16_000);
        let waiting = tokio::spawn(async move { waits.segment(true).await.map(drop) });
        // It is served although the other session never ends, and gets all of its own turns.
        let mut other = thread.session(Box::new(Slow { name: 2, left: 3 }), 16_000);
        let told = other.segment(true).await.unwrap();
        assert_eq!(told, vec![OperationOutput::SpeechEnded { at: 2 }; 3]);
        assert!(!waiting.is_finished());
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        // The thread ends with its sessions and drops work that nobody waits for.
        let alone = other.segment(true);
        drop(alone);
        drop((thread, other));
    }

    #[tokio::test]
    async fn a_session_that_panics_is_lost_and_others_are_not() {
        let thread = ModelThread::start(Operation::Vad, OperationMetrics::default()).unwrap();
        let mut lost = thread.session(Box::new(Fragile), 16_000);
        let mut other = thread.session(Box::new(Fragile), 16_000);
        assert!(matches!(lost.hear(vec![1.0]).await, Err(Error::SessionLost)));
        assert!(matches!(lost.segment(true).await, Err(Error::SessionLost)), "it is gone");
        assert_eq!(other.hear(vec![0.5]).await.unwrap(), []);
        assert_eq!(other.segment(true).await.unwrap(), [OperationOutput::SpeechEnded { at: 7 }]);
    }
}
