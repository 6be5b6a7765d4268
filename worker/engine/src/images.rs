//! Images in prompts. The rows of an image are tokens from [`IMAGE_ID`] on, so prefixes, caches and replays name an
//! image like text. Their embeddings come from the vision tower, and models with three axes give them other positions.

use std::ops::Range;
use std::sync::Arc;

mod encoding;

pub(crate) use encoding::Digest;
pub use encoding::{Embeddings, Encoded, ImageEncoder, RemoteDone, RemoteEncoder, Unencoded};
pub use vision::IMAGE_ID;

/// First rows of an image at which no prefix hit may end: fewer ids do not identify the image.
const IDENTIFYING_ROWS: u32 = 8;

/// Embedding of an image, from the vision tower.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EncodedImage {
    /// `[rows, hidden]`: take the place of embedded tokens.
    pub rows: Vec<f32>,
    /// `[rows, hidden]` each: list `k` is added to the rows after layer `k`.
    pub deepstack: Vec<Vec<f32>>,
    /// The rows as time, height and width, for models with three axes.
    pub grid: Option<[u32; 3]>,
}

impl EncodedImage {
    pub fn bytes(&self) -> usize {
        size_of::<f32>() * (self.rows.len() + self.deepstack.iter().map(Vec::len).sum::<usize>())
    }
}

/// An image's place in a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedImage {
    /// Positions of its rows, ascending.
    pub runs: Vec<Range<u32>>,
    /// Of its pixels.
    pub digest: [u8; 32],
}

impl PlacedImage {
    pub fn rows(&self) -> u32 {
        self.runs.iter().map(|run| run.end.saturating_sub(run.start)).sum()
    }
}

/// Rules of a model's rows of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageRules {
    /// The rows of a run see each other in both directions.
    pub see_ahead: bool,
    /// Rows have positions on three axes.
    pub axes: bool,
}

/// Consecutive rows of an image in a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    positions: Range<u32>,
    image: usize,
    /// The image's row at its start.
    first_row: u32,
    /// Position of that row on the axes.
    base: u32,
    grid: [u32; 3],
}

impl Run {
    /// Position on all axes of the first row after it.
    fn next(&self) -> u32 {
        self.base + self.grid.into_iter().max().unwrap_or(0)
    }
}

/// The images of a sequence.
#[derive(Debug, Clone)]
pub struct SequenceImages {
    rules: ImageRules,
    runs: Vec<Run>,
    images: Vec<PlacedImage>,
    embeddings: Vec<Arc<EncodedImage>>,
}

/// Equal digests have equal embeddings.
impl PartialEq for SequenceImages {
    fn eq(&self, other: &Self) -> bool {
        (self.rules, &self.images) == (other.rules, &other.images)
    }
}

impl Eq for SequenceImages {}

impl SequenceImages {
    /// Places images in a prompt.
    ///
    /// # Errors
    /// The fault of a place, in words: it is outside the prompt, has other tokens than those of images, or overlaps another.
    pub fn new(rules: ImageRules, prompt: &[u32], images: Vec<PlacedImage>) -> Result<Self, String> {
        let mut runs = Vec::new();
        for (image, placed) in images.iter().enumerate() {
            let mut first_row = 0;
            for positions in &placed.runs {
                let rows = prompt.get(positions.start as usize..positions.end as usize);
                let rows = rows.filter(|rows| !rows.is_empty() && rows.iter().all(|id| *id >= IMAGE_ID));
                let Some(rows) = rows else {
                    return Err(format!("image {image}: positions {positions:?} have no rows of an image"));
                };
                let positions = positions.clone();
                runs.push(Run { positions, image, first_row, base: 0, grid: [0; 3] });
                first_row += rows.len() as u32;
            }
        }
        runs.sort_by_key(|run| run.positions.start);
        let overlap = runs.windows(2).find(|pair| pair[1].positions.start < pair[0].positions.end);
        if let Some(pair) = overlap {
            return Err(format!("two images have position {}", pair[1].positions.start));
        }
        let placed: u32 = images.iter().map(PlacedImage::rows).sum();
        if prompt.iter().filter(|id| **id >= IMAGE_ID).count() != placed as usize {
            return Err("rows of images have no image".to_owned());
        }
        Ok(Self { rules, runs, images, embeddings: Vec::new() })
    }

    pub fn images(&self) -> &[PlacedImage] {
        &self.images
    }

