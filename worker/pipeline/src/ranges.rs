//! Layer ranges of a replica's stages.

use crate::Error;
use model::spec::ModelSpec;
use proto::stage::StageDrafter;
use std::ops::Range;

/// The drafter at the last stage of a replica, and the first layer that must be at that stage.
#[derive(Debug, Clone, Copy)]
pub struct LastStageDrafter {
    pub drafter: StageDrafter,
    pub from_layer: usize,
}

/// The model cannot be cut into that many layer ranges.
#[derive(Debug, thiserror::Error)]
#[error("the model can be cut into at most {most} shards, not {shards}")]
pub struct ShardCountError {
    /// The requested number.
    pub shards: usize,
    /// The maximum number.
    pub most: usize,
}

/// Layer ranges of a replica's stages. The layers from `last` on, if given, stay together at the last stage.
pub fn stage_ranges(
    spec: &ModelSpec,
    last: Option<usize>,
    shards: usize,
) -> Result<Vec<Range<usize>>, Error> {
    let last = last.unwrap_or(spec.layers.len());
    spec.stage_ranges_before(shards, last).ok_or_else(|| {
        let max = spec.cut_points().iter().filter(|cut| **cut <= last).count() + 1;
        ShardCountError { shards, most: max }.into()
    })
}

/// Returns the ranges of a plan after checking that they cover the whole model in order, that it can be cut
/// there, and that the layers from `last` on are at the last stage.
pub(crate) fn check_ranges(
    spec: &ModelSpec,
    last: Option<usize>,
    ranges: &[Range<usize>],
    stages: usize,
) -> Result<Vec<Range<usize>>, Error> {
    if let Some(last) = last
        && let Some(range) = ranges.last().filter(|range| range.start > last)
    {
        let reason = format!(
            "the drafter reads the caches of layer {last}, and the last stage is to have layers {range:?} only"
        );
        return Err(engine::Error::Config { option: "spec", reason }.into());
    }
    let cuts = spec.cut_points();
    let follows = |pair: &[Range<usize>]| match pair {
        [before, after] => before.end == after.start && cuts.contains(&after.start),
        _ => false,
    };
    let ends = (ranges.first().map(|range| range.start), ranges.last().map(|range| range.end));
    let whole = ends == (Some(0), Some(spec.layers.len())) && ranges.windows(2).all(follows);
    match whole && ranges.len() == stages && ranges.iter().all(|range| !range.is_empty()) {
        true => Ok(ranges.to_vec()),
        false => {
            let reason = format!("{ranges:?} is no cut of {} layers into {stages}", spec.layers.len());
            Err(engine::Error::StageStep { reason }.into())
        }
    }
}
