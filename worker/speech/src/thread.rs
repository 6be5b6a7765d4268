//! The thread that computes for all sessions of one model, one piece after the other. A long segment is
//! computed in parts: the caller gets the outputs of each, and asks for the next one when it has passed them
//! on. So sessions alternate, a slow client keeps its session waiting, and a segment ends when its caller is
//! gone.

use crate::Error;
use crate::metrics::OperationMetrics;
use crate::session::Session;
use proto::operation::{Operation, OperationOutput};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// A request to a session.
enum SessionRequest {
    Push(Vec<f32>),
    Segment { last: bool },
    Continue,
    Reset,
}

/// Receives each time that was computed for a session, also for one that its caller has dropped meanwhile.
pub type Computed = Arc<dyn Fn(Duration) + Send + Sync>;

/// A session on its way to the thread, with a request.
struct Job {
    session: Box<dyn Session>,
    request: SessionRequest,
    rate: u32,
    computed: Option<Computed>,
    done: oneshot::Sender<Done>,
}

/// The returned session, with its outputs.
struct Done {
    session: Box<dyn Session>,
    result: Result<Outputs, Error>,
}

/// The outputs of a request.
#[derive(Debug, PartialEq)]
pub struct Outputs {
    pub outputs: Vec<OperationOutput>,
    /// The segment has another part.
    pub more: bool,
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
    computed: Option<Computed>,
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
        SessionHandle { session: Some(session), jobs: self.jobs.clone(), rate, computed: None }
    }
}

fn run(inbox: &Receiver<Job>, operation: Operation, metrics: &OperationMetrics) {
    while let Ok(Job { mut session, request, rate, computed, done }) = inbox.recv() {
        // The caller is gone.
        if done.is_closed() {
            continue;
        }
        let start = Instant::now();
        let sample_count = match &request {
            SessionRequest::Push(samples) => samples.len(),
            SessionRequest::Segment { .. } | SessionRequest::Continue | SessionRequest::Reset => 0,
        };
        let mut outputs = Vec::new();
        // A panic ends only this session: `done` is dropped without a result.
        let ran = catch_unwind(AssertUnwindSafe(|| run_request(session.as_mut(), request, &mut outputs)));
        let took = start.elapsed();
        computed.iter().for_each(|computed| computed(took));
        let sample_count = outputs.iter().map(spoken).sum::<usize>() + sample_count;
        metrics.computed(operation, took, sample_count as f64 / f64::from(rate));
        let Ok(more) = ran else { continue };
        let result = more.map(|more| Outputs { outputs, more });
        // The send fails if the caller is gone; the session is dropped with it.
        let _ = done.send(Done { session, result });
    }
}

/// Samples of audio in an output.
fn spoken(output: &OperationOutput) -> usize {
    match output {
        OperationOutput::Audio(pcm) => pcm.len(),
        _ => 0,
    }
}

/// Runs a request. Returns whether more work is left.
fn run_request(
    session: &mut dyn Session,
    request: SessionRequest,
    out: &mut Vec<OperationOutput>,
) -> Result<bool, Error> {
    match request {
        SessionRequest::Push(samples) => session.push(&samples, out)?,
        SessionRequest::Segment { last } => {
            session.segment(last, out)?;
            return session.continue_segment(out);
        }
        SessionRequest::Continue => return session.continue_segment(out),
        SessionRequest::Reset => session.reset(),
    }
    Ok(false)
}

impl SessionHandle {
    /// Passes the time that is computed for this session to `computed`, on the model's thread.
    pub fn count_time(&mut self, computed: Computed) {
        self.computed = Some(computed);
    }

    /// Takes more samples; returns the resulting outputs.
    ///
    /// # Errors
    /// Errors of the model, after which the session must not be used; [`Error::SessionLost`] if the session
    /// is lost.
    pub async fn push(&mut self, samples: Vec<f32>) -> Result<Vec<OperationOutput>, Error> {
        self.send(SessionRequest::Push(samples)).await.map(|done| done.outputs)
    }

