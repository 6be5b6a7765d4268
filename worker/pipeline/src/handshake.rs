//! Forms a replica, on the first stage: requests the other stages to load their layers and to lay out their
//! caches. Ends with a [`DownstreamRanks`].

use super::downstream_ranks::DownstreamRanks;
use super::lease::{self, ReplicaClaim};
use super::ranges::{LastStageDrafter, check_ranges, stage_ranges};
use super::remote_blocks::RemoteBlocks;
use crate::Error;
use engine::decoder::Decoder;
use engine::executor::LostStage;
use engine::kv_cache::{CacheSpec, GroupKind, Slabs};
use model::spec::ModelSpec;
use pki::{Expected, Identity};
use proto::ids::{Epoch, Role};
use proto::stage::{
    ActivationType, ReplicaId, StageAdapter, StageAddress, StageBegin, StageFeed, StageJoin, StageOrder,
    StageReport,
};
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;
use transport::{Connection, Endpoint, EndpointConfig, StageControl};

/// The downstream stages of a replica, before they join.
#[derive(Debug)]
pub struct Replica {
    runtime: Handle,
    endpoint: Arc<Endpoint>,
    downstream: Vec<StageAddress>,
    activations: ActivationType,
    plan: Option<Plan>,
    lost: watch::Sender<Option<String>>,
}

/// A replica's layer ranges as planned by a coordinator, with its claim on the stages.
#[derive(Debug)]
struct Plan {
    ranges: Vec<Range<usize>>,
    claim: ReplicaClaim,
}

impl Replica {
    /// Creates a replica of this process and the `downstream` workers, at least one, in the order of their
    /// layers. `runtime` does the network I/O. Methods that block must not be called on its threads.
    pub fn new(
        runtime: Handle,
        identity: &Identity,
        downstream: Vec<StageAddress>,
        activations: ActivationType,
    ) -> Result<Self, Error> {
        let _runtime = runtime.enter();
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let config = super::attentive(EndpointConfig::new(Epoch(since_1970.as_micros() as u64), []));
        let endpoint = Endpoint::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)), identity, config)?;
        let (endpoint, lost) = (Arc::new(endpoint), watch::Sender::new(None));
        Ok(Self { runtime: runtime.clone(), endpoint, downstream, activations, plan: None, lost })
    }

    /// Uses a coordinator's plan: one range for each stage. The other stages are then claimed and held by
    /// leases.
    pub fn planned(self, ranges: Vec<Range<usize>>, claim: ReplicaClaim) -> Self {
        Self { plan: Some(Plan { ranges, claim }), ..self }
    }

    /// Watches for a lost stage, also while no step runs. The value is the reason. Only stages with a lease
    /// are watched.
    pub fn lost(&self) -> watch::Receiver<Option<String>> {
        self.lost.subscribe()
    }

    /// The endpoint to the other stages. Closing it ends the replica at any time.
    pub fn endpoint(&self) -> Arc<Endpoint> {
        Arc::clone(&self.endpoint)
    }

    /// Number of stages, the first one included.
    pub fn stages(&self) -> usize {
        self.downstream.len() + 1
    }

    /// Suffix of the numeric class for the activations' type. `None` if the type changes no results.
    pub fn class(&self) -> Option<&'static str> {
        match self.activations {
            ActivationType::F32 => None,
            ActivationType::Bf16 => Some("wire-bf16"),
        }
    }

    /// Requests all later stages to load their ranges and, if there is a drafter for it, the last stage to
    /// load the drafter. Returns without waiting for them. The caller loads the first range, which is
    /// returned.
    pub fn join(
        self,
        spec: &ModelSpec,
        (model_digest, class, last_stage_drafter): ([u8; 32], String, Option<LastStageDrafter>),
        max_rows: usize,
        block_tokens: usize,
    ) -> Result<(Range<usize>, Joining), Error> {
        let last = last_stage_drafter.map(|last_stage_drafter| last_stage_drafter.from_layer);
        let ranges = match &self.plan {
            Some(plan) => check_ranges(spec, last, &plan.ranges, self.stages())?,
            None => stage_ranges(spec, last, self.stages())?,
        };
        let replica = ReplicaId(self.unique_id());
        let Self { runtime, endpoint, downstream, activations, plan, lost } = self;
        let mut stages = Vec::with_capacity(downstream.len());
        let mut leases = JoinSet::new();
        for (index, address) in downstream.iter().enumerate() {
            let range = &ranges[index + 1];
            let is_last = index + 1 == downstream.len();
            let order = StageOrder::Join(StageJoin {
                replica,
                model_digest,
                layers: (range.start as u32, range.end as u32),
                class: class.clone(),
                max_rows: max_rows as u32,
                block_tokens: block_tokens as u32,
                activations,
                next: downstream.get(index + 1).cloned(),
                drafter: last_stage_drafter
                    .filter(|_| is_last)
                    .map(|last_stage_drafter| last_stage_drafter.drafter),
            });
            let joined = runtime.block_on(async {
                let connection = dial(&endpoint, address).await?;
                if let Some(Plan { claim, .. }) = &plan {
                    let lease = connection.claim_stage(&claim.of(replica)).await?;
                    let (lost, held, stage) = (lost.clone(), connection.clone(), index + 1);
                    leases.spawn(async move {
                        let reason = lease::keep(lease, held).await;
                        lost.send_replace(Some(format!("stage {stage} is lost: {reason}")));
                    });
                }
                let mut control = connection.open_stage().await?;
                control.orders.send(&order).await?;
                Ok(Stage { connection, control })
            });
            stages.push(joined.map_err(|source| LostStage { stage: index + 1, source })?);
        }
        let first = ranges[0].clone();
        Ok((
            first,
            Joining { runtime, endpoint, stages, leases, replica, activations, part_bytes: Vec::new() },
        ))
    }

    fn unique_id(&self) -> [u8; 16] {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("{} {} {since_1970:?}", self.endpoint.name(), self.endpoint.address());
        let digest = blake3::hash(format!("{name} {}", std::process::id()).as_bytes());
        digest.as_bytes().first_chunk().copied().unwrap_or_default()
    }
}

