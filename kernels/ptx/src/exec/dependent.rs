//! Checks of kernels that may start before the kernels before them have ended (programmatic dependent launch).
//!
//! Kernels run one after the other here, so a missing wait would change no result. It is a fault instead.

use super::{Block, Run};
use crate::FaultKind;
use crate::ast::Space;
use crate::lanes::each;
use crate::op::{Access, Address};
use crate::warp::Warp;
use crate::window;

impl Block<'_> {
    /// Checks that the lanes have waited for the kernels before this one, if it waits at all. `access` says what they
    /// do: only prefetches of global memory may come before.
    pub(super) fn after_wait(
        &self,
        warp: &Warp,
        access: &'static str,
        (space, address): (Space, Address),
        mask: u32,
    ) -> Run<()> {
        if !self.kernel.waits || mask & !warp.waited == 0 {
            return Ok(());
        }
        let is_global = |lane: usize| match space {
            Space::Generic => window::of(warp.address(address, lane)) == Space::Global,
            space => space == Space::Global,
        };
        match each(mask & !warp.waited).find(|lane| is_global(*lane)) {
            Some(lane) => Err((FaultKind::BeforeWait { access }, lane)),
            None => Ok(()),
        }
    }

    /// Checks that a kernel does not end before the kernels before it: later ones wait for this one only.
    pub(super) fn exit_after_wait(&self, warp: &Warp, mask: u32) -> Run<()> {
        let early = mask & !warp.waited;
        match self.kernel.waits && early != 0 {
            true => Err((FaultKind::BeforeWait { access: "exit" }, early.trailing_zeros() as usize)),
            false => Ok(()),
        }
    }

    /// Checks that no kernel has written to the allocation that a load reads as constant (`ld.global.nc`): its cache
    /// may hold what was there before.
    pub(super) fn constant(&self, warp: &Warp, access: &Access, mask: u32) -> Run<()> {
        for lane in each(if access.constant { mask } else { 0 }) {
            let (address, bytes) = (warp.address(access.address, lane), usize::from(access.element.bytes));
            let index = self.memory.find(address, bytes as u64);
            if index.is_some_and(|index| self.memory.allocation(index).stored_by_kernels()) {
                return Err((FaultKind::NotConstant { address, bytes }, lane));
            }
        }
        Ok(())
    }
}
