//! Images of requests: their embeddings come from a thread of their own, so that steps of other requests continue
//! meanwhile. An image that several requests have is encoded once, and stays in a cache of bounded size.

use super::request::{Removal, RequestState};
use super::{Engine, EngineImage};
use crate::Error;
use crate::images::{EncodedImage, ImageRules, PlacedImage, SequenceImages};
use crate::progress::spawn;
use crate::pull::Source;
use crate::scheduler::{SeqId, SequenceRequest};
use crate::telemetry::ImageMetrics;
use proto::message::GenerateError;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// Encodes images. Runs on a thread of its own.
pub trait ImageEncoder: Send {
    /// The embedding of the image in `file`.
    ///
    /// # Errors
    /// The file's fault in words, or that it is not the image of the place's digest.
    fn encode(&mut self, file: &[u8], place: &PlacedImage) -> Result<EncodedImage, String>;
}

/// Where an image's embedding comes from.
#[derive(Debug, Clone)]
pub enum ImageSource {
    /// The encoder reads the file.
    File(Arc<[u8]>),
    Embedding(Arc<EncodedImage>),
}

type Digest = [u8; 32];
type Encoded = Result<Arc<EncodedImage>, String>;

/// A request that waits for embeddings.
pub(super) struct Encoding {
    request: SequenceRequest,
    source: Option<Box<dyn Source>>,
    together: u32,
    images: SequenceImages,
    /// Of each image.
    embeddings: Vec<Option<Arc<EncodedImage>>>,
}

/// Embeddings by the digests of images, the least recently used first.
#[derive(Debug, Default)]
struct Cache {
    budget: usize,
    bytes: usize,
    uses: u64,
    entries: HashMap<Digest, (u64, Arc<EncodedImage>)>,
    oldest: BTreeMap<u64, Digest>,
}

impl Cache {
    fn get(&mut self, digest: &Digest) -> Option<Arc<EncodedImage>> {
        self.uses += 1;
        let (used, embedding) = self.entries.get_mut(digest)?;
        self.oldest.remove(used);
        self.oldest.insert(self.uses, *digest);
        *used = self.uses;
        Some(Arc::clone(embedding))
    }

    fn insert(&mut self, digest: Digest, embedding: &Arc<EncodedImage>) {
        let bytes = embedding.bytes();
        if bytes > self.budget || self.entries.contains_key(&digest) {
            return;
        }
        while self.bytes > self.budget - bytes
            && let Some((_, digest)) = self.oldest.pop_first()
        {
            let removed = self.entries.remove(&digest);
            self.bytes -= removed.map_or(0, |(_, embedding)| embedding.bytes());
        }
        self.uses += 1;
        self.bytes += bytes;
        self.oldest.insert(self.uses, digest);
        self.entries.insert(digest, (self.uses, Arc::clone(embedding)));
    }
}

/// A file to encode.
struct Job {
    file: Arc<[u8]>,
    place: PlacedImage,
}

/// The encoder's thread.
struct Encoder {
    jobs: Sender<Job>,
    encoded: Receiver<(Digest, Encoded)>,
}

#[derive(Default)]
pub(super) struct Images {
    encoder: Option<Encoder>,
    cache: Cache,
    /// Requests by the digests of the images that they wait for.
    waiting: HashMap<Digest, Vec<SeqId>>,
}

impl Images {
    /// Requests that wait, each once.
    pub(super) fn waiting(&self) -> Vec<SeqId> {
        let mut waiting: Vec<SeqId> = self.waiting.values().flatten().copied().collect();
        waiting.sort_unstable();
        waiting.dedup();
        waiting
    }

    /// Forgets a request. What it waits for is encoded nevertheless, for the cache.
    pub(super) fn remove(&mut self, id: SeqId) {
        self.waiting.values_mut().for_each(|ids| ids.retain(|other| *other != id));
    }

    /// The embedding if it is known; otherwise `id` waits for it.
    fn embedding(
        &mut self,
        id: SeqId,
        place: &PlacedImage,
        source: ImageSource,
        metrics: &ImageMetrics,
    ) -> Option<Arc<EncodedImage>> {
        let file = match source {
            ImageSource::Embedding(embedding) => return Some(embedding),
            ImageSource::File(file) => file,
        };
        if let Some(found) = self.cache.get(&place.digest) {
            metrics.hits.inc();
            return Some(found);
        }
        let encoder = &self.encoder;
        let waiting = self.waiting.entry(place.digest).or_insert_with(|| {
            let job = Job { file, place: place.clone() };
            // A thread that has ended answers nothing. The request then waits until its deadline.
            let _ = encoder.as_ref().map(|encoder| encoder.jobs.send(job));
            Vec::new()
        });
        waiting.push(id);
        None
    }
}

