//! Generic addresses: each space except global memory has its own window.

use crate::ast::Space;

/// Bytes of a window; more than any space's size.
const SIZE: u64 = 1 << 32;
/// Start of shared memory in generic addresses.
pub(crate) const SHARED: u64 = 0x0100_0000_0000;
/// Start of local memory in generic addresses.
pub(crate) const LOCAL: u64 = 0x0200_0000_0000;
pub(crate) const CONST: u64 = 0x0300_0000_0000;
pub(crate) const PARAM: u64 = 0x0400_0000_0000;

/// Returns the space of a generic address.
pub(crate) fn of(address: u64) -> Space {
    match address {
        a if a.wrapping_sub(SHARED) < SIZE => Space::Shared,
        a if a.wrapping_sub(LOCAL) < SIZE => Space::Local,
        a if a.wrapping_sub(CONST) < SIZE => Space::Const,
        a if a.wrapping_sub(PARAM) < SIZE => Space::Param,
        _ => Space::Global,
    }
}

/// Converts a generic address to its space and the address in it.
pub(crate) fn resolve(address: u64) -> (Space, u64) {
    let space = of(address);
    let base = match space {
        Space::Shared => SHARED,
        Space::Local => LOCAL,
        Space::Const => CONST,
        Space::Param => PARAM,
        Space::Global | Space::Generic => 0,
    };
    (space, address.wrapping_sub(base))
}
