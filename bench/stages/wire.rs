//! What a byte costs on its way from stage to stage: both ends in this process, over loopback, with encryption and the
//! conversion from and to f32, and nothing computed.

use anyhow::{Context, Result, bail};
use proto::ca::Authority;
use proto::ids::{ClusterName, Epoch, NodeId, Role};
use proto::stage::{ReplicaId, StageFeed, StageFeedV1, StageStep, StageStepV1, StageStepV2};
use proto::transport::{Endpoint, EndpointConfig, Expected, Identity, Incoming};
use serde_json::{Value, json};
use std::time::{Instant, SystemTime};

/// Rows of 1,024 values.
const HIDDEN: usize = 1024;

/// Sends `count` steps of `rows` rows, one behind the other.
pub(crate) async fn run(count: usize, rows: usize) -> Result<Value> {
    let ca = Authority::new(ClusterName::new("bench")?, SystemTime::now())?;
    let [first, second] = ["w1", "w2"].map(|name| endpoint(&ca, name));
    let (first, second) = (first?, second?);
    let expected = Expected::node(Role::Worker, NodeId::new("w2")?);
    let (ours, theirs) = tokio::join!(first.connect(second.address(), &expected), second.accept());
    let (ours, theirs) = (ours?, theirs.context("no connection")?);
    let feed = StageFeed::V1(StageFeedV1 { replica: ReplicaId([1; 16]) });
    let mut sender = ours.open_activations(&feed).await?;
    let plan = StageStepV1 { tokens: vec![1; rows], ..StageStepV1::default() };
    let step = StageStep::V2(StageStepV2 { plan, ..StageStepV2::default() });
    let values = vec![0.5f32; rows * HIDDEN];
    let (cpu, start) = (cpu_seconds()?, Instant::now());
    let receiving = tokio::spawn(async move {
        let Incoming::Activations(mut receiver) = theirs.accept().await? else { bail!("another stream") };
        let mut checked = 0usize;
        for _ in 0..count {
            let mut values: Vec<f32> = Vec::with_capacity(rows * HIDDEN);
            // Pieces end where packets do, which is seldom within a value; what is left out costs nothing.
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
    let received = receiving.await??;
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds()? - cpu);
    let cost = cpu / bytes as f64;
    // Either end has a half of it to do, on a core of its own.
    let per_core = 2.0 / cost;
    Ok(json!({
        "rows": rows, "bytes": bytes, "values": received, "gb_per_s": bytes as f64 / seconds / 1e9,
        "cpu_ns_per_byte": cost * 1e9, "gb_per_s_and_core": per_core / 1e9,
        "of_200_gbit_per_core": per_core * 8.0 / 200e9,
    }))
}

fn endpoint(ca: &Authority, name: &str) -> Result<Endpoint> {
    let identity: Identity = ca.issue(Role::Worker, NodeId::new(name)?, SystemTime::now())?.identity()?;
    let config = EndpointConfig::new(Epoch(1), [Role::Worker]);
    Ok(Endpoint::bind("127.0.0.1:0".parse()?, &identity, config)?)
}

/// Of this process, in user and kernel mode.
fn cpu_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let (_, fields) = stat.rsplit_once(')').context("/proc/self/stat")?;
    let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<f64>);
    // The kernel counts in hundredths of a second whatever its own clock.
    Ok(ticks.sum::<Result<f64, _>>()? / 100.0)
}
