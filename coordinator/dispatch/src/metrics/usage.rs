//! Usage by tenant, key and model as metrics. They are made for each scrape, by administrators only: names of tenants
//! are not public.

use ::usage::row::{Account, Counter, Counters};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter as Metric;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use std::collections::HashMap;
use std::sync::atomic::AtomicU64;

type Labels = [(&'static str, String); 3];

/// Families of whole numbers.
const COUNTS: [(&str, &str, Counter); 7] = [
    ("kvasir_usage_requests", "Requests that have ended", Counter::Requests),
    ("kvasir_usage_prompt_tokens", "Prompt tokens, including cached ones", Counter::PromptTokens),
    ("kvasir_usage_cached_tokens", "Prompt tokens that were cached", Counter::CachedTokens),
    ("kvasir_usage_generated_tokens", "Tokens that were delivered", Counter::GeneratedTokens),
    (
        "kvasir_usage_recomputed_tokens",
        "Tokens that were computed again, or computed and not delivered",
        Counter::RecomputedTokens,
    ),
    ("kvasir_usage_attempts", "Ended attempts at workers", Counter::Attempts),
    ("kvasir_usage_timed_attempts", "Attempts whose device time is known", Counter::TimedAttempts),
];

/// Families of seconds and joules, with their units' scale.
const AMOUNTS: [(&str, &str, Counter, f64); 6] = [
    ("kvasir_usage_device_seconds", "Device time, without recomputed tokens", Counter::DeviceNs, 1e9),
    (
        "kvasir_usage_recomputed_device_seconds",
        "Device time of recomputed tokens",
        Counter::RecomputedDeviceNs,
        1e9,
    ),
    ("kvasir_usage_energy_joules", "Energy, without recomputed tokens", Counter::EnergyUj, 1e6),
    (
        "kvasir_usage_recomputed_energy_joules",
        "Energy of recomputed tokens",
        Counter::RecomputedEnergyUj,
        1e6,
    ),
    (
        "kvasir_usage_energy_device_seconds",
        "The device time for which the energy is known",
        Counter::EnergyDeviceNs,
        1e9,
    ),
    ("kvasir_usage_audio_seconds", "Audio that was processed", Counter::AudioMs, 1e3),
];

/// The usage of this run in the OpenMetrics text format. A value of zero is left out: it may be unknown.
pub fn text(totals: &HashMap<Account, Counters>) -> String {
    let mut registry = Registry::default();
    for (name, help, counter) in COUNTS {
        let family = Family::<Labels, Metric>::default();
        for (account, counters) in totals.iter().filter(|(_, counters)| counters.get(counter) > 0) {
            family.get_or_create(&labels(account)).inc_by(counters.get(counter));
        }
        registry.register(name, help, family);
    }
    for (name, help, counter, scale) in AMOUNTS {
        let family = Family::<Labels, Metric<f64, AtomicU64>>::default();
        for (account, counters) in totals.iter().filter(|(_, counters)| counters.get(counter) > 0) {
            family.get_or_create(&labels(account)).inc_by(counters.get(counter) as f64 / scale);
        }
        registry.register(name, help, family);
    }
    let mut text = String::new();
    // Writing to a `String` cannot fail.
    if encode(&mut text, &registry).is_err() {
        tracing::error!("cannot encode the metrics of usage");
    }
    text
}

fn labels(account: &Account) -> Labels {
    let key = account.key.as_deref().unwrap_or_default();
    [
        ("tenant", account.tenant.to_string()),
        ("key", key.to_owned()),
        ("model_name", account.model.to_string()),
    ]
}