impl Engine {
    /// Serves images: `encoder` makes their embeddings, of which the cache keeps up to `cache_bytes`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn with_images(
        mut self,
        mut encoder: Box<dyn ImageEncoder>,
        cache_bytes: usize,
    ) -> Result<Self, Error> {
        let ((jobs, inbox), (results, encoded)) = (channel::<Job>(), channel());
        let metrics = self.metrics.images.clone();
        spawn("kvasir-images", move || {
            for Job { file, place } in inbox {
                let since = Instant::now();
                let made = encoder.encode(&file, &place).map(Arc::new);
                metrics.seconds.0.observe(since.elapsed().as_secs_f64());
                metrics.encoded.inc();
                if results.send((place.digest, made)).is_err() {
                    return;
                }
            }
        })?;
        self.images.encoder = Some(Encoder { jobs, encoded });
        self.images.cache.budget = cache_bytes;
        Ok(self)
    }

    /// Rules of rows of images. `None`: it serves none.
    pub fn image_rules(&self) -> Option<ImageRules> {
        self.executor.decoder().image_rules().filter(|_| self.executor.ranks() == 1)
    }

    /// Whether requests wait for embeddings, which come from another thread.
    pub fn encodes_images(&self) -> bool {
        !self.images.waiting().is_empty()
    }

    /// Checks the images of a request. `None`: it has none.
    pub(super) fn place_images(
        &self,
        prompt: &[u32],
        images: &[EngineImage],
    ) -> Result<Option<SequenceImages>, GenerateError> {
        if images.is_empty() {
            return Ok(None);
        }
        let refuse = |reason: String| GenerateError::InvalidField { field: "images".to_owned(), reason };
        let rules = self.image_rules().ok_or_else(|| {
            refuse("this worker computes no rows of images: it has a GPU, or a part of the layers".to_owned())
        })?;
        let is_file = |image: &EngineImage| matches!(image.source, ImageSource::File(_));
        if images.iter().any(is_file) && self.images.encoder.is_none() {
            return Err(refuse("this model sees no images".to_owned()));
        }
        let places = images.iter().map(|image| image.place.clone()).collect();
        SequenceImages::new(rules, prompt, places).map(Some).map_err(refuse)
    }

    /// Schedules a request with images, or lets it wait for their embeddings.
    pub(super) fn encode_or_schedule(
        &mut self,
        now: Instant,
        request: SequenceRequest,
        source: Option<Box<dyn Source>>,
        together: u32,
        (images, sources): (SequenceImages, Vec<ImageSource>),
    ) {
        let id = request.id;
        let metrics = &self.metrics.images;
        let found = images.images().iter().zip(sources);
        let embeddings =
            found.map(|(place, source)| self.images.embedding(id, place, source, metrics)).collect();
        self.schedule_if_encoded(now, id, Encoding { request, source, together, images, embeddings });
    }

    fn schedule_if_encoded(&mut self, now: Instant, id: SeqId, encoding: Encoding) {
        let Some(embeddings) = encoding.embeddings.iter().cloned().collect::<Option<Vec<_>>>() else {
            return self.set_state(id, RequestState::EncodingImages(Box::new(encoding)));
        };
        let Encoding { mut request, source, together, mut images, .. } = encoding;
        if let Err(reason) = images.embed(self.executor.decoder().spec().hidden, embeddings) {
            return self.remove(id, Removal::BadImage(reason));
        }
        request.images = Some(Arc::new(images));
        self.schedule_or_wait(now, request, source, together);
    }

    /// Continues requests whose images have been encoded.
    pub(super) fn finish_encodings(&mut self, now: Instant) {
        while let Some((digest, made)) =
            self.images.encoder.as_ref().and_then(|encoder| encoder.encoded.try_recv().ok())
        {
            if let Ok(embedding) = &made {
                self.images.cache.insert(digest, embedding);
                self.metrics.images.bytes.set(self.images.cache.bytes as i64);
            }
            let mut ids = self.images.waiting.remove(&digest).unwrap_or_default();
            ids.dedup();
            self.metrics.images.shared.inc_by(ids.len().saturating_sub(1) as u64);
            for id in ids {
                let Some(RequestState::EncodingImages(mut encoding)) = self.take_state(id) else { continue };
                match &made {
                    Err(reason) => {
                        self.images.remove(id);
                        self.remove(id, Removal::BadImage(reason.clone()));
                    }
                    Ok(embedding) => {
                        for (place, slot) in encoding.images.images().iter().zip(&mut encoding.embeddings) {
                            if place.digest == digest {
                                *slot = Some(Arc::clone(embedding));
                            }
                        }
                        self.schedule_if_encoded(now, id, *encoding);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_embeddings_leave_the_cache() {
        let mut cache = Cache { budget: 32, ..Cache::default() };
        let embedding =
            |values| Arc::new(EncodedImage { rows: vec![0.0; values], ..EncodedImage::default() });
        for digest in [1, 2, 3] {
            cache.insert([digest; 32], &embedding(2));
        }
        assert!(cache.get(&[1; 32]).is_some());
        cache.insert([4; 32], &embedding(4));
        let here: Vec<bool> = (1..5).map(|digest| cache.get(&[digest; 32]).is_some()).collect();
        assert_eq!((here, cache.bytes), (vec![true, false, true, true], 32));
        cache.insert([5; 32], &embedding(9));
        assert!(cache.get(&[5; 32]).is_none() && cache.get(&[1; 32]).is_some());
        cache.insert([6; 32], &embedding(8));
        assert_eq!((cache.entries.len(), cache.oldest.len(), cache.bytes), (1, 1, 32));
    }
}