async fn resolve(address: &StageAddress) -> Result<SocketAddr, transport::Error> {
    let unresolved =
        |source: std::io::Error| transport::Error::Resolve { target: address.quic.clone(), source };
    let mut found = tokio::net::lookup_host(&address.quic).await.map_err(unresolved)?;
    found.next().ok_or_else(|| unresolved(std::io::ErrorKind::NotFound.into()))
}

pub async fn dial(endpoint: &Endpoint, address: &StageAddress) -> Result<Connection, transport::Error> {
    let expected = Expected::node(Role::Worker, address.node.clone());
    endpoint.connect(resolve(address).await?, &expected).await
}

#[derive(Debug)]
struct Stage {
    connection: Connection,
    control: StageControl,
}

/// Stages that are loading their layers.
#[derive(Debug)]
pub struct Joining {
    runtime: Handle,
    endpoint: Arc<Endpoint>,
    stages: Vec<Stage>,
    /// Tasks that renew the leases in a cluster. Dropping them ends the leases.
    leases: JoinSet<()>,
    replica: ReplicaId,
    activations: ActivationType,
    /// Bytes of a block of each group, by stage, the first one included.
    part_bytes: Vec<Vec<usize>>,
}

impl Joining {
    /// Waits until all stages have loaded. Returns the bytes of a block of each group, summed over all
    /// stages; `first` has those of the first stage.
    pub fn block_bytes(&mut self, first: &[u64]) -> Result<Vec<u64>, engine::Error> {
        let lengths = |bytes: &[u64]| bytes.iter().map(|bytes| *bytes as usize).collect();
        self.part_bytes = vec![lengths(first)];
        let mut sums = first.to_vec();
        for (index, stage) in self.stages.iter_mut().enumerate() {
            let lost = |source| LostStage { stage: index + 1, source };
            let report = self.runtime.block_on(stage.control.reports.next()).map_err(lost)?;
            let StageReport::Joined(joined) = report else {
                return Err(lost(transport::Error::Protocol("a stage reports before it has joined")).into());
            };
            if joined.block_bytes.len() != sums.len() {
                return Err(lost(transport::Error::Protocol("a stage has other cache groups")).into());
            }
            self.part_bytes.push(lengths(&joined.block_bytes));
            for (sum, bytes) in sums.iter_mut().zip(joined.block_bytes) {
                *sum = sum.saturating_add(bytes);
            }
        }
        Ok(sums)
    }

