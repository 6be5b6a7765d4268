//! Ending a process whose libraries may not let it.

#![allow(unsafe_code)]

use std::time::Duration;

/// Time that the exit handlers of libraries have.
const HANDLERS: Duration = Duration::from_secs(2);

/// Ends the process with `code`. Exit handlers of libraries run, as far as they come: those of a GPU's driver may wait for
/// a device that never answers, so a thread ends the process without them after two seconds.
pub fn end_process(code: i32) -> ! {
    let at_the_latest = move || {
        std::thread::sleep(HANDLERS);
        // SAFETY: it takes a number, touches no memory of this process and does not return.
        unsafe { libc::_exit(code) }
    };
    // Without that thread the handlers have all the time they want.
    let _ = std::thread::Builder::new().name("ending".to_owned()).spawn(at_the_latest);
    std::process::exit(code)
}
