//! Images of chats: from parts of messages to files.
//!
//! A file is in the request, in base64, or at an address that the operator allows. Its form is found by its content; what
//! the request says about it is not used.

#[cfg(test)]
mod tests;

use super::error::ApiError;
use super::image_urls::Fetched;
use super::limits::{MAX_HELD_IMAGE_BYTES, MAX_IMAGE_BYTES, MAX_IMAGES};
use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::Bytes;
use dispatch::models::{MAX_FILE_BYTES, OfferedModel, PromptWithImages, SeenImage};
use proto::message::{FileBytes, MAX_IMAGE_RUNS, PromptImage, TokenIds};
use proto::served_model::ServedModel;
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use text::chat_template::{Content, Message, Part, Prompt};

const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
/// Time after which a request that finds no room for its images may try again.
const HELD_RETRY: Duration = Duration::from_secs(1);
/// Most characters of a value in an error.
const SHOWN: usize = 64;

/// The images of a request, in its order.
#[derive(Debug, Default)]
pub struct GivenImages<'a>(Vec<GivenImage<'a>>);

/// An image of a request.
#[derive(Debug)]
pub(super) struct GivenImage<'a> {
    /// Path of the field with the file.
    field: String,
    source: Source<'a>,
}

#[derive(Debug)]
enum Source<'a> {
    Base64(Cow<'a, str>),
    Address(Cow<'a, str>),
}

/// Bytes of the images of all requests that have no answer yet.
#[derive(Debug, Clone, Default)]
pub struct HeldImages(Arc<AtomicUsize>);

/// A request's part of [`HeldImages`]; dropping it ends it.
#[derive(Debug)]
pub(super) struct HeldBytes {
    all: HeldImages,
    bytes: usize,
}

impl HeldImages {
    /// Holds the images of a request until its answer ends, or refuses them.
    pub(super) fn hold(&self, images: &[PromptImage]) -> Result<HeldBytes, ApiError> {
        let bytes = images.iter().map(|image| image.file.len()).sum();
        let held = HeldBytes { all: self.clone(), bytes };
        // Refused bytes are dropped with `held`.
        match self.0.fetch_add(bytes, Ordering::Relaxed) + bytes {
            total if bytes > 0 && total > MAX_HELD_IMAGE_BYTES => {
                Err(ApiError::QueueFull { retry_after: HELD_RETRY })
            }
            _ => Ok(held),
        }
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.all.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A file with its facts.
#[derive(Debug)]
pub(super) struct SeenFile {
    file: FileBytes,
    seen: Arc<SeenImage>,
}

impl<'a> GivenImages<'a> {
    /// Adds an image. Returns its index.
    pub(super) fn add(&mut self, image: GivenImage<'a>) -> Result<usize, ApiError> {
        if self.0.len() == MAX_IMAGES {
            return Err(ApiError::field(
                image.field,
                format!("the request has more than {MAX_IMAGES} images"),
            ));
        }
        self.0.push(image);
        Ok(self.0.len() - 1)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The addresses to fetch: the path of the field, and the address.
    pub(super) fn addresses(&self) -> Vec<(String, String)> {
        let address = |image: &GivenImage<'_>| match &image.source {
            Source::Base64(_) => None,
            Source::Address(address) => Some((image.field.clone(), address.to_string())),
        };
        let mut addresses: Vec<(String, String)> = Vec::new();
        for (field, address) in self.0.iter().filter_map(address) {
            if !addresses.iter().any(|(_, known)| *known == address) {
                addresses.push((field, address));
            }
        }
        addresses
    }

    /// Decodes the images of `messages`, in the order of these, as `model` sees them.
    pub(super) fn see(
        &self,
        model: &OfferedModel,
        served: Option<&ServedModel>,
        messages: &[Message<'_>],
        fetched: Option<&Fetched>,
    ) -> Result<Vec<SeenFile>, ApiError> {
        let contents = messages.iter().filter_map(|message| message.content.as_ref());
        let images: Vec<_> = contents.flat_map(Content::images).filter_map(|at| self.0.get(at)).collect();
        let mut bytes = 0;
        for GivenImage { field, source } in &images {
            let wrong = |reason: String| ApiError::field(field, reason);
            model.images().map_err(|error| wrong(error.to_string()))?;
            if let Some(served) = served.filter(|served| !served.task.sees_images()) {
                return Err(wrong(format!("no worker that serves the model {} sees images", served.id)));
            }
            let length = match (source, fetched) {
                (Source::Base64(base64), _) => base64.len() / 4 * 3,
                (Source::Address(address), Some(fetched)) => fetched.get(&**address).map_or(0, Bytes::len),
                (Source::Address(address), None) => {
                    let shown: String = address.chars().take(SHOWN).collect();
                    let reason = "is an address, and this server fetches no addresses: send a data: URL";
                    return Err(wrong(format!("{shown:?} {reason}")));
                }
            };
            // Padding may take two bytes off.
            if length > MAX_FILE_BYTES + 2 {
                return Err(wrong(format!(
                    "the image has about {length} bytes, the limit is {MAX_FILE_BYTES}"
                )));
            }
            bytes += length;
            if bytes > MAX_IMAGE_BYTES {
                let limit = format!("the limit is {MAX_IMAGE_BYTES} for all images of a request");
                return Err(wrong(format!("the images up to here have about {bytes} bytes, {limit}")));
            }
        }
        let limit = served.map_or(model.context as u64, |served| served.max_model_len.into());
        let (mut files, mut rows) = (Vec::with_capacity(images.len()), 0);
        for GivenImage { field, source } in images {
            let wrong = |reason: String| ApiError::field(field, reason);
            let file = match source {
                Source::Base64(base64) => BASE64
                    .decode(base64.as_bytes())
                    .map_err(|error| wrong(format!("is not base64: {error}")))?,
                Source::Address(address) => {
                    let file = fetched.and_then(|fetched| fetched.get(&**address));
                    file.ok_or_else(|| {
                        wrong("its address is written in a form that is not fetched".to_owned())
                    })?
                    .to_vec()
                }
            };
            let seen = model.images().map_err(|error| wrong(error.to_string()))?.see(&file);
            let seen = seen.map_err(|error| wrong(error.to_string()))?;
            rows += seen.rows as u64;
            if limit > 0 && rows > limit {
                return Err(ApiError::ContextLength { prompt: rows, need: rows, limit });
            }
            files.push(SeenFile { file: file.into(), seen });
        }
        Ok(files)
    }

    /// An error of the first image, or of `field` without images.
    pub(super) fn wrong(&self, field: &str, reason: String) -> ApiError {
        ApiError::field(self.0.first().map_or(field, |image| &image.field), reason)
    }
}

/// An image at an address: a `data:` URL, `http://` or `https://`.
pub(super) fn at_address(field: String, url: Cow<'_, str>) -> Result<GivenImage<'_>, ApiError> {
    let begins =
        |scheme: &str| url.get(..scheme.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(scheme));
    if begins("http://") || begins("https://") {
        return Ok(GivenImage { field, source: Source::Address(url) });
    }
    match file_of_data_url(&url) {
        Ok(start) => {
            let base64 = match url {
                Cow::Borrowed(url) => Cow::Borrowed(url.get(start..).unwrap_or_default()),
                Cow::Owned(mut url) => {
                    url.drain(..start);
                    Cow::Owned(url)
                }
            };
            Ok(in_base64(field, base64))
        }
        Err(reason) => Err(ApiError::field(field, reason)),
    }
}

/// An image in base64.
pub(super) fn in_base64(field: String, base64: Cow<'_, str>) -> GivenImage<'_> {
    GivenImage { field, source: Source::Base64(base64) }
}

/// Where the base64 of a `data:` URL begins.
pub fn file_of_data_url(url: &str) -> Result<usize, String> {
    let shown = || -> String { url.chars().take(SHOWN).collect() };
    let scheme = url.get(..5).filter(|scheme| scheme.eq_ignore_ascii_case("data:"));
    if scheme.is_none() {
        return Err(format!("{:?} is no data: URL", shown()));
    }
    let head = url.bytes().take(256).position(|byte| byte == b',');
    let Some(comma) = head else { return Err(format!("{:?} has no comma after its media type", shown())) };
    let head = url.get(5..comma).unwrap_or_default();
    let (kind, encoding) = head.rsplit_once(';').unwrap_or((head, ""));
    if !encoding.eq_ignore_ascii_case("base64") {
        return Err(format!("{head:?} is not in base64: a data: URL begins with data:image/png;base64,"));
    }
    let image = kind.get(..6).is_some_and(|kind| kind.eq_ignore_ascii_case("image/"));
    if !image && !kind.is_empty() {
        return Err(format!("the media type {kind:?} is no image's"));
    }
    Ok(comma + 1)
}

/// Parts as a content: texts alone are one text, joined by newlines.
pub(super) fn content_of(parts: Vec<Part<'_>>) -> Content<'_> {
    let content = Content::Parts(parts);
    if content.images().next().is_some() {
        return content;
    }
    let texts: Vec<&str> = content.texts().collect();
    Content::Text(texts.join("\n").into())
}

/// The tokens of a chat with images, and the images as a worker gets them.
pub(super) fn place(
    model: &OfferedModel,
    prompt: &Prompt,
    files: Vec<SeenFile>,
    bos: bool,
) -> Result<(TokenIds, Vec<PromptImage>), String> {
    let seen: Vec<Arc<SeenImage>> = files.iter().map(|file| Arc::clone(&file.seen)).collect();
    let placed = model.chat_with_images(prompt, &seen, bos).map_err(|error| error.to_string())?;
    let PromptWithImages { tokens, runs } = placed;
    if let Some(runs) = runs.iter().map(Vec::len).find(|runs| *runs > MAX_IMAGE_RUNS) {
        return Err(format!("an image has {runs} tiles, the limit is {MAX_IMAGE_RUNS}"));
    }
    let image = |(SeenFile { file, seen }, runs)| PromptImage { file, digest: seen.digest, runs };
    Ok((tokens, files.into_iter().zip(runs).map(image).collect()))
}
