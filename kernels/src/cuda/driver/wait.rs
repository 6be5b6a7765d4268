//! Waiting for the device, not for ever and not by spinning.

#![allow(unsafe_code)]

use super::super::CudaError;
use super::api::{self, Driver};
use cudarc::driver::sys::{CUevent, CUevent_flags};
use std::time::{Duration, Instant};

/// How events that are waited for are made: without times, which would slow them down.
pub(super) const EVENT_FLAGS: u32 = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
/// A wait this short is not worth a sleep; other threads get the CPU between two looks.
const YIELDING: Duration = Duration::from_micros(500);
/// After that, a sleep is this part of the time waited so far, so that it adds less than one percent on average.
const PART: u32 = 64;
/// Longest sleep between two looks.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);
const CALL: &str = "waiting for the GPU";

/// Waits until the device has come to an event, `longest` at most.
///
/// # Errors
/// [`CudaError::Lost`] for a fault of what ran before the event, and for a wait that does not end.
pub(super) fn event(driver: &Driver, event: CUevent, longest: Duration) -> Result<(), CudaError> {
    let started = Instant::now();
    loop {
        // SAFETY: the caller's event lives; one that was never recorded counts as done.
        match unsafe { (driver.query_event)(event) } {
            api::NOT_READY => {}
            other => return driver.check("cuEventQuery", other),
        }
        let waited = started.elapsed();
        if waited >= longest {
            let status = format!("no end after {} s", longest.as_secs_f32());
            return Err(CudaError::Lost { call: CALL, status });
        }
        match waited < YIELDING {
            true => std::thread::yield_now(),
            false => std::thread::sleep((waited / PART).min(LONGEST_SLEEP)),
        }
    }
}

/// Whether an error is that of a wait which did not end.
pub(super) fn is_hang(error: &CudaError) -> bool {
    matches!(error, CudaError::Lost { call: CALL, .. })
}
