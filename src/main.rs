//! The kvasir command.
fn main() {}
