//! Embeddings of images by their digests: an image is encoded once for all that wait for it, by another worker or on a
//! thread of this one, and stays in a cache of bounded size.

use super::{EncodedImage, PlacedImage};
use crate::Error;
use crate::progress::spawn;
use crate::telemetry::ImageMetrics;
use parking_lot::Mutex;
use proto::log::Repeats;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// Limits the log lines about encoders that are not reached.
static AWAY: Repeats = Repeats::new();

pub(crate) type Digest = [u8; 32];

/// The embedding of an image, or why there is none.
pub type Encoded = Result<Arc<EncodedImage>, Unencoded>;

/// Why an image has no embedding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unencoded {
    /// The file's fault in words, or that it is not the image of the digest. No tower encodes it.
    BadImage(String),
    /// No tower is reached.
    NoEncoder(String),
}

/// Encodes images. Runs on a thread of its own.
pub trait ImageEncoder: Send {
    /// The embedding of the image in `file`.
    ///
    /// # Errors
    /// The file's fault in words, or that it is not the image of the place's digest.
    fn encode(&mut self, file: &[u8], place: &PlacedImage) -> Result<EncodedImage, String>;
}

/// Has other workers encode images.
pub trait RemoteEncoder: Send + Sync + Debug {
    /// Has the image in `file` encoded, and calls `done` once, from any thread. Does not block.
    fn encode(&self, file: Arc<[u8]>, place: PlacedImage, done: RemoteDone);
}

/// Takes the result of a [`RemoteEncoder`].
pub type RemoteDone = Box<dyn FnOnce(Result<EncodedImage, Unencoded>) + Send>;

type Waiter = Box<dyn FnOnce(&Encoded) + Send>;

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

#[derive(Default)]
struct State {
    cache: Cache,
    /// Those that wait for an image which is being encoded.
    waiting: HashMap<Digest, Vec<Waiter>>,
}

struct Shared {
    state: Mutex<State>,
    /// The thread that encodes. `None`: only other workers do.
    jobs: Option<Sender<Job>>,
    metrics: ImageMetrics,
}

/// Embeddings of one model's images. Cheap to clone.
#[derive(Clone)]
pub struct Embeddings(Arc<Shared>);

impl Embeddings {
    /// Starts the thread of `encoder`; without one only other workers encode. The cache keeps up to `cache_bytes`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        encoder: Option<Box<dyn ImageEncoder>>,
        cache_bytes: usize,
        metrics: ImageMetrics,
    ) -> Result<Self, Error> {
        let (jobs, inbox) = channel::<Job>();
        let state = Mutex::new(State {
            cache: Cache { budget: cache_bytes, ..Cache::default() },
            waiting: HashMap::new(),
        });
        let jobs = encoder.is_some().then_some(jobs);
        let shared = Arc::new(Shared { state, jobs, metrics });
        if let Some(mut encoder) = encoder {
            // The thread ends with the last sender of jobs.
            let shared = Arc::downgrade(&shared);
            spawn("kvasir-images", move || {
                for Job { file, place } in inbox {
                    let since = Instant::now();
                    let made = encoder.encode(&file, &place).map_err(Unencoded::BadImage);
                    let Some(shared) = Weak::upgrade(&shared) else { return };
                    shared.metrics.seconds.0.observe(since.elapsed().as_secs_f64());
                    shared.metrics.encoded.inc();
                    shared.finish(place.digest, made);
                }
            })?;
        }
        Ok(Self(shared))
    }

    /// The embedding of the image in `file` if it is known. Otherwise it is encoded, by `remote` if there is one, and
    /// `waiter` is called with it, from any thread. The image is encoded for the cache also if the waiter needs it no
    /// more.
    pub fn get(
        &self,
        (file, place): (Arc<[u8]>, &PlacedImage),
        remote: Option<&dyn RemoteEncoder>,
        waiter: impl FnOnce(&Encoded) + Send + 'static,
    ) -> Option<Arc<EncodedImage>> {
        let mut state = self.0.state.lock();
        if let Some(found) = state.cache.get(&place.digest) {
            self.0.metrics.hits.inc();
            return Some(found);
        }
        let waiting = state.waiting.entry(place.digest).or_default();
        waiting.push(Box::new(waiter));
        let first = waiting.len() == 1;
        drop(state);
        if first {
            let job = Job { file, place: place.clone() };
            match remote {
                Some(remote) => {
                    let shared = Arc::clone(&self.0);
                    let (file, place) = (Arc::clone(&job.file), place.clone());
                    remote.encode(file, place, Box::new(move |made| shared.take(job, made)));
                }
                None => self.0.encode_here(job, "no worker with the role encode serves the model"),
            }
        }
        None
    }
}

