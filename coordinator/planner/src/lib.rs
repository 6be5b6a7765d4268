//! Replays an arrival log on a virtual fleet of workers that load deployed models by order, in simulated time.
//!
//! Read in this order:
//!
//! - [`fleet`]: nodes and models, with their limits
//! - [`traffic`]: arrival logs, recorded or drawn from a distribution
//! - [`simulation`]: the run, and what it counts
//! - [`search`]: settings of deployments that let requests wait less
//!
//! Real: the leader's placement ([`group::deployments::decide`]) over the coordinators' table, with its counts of
//! uses. Simulated: time, the workers' files, memory and steps, and the choice of a replica for a request.
//!
//! Guarantees: the same fleet, traffic and policy give the same outcome. Each request is answered or refused once. The
//! models at a node never take more than its memory. Time and memory are bounded for any input within the limits.
//! Must not contain: a placement policy, files of a user's choice, clocks, randomness without a seed.

pub mod fleet;
pub mod search;
pub mod simulation;
pub mod traffic;

mod device;
mod host;
mod leader;

#[cfg(test)]
mod tests;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A field of the fleet or of the traffic breaks its limit.
    #[error("{field}: {value}, {limit}")]
    Field { field: String, value: String, limit: String },
    /// No node has the model's files at the beginning.
    #[error("models.{model}: no node has its files: name it in `files` of one")]
    NoFiles { model: String },
    #[error("line {line}: {reason}")]
    Read { line: usize, reason: String },
    #[error("the simulation takes more than {limit} decisions of the leader: use a shorter log")]
    TooLong { limit: u64 },
    /// The coordinators' table refuses a change, such as a setting beyond its limits.
    #[error("the table refuses {change}: {reason}")]
    Refused { change: String, reason: String },
}

impl Error {
    pub(crate) fn field(field: impl Into<String>, value: impl ToString, limit: impl Into<String>) -> Self {
        Self::Field { field: field.into(), value: value.to_string(), limit: limit.into() }
    }
}
