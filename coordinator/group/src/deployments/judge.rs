//! Whether a canary is rolled back.

use consensus::table::CanaryShare;
use dispatch::ModelCounts;

/// The reason to roll back the canary, if there is one. `active` and `canary` are the counts since the rollout began.
/// Errors are judged as soon as the requests that are still missing cannot make up for them.
pub(super) fn worse(bounds: &CanaryShare, active: &ModelCounts, canary: &ModelCounts) -> Option<String> {
    let min = u64::from(bounds.min_requests);
    let per_thousand = |counts: &ModelCounts, of: u64| (counts.failed * 1000) as f64 / of.max(1) as f64;
    let (own, base) =
        (per_thousand(canary, canary.requests().max(min)), per_thousand(active, active.requests()));
    let most = base + f64::from(bounds.max_errors_permille);
    if own > most {
        let (failed, all) = (canary.failed, canary.requests());
        return Some(format!(
            "{failed} of {all} requests failed, more than {:.1} in a thousand, the active version's rate and the bound",
            most
        ));
    }
    if canary.finished < min {
        return None;
    }
    let (own, base) = (canary.median_first_token()?, active.median_first_token()?);
    let most = base.mul_f64(f64::from(bounds.max_ttft_percent) / 100.0);
    (own > most).then(|| {
        format!(
            "the median time to first token is {} ms, and the bound is {} % of the active version's {} ms",
            own.as_millis(),
            bounds.max_ttft_percent,
            base.as_millis()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dispatch::Outcomes;
    use proto::ids::ModelId;
    use std::time::Duration;

    const BOUNDS: CanaryShare =
        CanaryShare { permille: 50, min_requests: 50, max_errors_permille: 20, max_ttft_percent: 200 };

    fn counts(finished: u64, failed: u64, millis: u64) -> ModelCounts {
        let outcomes = Outcomes::default();
        let id = ModelId::new("m").unwrap().version(&[1; 32]).unwrap();
        (0..finished).for_each(|_| outcomes.finished(&id, Duration::from_millis(millis)));
        (0..failed).for_each(|_| outcomes.failed(&id));
        outcomes.totals().remove(&id).unwrap_or_default()
    }

    #[test]
    fn a_canary_is_rolled_back_for_errors_and_for_slowness_only_beyond_the_bounds() {
        let active = counts(990, 10, 100);
        for (canary, reason) in [
            (counts(0, 0, 100), None),
            (counts(49, 1, 100), None),
            // 3 % is at most 1 % and 2 %.
            (counts(97, 3, 100), None),
            (counts(96, 4, 100), Some("4 of 100 requests failed")),
            // Two of the first ones cannot be made up for within 50.
            (counts(0, 1, 100), None),
            (counts(0, 2, 100), Some("2 of 2 requests failed")),
            (counts(49, 0, 900), None),
            (counts(50, 0, 180), None),
            (counts(50, 0, 900), Some("the median time to first token")),
        ] {
            let found = worse(&BOUNDS, &active, &canary);
            assert_eq!(found.is_some(), reason.is_some(), "{canary:?}: {found:?}");
            assert!(reason.is_none_or(|reason| found.unwrap().starts_with(reason)));
        }
        // Without requests of the active version only errors count.
        let none = ModelCounts::default();
        assert_eq!(worse(&BOUNDS, &none, &counts(50, 0, 90_000)), None);
        assert!(worse(&BOUNDS, &none, &counts(0, 2, 1)).is_some());
    }
}
