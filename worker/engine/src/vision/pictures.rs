//! Pictures of an image: their patches in the order of the rows, and their windows.

use super::Pixels;
use crate::Error;
use model::spec::{COLOURS, PixelLayout, VisionSpec};
use std::ops::Range;

/// Largest number of pixels on a side, and of patches.
const MAX_SIDE: usize = 1 << 16;

/// A picture or a frame, which is encoded by itself.
#[derive(Debug)]
pub(super) struct Picture<'a> {
    pixels: Source<'a>,
    /// Patches in height and width.
    grid: [usize; 2],
    /// Line and column of each patch in the order of the rows: those that are merged follow each other, and so do
    /// those of a window.
    places: Vec<(u32, u32)>,
    /// Rows of each window.
    windows: Vec<Range<usize>>,
    /// Place in the result of each merged row. Empty: rows are in the order of the result.
    order: Vec<usize>,
}

#[derive(Debug, Clone, Copy)]
enum Source<'a> {
    /// `[colours, height, width]`.
    Picture { values: &'a [f32], width: usize, side: usize },
    /// Patches by merged rows, `[colours, frames, lines, pixels]` each.
    Patches { values: &'a [f32], merge: usize, frames: usize, side: usize },
}

/// The pictures of an image, of at most `most` patches each.
pub(super) fn pictures<'a>(
    spec: &VisionSpec,
    most: usize,
    pixels: &Pixels<'a>,
) -> Result<Vec<Picture<'a>>, Error> {
    let Pixels { values, shape, grid } = *pixels;
    if values.len() != shape.iter().fold(1, |all: usize, dim| all.saturating_mul(*dim)) {
        return Err(refuse(format!("{} values, expected those of the shape {shape:?}", values.len())));
    }
    if let Some(value) = values.iter().find(|value| !value.is_finite()) {
        return Err(refuse(format!("a value is {value}, expected finite numbers")));
    }
    let side = spec.patches.side;
    match (spec.patches.pixels, shape, grid) {
        (PixelLayout::Pictures { sides }, &[count, COLOURS, height, width], _) => {
            if sides.is_some_and(|side| (height, width) != (side, side)) {
                let expected = sides.unwrap_or(0);
                return Err(refuse(format!("{width} x {height} pixels, expected {expected} x {expected}")));
            }
            let grid = [height / side, width / side];
            check(spec, most, grid)?;
            let picture = |number: usize| {
                let values =
                    &values[number * COLOURS * height * width..(number + 1) * COLOURS * height * width];
                Picture::new(spec, Source::Picture { values, width, side }, grid)
            };
            Ok((0..count).map(picture).collect())
        }
        (PixelLayout::Patches, &[patches, width], Some(grid)) if width == spec.patches.values() => {
            let [count, height, columns] = grid.map(|count| count as usize);
            let in_grid = count.checked_mul(height).and_then(|all| all.checked_mul(columns));
            if in_grid != Some(patches) {
                return Err(refuse(format!("{patches} patches, expected those of the grid {grid:?}")));
            }
            check(spec, most, [height, columns])?;
            let (merge, frames) = (spec.merge_side(), spec.patches.frames.len());
            let of_frame = height * columns * width;
            let picture = |number: usize| {
                let values = &values[number * of_frame..(number + 1) * of_frame];
                Picture::new(spec, Source::Patches { values, merge, frames, side }, [height, columns])
            };
            Ok((0..count).map(picture).collect())
        }
        (PixelLayout::Pictures { .. }, _, _) => {
            Err(refuse(format!("the shape {shape:?}, expected [pictures, {COLOURS}, height, width]")))
        }
        (PixelLayout::Patches, _, _) => {
            let width = spec.patches.values();
            Err(refuse(format!(
                "the shape {shape:?} with the grid {grid:?}, expected [patches, {width}] and a grid"
            )))
        }
    }
}

