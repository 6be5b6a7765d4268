//! The part of a model that sees images: a vision transformer, and projectors to the width of the text model.

use super::tensors::distinct;
use super::{Activation, LayerSpec, LinearSpec, NormSpec, TableSpec};

/// Rows of an image: `x = norm(class | patches + positions)`, the layers, then the projector of the features.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the resulting rows.
    pub out: usize,
    pub patches: PatchSpec,
    /// Name of a `[hidden]` tensor: the row before the patches of an image.
    pub class: Option<String>,
    pub positions: PositionSpec,
    /// Norm of the embedded rows.
    pub norm: Option<NormSpec>,
    pub layers: Vec<LayerSpec>,
    /// Layers whose rows see only their window.
    pub windows: Option<WindowSpec>,
    /// Numbers of layers, ascending, after which the residual is a feature. The projector reads all side by side.
    pub features: Vec<usize>,
    /// Whether features are without the first row of a picture, which is that of the class if there is one.
    pub skips_first: bool,
    pub projector: ProjectorSpec,
    /// Projectors of further rows, added in the text model, and the layers behind which they read.
    pub deepstack: Vec<(usize, ProjectorSpec)>,
}

/// From pixels to rows. `frames` successive pictures of `side * side` pixels of three colours are one patch.
#[derive(Debug, Clone, PartialEq)]
pub struct PatchSpec {
    pub side: usize,
    /// One matrix a frame, whose products are summed. Their columns are colours, then lines, then pixels of a line.
    pub frames: Vec<LinearSpec>,
    pub pixels: PixelLayout,
}

/// Number of colours of a pixel.
pub const COLOURS: usize = 3;

/// The form in which pixels come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PixelLayout {
    /// `[pictures, colours, height, width]`, of which each is encoded by itself; of these sizes if they are given.
    Pictures { sides: Option<usize> },
    /// `[patches, colours * frames * lines * pixels]`, those that are merged next to each other.
    Patches,
}

/// Learned positions, which are added to the embedded patches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PositionSpec {
    None,
    /// A row of the table for each row, that of the class first.
    Each(TableSpec),
    /// The table is a square grid. A patch has the row at the same fraction of its height and width.
    Fraction {
        table: TableSpec,
        side: usize,
    },
    /// The table is a square grid. A patch has the four rows around its place, weighed by their distance.
    Interpolated {
        table: TableSpec,
        side: usize,
    },
}

/// Square windows of the layers' attention, not overlapping, from the upper left corner on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowSpec {
    /// Merged rows on each side.
    pub side: usize,
    /// For each layer whether its rows see the whole picture instead.
    pub whole: Vec<bool>,
}

/// `down activation(up(norm(merge(norm x))))`. Without `down`, `up` alone.
#[derive(Debug, Clone, PartialEq)]
pub struct ProjectorSpec {
    /// Norm of a patch.
    pub norm: Option<NormSpec>,
    pub merge: MergeSpec,
    /// Norm of a merged row.
    pub merged_norm: Option<NormSpec>,
    pub up: LinearSpec,
    pub down: Option<(Activation, LinearSpec)>,
}

/// One row of `side * side` neighbouring patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergeSpec {
    /// Side by side, line by line.
    Concat { side: usize },
    /// Their mean.
    Mean { side: usize },
}

impl MergeSpec {
    pub fn side(self) -> usize {
        match self {
            Self::Concat { side } | Self::Mean { side } => side,
        }
    }
}

impl PatchSpec {
    /// Values of a patch.
    pub fn values(&self) -> usize {
        self.frames.len() * self.frame_values()
    }

    /// Values of a patch of one frame.
    pub fn frame_values(&self) -> usize {
        COLOURS * self.side * self.side
    }
}

impl PositionSpec {
    pub fn table(&self) -> Option<&TableSpec> {
        match self {
            Self::None => None,
            Self::Each(table) | Self::Fraction { table, .. } | Self::Interpolated { table, .. } => {
                Some(table)
            }
        }
    }
}

impl VisionSpec {
    /// Patches on each side of what becomes one row.
    pub fn merge_side(&self) -> usize {
        self.projector.merge.side()
    }

    /// The projector and those of further rows.
    pub fn projectors(&self) -> impl Iterator<Item = &ProjectorSpec> {
        std::iter::once(&self.projector).chain(self.deepstack.iter().map(|(_, projector)| projector))
    }

    /// All tensors without duplicates.
    pub fn tensors(&self) -> Vec<&str> {
        let mut names = Vec::new();
        self.patches.frames.iter().for_each(|linear| linear.push_tensors(&mut names));
        names.extend(self.class.as_deref());
        names.extend(self.positions.table().map(|table| table.tensor.as_str()));
        self.norm.iter().for_each(|norm| norm.push_tensors(&mut names));
        self.layers.iter().for_each(|layer| layer.push_tensors(&mut names));
        for ProjectorSpec { norm, merge: _, merged_norm, up, down } in self.projectors() {
            norm.iter().chain(merged_norm).for_each(|norm| norm.push_tensors(&mut names));
            up.push_tensors(&mut names);
            down.iter().for_each(|(_, down)| down.push_tensors(&mut names));
        }
        distinct(names)
    }
}
