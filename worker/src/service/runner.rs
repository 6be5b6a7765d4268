//! The compute thread of this node: an engine that generates, an encoder of texts or images, or nothing yet.

use super::Loaded;
use super::images::ImageTower;
use crate::Error;
use crate::external_engine::{ExternalGenerator, OnLost};
use crate::generator::Generator;
use engine::encoder::thread::EncoderHandle;
use engine::engine::EngineLoad;
use engine::engine::thread::{Broken, EngineHandle};
use engine::kv_events::EventLog;
use parking_lot::Mutex;
use proto::block::ClusterKey;
use proto::ids::Epoch;
use proto::message::PullReport;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The node's engine. Cheap to clone.
#[derive(Clone)]
pub(super) enum Runner {
    Generates(Arc<dyn Generator>),
    Encodes(EncoderHandle),
    /// Encodes images for other workers.
    EncodesImages(Arc<ImageTower>),
    /// A worker of the pool that leads no replica.
    Waits(Arc<Waiting>),
}

/// State of a worker without steps: an empty event log.
pub(super) struct Waiting {
    events: Mutex<EventLog>,
    updates: watch::Sender<u64>,
}

impl Waiting {
    pub(super) fn new(epoch: Epoch) -> Self {
        Self { events: Mutex::new(EventLog::new(epoch, 0)), updates: watch::Sender::new(0) }
    }
}

/// Calls the method of the same name on the engine or the encoder; returns the default for [`Runner::Waits`].
macro_rules! of_either {
    ($self:ident, $call:ident) => {
        match $self {
            Runner::Generates(engine) => engine.$call(),
            Runner::Encodes(encoder) => encoder.$call(),
            Runner::EncodesImages(tower) => tower.$call(),
            Runner::Waits(_) => Default::default(),
        }
    };
}

impl Runner {
    pub(super) fn start(
        loaded: Loaded,
        key: &ClusterKey,
        epoch: Epoch,
        stall_floor: Duration,
        (broken, on_lost): (Broken, OnLost),
    ) -> Result<Self, Error> {
        match loaded {
            Loaded::Generator(prepared) => {
                let engine = prepared.engine(key.clone(), epoch)?;
                let handle = EngineHandle::start_with(engine, stall_floor, Some(broken))?;
                Ok(Self::Generates(Arc::new(handle)))
            }
            Loaded::External(opened) => {
                Ok(Self::Generates(Arc::new(ExternalGenerator::start(*opened, key, epoch, on_lost))))
            }
            Loaded::Encoder(encoder) => {
                Ok(Self::Encodes(EncoderHandle::start(*encoder, epoch, stall_floor, Some(broken))?))
            }
            Loaded::Tower(tower) => Ok(Self::EncodesImages(Arc::new(ImageTower::start(*tower, epoch)?))),
            Loaded::Nothing => Ok(Self::Waits(Arc::new(Waiting::new(epoch)))),
        }
    }

    pub(super) fn load(&self) -> EngineLoad {
        of_either!(self, load)
    }

    pub(super) fn stalled(&self) -> Duration {
        of_either!(self, stalled)
    }

    pub(super) fn healthy(&self) -> bool {
        match self {
            Self::Generates(engine) => engine.healthy(),
            Self::Encodes(encoder) => encoder.healthy(),
            Self::EncodesImages(_) | Self::Waits(_) => true,
        }
    }

    pub(super) fn events(&self) -> &Mutex<EventLog> {
        match self {
            Self::Generates(engine) => engine.events(),
            Self::Encodes(encoder) => encoder.events(),
            Self::EncodesImages(tower) => &tower.waiting().events,
            Self::Waits(waiting) => &waiting.events,
        }
    }

    /// Changes on new KV events of an engine, or on new steps of an encoder.
    pub(super) fn updates(&self) -> watch::Receiver<u64> {
        match self {
            Self::Generates(engine) => engine.newest_event(),
            Self::Encodes(encoder) => encoder.steps(),
            Self::EncodesImages(tower) => tower.waiting().updates.subscribe(),
            Self::Waits(waiting) => waiting.updates.subscribe(),
        }
    }

    /// Whether the events name exactly what the cache holds.
    pub(super) fn exact(&self) -> bool {
        match self {
            Self::Generates(engine) => engine.exact(),
            Self::Encodes(_) | Self::EncodesImages(_) | Self::Waits(_) => true,
        }
    }

    /// Memory of this process, and of an engine that it has started.
    pub(super) fn resident_bytes(&self) -> u64 {
        let outside = match self {
            Self::Generates(engine) => engine.outside_bytes(),
            Self::Encodes(_) | Self::EncodesImages(_) | Self::Waits(_) => 0,
        };
        engine::memory::resident_bytes().saturating_add(outside)
    }

    pub(super) fn transfers(&self) -> PullReport {
        match self {
            Self::Generates(engine) => engine.transfers(),
            Self::Encodes(_) | Self::EncodesImages(_) | Self::Waits(_) => PullReport::default(),
        }
    }

    /// The built-in engine, if it generates here.
    pub(super) fn built_in(&self) -> Option<&EngineHandle> {
        match self {
            Self::Generates(engine) => engine.built_in(),
            Self::Encodes(_) | Self::EncodesImages(_) | Self::Waits(_) => None,
        }
    }

    pub(super) fn metrics_text(&self) -> String {
        of_either!(self, metrics_text)
    }

    pub(super) fn stop(&self) {
        match self {
            Self::Generates(engine) => engine.stop(),
            Self::Encodes(encoder) => encoder.stop(),
            Self::EncodesImages(_) | Self::Waits(_) => {}
        }
    }
}
