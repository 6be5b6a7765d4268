//! Learned positions of patches.

use super::pictures::Picture;
use crate::Error;
use crate::weights::Loader;
use model::spec::{PositionSpec, VisionSpec};

/// A table of positions, and how patches find their rows.
pub(super) struct Positions {
    kind: PositionSpec,
    /// `[rows, hidden]`.
    table: Vec<f32>,
    hidden: usize,
}

impl Positions {
    pub(super) fn load(spec: &VisionSpec, loader: &mut Loader<'_>) -> Result<Self, Error> {
        let table = match spec.positions.table() {
            Some(table) => loader.floats(&table.tensor, table.rows * spec.hidden)?,
            None => Vec::new(),
        };
        Ok(Self { kind: spec.positions.clone(), table, hidden: spec.hidden })
    }

    pub(super) fn is_some(&self) -> bool {
        self.kind != PositionSpec::None
    }

    /// Writes what is added to the rows of a picture; that of the class comes first.
    pub(super) fn write(&self, picture: &Picture<'_>, class: Option<&[f32]>, rows: &mut [f32]) {
        let (mut rows, [height, width]) = (rows.chunks_exact_mut(self.hidden), picture.grid());
        if let Some(class) = class
            && let Some(row) = rows.next()
        {
            row.copy_from_slice(class);
            self.add(row, 0, 1.0);
        }
        let behind = usize::from(class.is_some());
        let (lines, side): (fn(usize, usize) -> Lines, usize) = match self.kind {
            PositionSpec::Fraction { side, .. } => (fractions, side),
            PositionSpec::Interpolated { side, .. } => (places, side),
            PositionSpec::None | PositionSpec::Each(_) => return self.each(picture, behind, rows),
        };
        let (down, right) = (lines(height, side), lines(width, side));
        for (row, &(line, column)) in rows.zip(picture.patch_places()) {
            let (line, column) = (&down[line as usize], &right[column as usize]);
            for (above, by_line) in line {
                for (left, by_column) in column {
                    self.add(row, above * side + left, by_line * by_column);
                }
            }
        }
    }

    /// Adds the row of each patch's number to it.
    fn each<'a>(&self, picture: &Picture<'_>, behind: usize, rows: impl Iterator<Item = &'a mut [f32]>) {
        let width = picture.grid()[1];
        for (row, &(line, column)) in rows.zip(picture.patch_places()) {
            self.add(row, line as usize * width + column as usize + behind, 1.0);
        }
    }

    fn add(&self, row: &mut [f32], number: usize, factor: f32) {
        let found = self.table.get(number * self.hidden..(number + 1) * self.hidden).unwrap_or_default();
        row.iter_mut().zip(found).for_each(|(value, position)| *value += factor * position);
    }
}

/// For each of `count` patches the lines of a table of `side`, and their weights.
type Lines = Vec<Vec<(usize, f32)>>;

/// The line at the same fraction. Values are rounded as those of the reference, which decides at borders.
fn fractions(count: usize, side: usize) -> Lines {
    let step = 1.0 / count as f32;
    let borders: Vec<f32> = (1..side).map(|border| (border as f64 * (1.0 / side as f64)) as f32).collect();
    let line = |patch: usize| {
        let fraction = (patch as f32 * step).min(1.0 - 1e-6);
        borders.partition_point(|border| *border <= fraction)
    };
    (0..count).map(|patch| vec![(line(patch), 1.0)]).collect()
}

/// The two lines around places that divide the table evenly, from its first line to its last.
fn places(count: usize, side: usize) -> Lines {
    let last = side.saturating_sub(1);
    let place = |patch: usize| {
        let place = (patch * last) as f64 / count.saturating_sub(1).max(1) as f64;
        let above = (place as usize).min(last);
        let below = (place - above as f64) as f32;
        vec![(above, 1.0 - below), ((above + 1).min(last), below)]
    };
    (0..count).map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::{fractions, places};

    #[test]
    fn fractions_are_rounded_as_the_references() {
        let lines = |count, side| fractions(count, side).iter().map(|line| line[0].0).collect::<Vec<usize>>();
        for side in [1, 8, 26, 27, 32, 70] {
            assert_eq!(lines(side, side), (0..side).collect::<Vec<usize>>());
        }
        assert_eq!(lines(4, 8), [0, 2, 4, 6]);
        assert_eq!(lines(6, 4), [0, 0, 1, 2, 2, 3]);
        // Here the border is above the fraction by one unit of the last place.
        assert_eq!(lines(25, 25)[3..7], [3, 4, 4, 6]);
    }

    #[test]
    fn places_reach_from_the_first_line_to_the_last() {
        assert_eq!(places(1, 4), [vec![(0, 1.0), (1, 0.0)]]);
        let expected = [[(0, 1.0), (1, 0.0)], [(1, 0.5), (2, 0.5)], [(3, 1.0), (3, 0.0)]];
        assert_eq!(places(3, 4), expected.map(Vec::from));
    }
}
