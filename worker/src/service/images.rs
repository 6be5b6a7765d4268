//! Images that one worker encodes for others: asks the workers with the role encode for embeddings, and serves as one.
//!
//! An embedding of another worker has the same bits as one of a tower of this worker: only encoders with the model's
//! digest and the class of its tower are asked.

use super::Node;
use super::peers::Peers;
use super::runner::{Runner, Waiting};
use crate::Error;
use crate::load::LoadedTower;
use engine::engine::EngineLoad;
use engine::images::{Embeddings, Encoded, EncodedImage, PlacedImage, RemoteDone, RemoteEncoder, Unencoded};
use engine::telemetry::{EngineMetrics, ImageMetrics};
use prometheus_client::registry::Registry;
use proto::ids::Epoch;
use proto::message::image_encoder::{
    EncodeImage, EncodeImageFrame, EncodeImageRefusal, EncodedImageHead, IMAGES_AT_ONCE, ImageEncoderSource,
    WORKING_EVERY,
};
use proto::message::{FileBytes, GenerateRequest};
use proto::worker::WorkerState;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;
use transport::{CloseCode, EncodeImageCall, EncodeImageReply};

/// An encoder that sends nothing for this long counts as away: six times the interval of its frames.
const SILENCE: Duration = Duration::from_secs(3);
/// Slowest rate, in bytes per second, at which a file is sent to an encoder.
const SLOWEST: u64 = 4 << 20;
/// Time limit of an image at one encoder.
const IMAGE_LIMIT: Duration = Duration::from_secs(120);
/// Encoders that are tried for an image.
const TRIES: usize = 2;

/// The encoders of a request, over QUIC.
#[derive(Clone)]
struct Encoders {
    peers: Arc<Peers>,
    sources: Arc<[ImageEncoderSource]>,
    model_digest: [u8; 32],
    /// Class that an encoder must have.
    class: String,
    runtime: tokio::runtime::Handle,
}

impl std::fmt::Debug for Encoders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Encoders").field(&self.sources).finish()
    }
}

/// The encoders that the coordinator has named for a request's images. Must be called inside the runtime that will ask.
pub(super) fn encoder(node: &Node, request: &GenerateRequest) -> Option<Arc<dyn RemoteEncoder>> {
    if request.images.is_empty() || request.encoders.is_empty() {
        return None;
    }
    let offer = node.offer()?;
    Some(Arc::new(Encoders {
        peers: Arc::clone(&node.peers),
        sources: request.encoders.as_slice().into(),
        model_digest: offer.model.as_ref()?.model_digest,
        class: offer.tower_class.clone()?,
        runtime: tokio::runtime::Handle::current(),
    }))
}

impl RemoteEncoder for Encoders {
    fn encode(&self, file: Arc<[u8]>, place: PlacedImage, done: RemoteDone) {
        let (encoders, runtime) = (self.clone(), &self.runtime);
        runtime.spawn(async move { done(encoders.first(file, &place).await) });
    }
}

impl Encoders {
    /// Asks one encoder after the other. Each image has an order of its own, so that each is encoded at one of them.
    async fn first(&self, file: Arc<[u8]>, place: &PlacedImage) -> Result<EncodedImage, Unencoded> {
        let fits = |source: &&ImageEncoderSource| source.numeric_class == self.class;
        let mut sources: Vec<&ImageEncoderSource> = self.sources.iter().filter(fits).collect();
        let rank = |source: &&ImageEncoderSource| {
            let mut hasher = blake3::Hasher::new_keyed(&place.digest);
            *hasher.update(source.node.as_str().as_bytes()).finalize().as_bytes()
        };
        sources.sort_by_cached_key(rank);
        let image = EncodeImage {
            model_digest: self.model_digest,
            digest: place.digest,
            rows: place.rows(),
            file: FileBytes(file),
        };
        let mut reasons = Vec::new();
        for source in sources.into_iter().take(TRIES) {
            match timeout(IMAGE_LIMIT, self.ask(source, &image)).await {
                Ok(Ok(encoded)) => return Ok(encoded),
                Ok(Err(Unencoded::BadImage(reason))) => return Err(Unencoded::BadImage(reason)),
                Ok(Err(Unencoded::NoEncoder(reason))) => reasons.push(format!("{}: {reason}", source.node)),
                Err(_) => reasons.push(format!("{}: an image took too long", source.node)),
            }
        }
        if reasons.is_empty() {
            reasons.push(format!("no worker with the role encode has the numeric class {}", self.class));
        }
        Err(Unencoded::NoEncoder(reasons.join("; ")))
    }

    async fn ask(&self, source: &ImageEncoderSource, image: &EncodeImage) -> Result<EncodedImage, Unencoded> {
        let away = Unencoded::NoEncoder;
        let connection =
            within(SILENCE, self.peers.connect(&source.node, &source.quic)).await.map_err(away)?;
        let asked = async {
            let limit = SILENCE + Duration::from_secs(image.file.len() as u64 / SLOWEST);
            let mut stream = within(limit, connection.open_encode_image(image)).await?;
            let head = loop {
                match within(SILENCE, stream.next()).await? {
                    EncodeImageFrame::Working => {}
                    EncodeImageFrame::Encoded(head) => break head,
                    EncodeImageFrame::Failed(refusal) => return Ok(Err(refusal)),
                }
            };
            let Some((values, count)) = head.lists().filter(|_| head.rows == image.rows) else {
                return Err(format!("it sent {} rows of {} values", head.rows, head.width));
            };
            let mut lists = Vec::with_capacity(count);
            for _ in 0..count {
                let mut list = Vec::new();
                while !within(SILENCE, stream.values(values, &mut list)).await? {}
                lists.push(list);
            }
            let deepstack = lists.split_off(1);
            let rows = lists.pop().unwrap_or_default();
            Ok(Ok(EncodedImage { rows, deepstack, grid: head.grid }))
        };
        match asked.await {
            Ok(Ok(encoded)) => Ok(encoded),
            Ok(Err(EncodeImageRefusal::BadImage { reason })) => Err(Unencoded::BadImage(reason)),
            Ok(Err(refusal)) => Err(away(refusal.to_string())),
            Err(reason) => {
                // A killed worker closes nothing. The next image dials anew.
                connection.close(CloseCode::Shutdown);
                Err(away(reason))
            }
        }
    }
}

