//! Errors of a worker.

use crate::external_engine::ExternalEngineError;
use crate::service::FindError;
use model::shard::StoreError;
use pipeline::ShardCountError;
use pipeline::weight_distribution::{LoadError, ShippingError};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Engine(#[from] engine::Error),
    #[error(transparent)]
    Transport(#[from] transport::Error),
    #[error(transparent)]
    Shards(#[from] ShardCountError),
    /// The model cannot be fetched from other workers.
    #[error(transparent)]
    Shipping(#[from] ShippingError),
    /// The environment selects kernels that are not available.
    #[error(transparent)]
    Backend(#[from] kernels::registry::SelectError),
    /// The server of another project cannot be this worker's engine.
    #[error(transparent)]
    External(#[from] Box<ExternalEngineError>),
    /// The model's tokenizer is not usable.
    #[error(transparent)]
    Text(#[from] text::Error),
    /// The preprocessing of the model's images is not supported.
    #[error(transparent)]
    Vision(#[from] vision::Error),
    /// The model does not support the requested task.
    #[error("this model {does}: {instead}")]
    WrongTask {
        does: &'static str,
        /// What to use instead.
        instead: &'static str,
    },
    /// Coordinators sent another cluster key than the one in use.
    #[error("coordinators belong to clusters with different keys: another cluster key is in use here")]
    OtherKey,
    /// A coordinator has accepted an epoch that is not the current one.
    #[error("a coordinator accepted epoch {}, which is not the current one", .0.0)]
    AnotherEpoch(proto::ids::Epoch),
    /// A model's file is not what it was when it was found.
    #[error("the model's file has changed since it was read")]
    FileChanged,
    /// A model is neither on this worker nor at another one.
    #[error(transparent)]
    Find(#[from] FindError),
    /// The model computed a value that is not finite.
    #[error("the model's {what} not finite: its weights or intermediate values contain NaN or infinity")]
    NotFinite { what: &'static str },
}

impl Error {
    /// Whether the cause is the content of a model file, so that the same bytes fail on every worker.
    pub(crate) fn is_of_content(&self) -> bool {
        match self {
            Self::Engine(error) => error.is_of_content(),
            Self::Text(_) | Self::WrongTask { .. } => true,
            Self::Find(error) => error.is_permanent(),
            _ => false,
        }
    }
}

impl From<ExternalEngineError> for Error {
    fn from(error: ExternalEngineError) -> Self {
        Self::External(Box::new(error))
    }
}

impl From<pipeline::Error> for Error {
    fn from(error: pipeline::Error) -> Self {
        match error {
            pipeline::Error::Engine(error) => Self::Engine(error),
            pipeline::Error::Transport(error) => Self::Transport(error),
            pipeline::Error::Shards(error) => Self::Shards(error),
            pipeline::Error::Shipping(error) => Self::Shipping(error),
        }
    }
}

impl LoadError for Error {
    fn store_error(&self) -> Option<&StoreError> {
        match self {
            Self::Engine(engine::Error::Model(model::Error::Store(error))) => Some(error),
            _ => None,
        }
    }
}

/// Errors that an engine also fails with.
macro_rules! from_engine {
    ($($source:ty),*) => {$(
        impl From<$source> for Error {
            fn from(error: $source) -> Self {
                Self::Engine(error.into())
            }
        }
    )*};
}

from_engine!(kernels::Error, model::Error, speech::Error);
