//! Runs the batches of this coordinator in the fleet's idle time. A line is planned and dispatched like an HTTP request
//! of its tenant, with the priority of `Background`.
//!
//! The number of lines at workers is adapted (`Pace`): it grows while workers have room and shrinks while requests
//! wait. A line ends once its result is on disk; one without a result runs again after a restart.

mod line;
mod pace;

use super::AppState;
use super::admitted::Background;
use super::endpoint::Endpoint;
use super::error::ApiError;
use files::{BatchRecord, FilesError, Line, LineError, Lines, Outcome, Results, Status, now};
use futures::stream::{FuturesUnordered, StreamExt};
use line::{Context, LineResult};
use pace::{Pace, Slots};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Most batches that run at once. Further ones wait, those of tenants with the fewest running ones first.
const MAX_RUNNING: usize = 8;
/// Lines of a batch that are in memory.
const LINES_AHEAD: usize = 128;
/// Interval of looks at the fleet and at the batches.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Interval of looks at what has expired.
const EXPIRE_EVERY: Duration = Duration::from_secs(60);
/// Pause after a failed write.
const DISK_PAUSE: Duration = Duration::from_secs(5);
/// Most results that are written at once.
const WRITE_AT_ONCE: usize = 64;

/// Runs batches until it is dropped.
pub async fn run(state: Arc<AppState>) {
    let slots = Slots::default();
    let mut pace = Pace::default();
    let mut tasks = JoinSet::new();
    let mut running: HashMap<String, String> = HashMap::new();
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut expired = Instant::now();
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = state.batches.changed() => {}
            Some(ended) = tasks.join_next() => {
                // A task that panicked is tried again at the next start.
                if let Ok(id) = ended {
                    running.remove(&id);
                }
            }
        }
        if expired.elapsed() >= EXPIRE_EVERY {
            expired = Instant::now();
            let store = Arc::clone(state.batches.store());
            let ended = tokio::task::spawn_blocking(move || store.expire(now())).await;
            if let Ok(Err(error)) = ended {
                tracing::error!(%error, "expired files and batches cannot be removed; it is tried again every minute");
            }
        }
        if !running.is_empty() {
            let few = state.batches.others_arrive(Instant::now());
            slots.limit(pace.next(slots.taken(), few, &state.dispatch.worker_loads()));
        }
        let (files, bytes, open) = state.batches.store().sizes();
        state.metrics.batches(files, bytes, open, slots.taken());
        for batch in next(state.batches.store().unfinished(), &running) {
            running.insert(batch.id.clone(), batch.tenant.clone());
            let (state, slots) = (Arc::clone(&state), slots.clone());
            tasks.spawn(async move {
                let id = batch.id.clone();
                run_until_recorded(&state, &slots, batch).await;
                id
            });
        }
    }
}

/// The batches to start. One that is cancelled or was ending needs no turn.
fn next(unfinished: Vec<BatchRecord>, running: &HashMap<String, String>) -> Vec<BatchRecord> {
    let mut by_tenant: HashMap<String, usize> = HashMap::new();
    running.values().for_each(|tenant| *by_tenant.entry(tenant.clone()).or_default() += 1);
    let waits = |batch: &BatchRecord| !running.contains_key(&batch.id);
    let (mut queue, mut chosen): (Vec<_>, Vec<_>) = unfinished
        .into_iter()
        .filter(waits)
        .partition(|batch| matches!(batch.status, Status::Validating | Status::InProgress));
    let mut room = MAX_RUNNING.saturating_sub(running.len());
    while room > 0 && !queue.is_empty() {
        let of = |batch: &BatchRecord| by_tenant.get(&batch.tenant).copied().unwrap_or(0);
        // The first of equal ones: they are in the order of creation.
        let at = (0..queue.len()).min_by_key(|at| of(&queue[*at])).unwrap_or(0);
        let batch = queue.remove(at);
        *by_tenant.entry(batch.tenant.clone()).or_default() += 1;
        chosen.push(batch);
        room -= 1;
    }
    chosen
}

/// Runs a batch to its end. If the disk fails, goes on from what is recorded.
async fn run_until_recorded(state: &Arc<AppState>, slots: &Slots, batch: BatchRecord) {
    let mut batch = batch;
    loop {
        let id = batch.id.clone();
        let error = match run_batch(state, slots, batch).await {
            Ok(()) => return,
            Err(error @ FilesError::Damaged { .. }) => {
                tracing::error!(batch = id, %error, "the batch fails");
                let message = "the results of the batch are damaged on the coordinator's disk".to_owned();
                let fault = LineError { code: "storage_damaged".into(), message, param: None, line: None };
                let (store, id) = (Arc::clone(state.batches.store()), id.clone());
                match on_disk(move || store.fail(&id, vec![fault])).await {
                    Ok(_) => return,
                    Err(error) => error,
                }
            }
            Err(error) => error,
        };
        tracing::error!(batch = id, %error, "a batch cannot be read or written; it is tried again");
        tokio::time::sleep(DISK_PAUSE).await;
        match state.batches.store().present(&id) {
            Ok(present) if !present.status.is_final() => batch = present,
            _ => return,
        }
    }
}