impl Shared {
    /// Takes what other workers answered. Encodes here if none was reached.
    fn take(&self, job: Job, made: Result<EncodedImage, Unencoded>) {
        match made {
            Err(Unencoded::NoEncoder(reason)) => {
                self.metrics.fallbacks.inc();
                if let Some(left_out) = AWAY.due(&reason) {
                    let here = self.jobs.is_some();
                    tracing::warn!(reason, here, left_out, "no other worker has encoded an image");
                }
                self.encode_here(job, &reason);
            }
            made => {
                self.metrics.remote.inc_by(u64::from(made.is_ok()));
                self.finish(job.place.digest, made);
            }
        }
    }

    /// `away`: why other workers do not encode it.
    fn encode_here(&self, job: Job, away: &str) {
        let digest = job.place.digest;
        match &self.jobs {
            // A thread that has ended answers nothing. The request then waits until its deadline.
            Some(jobs) => drop(jobs.send(job)),
            None => self.finish(
                digest,
                Err(Unencoded::NoEncoder(format!("this worker has no vision tower, and {away}"))),
            ),
        }
    }

    fn finish(&self, digest: Digest, made: Result<EncodedImage, Unencoded>) {
        let made = made.map(Arc::new);
        let waiting = {
            let mut state = self.state.lock();
            if let Ok(embedding) = &made {
                state.cache.insert(digest, embedding);
                self.metrics.bytes.set(state.cache.bytes as i64);
            }
            state.waiting.remove(&digest).unwrap_or_default()
        };
        self.metrics.shared.inc_by(waiting.len().saturating_sub(1) as u64);
        waiting.into_iter().for_each(|waiter| waiter(&made));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

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

    /// The tower of this worker: rows of ones.
    struct Tower;

    impl ImageEncoder for Tower {
        fn encode(&mut self, _: &[u8], _: &PlacedImage) -> Result<EncodedImage, String> {
            Ok(EncodedImage { rows: vec![1.0], ..EncodedImage::default() })
        }
    }

    /// Another worker that answers by the first byte of the file: rows of twos, a fault, or nothing reached.
    #[derive(Debug)]
    struct Other;

    impl RemoteEncoder for Other {
        fn encode(&self, file: Arc<[u8]>, _: PlacedImage, done: RemoteDone) {
            done(match file[0] {
                b'2' => Ok(EncodedImage { rows: vec![2.0], ..EncodedImage::default() }),
                b'b' => Err(Unencoded::BadImage("bad".to_owned())),
                _ => Err(Unencoded::NoEncoder("w9 is away".to_owned())),
            });
        }
    }

    #[test]
    fn another_worker_goes_first_and_the_tower_here_follows() {
        let ask = |embeddings: &Embeddings, file: &'static [u8], remote: Option<&dyn RemoteEncoder>| {
            let (sender, made) = mpsc::channel();
            let place = PlacedImage { runs: Vec::new(), digest: [file[0]; 32] };
            let known = embeddings.get((Arc::from(file), &place), remote, move |made| {
                let _ = sender.send(made.clone());
            });
            match known {
                Some(known) => Ok(known.rows[0]),
                None => made.recv().unwrap().map(|made| made.rows[0]),
            }
        };
        let metrics = ImageMetrics::default();
        let with_tower = Embeddings::start(Some(Box::new(Tower)), 1 << 10, metrics.clone()).unwrap();
        let remote: Option<&dyn RemoteEncoder> = Some(&Other);
        assert_eq!(ask(&with_tower, b"2", remote), Ok(2.0));
        assert_eq!(ask(&with_tower, b"2", None), Ok(2.0));
        assert_eq!(ask(&with_tower, b"away", remote), Ok(1.0));
        assert_eq!(ask(&with_tower, b"b", remote), Err(Unencoded::BadImage("bad".to_owned())));
        assert_eq!(ask(&with_tower, b"alone", None), Ok(1.0));
        let counts = [&metrics.encoded, &metrics.remote, &metrics.fallbacks, &metrics.hits];
        // `alone` has the digest of `away`.
        assert_eq!(counts.map(|counter| counter.get()), [1, 1, 1, 2]);
        let without = Embeddings::start(None, 1 << 10, ImageMetrics::default()).unwrap();
        assert_eq!(ask(&without, b"2", remote), Ok(2.0));
        for (remote, reason) in [(remote, "w9 is away"), (None, "role encode")] {
            match ask(&without, b"away", remote) {
                Err(Unencoded::NoEncoder(found)) => assert!(found.contains(reason), "{found}"),
                other => panic!("{other:?}"),
            }
        }
    }
}
