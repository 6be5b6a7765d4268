//! Threads that work out what may be drawn.

use crate::Error;
use crate::progress::spawn;
use parking_lot::Mutex;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

pub(super) type Job = Box<dyn FnOnce() + Send>;

/// See the module. They end when it is dropped and all jobs are done.
pub(super) struct Pool {
    jobs: Mutex<Sender<Job>>,
}

impl Pool {
    pub(super) fn start(threads: usize) -> Result<Self, Error> {
        let (jobs, inbox) = channel();
        let inbox = Arc::new(Mutex::new(inbox));
        for _ in 0..threads.max(1) {
            let inbox = Arc::clone(&inbox);
            spawn("kvasir-grammar", move || serve(&inbox))?;
        }
        Ok(Self { jobs: Mutex::new(jobs) })
    }

    /// `false`: there is nobody to run it.
    pub(super) fn run(&self, job: Job) -> bool {
        self.jobs.lock().send(job).is_ok()
    }
}

fn serve(inbox: &Mutex<Receiver<Job>>) {
    loop {
        let job = inbox.lock().recv();
        match job {
            // What a job has broken is the job's own; whoever waits for it has a deadline.
            Ok(job) => drop(catch_unwind(AssertUnwindSafe(job))),
            Err(_) => return,
        }
    }
}
