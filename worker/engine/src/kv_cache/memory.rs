//! The host-memory floor. Allocations that would leave less than the floor free are refused, so that the
//! kernel need not kill a process and a machine whose GPU shares the host's memory does not lock up.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Source of the host's free memory. Tests use a fake.
pub trait MemInfo {
    /// Bytes that can be allocated without swapping.
    fn available_bytes(&self) -> io::Result<u64>;
}

/// `MemAvailable` of `/proc/meminfo`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcMemInfo;

impl MemInfo for ProcMemInfo {
    fn available_bytes(&self) -> io::Result<u64> {
        parse_available(&std::fs::read_to_string(Path::new("/proc/meminfo"))?)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum MemoryRefused {
    /// The allocation would leave less than the floor.
    #[error(
        "cannot allocate {requested} bytes for {purpose}: {available} are available and {floor} must stay \
         free"
    )]
    BelowFloor {
        purpose: &'static str,
        /// Requested bytes.
        requested: u64,
        /// Bytes that can be allocated now.
        available: u64,
        /// Bytes that must stay free.
        floor: u64,
    },
    /// Free memory cannot be read, so no allocation is admitted.
    #[error("cannot read the free memory of this host: {0}")]
    Unknown(#[from] io::Error),
}

/// Bytes of the host that no allocation of the engine may touch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryFloor {
    /// The floor in bytes.
    pub bytes: u64,
}

impl MemoryFloor {
    /// Checks whether `requested` bytes can be allocated. Large allocations repeat the check before each
    /// part, because other processes allocate too.
    pub fn admit(
        self,
        info: &dyn MemInfo,
        purpose: &'static str,
        requested: u64,
    ) -> Result<(), MemoryRefused> {
        let available = info.available_bytes()?;
        if requested.checked_add(self.bytes).is_some_and(|needed| needed <= available) {
            Ok(())
        } else {
            Err(MemoryRefused::BelowFloor { purpose, requested, available, floor: self.bytes })
        }
    }

    /// Whether the host is below the floor now. If it is, the worker takes no new work and frees what it can.
    pub fn is_breached(self, info: &dyn MemInfo) -> io::Result<bool> {
        Ok(info.available_bytes()? < self.bytes)
    }
}

/// The host's memory floor and the source of its free memory.
#[derive(Clone)]
pub struct HostFloor {
    /// Bytes that must stay free.
    pub floor: MemoryFloor,
    pub memory: Arc<dyn MemInfo + Send + Sync>,
}

impl fmt::Debug for HostFloor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostFloor").field("floor", &self.floor).finish_non_exhaustive()
    }
}

fn parse_available(text: &str) -> io::Result<u64> {
    text.lines()
        .find_map(|line| {
            line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        })
        .and_then(|kib| kib.checked_mul(1024))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no usable MemAvailable in /proc/meminfo"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    struct Fake(Cell<u64>);

    impl MemInfo for Fake {
        fn available_bytes(&self) -> io::Result<u64> {
            Ok(self.0.get())
        }
    }

    struct Unreadable;

    impl MemInfo for Unreadable {
        fn available_bytes(&self) -> io::Result<u64> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
    }

    #[test]
    fn an_allocation_stops_before_the_floor() {
        let host = Fake(Cell::new(1000));
        let floor = MemoryFloor { bytes: 300 };
        assert!(floor.admit(&host, "weights", 700).is_ok());
        let refused = floor.admit(&host, "kv cache", 701).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "cannot allocate 701 bytes for kv cache: 1000 are available and 300 must stay free"
        );
        assert!(floor.admit(&host, "kv cache", u64::MAX).is_err());
        assert!(!floor.is_breached(&host).unwrap());
        host.0.set(299);
        assert!(floor.is_breached(&host).unwrap());
        assert!(floor.admit(&host, "nothing", 0).is_err());
    }

    #[test]
    fn unknown_memory_refuses() {
        let refused = MemoryFloor { bytes: 0 }.admit(&Unreadable, "weights", 1);
        assert!(matches!(refused, Err(MemoryRefused::Unknown(_))));
    }

    #[test]
    fn meminfo_is_read_in_kib() {
        let text = "MemTotal:  100 kB\nMemFree:  5 kB\nMemAvailable:     7 kB\n";
        assert_eq!(parse_available(text).unwrap(), 7 * 1024);
        for bad in ["", "MemAvailable: x kB", "MemAvailable: 7", "MemAvailable: 18446744073709551615 kB"] {
            assert!(parse_available(bad).is_err(), "{bad:?}");
        }
    }
}
