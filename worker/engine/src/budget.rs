//! The memory of a worker that holds several models: a ledger of weights, caches, scratch and the peaks of loads. Every
//! allocation of a model is reserved before it is made, and given back after it is freed.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::watch;

/// The ledger. Cheap to clone.
#[derive(Clone)]
pub struct MemoryBudget(Arc<Ledger>);

struct Ledger {
    /// Bytes that all reservations together may have.
    limit: u64,
    reserved: Mutex<u64>,
    /// Counts the times that memory was given back.
    released: watch::Sender<u64>,
}

/// A reservation that does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{requested} bytes do not fit: {reserved} of the {limit} bytes for models are in use")]
pub struct BudgetExceeded {
    pub requested: u64,
    /// Bytes of all reservations.
    pub reserved: u64,
    pub limit: u64,
}

/// Reserved bytes. Dropping it gives them back.
pub struct Reservation {
    budget: MemoryBudget,
    /// Read by others, written by the owner only.
    bytes: Arc<AtomicU64>,
}

/// The bytes of a [`Reservation`] for others to read: 0 once it is dropped.
#[derive(Debug, Clone, Default)]
pub struct ReservedBytes(Arc<AtomicU64>);

impl ReservedBytes {
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl std::fmt::Debug for MemoryBudget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryBudget")
            .field("limit", &self.limit())
            .field("reserved", &self.reserved())
            .finish()
    }
}

impl std::fmt::Debug for Reservation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reservation").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl MemoryBudget {
    /// An empty ledger of `limit` bytes.
    pub fn new(limit: u64) -> Self {
        Self(Arc::new(Ledger { limit, reserved: Mutex::default(), released: watch::Sender::new(0) }))
    }

    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Bytes of all reservations.
    pub fn reserved(&self) -> u64 {
        *self.0.reserved.lock()
    }

    /// Bytes that a reservation can have now.
    pub fn free(&self) -> u64 {
        self.limit().saturating_sub(self.reserved())
    }

    /// # Errors
    /// [`BudgetExceeded`] if less is free.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, BudgetExceeded> {
        let mut reservation = Reservation { budget: self.clone(), bytes: Arc::default() };
        reservation.grow(bytes)?;
        Ok(reservation)
    }

    /// Reserves memory that is in use already, whether or not it fits.
    pub fn record(&self, bytes: u64) -> Reservation {
        let mut reserved = self.0.reserved.lock();
        *reserved = reserved.saturating_add(bytes);
        Reservation { budget: self.clone(), bytes: Arc::new(AtomicU64::new(bytes)) }
    }

    /// Changes whenever memory was given back.
    pub fn released(&self) -> watch::Receiver<u64> {
        self.0.released.subscribe()
    }
}

impl Reservation {
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn watch(&self) -> ReservedBytes {
        ReservedBytes(Arc::clone(&self.bytes))
    }

    /// Adds `bytes`.
    ///
    /// # Errors
    /// [`BudgetExceeded`] if less is free. The reservation then stays as it is.
    pub fn grow(&mut self, bytes: u64) -> Result<(), BudgetExceeded> {
        let limit = self.budget.limit();
        let mut reserved = self.budget.0.reserved.lock();
        match reserved.checked_add(bytes).filter(|sum| *sum <= limit || bytes == 0) {
            Some(sum) => *reserved = sum,
            None => return Err(BudgetExceeded { requested: bytes, reserved: *reserved, limit }),
        }
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Takes over the bytes of another reservation of the same ledger.
    pub fn add(&mut self, other: Self) {
        self.bytes.fetch_add(other.bytes.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Gives back up to `bytes`.
    pub fn shrink(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes());
        if bytes == 0 {
            return;
        }
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        let mut reserved = self.budget.0.reserved.lock();
        *reserved = reserved.saturating_sub(bytes);
        drop(reserved);
        self.budget.0.released.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Sets the bytes to what was measured after the allocations: gives back the rest, or records what exceeds the
    /// reservation, whether or not it fits.
    pub fn settle(&mut self, bytes: u64) {
        let now = self.bytes();
        if bytes < now {
            return self.shrink(now - bytes);
        }
        let mut reserved = self.budget.0.reserved.lock();
        *reserved = reserved.saturating_add(bytes - now);
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shrink(self.bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_reservation_fits_or_changes_nothing() {
        let budget = MemoryBudget::new(100);
        let mut first = budget.reserve(60).unwrap();
        let refused = budget.reserve(41).unwrap_err();
        assert_eq!(refused, BudgetExceeded { requested: 41, reserved: 60, limit: 100 });
        assert_eq!(first.grow(u64::MAX).unwrap_err().requested, u64::MAX);
        assert_eq!((first.bytes(), budget.free()), (60, 40));
        let mut released = budget.released();
        first.shrink(10);
        assert!(released.has_changed().unwrap());
        released.mark_unchanged();
        let second = budget.reserve(50).unwrap();
        assert!(!released.has_changed().unwrap() && budget.free() == 0);
        drop(second);
        assert!(released.has_changed().unwrap());
        first.add(budget.reserve(20).unwrap());
        assert_eq!((first.bytes(), budget.reserved()), (70, 70));
        first.settle(120);
        assert_eq!((budget.reserved(), budget.free()), (120, 0), "memory in use is never left out");
        drop((first, budget.record(7)));
        assert_eq!(budget.reserved(), 0);
    }

    proptest! {
        #[test]
        fn the_ledger_is_the_sum_of_its_reservations(steps in prop::collection::vec((0..4_u8, 0..60_u64), 1..80)) {
            let budget = MemoryBudget::new(100);
            let mut held: Vec<Reservation> = Vec::new();
            for (kind, bytes) in steps {
                match (kind, held.last_mut()) {
                    (0, _) | (_, None) => held.extend(budget.reserve(bytes).ok()),
                    (1, Some(last)) => drop(last.grow(bytes)),
                    (2, Some(last)) => last.shrink(bytes),
                    (_, Some(_)) => drop(held.remove(bytes as usize % held.len())),
                }
                prop_assert_eq!(budget.reserved(), held.iter().map(Reservation::bytes).sum::<u64>());
                prop_assert!(budget.reserved() <= budget.limit());
            }
        }
    }
}
