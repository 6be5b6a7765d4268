//! Text and JSON of a simulation, and the proposal as a file for `kvasir apply`.

use crate::columns::columns;
use consensus::table::DeploymentSettings;
use planner::fleet::Model;
use planner::search::Proposal;
use planner::simulation::{ModelOutcome, Outcome};
use serde_json::json;
use toml::{Table, Value};

pub(super) fn totals(outcome: &Outcome) -> serde_json::Value {
    let Outcome { refused, ttft, loads, wakes, evictions, .. } = outcome;
    json!({"refused": refused, "ttft": ttft, "loads": loads, "wakes": wakes, "evictions": evictions})
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

pub(super) fn text(outcome: &Outcome) -> String {
    let heads = [
        "MODEL", "REQUESTS", "REFUSED", "TTFT P50", "P95", "P99", "WAITED", "LOADS", "WAKES", "EVICTED",
        "SLEPT", "REPLICAS",
    ];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    let seconds = |seconds: f64| format!("{seconds:.2} s");
    rows.extend(outcome.models.iter().map(|model| {
        vec![
            model.model.clone(),
            model.requests.to_string(),
            model.refused.total().to_string(),
            seconds(model.ttft.p50),
            seconds(model.ttft.p95),
            seconds(model.ttft.p99),
            format!("{} x {}", model.waited, seconds(model.wait.mean)),
            model.loads.to_string(),
            model.wakes.to_string(),
            model.evictions.to_string(),
            model.sleeps.to_string(),
            format!("{:.2}", model.replicas),
        ]
    }));
    let mut text = columns(&rows);
    let heads = ["NODE", "BUSY", "LOADING", "USED", "AT MOST", "MEMORY", "LOADS"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    rows.extend(outcome.nodes.iter().map(|node| {
        vec![
            node.node.clone(),
            percent(node.busy),
            percent(node.loading),
            mib(node.mean_used),
            mib(node.most_used),
            mib(node.memory),
            node.loads.to_string(),
        ]
    }));
    text += "\n";
    text += &columns(&rows);
    let Outcome { requests, refused, ttft, loads, wakes, evictions, seconds, .. } = outcome;
    text + &format!(
        "\n{requests} requests in {seconds:.0} s, {refused} refused; time to the first token: mean {:.2} s, p50 {:.2} s, \
         p95 {:.2} s, p99 {:.2} s; {loads} loads, {wakes} wakes, {evictions} evictions\n",
        ttft.mean, ttft.p50, ttft.p95, ttft.p99
    )
}

pub(super) fn compared(found: &Outcome, others: &[(&str, Outcome)]) -> String {
    let heads = ["EVICTS", "LOADS", "WAKES", "EVICTED", "REFUSED", "TTFT MEAN", "P95", "P99"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    let all = std::iter::once(("kvasir", found)).chain(others.iter().map(|(name, other)| (*name, other)));
    rows.extend(all.map(|(name, outcome)| {
        let Outcome { refused, ttft, loads, wakes, evictions, .. } = outcome;
        let seconds = |seconds: f64| format!("{seconds:.2} s");
        let counts = [*loads, *wakes, *evictions, *refused].map(|count| count.to_string());
        let times = [ttft.mean, ttft.p95, ttft.p99].map(seconds);
        std::iter::once(name.to_owned()).chain(counts).chain(times).collect()
    }));
    columns(&rows)
}

/// The proposed deployments, with the nodes where each model is expected as a comment. All other settings are those of
/// `text`, the file of the fleet.
pub(super) fn file(proposal: &Proposal, models: &[Model], text: &str) -> anyhow::Result<String> {
    let file: Table = toml::from_str(text)?;
    let Proposal { before, after, evaluations, fleet } = proposal;
    let total = |outcome: &Outcome| {
        format!(
            "{:.2} s mean, {:.2} s p95, {} loads and wakes, {} refused",
            outcome.ttft.mean,
            outcome.ttft.p95,
            outcome.loads + outcome.wakes,
            outcome.refused
        )
    };
    let mut text = format!(
        "# Proposal after {evaluations} simulations. Time to the first token:\n# now:      {}\n# expected: {}\n",
        total(before),
        total(after)
    );
    for ((model, outcome), now) in fleet.models.iter().zip(&after.models).zip(models) {
        let DeploymentSettings { min, max, idle_s, pin, .. } = model.settings;
        let entry = file.get("models").and_then(|models| models.get(model.name.as_str()));
        let mut entry = entry.and_then(Value::as_table).cloned().unwrap_or_default();
        entry.remove("costs");
        entry.insert("replicas".to_owned(), format!("{min}:{max}").into());
        entry.insert("idle".to_owned(), format!("{idle_s}s").into());
        entry.insert("pin".to_owned(), pin.into());
        let by_name = Table::from_iter([(model.name.to_string(), Value::from(entry))]);
        let file = Table::from_iter([("models".to_owned(), Value::from(by_name))]);
        let changed = if model.settings == now.settings { "" } else { "changed; " };
        text += &format!("\n# {changed}{}\n", places(outcome));
        text += &toml::to_string(&file)?;
    }
    Ok(text)
}

/// The nodes where a model is expected to be ready, at most eight.
fn places(outcome: &ModelOutcome) -> String {
    const SHOWN: usize = 8;
    let shown = outcome.places.iter().take(SHOWN).map(|(node, share)| format!("{node} {}", percent(*share)));
    let shown: Vec<String> = shown.collect();
    match outcome.places.len() {
        0 => "ready at no node".to_owned(),
        all if all > SHOWN => format!("ready at {}, and {} others", shown.join(", "), all - SHOWN),
        _ => format!("ready at {}", shown.join(", ")),
    }
}

pub(super) fn proposal(proposal: &Proposal) -> serde_json::Value {
    let models = proposal.fleet.models.iter().map(|model| {
        let DeploymentSettings { min, max, idle_s, pin, .. } = model.settings;
        (model.name.to_string(), json!({"min": min, "max": max, "idle_s": idle_s, "pin": pin}))
    });
    let models: serde_json::Map<String, serde_json::Value> = models.collect();
    json!({"evaluations": proposal.evaluations, "models": models, "outcome": proposal.after})
}