    /// Sets the embedding of each image, and with the grids the positions.
    ///
    /// # Errors
    /// In words: an embedding has another shape than the image's rows of `hidden` values, or another number of rows in
    /// its grid.
    pub fn embed(&mut self, hidden: usize, embeddings: Vec<Arc<EncodedImage>>) -> Result<(), String> {
        let (expected, found) = (self.images.len(), embeddings.len());
        if expected != found {
            return Err(format!("{found} embeddings for {expected} images"));
        }
        for (image, (placed, embedding)) in self.images.iter().zip(&embeddings).enumerate() {
            let expected = placed.rows() as usize * hidden;
            let lists = std::iter::once(&embedding.rows).chain(&embedding.deepstack);
            if let Some(list) = lists.into_iter().find(|list| list.len() != expected) {
                let (rows, found) = (placed.rows(), list.len());
                return Err(format!("image {image}: {found} values for {rows} rows of {hidden}"));
            }
            let grid = embedding.grid.unwrap_or_default();
            let of_grid = grid.iter().try_fold(1_u32, |all, count| all.checked_mul(*count));
            if self.rules.axes && (placed.runs.len() != 1 || of_grid != Some(placed.rows())) {
                return Err(format!("image {image}: {} rows are not a grid of {grid:?}", placed.rows()));
            }
        }
        let mut end = (0, 0);
        for run in &mut self.runs {
            run.grid = embeddings[run.image].grid.unwrap_or_default();
            run.base = end.1 + run.positions.start - end.0;
            end = (run.positions.end, run.next());
        }
        self.embeddings = embeddings;
        Ok(())
    }

    /// The run at a position, or the last one before it.
    fn run(&self, position: u32) -> Option<&Run> {
        let at = self.runs.partition_point(|run| run.positions.start <= position);
        self.runs.get(at.checked_sub(1)?)
    }

    /// The position on each axis.
    pub fn axes(&self, position: u32) -> [u32; 3] {
        let Some(run) = self.run(position).filter(|_| self.rules.axes) else { return [position; 3] };
        let row = position - run.positions.start;
        let [_, height, width] = run.grid;
        match position < run.positions.end {
            true => [row / (height * width), row / width % height, row % width].map(|at| run.base + at),
            false => [run.next() + position - run.positions.end; 3],
        }
    }

    /// The positions that a row sees in both directions; an empty range for most.
    pub fn span(&self, position: u32) -> Range<u32> {
        let run = self.run(position).filter(|run| self.rules.see_ahead && position < run.positions.end);
        run.map_or(0..0, |run| run.positions.clone())
    }

    /// Rows of the longest span.
    pub fn longest_span(&self) -> u32 {
        let spans = self.runs.iter().filter(|_| self.rules.see_ahead);
        spans.map(|run| run.positions.len() as u32).max().unwrap_or(0)
    }

    /// The last position up to `end` at which a prefix hit may end: not among the first rows of an image, and not
    /// inside a span.
    pub fn hit_end(&self, end: u32) -> u32 {
        let Some(run) = end.checked_sub(1).and_then(|last| self.run(last)) else { return end };
        let image = self.runs.iter().find(|first| first.image == run.image).unwrap_or(run);
        let positions = &run.positions;
        let inside_span = self.rules.see_ahead && end < positions.end;
        let identified = run.first_row + (end.min(positions.end) - positions.start) >= IDENTIFYING_ROWS;
        let whole =
            end >= positions.end && run.first_row + positions.len() as u32 == self.images[run.image].rows();
        match (inside_span, identified || whole) {
            (_, false) => image.positions.start,
            (true, true) => positions.start,
            (false, true) => end,
        }
    }

    /// Number of rows of a chunk from `from` that may be computed together: it ends in no span.
    pub fn uncut(&self, from: u32, rows: u32) -> u32 {
        let span = self.span(from + rows);
        if span.start < from + rows && !span.is_empty() { span.start.saturating_sub(from) } else { rows }
    }

    /// Rows from `from` on to the end of its span, at least `rows`.
    pub fn at_least(&self, from: u32, rows: u32) -> u32 {
        rows.max(self.span(from).end.saturating_sub(from))
    }
}

/// Embeddings and places of a step's rows of images. Empty without images.
#[derive(Debug, Default)]
pub struct StepImages {
    /// See [`kernels::backend::RowPlaces`].
    pub axes: Vec<[u32; 3]>,
    pub spans: Vec<(u32, u32)>,
    pub rows: Vec<ImageRows>,
}

/// Rows of a step that an image has.
#[derive(Debug)]
pub struct ImageRows {
    /// The first of these rows in the step.
    pub first: usize,
    /// The image's rows.
    pub rows: Range<usize>,
    pub embedding: Arc<EncodedImage>,
}

impl StepImages {
    /// Adds the rows of a sequence, which follow those that were added before. `images`: those of the sequence.
    pub fn push(&mut self, images: Option<&SequenceImages>, context: u32, rows: u32) {
        let (first, positions) = (self.spans.len(), context..context + rows);
        let Some(images) = images else {
            self.axes.extend(positions.clone().map(|position| [position; 3]));
            self.spans.extend(positions.map(|_| (0, 0)));
            return;
        };
        for run in &images.runs {
            let (from, to) = (run.positions.start.max(context), run.positions.end.min(positions.end));
            if let Some(embedding) = images.embeddings.get(run.image).filter(|_| from < to) {
                let row = |position: u32| (run.first_row + position - run.positions.start) as usize;
                self.rows.push(ImageRows {
                    first: first + (from - context) as usize,
                    rows: row(from)..row(to),
                    embedding: Arc::clone(embedding),
                });
            }
        }
        self.axes.extend(positions.clone().map(|position| images.axes(position)));
        self.spans.extend(positions.map(|position| images.span(position)).map(|span| (span.start, span.end)));
    }
}

#[cfg(test)]
mod tests;
