//! The latest severities of this process's node, for its metrics.

use crate::findings::Severity;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Older severities are not returned: the checks hang.
const STALE: Duration = Duration::from_secs(120);

type Severities = BTreeMap<&'static str, Severity>;

static LATEST: Mutex<Option<(Instant, Severities)>> = Mutex::new(None);

/// Sets the severity of each check that was made now.
pub fn set_latest(severities: Severities) {
    *LATEST.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), severities));
}

/// The severity of each check that was made in the last two minutes.
pub fn latest() -> Severities {
    let latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
    let recent = latest.as_ref().filter(|(at, _)| at.elapsed() <= STALE);
    recent.map(|(_, severities)| severities.clone()).unwrap_or_default()
}
