//! The thread that computes for all sessions of one model, one piece after the other.

use super::session::Session;
use crate::Error;
use crate::telemetry::OperationMetrics;
use proto::operation::{Operation, OperationOutput};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;
use tokio::sync::oneshot;

/// What a session is asked.
enum Ask {
    Hear(Vec<f32>),
    Segment { last: bool },
    Reset,
}

/// A session, lent to the thread with what is asked of it.
struct Job {
    session: Box<dyn Session>,
    ask: Ask,
    rate: u32,
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
    /// Starts it.
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
    while let Ok(Job { mut session, ask, rate, done }) = inbox.recv() {
        // Whoever asked has left meanwhile.
        if done.is_closed() {
            continue;
        }
        let start = Instant::now();
        let heard = match &ask {
            Ask::Hear(samples) => samples.len(),
            Ask::Segment { .. } | Ask::Reset => 0,
        };
        // A runtime that panics ends the session, not those that share its thread: `done` is dropped unsent.
        let answer = catch_unwind(AssertUnwindSafe(|| computed(session.as_mut(), ask)));
        let Ok(answer) = answer else { continue };
        metrics.computed(operation, start.elapsed(), heard as f64 / f64::from(rate));
        // Nobody waits for it any more: the session ends with what is sent.
        let _ = done.send(Done { session, answer });
    }
}

fn computed(session: &mut dyn Session, ask: Ask) -> Result<Vec<OperationOutput>, Error> {
    let mut out = Vec::new();
    match ask {
        Ask::Hear(samples) => session.hear(&samples, &mut out)?,
        Ask::Segment { last } => session.segment(last, &mut out)?,
        Ask::Reset => session.reset(),
    }
    Ok(out)
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
        let job = Job { session, ask, rate: self.rate, done };
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

    /// Panics on loud sound.
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
