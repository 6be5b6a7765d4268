//! State of a node: facts become findings, each with a severity, one fact and one remedy.
//!
//! - `facts`: everything that was looked at
//! - `findings`: the rules, without files, sockets or clocks
//! - `host`: reads the machine below a root directory, so that tests can plant faults
//! - `baseline`: a file with an earlier run's values
//! - `latest`: the severities that a running node exports
//!
//! Invariants: the same facts give the same findings; a fact that could not be read gives no finding, but for the
//! libraries, certificates and nodes that must be there. This crate never contains GPU calls or the network:
//! callers add those facts.

mod baseline;
mod facts;
mod findings;
mod host;
mod latest;

pub use baseline::BaselineError;
pub use facts::{
    Baseline, Certificate, CertificateState, Cluster, Coordinator, Cuda, Disk, Facts, FileLimit, Gpu,
    GpuBaseline, Interface, InterfaceBaseline, Memory, Node, NodePath, OwnedFile, PathSpeed,
};
pub use findings::{CHECKS, Finding, LOCAL_CHECKS, Severity, findings, worst};
pub use host::{Host, Places};
pub use latest::{latest, set_latest};