fn check(spec: &VisionSpec, most: usize, grid: [usize; 2]) -> Result<(), Error> {
    let ([height, width], merge) = (grid, spec.merge_side());
    if !(1..=MAX_SIDE).contains(&height) || !(1..=MAX_SIDE).contains(&width) {
        return Err(refuse(format!("{width} x {height} patches, expected 1 to {MAX_SIDE} on a side")));
    }
    if !height.is_multiple_of(merge) || !width.is_multiple_of(merge) {
        return Err(refuse(format!("{width} x {height} patches, expected multiples of {merge}")));
    }
    match height * width {
        patches if patches <= most => Ok(()),
        patches => Err(refuse(format!("a picture of {patches} patches, the limit is {most}"))),
    }
}

fn refuse(reason: String) -> Error {
    Error::Image { reason }
}

impl<'a> Picture<'a> {
    fn new(spec: &VisionSpec, pixels: Source<'a>, grid: [usize; 2]) -> Self {
        let merge = spec.merge_side();
        let [height, width] = grid.map(|patches| patches / merge);
        let window = spec.windows.as_ref().map(|windows| windows.side);
        let (window_height, window_width) = (window.unwrap_or(height), window.unwrap_or(width));
        let mut picture = Self { pixels, grid, places: Vec::new(), windows: Vec::new(), order: Vec::new() };
        picture.places.reserve_exact(grid[0] * grid[1]);
        for top in (0..height).step_by(window_height.max(1)) {
            for left in (0..width).step_by(window_width.max(1)) {
                let start = picture.places.len();
                for line in top..height.min(top + window_height) {
                    for column in left..width.min(left + window_width) {
                        let patches = (0..merge * merge).map(|patch| (patch / merge, patch % merge));
                        let place =
                            |(down, right)| ((line * merge + down) as u32, (column * merge + right) as u32);
                        picture.places.extend(patches.map(place));
                        if window.is_some() {
                            picture.order.push(line * width + column);
                        }
                    }
                }
                picture.windows.push(start..picture.places.len());
            }
        }
        picture
    }

    pub(super) fn patches(&self) -> usize {
        self.places.len()
    }

    pub(super) fn grid(&self) -> [usize; 2] {
        self.grid
    }

    pub(super) fn patch_places(&self) -> &[(u32, u32)] {
        &self.places
    }

    pub(super) fn windows(&self) -> &[Range<usize>] {
        &self.windows
    }

    /// Writes the pixels of each patch's frame `[colours, lines, pixels]`, in the order of the rows.
    pub(super) fn write_patches(&self, frame: usize, out: &mut [f32]) {
        let rows = out.chunks_exact_mut((out.len() / self.places.len().max(1)).max(1));
        for (out, &(line, column)) in rows.zip(&self.places) {
            let (line, column) = (line as usize, column as usize);
            match self.pixels {
                Source::Picture { values, width, side } => {
                    let plane = values.len() / COLOURS;
                    for (number, out) in out.chunks_exact_mut(side).enumerate() {
                        let (colour, within) = (number / side, number % side);
                        let at = colour * plane + (line * side + within) * width + column * side;
                        out.copy_from_slice(&values[at..at + side]);
                    }
                }
                Source::Patches { values, merge, frames, side } => {
                    let merged = line / merge * (self.grid[1] / merge) + column / merge;
                    let patch = (merged * merge + line % merge) * merge + column % merge;
                    let square = side * side;
                    for (colour, out) in out.chunks_exact_mut(square).enumerate() {
                        let at = ((patch * COLOURS + colour) * frames + frame) * square;
                        out.copy_from_slice(&values[at..at + square]);
                    }
                }
            }
        }
    }

    /// Merged rows in the order of the result.
    pub(super) fn in_order(&self, rows: &[f32], width: usize) -> Vec<f32> {
        if self.order.is_empty() {
            return rows.to_vec();
        }
        let mut result = vec![0.0; rows.len()];
        for (row, place) in rows.chunks_exact(width).zip(&self.order) {
            result[place * width..(place + 1) * width].copy_from_slice(row);
        }
        result
    }
}
