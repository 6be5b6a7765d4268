//! Names for what lies on a device. Only the backend that made one understands its number.

/// Handles are numbers that only the backend that made them understands.
macro_rules! handle {
    ($name:ident) => {
        impl $name {
            /// A handle of a backend's own making.
            pub const fn new(number: u32) -> Self {
                Self(number)
            }

            /// The number that it was made with.
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

/// An `[rows][cols]` f32 activation buffer on the device. It has a capacity; how many rows of which width it
/// holds is decided by the op that fills it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufferId(pub(crate) u32);

/// A weight matrix on the device, repacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatrixId(pub(crate) u32);

/// An f32 vector on the device: norm weight, bias, rope factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VectorId(pub(crate) u32);

/// A rotary embedding prepared on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RopeId(pub(crate) u32);

/// The KV of one layer: where it lies in its group's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvLayerId(pub(crate) u32);

/// The recurrent state of one layer: where it lies in a sequence's state slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateLayerId(pub(crate) u32);
