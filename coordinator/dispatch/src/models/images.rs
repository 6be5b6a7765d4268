//! Images of chats: what the coordinator needs to know of a file, and the prompt with its rows.

#[cfg(test)]
mod tests;

use super::OfferedModel;
use metadata::Metadata;
use parking_lot::Mutex;
use proto::ids::ModelId;
use proto::message::TokenIds;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use text::Tokenizer;
use text::chat_template::Prompt;
use vision::{ImageProcessor, Piece, ProcessedImage};

/// Most files whose facts are kept for each model.
const MAX_KNOWN: usize = 2048;

/// Preprocessing of a model's images.
#[derive(Debug)]
pub struct Images {
    processor: ImageProcessor,
    /// Text of the token that stands for a row.
    row_text: String,
    known: Mutex<Known>,
    decoded: AtomicU64,
    reused: AtomicU64,
    refused: AtomicU64,
}

/// Facts of files by their BLAKE3. When the young table is full, it becomes the old one, which is dropped.
#[derive(Debug, Default)]
struct Known {
    young: Table,
    old: Table,
}

type Table = HashMap<[u8; 32], Slot>;
type Slot = Arc<OnceLock<Result<Arc<SeenImage>, vision::Error>>>;

impl Known {
    fn slot(&mut self, file: [u8; 32]) -> Slot {
        if let Some(slot) = self.young.get(&file) {
            return Arc::clone(slot);
        }
        if self.young.len() >= MAX_KNOWN / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        let slot = self.old.remove(&file).unwrap_or_default();
        self.young.insert(file, Arc::clone(&slot));
        slot
    }
}

/// Facts of an image after preprocessing. The pixels are not kept.
#[derive(Debug, PartialEq, Eq)]
pub struct SeenImage {
    /// BLAKE3 of the preprocessed pixels.
    pub digest: [u8; 32],
    /// Rows of the prompt.
    pub rows: usize,
    pieces: Vec<Piece>,
}

/// A chat's tokens, with the places of its images.
#[derive(Debug, PartialEq, Eq)]
pub struct PromptWithImages {
    pub tokens: TokenIds,
    /// For each image the positions of its rows, ascending.
    pub runs: Vec<Vec<Range<u32>>>,
}

/// Why images have no place in a prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    #[error("the model {0} sees no images")]
    Blind(ModelId),
    #[error("the model {model} sees no images here: {error}")]
    Unsupported { model: ModelId, error: vision::Error },
    #[error(
        "the model's chat template writes {written} of {given} images: it may accept them in fewer roles"
    )]
    Template { given: usize, written: usize },
    /// The prompt has tokens of rows that are no image's.
    #[error("the prompt has {found} places for rows of images, its images have {expected}")]
    Rows { expected: usize, found: usize },
}

impl Images {
    /// `None` if the model sees no images. If it does, the tokenizer's tokens of images become control tokens.
    pub(super) fn of(metadata: &Metadata, tokenizer: &mut Tokenizer) -> Result<Option<Self>, vision::Error> {
        let Some(processor) = ImageProcessor::from_metadata(metadata)? else { return Ok(None) };
        let row = processor.row_token();
        let Some(row_text) = tokenizer.token_text(row).map(str::to_owned) else {
            let key = "config.json: image_token_id".to_owned();
            return Err(vision::Error::Config { key, detail: format!("is {row}, which is no token") });
        };
        let markers = tokenizer.encode(processor.marker(), true);
        tokenizer.make_control(&markers);
        tokenizer.make_control(&[row]);
        let (known, decoded, reused, refused) = Default::default();
        Ok(Some(Self { processor, row_text, known, decoded, reused, refused }))
    }

