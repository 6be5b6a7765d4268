//! Asynchronous copies from global to shared memory. The data is not visible before the warp has waited for
//! it, however long that takes.

use super::{Block, Run};
use crate::FaultKind;
use crate::ast::Space;
use crate::lanes::each;
use crate::op::CopyAsync;
use crate::warp::{Copy, Warp};

impl Block<'_> {
    pub(super) fn copy_begin(&mut self, warp: &mut Warp, copy: &CopyAsync, mask: u32) -> Run<()> {
        let bytes = usize::from(copy.bytes);
        let accessor = self.accessor(warp);
        let mut hint = None;
        self.reads(warp, copy.from, mask);
        for lane in each(mask) {
            let (to, from) = (warp.address(copy.to, lane), warp.address(copy.from, lane));
            let read = copy.read.map_or(bytes, |read| warp.v32(read)[lane] as usize);
            if read > bytes {
                let what = format!("{read} bytes read for a copy of {bytes}");
                return Err((FaultKind::Invalid { what }, lane));
            }
            if !from.is_multiple_of(bytes as u64) {
                return Err((FaultKind::Misaligned { space: "global", address: from, bytes }, lane));
            }
            // A partial copy need not have a power of two bytes, so its bytes are read one by one.
            let mut data = [0; 16];
            if read == bytes {
                self.read(warp, Space::Global, from, &mut data[..bytes], accessor, lane, &mut hint)?;
            } else {
                for (at, byte) in (from..).zip(&mut data[..read]) {
                    self.read(
                        warp,
                        Space::Global,
                        at,
                        std::slice::from_mut(byte),
                        accessor,
                        lane,
                        &mut hint,
                    )?;
                }
            }
            self.shared.copy_begin(to, bytes, accessor).map_err(|wrong| self.wrong(wrong, lane))?;
            let group = warp.copies.groups[lane];
            warp.copies.pending.push(Copy { lane, group, to, data, bytes });
        }
        Ok(())
    }

    /// Completes all copies except those of the last `keep` groups. `None` completes all.
    pub(super) fn copy_wait(&mut self, warp: &mut Warp, keep: Option<u32>, mask: u32) -> Run<()> {
        let accessor = self.accessor(warp);
        let groups = warp.copies.groups;
        let (done, pending) =
            std::mem::take(&mut warp.copies.pending).into_iter().partition(|copy: &Copy| {
                let waited = keep.is_none_or(|keep| copy.group < groups[copy.lane].saturating_sub(keep));
                waited && mask >> copy.lane & 1 == 1
            });
        warp.copies.pending = pending;
        for Copy { lane, to, data, bytes, .. } in done {
            self.shared.copy_end(to, &data[..bytes], accessor).map_err(|wrong| self.wrong(wrong, lane))?;
        }
        Ok(())
    }
}
