//! How long the allocator keeps memory that nobody uses before the kernel gets it back.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_long};
use std::time::Duration;

/// `mi_option_purge_delay` in version 3 of mimalloc's `mimalloc.h`: milliseconds.
const PURGE_DELAY: c_int = 15;

unsafe extern "C" {
    fn mi_option_set_default(option: c_int, value: c_long);
    #[cfg(test)]
    fn mi_option_get(option: c_int) -> c_long;
}

/// Memory that is not in use for this long goes back to the kernel. What is needed again sooner would be filled with
/// zeros by it, mostly 2 MiB at a time. `MIMALLOC_PURGE_DELAY` in the environment counts more.
pub(crate) fn keep_free_memory(time: Duration) {
    let millis = c_long::try_from(time.as_millis()).unwrap_or(c_long::MAX);
    // SAFETY: mimalloc, which is linked in as the global allocator, has this function with these types; it checks the
    // option's number and stores a number of its own. Another thread that reads it meanwhile sees the old or the new one:
    // it is a word that is written at once.
    unsafe { mi_option_set_default(PURGE_DELAY, millis) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_delay_that_is_set() {
        // SAFETY: as above.
        let get = || unsafe { mi_option_get(PURGE_DELAY) };
        // What only this option is by default; another version may have numbered them otherwise.
        assert_eq!(get(), 1_000);
        keep_free_memory(Duration::from_secs(7));
        assert_eq!(get(), 7_000);
    }
}
