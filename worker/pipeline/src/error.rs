//! Errors of a replica's formation and of weight distribution. A formed replica fails with [`engine::Error`].

use crate::ranges::ShardCountError;
use crate::weight_distribution::ShippingError;
use engine::executor::LostStage;

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
}

impl From<model::Error> for Error {
    fn from(error: model::Error) -> Self {
        Self::Engine(error.into())
    }
}

impl From<LostStage> for Error {
    fn from(lost: LostStage) -> Self {
        Self::Engine(lost.into())
    }
}
