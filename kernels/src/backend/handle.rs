//! Handles of objects on a device. Only the backend that created a handle can interpret its number.

/// Defines the constructor and the accessor of a handle.
macro_rules! handle {
    ($name:ident) => {
        impl $name {
            /// Creates a handle. Only backends call this.
            pub const fn new(number: u32) -> Self {
                Self(number)
            }

            pub const fn number(self) -> u32 {
                self.0
            }
        }
    };
}

handle!(BufferId);
handle!(MatrixId);
handle!(VectorId);
handle!(RopeId);
handle!(KvLayerId);
handle!(StateLayerId);
handle!(AdapterId);

/// An `[rows][cols]` f32 activation buffer on the device. Its capacity is fixed. The op that fills it sets
/// the current number of rows and their width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufferId(pub(crate) u32);

/// A weight matrix on the device, usually repacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatrixId(pub(crate) u32);

/// An f32 vector on the device: norm weight, bias, rope factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VectorId(pub(crate) u32);

/// A rotary embedding prepared on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RopeId(pub(crate) u32);

/// The KV of one layer, at a fixed offset in its group's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvLayerId(pub(crate) u32);

/// The recurrent state of one layer, at a fixed offset in a sequence's state slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateLayerId(pub(crate) u32);

/// An adapter that rows of a step may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AdapterId(pub(crate) u32);
