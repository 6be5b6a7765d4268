//! A faulty holder of a prefix.

use crate::cluster::{Cluster, ROOT, options, path};
use engine::engine::kv_send::SentPiece;
use engine::engine::{Engine, EngineRequest};
use engine::pieces::Namer;
use kernels::backend::KvType;
use kvasir_worker::load;
use proto::ids::NodeId;
use proto::message::{GenerateFrame, Sampling, Stop, TenantShare};
use proto::pull::{PullHead, PullRefusal, PullRequest, PullSource, PulledPiece};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::sync::mpsc;
use transport::{CloseCode, Endpoint, Incoming, PullCall};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Flips a bit of the third piece.
    FlippedBit,
    /// Sends pieces of other tokens, with matching digests.
    OtherTokens,
    /// Closes the connection after the third piece.
    Dies,
    /// Announces a piece that is too long.
    LongPiece,
    /// Sends the first piece repeatedly.
    Repeats,
    /// Sends three pieces, then nothing.
    Silent,
}

/// Notices of a holder that becomes silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notice {
    /// It has sent its pieces.
    Silent,
    Cancelled,
}

pub(crate) struct Holder {
    endpoint: Arc<Endpoint>,
    pub(crate) notices: mpsc::UnboundedReceiver<Notice>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Holder {
    pub(crate) fn start(cluster: &Cluster, name: &str, model: &str, prompt: &[u32], fault: Fault) -> Self {
        let mut engine = load::open(&path(model), &options(KvType::F32), &mut |_, _| {}).unwrap().engine;
        compute(&mut engine, prompt);
        let mut other = prompt.to_vec();
        other[0] ^= 1;
        compute(&mut engine, &other);
        let engine = Arc::new(Mutex::new(engine));
        let endpoint = Arc::new(cluster.bare(name));
        let (notice, notices) = mpsc::unbounded_channel();
        let accepting = Arc::clone(&endpoint);
        let task = tokio::spawn(async move {
            while let Some(connection) = accepting.accept().await {
                let (engine, notice) = (Arc::clone(&engine), notice.clone());
                tokio::spawn(async move {
                    while let Ok(Incoming::Pull(call)) = connection.accept().await {
                        send(&engine, call, fault, &notice).await;
                        if fault == Fault::Dies {
                            connection.close(CloseCode::Shutdown);
                        }
                    }
                });
            }
        });
        Self { endpoint, notices, task }
    }

    pub(crate) fn source(&self, tokens: u32) -> PullSource {
        let (node, quic): (NodeId, _) = (self.endpoint.name().node.clone(), self.endpoint.address());
        PullSource { node, quic: quic.to_string(), tokens }
    }
}

fn compute(engine: &mut Engine, prompt: &[u32]) {
    let request = EngineRequest {
        name: None,
        root: ROOT,
        adapter: None,
        tenant: TenantShare::of_root(ROOT),
        prompt: prompt.to_vec(),
        images: Vec::new(),
        emitted: Vec::new(),
        prompt_logprobs: None,
        sampling: Sampling::default(),
        stop: Stop { max_tokens: 1, ignore_eos: true, ..Stop::default() },
        deadline: None,
        pull: None,
        together: 1,
        guide: None,
        sink: Box::new(|_: GenerateFrame| true),
    };
    engine.submit(Instant::now(), request).unwrap();
    while engine.has_work() {
        engine.step(Instant::now()).unwrap();
    }
}

/// A piece with its bytes.
type Whole = (PulledPiece, Vec<u8>);

/// All pieces that the engine offers for these tokens.
fn whole(
    engine: &mut Engine,
    request: &PullRequest,
    tokens: &[u32],
) -> Result<(u32, Vec<Whole>), PullRefusal> {
    let offer = engine.kv_sender().offer(&request.origin, request.root, tokens, request.have)?;
    let prefix = &tokens[..offer.tokens as usize];
    let names = Namer::new(&engine.origin()).unwrap().names(request.root, prefix);
    let copies = engine.kv_sender().copy_pieces(request.root, prefix, &offer.pieces)?;
    let head = |((group, end, _), piece): (&(u32, u32, usize), SentPiece)| {
        let bytes = piece.read().unwrap();
        let digest = names.piece(*group as usize, *end).unwrap().digest(&bytes);
        (PulledPiece { group: *group, end: *end, bytes: bytes.len() as u32, digest }, bytes)
    };
    Ok((offer.tokens, offer.pieces.iter().zip(copies).map(head).collect()))
}

async fn send(engine: &Mutex<Engine>, call: PullCall, fault: Fault, notice: &mpsc::UnboundedSender<Notice>) {
    let PullCall { request, mut reply } = call;
    let mut tokens = request.tokens.clone();
    if fault == Fault::OtherTokens {
        tokens[0] ^= 1;
    }
    let whole = whole(&mut engine.lock().unwrap(), &request, &tokens);
    let (tokens, mut pieces) = match whole {
        Ok(whole) => whole,
        Err(refusal) => return reply.fail(refusal).await.unwrap(),
    };
    match fault {
        Fault::None | Fault::OtherTokens | Fault::Dies | Fault::Silent => {}
        Fault::FlippedBit => pieces[2].1[5] ^= 0x10,
        Fault::LongPiece => {
            pieces[1].1.push(0);
            pieces[1].0.bytes += 1;
        }
        Fault::Repeats => pieces = vec![pieces[0].clone(); pieces.len() + 100],
    }
    let cancelled = reply.cancelled();
    reply.head(PullHead { tokens, pieces: pieces.len() as u32 }).await.unwrap();
    let limit = if matches!(fault, Fault::Dies | Fault::Silent) { 3 } else { pieces.len() };
    for (piece, bytes) in pieces.iter().take(limit) {
        // The receiver may cancel once it has seen a fault.
        if reply.piece(*piece, bytes).await.is_err() {
            return;
        }
    }
    match fault {
        Fault::Silent => {
            let _ = notice.send(Notice::Silent);
            cancelled.await;
            let _ = notice.send(Notice::Cancelled);
        }
        Fault::Dies => {}
        _ => reply.finish(),
    }
}
