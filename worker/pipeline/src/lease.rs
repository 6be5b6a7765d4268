//! Leases between stages. In a cluster, the first stage holds the others by leases, and either side notices
//! the loss of the other, even if the network fails in one direction only or no step is in flight.
//!
//! The latest claim, by (plan index, epoch), holds a stage. A later claim ends an earlier one; an earlier
//! claim is refused. So a first stage that was given up but still runs can use no stage.

use parking_lot::Mutex;
use proto::ids::Epoch;
use proto::placement::{ClaimRefusal, StageClaim};
use proto::stage::ReplicaId;
use std::time::Duration;
use tokio::sync::watch;
use transport::{CloseCode, Connection, LeaseCall, StageLease};

const BEAT_EVERY: Duration = Duration::from_millis(400);
/// Without a heartbeat for this long the other side is lost. Together with one [`BEAT_EVERY`] and the time to
/// react, a loss is handled within 3 s.
const LEASE: Duration = Duration::from_secs(2);

/// The claim of a first stage on the others.
#[derive(Debug, Clone, Copy)]
pub struct ReplicaClaim {
    pub plan_index: u64,
    pub epoch: Epoch,
}

impl ReplicaClaim {
    pub(crate) fn of(self, replica: ReplicaId) -> StageClaim {
        StageClaim { replica, plan_index: self.plan_index, epoch: self.epoch }
    }
}

/// Renews a lease until the stage stops responding. Then closes the connection, so that all waits for the
/// stage fail, and returns the reason.
pub(crate) async fn keep(mut lease: StageLease, connection: Connection) -> String {
    loop {
        let reason = match tokio::time::timeout(LEASE, lease.beat()).await {
            Ok(Ok(())) => {
                tokio::time::sleep(BEAT_EVERY).await;
                continue;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no heartbeat for {} s", LEASE.as_secs()),
        };
        connection.close(CloseCode::Fenced);
        return reason;
    }
}

#[derive(Debug, Default)]
pub struct Claims(Mutex<LeaseState>);

#[derive(Debug, Default)]
struct LeaseState {
    /// The latest claim that was ever granted: (plan index, epoch).
    latest: (u64, u64),
    now: Option<Holder>,
    /// Whether this worker is the first stage of a replica.
    leads: bool,
}

#[derive(Debug)]
struct Holder {
    claim: StageClaim,
    /// Dropped when the claim ends.
    lasts: watch::Sender<()>,
}

/// Resolves when the claim ends.
#[derive(Debug, Clone)]
pub struct Hold(watch::Receiver<()>);

impl Hold {
    /// Resolves when the claim has ended.
    pub async fn ended(&mut self) {
        while self.0.changed().await.is_ok() {}
    }
}

impl Claims {
    /// Sets whether this worker is a first stage itself.
    pub fn leads(&self, leads: bool) {
        self.0.lock().leads = leads;
    }

    /// The plan index of the claim that holds this worker, or `None`.
    pub fn plan_index(&self) -> Option<u64> {
        self.0.lock().now.as_ref().map(|holder| holder.claim.plan_index)
    }

    /// A `Hold` on the claim if `replica` is its holder.
    pub fn hold(&self, replica: ReplicaId) -> Option<Hold> {
        let held = self.0.lock();
        let holder = held.now.as_ref().filter(|holder| holder.claim.replica == replica)?;
        Some(Hold(holder.lasts.subscribe()))
    }

    fn claim(&self, claim: StageClaim) -> Result<(), ClaimRefusal> {
        let mut held = self.0.lock();
        let (plan_index, epoch) = held.latest;
        if (claim.plan_index, claim.epoch.0) <= (plan_index, epoch) {
            return Err(ClaimRefusal::Stale { plan_index, epoch: Epoch(epoch) });
        }
        if held.leads {
            return Err(ClaimRefusal::Leads);
        }
        held.latest = (claim.plan_index, claim.epoch.0);
        held.now = Some(Holder { claim, lasts: watch::Sender::new(()) });
        Ok(())
    }

    fn release(&self, claim: &StageClaim) {
        let mut held = self.0.lock();
        if held.now.as_ref().is_some_and(|holder| holder.claim == *claim) {
            held.now = None;
        }
    }

    /// Serves a claim until it ends.
    pub async fn serve(&self, call: LeaseCall) {
        let claim = call.claim;
        if let Err(refusal) = self.claim(claim) {
            tracing::warn!(plan_index = claim.plan_index, epoch = claim.epoch.0, %refusal, "refused the claim of a first stage");
            // The send fails if the claimant is gone.
            let _ = call.refuse(refusal).await;
            return;
        }
        let ended = match call.grant().await {
            Ok(mut lease) => loop {
                match tokio::time::timeout(LEASE, lease.beat()).await {
                    Ok(Ok(())) if self.hold(claim.replica).is_some() => {}
                    Ok(Ok(())) => break "another first stage has claimed the worker".to_owned(),
                    Ok(Err(error)) => break error.to_string(),
                    Err(_) => break format!("no heartbeat for {} s", LEASE.as_secs()),
                }
            },
            Err(error) => error.to_string(),
        };
        tracing::info!(
            plan_index = claim.plan_index,
            epoch = claim.epoch.0,
            ended,
            "the claim of a first stage has ended"
        );
        self.release(&claim);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(plan_index: u64, epoch: u64) -> StageClaim {
        StageClaim { replica: ReplicaId([epoch as u8; 16]), plan_index, epoch: Epoch(epoch) }
    }

    #[test]
    fn the_latest_claim_holds_and_earlier_ones_are_refused() {
        let claims = Claims::default();
        claims.claim(claim(5, 10)).unwrap();
        let first = claims.hold(ReplicaId([10; 16])).unwrap();
        let stale = |plan_index, epoch| Err(ClaimRefusal::Stale { plan_index, epoch: Epoch(epoch) });
        assert_eq!(claims.claim(claim(5, 10)), stale(5, 10), "one attempt claims once");
        assert_eq!(claims.claim(claim(4, 99)), stale(5, 10), "an earlier life");
        claims.claim(claim(5, 11)).unwrap();
        assert_eq!(claims.plan_index(), Some(5));
        assert!(claims.hold(ReplicaId([10; 16])).is_none());
        assert!(first.0.has_changed().is_err(), "the earlier attempt has lost it");
        // Releasing a claim that has ended must not release its successor.
        claims.release(&claim(5, 10));
        assert!(claims.hold(ReplicaId([11; 16])).is_some());
        claims.claim(claim(6, 1)).unwrap();
        claims.release(&claim(6, 1));
        assert_eq!(claims.plan_index(), None);
        assert_eq!(claims.claim(claim(5, 12)), stale(6, 1), "also when nobody holds it");
    }

    #[test]
    fn a_first_stage_cannot_be_claimed() {
        let claims = Claims::default();
        claims.leads(true);
        assert_eq!(claims.claim(claim(1, 1)), Err(ClaimRefusal::Leads));
        claims.leads(false);
        claims.claim(claim(1, 1)).unwrap();
    }
}