    /// Has the later stages load adapters. Called behind [`Self::block_bytes`].
    pub fn load_adapters(&mut self, adapters: &[StageAdapter]) -> Result<(), engine::Error> {
        for (index, stage) in self.stages.iter_mut().enumerate() {
            for adapter in adapters {
                let loaded = self.runtime.block_on(async {
                    stage.control.orders.send(&StageOrder::Adapter(adapter.clone())).await?;
                    match stage.control.reports.next().await? {
                        StageReport::AdapterLoaded => Ok(()),
                        _ => Err(transport::Error::Protocol(
                            "a stage that loads an adapter reports something else",
                        )),
                    }
                });
                loaded.map_err(|source| LostStage { stage: index + 1, source })?;
            }
        }
        Ok(())
    }

    /// Has all stages, `decoder`'s included, lay out their caches so that together they implement `cache`.
    pub fn begin(
        mut self,
        decoder: &mut Decoder,
        cache: &CacheSpec,
    ) -> Result<DownstreamRanks, engine::Error> {
        let blocks = Slabs::of(cache);
        let own = arena(blocks.count(), &blocks.blocks_per_slab(), decoder)?;
        decoder.allocate_kv(own.bytes() as usize)?;
        let order = StageOrder::Begin(StageBegin {
            slabs: blocks.count(),
            blocks_per_slab: blocks.blocks_per_slab(),
        });
        // In reverse order, because each stage connects to its successor.
        for (index, stage) in self.stages.iter_mut().enumerate().rev() {
            let started = self.runtime.block_on(async {
                stage.control.orders.send(&order).await?;
                match stage.control.reports.next().await? {
                    StageReport::Ready => Ok(()),
                    _ => Err(transport::Error::Protocol("a stage that is not ready reports something else")),
                }
            });
            started.map_err(|source| LostStage { stage: index + 1, source })?;
        }
        let feed = StageFeed { replica: self.replica };
        let Some(second) = self.stages.first() else {
            return Err(engine::Error::Invariant("a replica of one stage".to_owned()));
        };
        let sender = self
            .runtime
            .block_on(second.connection.open_activations(&feed))
            .map_err(|source| LostStage { stage: 1, source })?;
        let mut links = Vec::with_capacity(self.stages.len());
        for (index, stage) in self.stages.iter().enumerate() {
            let opened = self.runtime.block_on(stage.connection.open_stage_blocks(&feed));
            links.push(opened.map_err(|source| LostStage { stage: index + 1, source })?);
        }
        let state_group = cache.groups.iter().position(|group| group.kind == GroupKind::State);
        let controls = self.stages.into_iter().map(|stage| stage.control);
        let layout =
            super::downstream_ranks::Layout { blocks, own, state_group, activations: self.activations };
        let arenas = (layout.blocks.clone(), layout.own.clone());
        let remote_blocks =
            RemoteBlocks::new(self.runtime.clone(), arenas, state_group, self.part_bytes, links);
        DownstreamRanks::new(
            self.runtime,
            (self.endpoint, self.leases),
            (layout, remote_blocks),
            sender,
            controls,
        )
    }
}

/// Layout of a stage's arena, from the slabs of the scheduler's cache.
pub fn arena(count: u32, blocks_per_slab: &[u32], decoder: &Decoder) -> Result<Slabs, engine::Error> {
    let sizes: Vec<u64> = decoder.groups().iter().map(|group| group.block_bytes as u64).collect();
    Slabs::with_blocks(count, blocks_per_slab, &sizes).ok_or_else(|| engine::Error::KvMemory {
        reason: "the blocks of a stage cannot be addressed".to_owned(),
    })
}