async fn run_batch(state: &Arc<AppState>, slots: &Slots, batch: BatchRecord) -> Result<(), FilesError> {
    let store = Arc::clone(state.batches.store());
    let (id, at) = (batch.id.clone(), Arc::clone(&store));
    let ends_as = batch.ends_as;
    let opened = on_disk(move || {
        let results = at.results(&batch)?;
        if batch.ends_as.is_some() || batch.status == Status::Cancelling {
            return Ok((results, batch, None));
        }
        match at.lines(&batch)? {
            Err(errors) => at.fail(&batch.id, errors).map(|batch| (results, batch, None)),
            Ok(lines) => {
                let batch = at.begin(&batch.id, lines.order().len() as u64)?;
                Ok((results, batch, Some(lines)))
            }
        }
    });
    let (mut results, batch, lines) = opened.await?;
    if batch.status == Status::Failed {
        tracing::info!(batch = id, tenant = batch.tenant, faults = batch.errors.len(), "a batch was refused");
        return Ok(());
    }
    store.count(&id, results.counts());
    let end = match (ends_as, lines) {
        (Some(end), _) => end,
        (None, None) => Status::Cancelled,
        (None, Some(lines)) => {
            let (after, end) = run_lines(state, slots, &batch, Arc::new(lines), results).await?;
            results = after;
            end
        }
    };
    let ended = on_disk(move || store.finish(&id, &results, end)).await?;
    let files::Counts { total, completed, failed } = ended.counts;
    tracing::info!(
        batch = ended.id,
        tenant = ended.tenant,
        status = ended.status.name(),
        total,
        completed,
        failed,
        "a batch has ended"
    );
    Ok(())
}

/// Runs the lines without a result, and returns how the batch ends.
async fn run_lines(
    state: &Arc<AppState>,
    slots: &Slots,
    batch: &BatchRecord,
    lines: Arc<Lines>,
    mut results: Results,
) -> Result<(Results, Status), FilesError> {
    let store = state.batches.store();
    let endpoint = super::batches::ENDPOINTS.into_iter().find(|known| known.path() == batch.endpoint);
    let Some(endpoint) = endpoint else { return Ok((results, Status::Cancelled)) };
    let context = Arc::new(Context::new(state, slots, batch, endpoint, &lines));
    let missing: Vec<Line> = lines.order().iter().filter(|line| !results.has(line.number)).copied().collect();
    let mut waiting = missing.into_iter();
    let mut running = FuturesUnordered::new();
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        while running.len() < LINES_AHEAD
            && let Some(line) = waiting.next()
        {
            running.push(Arc::clone(&context).run(line));
        }
        if running.is_empty() {
            return Ok((results, Status::Completed));
        }
        tokio::select! {
            Some(ended) = running.next() => {
                let mut done = vec![ended?];
                while done.len() < WRITE_AT_ONCE
                    && let Some(Some(ended)) = futures::FutureExt::now_or_never(running.next())
                {
                    done.push(ended?);
                }
                results = record(state, &batch.id, results, done).await;
            }
            _ = looks.tick() => {
                let present = store.present(&batch.id)?;
                if present.status == Status::Cancelling {
                    return Ok((results, Status::Cancelled));
                }
                if now() >= present.expires_at {
                    drop(running);
                    let expired = context.expire(results);
                    let results = on_disk(expired).await?;
                    store.count(&batch.id, results.counts());
                    return Ok((results, Status::Expired));
                }
            }
        }
    }
}

/// Writes results. While the disk fails, tries again, so that no line runs twice.
async fn record(state: &AppState, id: &str, mut results: Results, done: Vec<LineResult>) -> Results {
    let done = Arc::new(done);
    loop {
        let lines = Arc::clone(&done);
        let write = move || {
            let written = results.append(&lines);
            (results, written)
        };
        let (after, written) = match tokio::task::spawn_blocking(write).await {
            Ok(written) => written,
            // The runtime stops.
            Err(_) => std::future::pending().await,
        };
        results = after;
        match written {
            Ok(()) => break,
            Err(error) => {
                tracing::error!(batch = id, %error, "results of a batch cannot be written; it is tried again")
            }
        }
        tokio::time::sleep(DISK_PAUSE).await;
    }
    state.batches.store().count(id, results.counts());
    for (_, outcome, _) in done.iter() {
        state.metrics.batch_line(matches!(outcome, Outcome::Completed));
    }
    results
}

/// Runs a call that waits for the disk.
async fn on_disk<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, FilesError> + Send + 'static,
) -> Result<T, FilesError> {
    match tokio::task::spawn_blocking(call).await {
        Ok(done) => done,
        // The runtime stops.
        Err(_) => std::future::pending().await,
    }
}
