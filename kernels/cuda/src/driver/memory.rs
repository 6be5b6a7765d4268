//! Table of allocated addresses, because the driver itself does not refuse a copy past an allocation's end.

use super::super::{CudaError, DevicePtr};
use std::collections::BTreeMap;

/// Live allocations: start address and length in bytes.
#[derive(Debug, Default)]
pub(super) struct Allocations(BTreeMap<u64, usize>);

impl Allocations {
    pub(super) fn add(&mut self, ptr: DevicePtr, bytes: usize) {
        self.0.insert(ptr.0, bytes);
    }

    /// # Errors
    /// [`CudaError::Invalid`] if no allocation starts there.
    pub(super) fn remove(&mut self, ptr: DevicePtr) -> Result<(), CudaError> {
        let missing = || CudaError::Invalid { what: format!("no allocation starts at {:#x}", ptr.0) };
        self.0.remove(&ptr.0).map(|_| ()).ok_or_else(missing)
    }

    /// Checks that `bytes` bytes from `ptr` on lie inside one allocation.
    ///
    /// # Errors
    /// [`CudaError::Invalid`].
    pub(super) fn check(&self, ptr: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        let inside = self.0.range(..=ptr.0).next_back().is_some_and(|(start, len)| {
            let (offset, len) = (ptr.0 - start, *len as u64);
            offset.checked_add(bytes as u64).is_some_and(|end| end <= len)
        });
        let outside = || CudaError::Invalid {
            what: format!("{bytes} bytes at {:#x} do not lie inside of one allocation", ptr.0),
        };
        if inside { Ok(()) } else { Err(outside()) }
    }

    /// Removes and returns all allocations.
    pub(super) fn take(&mut self) -> impl Iterator<Item = DevicePtr> {
        std::mem::take(&mut self.0).into_keys().map(DevicePtr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bytes_inside_one_allocation_are_accepted() {
        let mut allocations = Allocations::default();
        allocations.add(DevicePtr(1000), 100);
        allocations.add(DevicePtr(1100), 50);
        for (start, bytes, inside) in [
            (1000, 100, true),
            (1000, 101, false),
            (1099, 1, true),
            (1099, 2, false),
            (1150, 0, true),
            (1151, 0, false),
            (999, 1, false),
            (1100, usize::MAX, false),
        ] {
            assert_eq!(allocations.check(DevicePtr(start), bytes).is_ok(), inside, "{start} {bytes}");
        }
        assert!(allocations.remove(DevicePtr(1001)).is_err());
        allocations.remove(DevicePtr(1000)).unwrap();
        assert!(allocations.check(DevicePtr(1000), 1).is_err());
        assert_eq!(allocations.take().collect::<Vec<_>>(), [DevicePtr(1100)]);
        assert!(allocations.check(DevicePtr(1100), 1).is_err());
    }
}
