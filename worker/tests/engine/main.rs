//! The engine with the small models of the oracle set: the same bits with every batch, chunking, block layout
//! and device, and requests that end as they should.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod capacity;
mod deferred;
mod equal_prompts;
mod exactness;
mod generation;
mod guided;
mod harness;
mod images;
mod instruction_sets;
mod mtp_head;
mod mtp_head_file;
mod not_finite;
mod opaque;
mod opaque_device;
mod parts;
mod pins;
mod prompt_logprobs;
mod pulls;
mod resume;
mod simulated;
mod snapshots;
mod speculation;
mod stage_drafts;
mod staged_drafts;
mod stages;
mod storm;
mod tiers;