    /// Returns the outputs for the audio so far, or the first part of them.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub async fn segment(&mut self, last: bool) -> Result<Outputs, Error> {
        self.send(SessionRequest::Segment { last }).await
    }

    /// Returns the next part of the outputs, if the part before says that there is one.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub async fn continue_segment(&mut self) -> Result<Outputs, Error> {
        self.send(SessionRequest::Continue).await
    }

    /// Resets the session to its initial state.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub async fn reset(&mut self) -> Result<(), Error> {
        self.send(SessionRequest::Reset).await.map(drop)
    }

    /// Sends a request to the thread. Dropping the future loses the session.
    async fn send(&mut self, request: SessionRequest) -> Result<Outputs, Error> {
        let session = self.session.take().ok_or(Error::SessionLost)?;
        let (done, result) = oneshot::channel();
        let (rate, computed) = (self.rate, self.computed.clone());
        let job = Job { session, request, rate, computed, done };
        self.jobs.send(job).map_err(|_| Error::SessionLost)?;
        // The receive fails if the model panicked.
        let Done { session, result } = result.await.map_err(|_| Error::SessionLost)?;
        self.session = Some(session);
        result
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

        fn push(&mut self, samples: &[f32], _: &mut Vec<OperationOutput>) -> Result<(), Error> {
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

        fn push(&mut self, _: &[f32], _: &mut Vec<OperationOutput>) -> Result<(), Error> {
            Ok(())
        }

        fn segment(&mut self, _: bool, _: &mut Vec<OperationOutput>) -> Result<(), Error> {
            Ok(())
        }

        fn continue_segment(&mut self, out: &mut Vec<OperationOutput>) -> Result<bool, Error> {
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
        let waiting = tokio::spawn(async move {
            waits.segment(true).await.unwrap();
            while waits.continue_segment().await.unwrap().more {}
        });
        // It is served although the other session never ends, and gets all of its own turns.
        let mut other = thread.session(Box::new(Slow { name: 2, left: 3 }), 16_000);
        let part = |more| Outputs { outputs: vec![OperationOutput::SpeechEnded { at: 2 }], more };
        assert_eq!(other.segment(true).await.unwrap(), part(true));
        assert_eq!(other.continue_segment().await.unwrap(), part(true));
        assert_eq!(other.continue_segment().await.unwrap(), part(false));
        assert!(!waiting.is_finished());
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        // The thread ends with its sessions and drops work that no caller waits for.
        let alone = other.segment(true);
        drop(alone);
        drop((thread, other));
    }

    #[tokio::test]
    async fn the_time_of_a_session_is_counted() {
        let thread = ModelThread::start(Operation::Asr, OperationMetrics::default()).unwrap();
        let mut session = thread.session(Box::new(Slow { name: 1, left: 3 }), 16_000);
        let (turns, counted) = channel();
        let turns = parking_lot::Mutex::new(turns);
        session.count_time(Arc::new(move |took| turns.lock().send(took).unwrap()));
        session.segment(true).await.unwrap();
        while session.continue_segment().await.unwrap().more {}
        drop((session, thread));
        assert_eq!(counted.iter().count(), 3);
    }

    #[tokio::test]
    async fn a_session_that_panics_is_lost_and_others_are_not() {
        let thread = ModelThread::start(Operation::Vad, OperationMetrics::default()).unwrap();
        let mut lost = thread.session(Box::new(Fragile), 16_000);
        let mut other = thread.session(Box::new(Fragile), 16_000);
        assert!(matches!(lost.push(vec![1.0]).await, Err(Error::SessionLost)));
        assert!(matches!(lost.segment(true).await, Err(Error::SessionLost)), "it is gone");
        assert_eq!(other.push(vec![0.5]).await.unwrap(), []);
        let ended = vec![OperationOutput::SpeechEnded { at: 7 }];
        assert_eq!(other.segment(true).await.unwrap(), Outputs { outputs: ended, more: false });
    }
}
