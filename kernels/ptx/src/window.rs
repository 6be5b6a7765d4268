//! Generic addresses: each space but global memory has a window of its own.

use crate::ast::Space;

/// Bytes of a window, beyond any space's size.
const SIZE: u64 = 1 << 32;
/// Where shared memory lies in generic addresses.
pub(crate) const SHARED: u64 = 0x0100_0000_0000;
/// The same of local memory.
pub(crate) const LOCAL: u64 = 0x0200_0000_0000;
pub(crate) const CONST: u64 = 0x0300_0000_0000;
pub(crate) const PARAM: u64 = 0x0400_0000_0000;

/// The space that a generic address lies in.
pub(crate) fn of(address: u64) -> Space {
    match address {
        a if a.wrapping_sub(SHARED) < SIZE => Space::Shared,
        a if a.wrapping_sub(LOCAL) < SIZE => Space::Local,
        a if a.wrapping_sub(CONST) < SIZE => Space::Const,
        a if a.wrapping_sub(PARAM) < SIZE => Space::Param,
        _ => Space::Global,
    }
}

/// A generic address as its space knows it.
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
