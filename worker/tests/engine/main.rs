//! The engine on the oracle set's small models: the same bits whatever the batch, the chunking, the placement
//! and the device, and requests that end as they should.

mod exactness;
mod generation;
mod harness;
