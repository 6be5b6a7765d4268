//! Delay after which the allocator returns unused memory to the kernel.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_long};
use std::time::Duration;

/// `mi_option_purge_delay` in version 3 of mimalloc's `mimalloc.h`: milliseconds.
const PURGE_DELAY: c_int = 15;

unsafe extern "C" {
    fn mi_option_set_default(option: c_int, value: c_long);
    fn mi_collect(force: bool);
    #[cfg(test)]
    fn mi_option_get(option: c_int) -> c_long;
}

/// Returns memory to the kernel only after it was unused for `time`. Memory returned earlier would have to be
/// zeroed again by the kernel, mostly 2 MiB at a time. The environment variable `MIMALLOC_PURGE_DELAY` has
/// priority.
pub(crate) fn keep_free_memory(time: Duration) {
    let millis = c_long::try_from(time.as_millis()).unwrap_or(c_long::MAX);
    // SAFETY: mimalloc, the linked global allocator, has this function with these types. It checks the
    // option's number and stores a number of its own. A concurrent reader sees the old or the new value,
    // because it is one word written at once.
    unsafe { mi_option_set_default(PURGE_DELAY, millis) }
}

/// Returns unused memory to the kernel now, also that of threads that have ended.
pub(crate) fn free_memory() {
    // SAFETY: mimalloc, the linked global allocator, has this function with this type. It may be called by any thread
    // at any time and frees nothing that is in use.
    unsafe { mi_collect(true) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_delay_that_is_set() {
        // SAFETY: as above.
        let get = || unsafe { mi_option_get(PURGE_DELAY) };
        // Default of this option only. Another mimalloc version may number the options differently.
        assert_eq!(get(), 1_000);
        keep_free_memory(Duration::from_secs(7));
        assert_eq!(get(), 7_000);
    }
}
