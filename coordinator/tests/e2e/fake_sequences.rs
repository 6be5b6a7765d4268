//! The fake worker's sequences: it has those that it generated, a snapshot is the sequence's tokens, and every
//! operation is recorded.

use super::fake_worker::letters;
use proto::block::BlockId;
use proto::sequence::*;
use std::collections::BTreeMap;
use transport::SequenceCall;

/// Maximum size of a snapshot in bytes.
pub(crate) const MAX_UPLOAD: u64 = 64 << 20;
/// Maximum tokens of all pins.
pub(crate) const PIN_TOKENS: u64 = 100;

type Key = (BlockId, SequenceName);

#[derive(Default)]
pub(crate) struct Sequences {
    entries: BTreeMap<Key, Vec<u32>>,
    saved: BTreeMap<Key, (SaveMedium, Vec<u8>)>,
    pins: BTreeMap<u64, (BlockId, Vec<u32>, u64)>,
    /// The received operations, in order.
    pub(crate) operations: Vec<SequenceOperation>,
}

pub(crate) enum SequenceAnswer {
    Reply(SequenceReply),
    File(Vec<u8>),
}

fn file(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

fn info(name: &SequenceName, tokens: &[u32]) -> SequenceInfo {
    SequenceInfo { name: name.clone(), tokens: tokens.len() as u32, cached: 16, live: false }
}

fn unknown(name: &SequenceName) -> SequenceError {
    SequenceError::Unknown { what: format!("sequence {name}") }
}

impl Sequences {
    /// Records the sequence of a completed request.
    pub(crate) fn generated(&mut self, key: Key, prompt: &[u32], n: u32) {
        let output = letters(prompt, n as usize);
        self.entries.insert(key, prompt.iter().copied().chain(output.bytes().map(u32::from)).collect());
    }

    fn perform(&mut self, request: &SequenceRequest, body: Vec<u8>) -> Result<SequenceAnswer, SequenceError> {
        let root = request.root;
        self.operations.push(request.operation.clone());
        let find = |all: &BTreeMap<Key, Vec<u32>>, name: &SequenceName| {
            all.get(&(root, name.clone())).cloned().ok_or_else(|| unknown(name))
        };
        let pin = |pin: u64, (_, tokens, ttl_ms): &(BlockId, Vec<u32>, u64), all: u64| PinInfo {
            pin,
            tokens: tokens.len() as u32 / 16 * 16,
            ttl_ms: *ttl_ms,
            pinned_bytes: all,
            budget_bytes: PIN_TOKENS,
        };
        let pinned: u64 = self.pins.values().map(|(_, tokens, _)| tokens.len() as u64).sum();
        let reply = match &request.operation {
            SequenceOperation::List => SequenceReply::List(SequenceList {
                sequences: self
                    .entries
                    .iter()
                    .filter(|(k, _)| k.0 == root)
                    .map(|(k, t)| info(&k.1, t))
                    .collect(),
                snapshots: self
                    .saved
                    .iter()
                    .filter(|(k, _)| k.0 == root)
                    .map(|(k, (medium, file))| SnapshotInfo {
                        name: k.1.clone(),
                        bytes: file.len() as u64,
                        medium: *medium,
                    })
                    .collect(),
                pins: self
                    .pins
                    .iter()
                    .filter(|(_, p)| p.0 == root)
                    .map(|(n, p)| pin(*n, p, pinned))
                    .collect(),
            }),
            SequenceOperation::Save { sequence, medium } => {
                let file = file(&find(&self.entries, sequence)?);
                let bytes = file.len() as u64;
                self.saved.insert((root, sequence.clone()), (*medium, file));
                SequenceReply::Saved(SnapshotInfo { name: sequence.clone(), bytes, medium: *medium })
            }
            SequenceOperation::Fetch { sequence } => {
                let saved = self.saved.get(&(root, sequence.clone())).map(|(_, file)| file.clone());
                return match saved {
                    Some(file) => Ok(SequenceAnswer::File(file)),
                    None => find(&self.entries, sequence).map(|tokens| SequenceAnswer::File(file(&tokens))),
                };
            }
            SequenceOperation::Restore { snapshot, name } => {
                let (_, saved) =
                    self.saved.get(&(root, snapshot.clone())).ok_or_else(|| unknown(snapshot))?;
                let saved = saved.clone();
                self.take(root, name, &saved)?
            }
            SequenceOperation::Upload { name, .. } => self.take(root, name, &body)?,
            SequenceOperation::Fork { sequence, name } => {
                let tokens = find(&self.entries, sequence)?;
                let reply = SequenceReply::Sequence(info(name, &tokens));
                self.entries.insert((root, name.clone()), tokens);
                reply
            }
            SequenceOperation::Reset { sequence, keep } => {
                let mut tokens = find(&self.entries, sequence)?;
                if !(1..=tokens.len()).contains(&(*keep as usize)) {
                    let reason =
                        format!("{keep} tokens, must be 1 to {}, the sequence's length", tokens.len());
                    return Err(SequenceError::InvalidField { field: "keep".into(), reason });
                }
                tokens.truncate(*keep as usize);
                let reply = SequenceReply::Sequence(info(sequence, &tokens));
                self.entries.insert((root, sequence.clone()), tokens);
                reply
            }
            SequenceOperation::Drop { sequence } => {
                let key = (root, sequence.clone());
                let (removed, saved) = (self.entries.remove(&key), self.saved.remove(&key));
                if removed.is_none() && saved.is_none() {
                    return Err(unknown(sequence));
                }
                SequenceReply::Done
            }
            SequenceOperation::Pin { tokens, ttl_ms } => {
                let wanted = pinned + tokens.len() as u64;
                if wanted > PIN_TOKENS {
                    let what = "pinned prefixes".to_owned();
                    return Err(SequenceError::OverBudget { what, wanted, limit: PIN_TOKENS });
                }
                let number = self.pins.keys().next_back().map_or(1, |last| last + 1);
                let entry = (root, tokens.clone(), *ttl_ms);
                let reply = SequenceReply::Pinned(pin(number, &entry, wanted));
                self.pins.insert(number, entry);
                reply
            }
            SequenceOperation::Unpin { pin } => match self.pins.get(pin) {
                Some(held) if held.0 == root => {
                    self.pins.remove(pin);
                    SequenceReply::Done
                }
                _ => return Err(SequenceError::Unknown { what: format!("pin {pin}") }),
            },
        };
        Ok(SequenceAnswer::Reply(reply))
    }

    fn take(
        &mut self,
        root: BlockId,
        name: &SequenceName,
        file: &[u8],
    ) -> Result<SequenceReply, SequenceError> {
        let (tokens, rest) = file.as_chunks::<4>();
        if !rest.is_empty() || file.is_empty() {
            return Err(SequenceError::NotThisSnapshot("damaged snapshot: odd bytes".into()));
        }
        let tokens: Vec<u32> = tokens.iter().map(|token| u32::from_le_bytes(*token)).collect();
        let reply = SequenceReply::Sequence(info(name, &tokens));
        self.entries.insert((root, name.clone()), tokens);
        Ok(reply)
    }
}

pub(crate) async fn serve(sequences: &parking_lot::Mutex<Sequences>, call: SequenceCall) {
    let request = call.request;
    // A coordinator that is cut off sends less than announced; then nothing has happened.
    let answer = match call.body.read(MAX_UPLOAD).await {
        Ok(body) => sequences.lock().perform(&request, body),
        Err(transport::Error::Codec(error)) => {
            Err(SequenceError::InvalidField { field: "body".into(), reason: error.to_string() })
        }
        Err(_) => return,
    };
    let sent = match answer {
        Ok(SequenceAnswer::Reply(reply)) => call.reply.send(reply).await,
        Ok(SequenceAnswer::File(file)) => call.reply.send_bytes(&file).await,
        Err(error) => call.reply.fail(error).await,
    };
    // The client may have left.
    let _ = sent;
}
