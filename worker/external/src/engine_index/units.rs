//! The held units, and the events that report them.

use proto::block::BlockId;
use proto::event::{KvEvent, Medium};
use std::collections::HashMap;

/// Most units of one event.
const MAX_RUN: usize = 4096;
pub(super) const MEDIA: [Medium; 3] = [Medium::Device, Medium::Host, Medium::Disk];

/// Position in [`MEDIA`]: faster ones first.
pub(super) fn rank(medium: Medium) -> usize {
    match medium {
        Medium::Device => 0,
        Medium::Host => 1,
        Medium::Disk => 2,
    }
}

/// The units that blocks own, with the number of blocks by medium.
#[derive(Debug, Default)]
pub(super) struct HeldUnits {
    units: HashMap<BlockId, HeldUnit>,
    /// Nothing counts as held. The units are kept.
    suspended: bool,
    events: Vec<KvEvent>,
}

#[derive(Debug)]
struct HeldUnit {
    parent: BlockId,
    /// Blocks that own the unit and can be hit, by medium.
    blocks: [u32; 3],
}

impl HeldUnit {
    /// The fastest medium.
    fn medium(&self) -> Option<Medium> {
        MEDIA.into_iter().zip(self.blocks).find(|(_, blocks)| *blocks > 0).map(|(medium, _)| medium)
    }
}

impl HeldUnits {
    pub(super) fn len(&self) -> usize {
        if self.suspended { 0 } else { self.units.len() }
    }

    pub(super) fn is_suspended(&self) -> bool {
        self.suspended
    }

    /// A block that owns the unit was reachable on `from` and is now on `to`.
    pub(super) fn change(
        &mut self,
        unit: BlockId,
        parent: BlockId,
        from: Option<Medium>,
        to: Option<Medium>,
    ) {
        let held = self.units.entry(unit).or_insert(HeldUnit { parent, blocks: [0; 3] });
        let before = held.medium();
        if let Some(from) = from {
            held.blocks[rank(from)] = held.blocks[rank(from)].saturating_sub(1);
        }
        if let Some(to) = to {
            held.blocks[rank(to)] += 1;
        }
        let after = held.medium();
        if after.is_none() {
            self.units.remove(&unit);
        }
        if before == after || self.suspended {
            return;
        }
        if let Some(medium) = before {
            push_removed(&mut self.events, unit, medium);
        }
        if let Some(medium) = after {
            push_stored(&mut self.events, unit, parent, medium);
        }
    }

    pub(super) fn clear(&mut self) {
        if !self.units.is_empty() && !self.suspended {
            self.events = vec![KvEvent::Cleared];
        }
        self.units = HashMap::new();
    }

    pub(super) fn suspend(&mut self) {
        if !self.suspended && !self.units.is_empty() {
            self.events = vec![KvEvent::Cleared];
        }
        self.suspended = true;
    }

    /// Reports everything again, parents first.
    pub(super) fn resume(&mut self) {
        if !std::mem::replace(&mut self.suspended, false) {
            return;
        }
        let mut children: HashMap<BlockId, Vec<BlockId>> = HashMap::new();
        let mut next = Vec::new();
        for (&unit, held) in &self.units {
            if self.units.contains_key(&held.parent) {
                children.entry(held.parent).or_default().push(unit);
            } else {
                next.push(unit);
            }
        }
        while let Some(unit) = next.pop() {
            if let Some(held) = self.units.get(&unit)
                && let Some(medium) = held.medium()
            {
                push_stored(&mut self.events, unit, held.parent, medium);
            }
            next.extend(children.remove(&unit).unwrap_or_default());
        }
    }

    pub(super) fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }
}

fn push_stored(events: &mut Vec<KvEvent>, unit: BlockId, parent: BlockId, medium: Medium) {
    if let Some(KvEvent::Stored { units, medium: last, .. }) = events.last_mut()
        && *last == medium
        && units.last() == Some(&parent)
        && units.len() < MAX_RUN
    {
        units.push(unit);
        return;
    }
    events.push(KvEvent::Stored { parent, units: vec![unit], medium });
}

fn push_removed(events: &mut Vec<KvEvent>, unit: BlockId, medium: Medium) {
    if let Some(KvEvent::Removed { units, medium: last }) = events.last_mut()
        && *last == medium
        && units.len() < MAX_RUN
    {
        units.push(unit);
        return;
    }
    events.push(KvEvent::Removed { units: vec![unit], medium });
}