    /// Decodes and preprocesses a file, unless that is done. Equal files that come together are decoded once.
    pub fn see(&self, file: &[u8]) -> Result<Arc<SeenImage>, vision::Error> {
        let slot = self.known.lock().slot(blake3::hash(file).into());
        let mut known = true;
        let seen = slot.get_or_init(|| {
            known = false;
            self.processor.process(file).map(|image| Arc::new(self.facts(&image)))
        });
        let counter = if known { &self.reused } else { &self.decoded };
        counter.fetch_add(1, Ordering::Relaxed);
        if seen.is_err() {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        seen.clone()
    }

    /// Files that were decoded, files that were known, and refused ones of both.
    pub fn counts(&self) -> [u64; 3] {
        [&self.decoded, &self.reused, &self.refused].map(|counter| counter.load(Ordering::Relaxed))
    }

    fn facts(&self, image: &ProcessedImage) -> SeenImage {
        SeenImage { digest: image.digest, rows: image.rows, pieces: self.processor.expand(image) }
    }

    /// Replaces the markers that the template wrote by the pieces of the images, each run of rows by the token of one
    /// row. Returns the runs, too: image and number of rows.
    fn expand(
        &self,
        prompt: &Prompt,
        images: &[Arc<SeenImage>],
    ) -> Result<(Prompt, Vec<(usize, usize)>), PlaceError> {
        let marker = self.processor.marker();
        let own = |at: usize| {
            let next = prompt.quoted.partition_point(|range| range.end <= at);
            prompt.quoted.get(next).is_none_or(|range| range.start >= at + marker.len())
        };
        let markers = prompt.text.match_indices(marker).map(|(at, _)| at).filter(|at| own(*at));
        let markers: Vec<usize> = markers.collect();
        if markers.len() != images.len() {
            return Err(PlaceError::Template { given: images.len(), written: markers.len() });
        }
        let mut quoted = prompt.quoted.iter().peekable();
        let (mut expanded, mut runs, mut from) = (Prompt::default(), Vec::new(), 0);
        for (at, image) in
            markers.into_iter().zip(images.iter().enumerate().map(Some)).chain([(prompt.text.len(), None)])
        {
            let base = expanded.text.len();
            expanded.text.push_str(prompt.text.get(from..at).unwrap_or_default());
            while let Some(range) = quoted.next_if(|range| range.end <= at) {
                let shifted: Range<usize> = base + range.start - from..base + range.end - from;
                expanded.quoted.push(shifted);
            }
            let Some((index, image)) = image else { break };
            for piece in &image.pieces {
                match piece {
                    Piece::Text(text) => expanded.text.push_str(text),
                    Piece::Rows(rows) => {
                        expanded.text.push_str(&self.row_text);
                        runs.push((index, *rows));
                    }
                }
            }
            from = at + marker.len();
        }
        Ok((expanded, runs))
    }
}

impl OfferedModel {
    /// Preprocessing of the model's images.
    pub fn images(&self) -> Result<&Images, PlaceError> {
        let model = || self.id.clone();
        match &self.images {
            Ok(Some(images)) => Ok(images),
            Ok(None) => Err(PlaceError::Blind(model())),
            Err(error) => Err(PlaceError::Unsupported { model: model(), error: error.clone() }),
        }
    }

    /// The tokens with the vocabulary's token for each row of an image.
    pub fn in_vocabulary(&self, tokens: &[u32]) -> Vec<u32> {
        let row = self.images().map_or(u32::MAX, |images| images.processor.row_token());
        tokens.iter().map(|id| if *id >= vision::IMAGE_ID { row } else { *id }).collect()
    }

    /// The tokens of a chat with images, which are in the order of the template's markers.
    pub fn chat_with_images(
        &self,
        prompt: &Prompt,
        images: &[Arc<SeenImage>],
        bos: bool,
    ) -> Result<PromptWithImages, PlaceError> {
        let sees = self.images()?;
        let (expanded, expected) = sees.expand(prompt, images)?;
        let tokens = self.chat(&expanded, bos);
        let row = sees.processor.row_token();
        let found = tokens.iter().filter(|id| **id == row).count();
        if found != expected.len() {
            return Err(PlaceError::Rows { expected: expected.len(), found });
        }
        let ids: Vec<Vec<u32>> =
            images.iter().map(|image| vision::image_ids(&image.digest, image.rows)).collect();
        let (mut runs, mut used) = (vec![Vec::new(); images.len()], vec![0; images.len()]);
        let mut all = Vec::with_capacity(tokens.len() + ids.iter().map(Vec::len).sum::<usize>());
        let mut expected = expected.into_iter();
        let mut before = tokens.len();
        for (at, id) in tokens.iter().enumerate() {
            let Some((image, rows)) = (*id == row).then(|| expected.next()).flatten() else {
                all.push(*id);
                continue;
            };
            before = before.min(at);
            let first = all.len();
            let from = used[image];
            all.extend_from_slice(ids[image].get(from..from + rows).unwrap_or_default());
            used[image] += rows;
            runs[image].push(first as u32..all.len() as u32);
        }
        // Names of parts say nothing about the rows.
        let parts = tokens.parts().iter().filter(|part| part.end <= before).copied().collect();
        Ok(PromptWithImages { tokens: TokenIds::from_parts(all, parts), runs })
    }
}
