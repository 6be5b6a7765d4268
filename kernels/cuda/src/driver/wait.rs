//! Waits for the device, with a time limit and without spinning.

#![allow(unsafe_code)]

use super::super::CudaError;
use super::api::{self, Driver};
use cudarc::driver::sys::{CUevent, CUevent_flags};
use std::time::{Duration, Instant};

/// Flags of events to wait for: without timing, which would slow them down.
pub(super) const EVENT_FLAGS: u32 = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
/// Waits up to this long yield the CPU between polls instead of sleeping.
const YIELDING: Duration = Duration::from_micros(500);
/// After that, a sleep is this fraction (1/64) of the time waited so far, so that it adds less than one
/// percent on average.
const SLEEP_DIVISOR: u32 = 64;
/// Longest sleep between two polls.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);
const CALL: &str = "waiting for the GPU";

/// Waits until the device has reached an event, for at most `longest`.
///
/// # Errors
/// [`CudaError::Lost`] for a fault in the work before the event, and for a wait that does not end.
pub(super) fn event(driver: &Driver, event: CUevent, longest: Duration) -> Result<(), CudaError> {
    let started = Instant::now();
    loop {
        // SAFETY: the caller's event is live; an event that was never recorded counts as done.
        match unsafe { (driver.query_event)(event) } {
            api::NOT_READY => {}
            other => return driver.check("cuEventQuery", other),
        }
        let waited = started.elapsed();
        if waited >= longest {
            let status = format!("not finished after {} s", longest.as_secs_f32());
            return Err(CudaError::Lost { call: CALL, status });
        }
        match waited < YIELDING {
            true => std::thread::yield_now(),
            false => std::thread::sleep((waited / SLEEP_DIVISOR).min(LONGEST_SLEEP)),
        }
    }
}

/// Whether an error is that of a wait that did not end.
pub(super) fn is_hang(error: &CudaError) -> bool {
    matches!(error, CudaError::Lost { call: CALL, .. })
}
