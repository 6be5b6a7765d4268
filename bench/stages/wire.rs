//! Cost per byte between stages: both ends in this process over loopback, with encryption and conversion from
//! and to f32, without computation. Uses one pair of endpoints, or several at once (lanes).

use anyhow::{Context, Result, bail, ensure};
use pki::ca::Authority;
use pki::{Expected, Identity};
use proto::ids::{ClusterName, Epoch, NodeId, Role};
use proto::stage::{ReplicaId, StageFeed, StageFrame, StageStep};
use serde_json::{Value, json};
use std::num::NonZero;
use std::time::{Instant, SystemTime};
use tokio::task::JoinSet;
use transport::{ActivationSender, Connection, Endpoint, EndpointConfig, Incoming};

/// Rows of 1,024 values.
const HIDDEN: usize = 1024;

/// Both ends of a lane, each with its own endpoint.
struct Lane {
    sender: ActivationSender,
    theirs: Connection,
    /// Kept until everything is sent.
    _endpoints: [Endpoint; 2],
}

/// Threads that move the bytes, besides the sending one: one for a single lane, as between two stages that
/// share a CPU with arithmetic; with several lanes the number of CPUs.
pub(crate) fn threads(lanes: usize) -> usize {
    if lanes > 1 { cpus() } else { 1 }
}

/// CPUs that this process may use.
fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Sends `count` steps of `rows` rows, divided among `lanes` lanes; each lane sends its steps one after the
/// other.
pub(crate) async fn run(count: usize, rows: usize, lanes: usize) -> Result<Value> {
    ensure!((1..=64).contains(&lanes), "`lanes`: {lanes}, 1 to 64 are possible");
    let ca = Authority::new(ClusterName::new("bench")?, SystemTime::now())?;
    let mut opened = Vec::new();
    for _ in 0..lanes {
        opened.push(open(&ca).await?);
    }
    let (cpu, start) = (cpu_seconds()?, Instant::now());
    let last = opened.pop().context("no lane")?;
    let mut ends = JoinSet::new();
    for (number, lane) in opened.into_iter().enumerate() {
        // The first lanes have one more if the division has a remainder.
        let count = count / lanes + usize::from(number < count % lanes);
        ends.spawn(carry(lane, count, rows));
    }
    let (mut bytes, mut received) = carry(last, count / lanes, rows).await?;
    while let Some(carried) = ends.join_next().await {
        let (sent, values) = carried??;
        bytes += sent;
        received += values;
    }
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds()? - cpu);
    let cost = cpu / bytes as f64;
    // Each end does half of the work, on its own core.
    let per_core = 2.0 / cost;
    Ok(json!({
        "rows": rows, "bytes": bytes, "values": received, "gb_per_s": bytes as f64 / seconds / 1e9,
        "cpu_ns_per_byte": cost * 1e9, "gb_per_s_and_core": per_core / 1e9,
        "of_200_gbit_per_core": per_core * 8.0 / 200e9,
        "lanes": lanes, "cpus": cpus(), "cpus_busy": cpu / seconds,
    }))
}

/// Two connected nodes and the stream between them.
async fn open(ca: &Authority) -> Result<Lane> {
    let [first, second] = ["w1", "w2"].map(|name| endpoint(ca, name));
    let (first, second) = (first?, second?);
    let expected = Expected::node(Role::Worker, NodeId::new("w2")?);
    let (ours, theirs) = tokio::join!(first.connect(second.address(), &expected), second.accept());
    let (ours, theirs) = (ours?, theirs.context("no connection")?);
    let feed = StageFeed { replica: ReplicaId([1; 16]) };
    let sender = ours.open_activations(&feed).await?;
    Ok(Lane { sender, theirs, _endpoints: [first, second] })
}

/// Sends over one lane. Returns the bytes sent and the values received.
async fn carry(lane: Lane, count: usize, rows: usize) -> Result<(usize, usize)> {
    let Lane { mut sender, theirs, _endpoints } = lane;
    let step = StageFrame::Step(StageStep { tokens: vec![1; rows], ..StageStep::default() });
    let values = vec![0.5f32; rows * HIDDEN];
    let receiving = tokio::spawn(async move {
        let Incoming::Activations(mut receiver) = theirs.accept().await? else { bail!("another stream") };
        let mut checked = 0usize;
        for _ in 0..count {
            let mut values: Vec<f32> = Vec::with_capacity(rows * HIDDEN);
            // Pieces end at packet boundaries, rarely inside a value; skipping such a value does not change
            // the cost.
            let mut sink = |bytes: &[u8]| {
                values.extend(bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)));
            };
            receiver.next(HIDDEN * size_of::<f32>(), rows, &mut sink).await?.context("it ends early")?;
            checked += values.len();
        }
        anyhow::Ok(checked)
    });
    let mut bytes = 0usize;
    for _ in 0..count {
        let mut encoded = vec![0; size_of_val(values.as_slice())];
        encoded.as_chunks_mut().0.iter_mut().zip(&values).for_each(|(out, x)| *out = x.to_le_bytes());
        bytes += sender.send(&step, encoded).await?;
    }
    Ok((bytes, receiving.await??))
}

fn endpoint(ca: &Authority, name: &str) -> Result<Endpoint> {
    let identity: Identity = ca.issue(Role::Worker, NodeId::new(name)?, SystemTime::now())?.identity()?;
    let config = EndpointConfig::new(Epoch(1), [Role::Worker]);
    Ok(Endpoint::bind("127.0.0.1:0".parse()?, &identity, config)?)
}

/// CPU time of this process, user and kernel.
fn cpu_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let (_, fields) = stat.rsplit_once(')').context("/proc/self/stat")?;
    let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<f64>);
    // The kernel counts in hundredths of a second, independent of its clock.
    Ok(ticks.sum::<Result<f64, _>>()? / 100.0)
}
