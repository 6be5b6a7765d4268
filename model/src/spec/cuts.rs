//! Layer boundaries at which a model can be split into stages.

use super::{KvSpec, ModelSpec};
use std::ops::Range;

impl ModelSpec {
    /// Layers before which the model can be cut, ascending. No layer after a cut reads keys and values of a
    /// layer before it.
    pub fn cut_points(&self) -> Vec<usize> {
        // Iterates from the end: the earliest layer whose keys and values any later layer reads.
        let mut earliest = usize::MAX;
        let mut cuts = Vec::new();
        for (index, layer) in self.layers.iter().enumerate().skip(1).rev() {
            if let Some(attention) = layer.attention()
                && let KvSpec::Shared { layer: source } = attention.kv
            {
                earliest = earliest.min(source);
            }
            if earliest >= index {
                cuts.push(index);
            }
        }
        cuts.reverse();
        cuts
    }

    /// Layer ranges of `shards` stages, as even in layers as the cut points allow. `None` if `shards` is 0 or
    /// more than the cut points allow.
    pub fn stage_ranges(&self, shards: usize) -> Option<Vec<Range<usize>>> {
        self.stage_ranges_before(shards, self.layers.len())
    }

    /// Like [`Self::stage_ranges`], but the last stage contains all layers from `last` on.
    pub fn stage_ranges_before(&self, shards: usize, last: usize) -> Option<Vec<Range<usize>>> {
        let mut cuts = self.cut_points();
        cuts.retain(|cut| *cut <= last);
        let needed = shards.checked_sub(1)?;
        if needed > cuts.len() {
            return None;
        }
        let layers = self.layers.len();
        let mut ranges = Vec::with_capacity(shards);
        let (mut start, mut next) = (0, 0);
        for made in 1..=needed {
            // Leave enough cut points for the remaining cuts.
            let choice = &cuts[next..cuts.len() - (needed - made)];
            let best =
                choice.iter().enumerate().min_by_key(|(_, cut)| (**cut * shards).abs_diff(made * layers));
            let (at, &cut) = best?;
            ranges.push(start..cut);
            (start, next) = (cut, next + at + 1);
        }
        ranges.push(start..layers);
        Some(ranges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelFile;
    use std::path::Path;

    fn tiny(arch: &str) -> ModelSpec {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
        let file = ModelFile::open(root.join(arch).join(format!("{arch}-f32.gguf"))).unwrap();
        ModelSpec::from_file(&file).unwrap()
    }

    /// `tiny` with `layers` layers.
    fn stretched(layers: usize) -> ModelSpec {
        let mut spec = tiny("llama");
        spec.layers = vec![spec.layers[0].clone(); layers];
        spec
    }

    #[test]
    fn a_layer_stays_with_the_one_whose_keys_it_reads() {
        let spec = tiny("gemma4");
        let shares = |layer: usize| spec.attention(layer).is_some_and(|a| a.own_kv().is_none());
        assert!((0..spec.layers.len()).any(shares), "the fixture shares keys and values");
        let cuts = spec.cut_points();
        for cut in 1..spec.layers.len() {
            let crossed = (cut..spec.layers.len()).any(|layer| {
                matches!(spec.attention(layer).map(|a| &a.kv), Some(KvSpec::Shared { layer }) if *layer < cut)
            });
            assert_eq!(cuts.contains(&cut), !crossed, "before layer {cut}");
        }
        assert_eq!(spec.stage_ranges(cuts.len() + 2), None);
        assert_eq!(spec.stage_ranges(cuts.len() + 1).unwrap().len(), cuts.len() + 1);
    }

    #[test]
    fn ranges_are_contiguous_and_differ_by_a_layer_at_most() {
        for layers in 1..40 {
            let spec = stretched(layers);
            assert_eq!(spec.cut_points().len(), layers - 1);
            for shards in 1..=layers {
                let ranges = spec.stage_ranges(shards).unwrap();
                assert_eq!((ranges.len(), ranges[0].start, ranges[shards - 1].end), (shards, 0, layers));
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
                let sizes = || ranges.iter().map(Range::len);
                let (min, max) = (sizes().min().unwrap(), sizes().max().unwrap());
                assert!(min >= 1 && max - min <= 1, "{layers} layers over {shards}: {ranges:?}");
            }
            assert_eq!(spec.stage_ranges(layers + 1), None);
            assert_eq!(spec.stage_ranges(0), None);
            // The last stage has at least this many layers.
            for last in 1..layers {
                assert_eq!(spec.stage_ranges_before(last + 2, last), None);
                let ranges = spec.stage_ranges_before(last + 1, last).unwrap();
                assert_eq!((ranges.len(), ranges[last].clone()), (last + 1, last..layers));
                assert!(spec.stage_ranges_before(2, last).unwrap()[1].contains(&last));
            }
        }
    }
}
