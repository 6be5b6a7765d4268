//! What computes on this node: an engine that generates, or an encoder.

use super::Loaded;
use crate::Error;
use crate::encoder::thread::EncoderHandle;
use crate::engine::EngineLoad;
use crate::engine::thread::EngineHandle;
use crate::kv_events::EventLog;
use parking_lot::Mutex;
use proto::block::ClusterKey;
use proto::ids::Epoch;
use std::time::Duration;
use tokio::sync::watch;

/// See the module. Cheap to clone.
#[derive(Clone)]
pub(super) enum Runner {
    Generates(EngineHandle),
    Encodes(EncoderHandle),
}

/// Calls the method of the same name of whichever it is.
macro_rules! of_either {
    ($self:ident, $call:ident) => {
        match $self {
            Runner::Generates(engine) => engine.$call(),
            Runner::Encodes(encoder) => encoder.$call(),
        }
    };
}

impl Runner {
    /// Starts the threads.
    pub(super) fn start(
        loaded: Loaded,
        key: &ClusterKey,
        epoch: Epoch,
        stall_floor: Duration,
    ) -> Result<Self, Error> {
        match loaded {
            Loaded::Generator(prepared) => {
                let engine = prepared.engine(key.clone(), epoch)?;
                EngineHandle::start(engine, stall_floor).map(Self::Generates)
            }
            Loaded::Encoder(encoder) => EncoderHandle::start(*encoder, epoch, stall_floor).map(Self::Encodes),
        }
    }

    pub(super) fn load(&self) -> EngineLoad {
        of_either!(self, load)
    }

    pub(super) fn stalled(&self) -> Duration {
        of_either!(self, stalled)
    }

    pub(super) fn healthy(&self) -> bool {
        of_either!(self, healthy)
    }

    /// The KV event log.
    pub(super) fn events(&self) -> &Mutex<EventLog> {
        of_either!(self, events)
    }

    /// Changes when there is news: KV events, or, of an encoder, steps.
    pub(super) fn news(&self) -> watch::Receiver<u64> {
        match self {
            Self::Generates(engine) => engine.newest_event(),
            Self::Encodes(encoder) => encoder.steps(),
        }
    }

    pub(super) fn metrics_text(&self) -> String {
        of_either!(self, metrics_text)
    }

    pub(super) fn stop(&self) {
        of_either!(self, stop);
    }
}
