//! The command line as others script against it: numbers against the oracle, exit codes, outputs.
#![allow(clippy::unwrap_used, reason = "a panic in a test is its report")]

mod embed;
mod fixture_set;
mod golden;
mod numerics;
mod perplexity;
mod tokenize;
mod usage;
