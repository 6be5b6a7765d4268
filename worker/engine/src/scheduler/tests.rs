//! Tests of the scheduler with a fake model whose "KV" is the history of a token, so that every row can check
//! that it reads its own past and nothing else.

mod contract;
mod pressure;
mod resume;
mod sharing;
mod simulator;
mod storms;
mod tenants;
