//! Images of requests: their embeddings come from a thread of their own, so that steps of other requests continue
//! meanwhile. An image that several requests have is encoded once, and stays in a cache of bounded size.

use super::request::{Removal, RequestState};
use super::{Engine, EngineImage};
use crate::Error;
use crate::images::{
    Digest, Embeddings, Encoded, EncodedImage, ImageEncoder, ImageRules, RemoteEncoder, SequenceImages,
    Unencoded,
};
use crate::pull::Source;
use crate::scheduler::{SeqId, SequenceRequest};
use proto::message::GenerateError;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// Where an image's embedding comes from.
#[derive(Debug, Clone)]
pub enum ImageSource {
    /// The encoder of this engine reads the file.
    File(Arc<[u8]>),
    /// Another worker reads the file, or this engine's encoder if none is reached.
    Elsewhere(Arc<[u8]>, Arc<dyn RemoteEncoder>),
    Embedding(Arc<EncodedImage>),
}

/// A request that waits for embeddings.
pub(super) struct Encoding {
    request: SequenceRequest,
    source: Option<Box<dyn Source>>,
    together: u32,
    images: SequenceImages,
    /// Of each image.
    embeddings: Vec<Option<Arc<EncodedImage>>>,
}

/// An image of a request that is encoded.
type Made = (SeqId, Digest, Encoded);

struct Encoder {
    embeddings: Embeddings,
    sender: Sender<Made>,
    encoded: Receiver<Made>,
}

#[derive(Default)]
pub(super) struct Images {
    encoder: Option<Encoder>,
    waiting: BTreeSet<SeqId>,
}

impl Images {
    /// Requests that wait.
    pub(super) fn waiting(&self) -> Vec<SeqId> {
        self.waiting.iter().copied().collect()
    }

    /// Forgets a request. What it waits for is encoded nevertheless, for the cache.
    pub(super) fn remove(&mut self, id: SeqId) {
        self.waiting.remove(&id);
    }

    /// The embeddings that are known. `id` waits for the others.
    fn embeddings(
        &self,
        id: SeqId,
        images: &SequenceImages,
        sources: Vec<ImageSource>,
    ) -> Vec<Option<Arc<EncodedImage>>> {
        let mut asked = Vec::new();
        let found = images.images().iter().zip(sources).map(|(place, source)| {
            let (file, remote) = match source {
                ImageSource::Embedding(embedding) => return Some(embedding),
                ImageSource::File(file) => (file, None),
                ImageSource::Elsewhere(file, remote) => (file, Some(remote)),
            };
            let encoder = self.encoder.as_ref().filter(|_| !asked.contains(&place.digest))?;
            let (sender, digest) = (encoder.sender.clone(), place.digest);
            let waiter = move |made: &Encoded| {
                // Fails only if the engine has ended.
                let _ = sender.send((id, digest, made.clone()));
            };
            let known = encoder.embeddings.get((file, place), remote.as_deref(), waiter);
            asked.extend(known.is_none().then_some(digest));
            known
        });
        found.collect()
    }
}

impl Engine {
    /// Serves images: `encoder` makes their embeddings, unless another worker does, and the cache keeps up to
    /// `cache_bytes` of them.
    ///
    /// # Errors
    /// If the encoder's thread cannot be started.
    pub fn with_images(
        mut self,
        encoder: Option<Box<dyn ImageEncoder>>,
        cache_bytes: usize,
    ) -> Result<Self, Error> {
        let embeddings = Embeddings::start(encoder, cache_bytes, self.metrics.images.clone())?;
        let (sender, encoded) = channel();
        self.images.encoder = Some(Encoder { embeddings, sender, encoded });
        Ok(self)
    }

    /// Rules of rows of images. `None`: it serves none.
    pub fn image_rules(&self) -> Option<ImageRules> {
        self.executor.decoder().image_rules().filter(|_| self.executor.ranks() == 1)
    }

    /// Whether requests wait for embeddings, which come from another thread.
    pub fn encodes_images(&self) -> bool {
        !self.images.waiting.is_empty()
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
        let is_file = |image: &EngineImage| !matches!(image.source, ImageSource::Embedding(_));
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
        let embeddings = self.images.embeddings(id, &images, sources);
        self.schedule_if_encoded(now, id, Encoding { request, source, together, images, embeddings });
    }

    fn schedule_if_encoded(&mut self, now: Instant, id: SeqId, encoding: Encoding) {
        let Some(embeddings) = encoding.embeddings.iter().cloned().collect::<Option<Vec<_>>>() else {
            self.images.waiting.insert(id);
            return self.set_state(id, RequestState::EncodingImages(Box::new(encoding)));
        };
        self.images.waiting.remove(&id);
        let Encoding { mut request, source, together, mut images, .. } = encoding;
        if let Err(reason) = images.embed(self.executor.decoder().spec().hidden, embeddings) {
            return self.remove(id, Removal::BadImage(reason));
        }
        request.images = Some(Arc::new(images));
        self.schedule_or_wait(now, request, source, together);
    }

    /// Continues requests whose images have been encoded.
    pub(super) fn finish_encodings(&mut self, now: Instant) {
        while let Some((id, digest, made)) =
            self.images.encoder.as_ref().and_then(|encoder| encoder.encoded.try_recv().ok())
        {
            if !self.images.waiting.contains(&id) {
                continue;
            }
            let embedding = match made {
                Ok(embedding) => embedding,
                Err(Unencoded::BadImage(reason)) => {
                    self.remove(id, Removal::BadImage(reason));
                    continue;
                }
                Err(Unencoded::NoEncoder(reason)) => {
                    self.remove(id, Removal::NoEncoder(reason));
                    continue;
                }
            };
            let Some(RequestState::EncodingImages(mut encoding)) = self.take_state(id) else { continue };
            for (place, slot) in encoding.images.images().iter().zip(&mut encoding.embeddings) {
                if place.digest == digest {
                    *slot = Some(Arc::clone(&embedding));
                }
            }
            self.schedule_if_encoded(now, id, *encoding);
        }
    }
}