/// Fails in words, also if `future` takes longer than `limit`.
async fn within<T, E: ToString>(
    limit: Duration,
    future: impl Future<Output = Result<T, E>>,
) -> Result<T, String> {
    match timeout(limit, future).await {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err(format!("it sent nothing for {} s", limit.as_secs())),
    }
}

/// A vision tower that serves other workers.
pub(super) struct ImageTower {
    embeddings: Embeddings,
    model_digest: [u8; 32],
    /// Values of a row.
    width: usize,
    /// Permits for images. Each holds a file, or an embedding that is sent.
    permits: Semaphore,
    waiting: Waiting,
    registry: Registry,
}

impl ImageTower {
    pub(super) fn start(tower: LoadedTower, epoch: Epoch) -> Result<Self, Error> {
        let (model_digest, width) = (tower.model_digest(), tower.width());
        let (encoder, cache_bytes) = tower.into_encoder();
        let metrics = ImageMetrics::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        Ok(Self {
            embeddings: Embeddings::start(Some(encoder), cache_bytes as usize, metrics)?,
            model_digest,
            width,
            permits: Semaphore::new(IMAGES_AT_ONCE),
            waiting: Waiting::new(epoch),
            registry,
        })
    }

    pub(super) fn waiting(&self) -> &Waiting {
        &self.waiting
    }

    pub(super) fn load(&self) -> EngineLoad {
        let running = IMAGES_AT_ONCE.saturating_sub(self.permits.available_permits());
        EngineLoad { running, ..EngineLoad::default() }
    }

    pub(super) fn stalled(&self) -> Duration {
        Duration::ZERO
    }

    pub(super) fn metrics_text(&self) -> String {
        EngineMetrics::text(&self.registry)
    }

    /// The head and the embedding of an image. Until it is encoded, the asker is told that this worker is at it.
    async fn encode(
        &self,
        image: EncodeImage,
        reply: &mut EncodeImageReply,
    ) -> Result<Result<(EncodedImageHead, Arc<EncodedImage>), EncodeImageRefusal>, transport::Error> {
        let EncodeImage { digest, rows, file: FileBytes(file), .. } = image;
        let (sender, mut answer) = oneshot::channel();
        let place = PlacedImage { runs: std::iter::once(0..rows).collect(), digest };
        let known = self.embeddings.get((file, &place), None, |made: &Encoded| {
            // Fails only if the asker is gone.
            let _ = sender.send(made.clone());
        });
        let made = match known {
            Some(known) => Ok(known),
            None => loop {
                match timeout(WORKING_EVERY, &mut answer).await {
                    // The encoder's thread has ended.
                    Ok(Err(_)) => return Ok(Err(EncodeImageRefusal::Internal)),
                    Ok(Ok(made)) => break made,
                    Err(_) => reply.working().await?,
                }
            },
        };
        let encoded = match made {
            Ok(encoded) => encoded,
            Err(Unencoded::BadImage(reason)) => return Ok(Err(EncodeImageRefusal::BadImage { reason })),
            Err(Unencoded::NoEncoder(_)) => return Ok(Err(EncodeImageRefusal::Internal)),
        };
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let head = EncodedImageHead {
            rows: number(encoded.rows.len() / self.width.max(1)),
            width: number(self.width),
            deepstack: number(encoded.deepstack.len()),
            grid: encoded.grid,
        };
        if head.rows != rows {
            let reason = format!("the image has {} rows, its place has {rows}", head.rows);
            return Ok(Err(EncodeImageRefusal::BadImage { reason }));
        }
        Ok(Ok((head, encoded)))
    }
}

/// Serves another worker that has an image encoded.
pub(super) async fn serve(node: Arc<Node>, call: EncodeImageCall) {
    let EncodeImageCall { image, reply } = call;
    let cancelled = reply.cancelled();
    let answered = tokio::select! {
        answered = answer(&node, image, reply) => answered,
        () = cancelled => return,
        () = tokio::time::sleep(IMAGE_LIMIT) => return,
    };
    if let Err(error) = answered {
        tracing::debug!(%error, "another worker did not read an encoded image to the end");
    }
}

async fn answer(
    node: &Node,
    image: EncodeImage,
    mut reply: EncodeImageReply,
) -> Result<(), transport::Error> {
    let Some(Runner::EncodesImages(tower)) = node.engine() else {
        return reply.fail(EncodeImageRefusal::OtherModel).await;
    };
    if node.state() == WorkerState::Draining {
        return reply.fail(EncodeImageRefusal::Draining).await;
    }
    if image.model_digest != tower.model_digest {
        return reply.fail(EncodeImageRefusal::OtherModel).await;
    }
    let Ok(_permit) = tower.permits.try_acquire() else { return reply.fail(EncodeImageRefusal::Busy).await };
    match tower.encode(image, &mut reply).await? {
        Ok((head, encoded)) => {
            let lists = std::iter::once(&encoded.rows).chain(&encoded.deepstack);
            let lists: Vec<&[f32]> = lists.map(Vec::as_slice).collect();
            reply.send(head, &lists).await
        }
        Err(refusal) => reply.fail(refusal).await,
    }
}
