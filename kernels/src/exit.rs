//! Ends a process even if exit handlers of its libraries hang.

#![allow(unsafe_code)]

use std::time::Duration;

/// Time limit of the libraries' exit handlers.
const HANDLERS: Duration = Duration::from_secs(2);

/// Ends the process with `code`. Exit handlers of libraries run for at most two seconds, because a GPU
/// driver's handler may wait for a device that never responds. A thread then ends the process without them.
pub fn end_process(code: i32) -> ! {
    let at_the_latest = move || {
        std::thread::sleep(HANDLERS);
        // SAFETY: `_exit` takes a number, accesses no memory of this process and does not return.
        unsafe { libc::_exit(code) }
    };
    // If the thread cannot be started, the handlers have no time limit.
    let _ = std::thread::Builder::new().name("ending".to_owned()).spawn(at_the_latest);
    std::process::exit(code)
}
