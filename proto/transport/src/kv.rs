//! Streams of KV events, and KV snapshots sent in parts.

use super::streams::{FrameReader, FrameWriter};
use crate::Error;
use proto::codec::Cap;
use proto::event::{KvEvent, KvEventBatch, KvFrame, KvRun, KvSnapshot, KvSnapshotFrame};
use proto::event::{MAX_EVENTS_PER_BATCH, MAX_RUNS_PER_FRAME, decode_kv_frame};
use quinn::{RecvStream, SendStream};

/// Most units of one frame: 1 MiB of ids, a quarter of the frame's cap. A run without units counts as one
/// unit, so that the number of runs is bounded too.
const UNITS_PER_FRAME: usize = MAX_RUNS_PER_FRAME;
/// Most units of a snapshot: 256 MiB of ids.
const MAX_SNAPSHOT_UNITS: usize = 16 << 20;

/// Worker's end of its event stream to one coordinator.
#[derive(Debug)]
pub struct KvEventSender {
    frames: FrameWriter<KvFrame>,
}

impl KvEventSender {
    pub(super) fn new(stream: SendStream) -> Self {
        Self { frames: FrameWriter::new(stream, Cap::Events) }
    }

    /// Sends a batch, split into several if it is too long for a frame. Waits while the coordinator reads
    /// more slowly. A single event fits about 250,000 units; a longer one is refused ([`Error::Codec`]). If
    /// the future is dropped before it completes, the stream is unusable.
    pub async fn send(&mut self, batch: KvEventBatch) -> Result<(), Error> {
        for batch in split(batch, MAX_EVENTS_PER_BATCH, UNITS_PER_FRAME) {
            self.frames.write(&KvFrame::Events(batch)).await?;
        }
        Ok(())
    }
}

/// Splits a batch into batches of at most `events` events and `units` units. A single event may have more
/// units.
fn split(batch: KvEventBatch, events: usize, units: usize) -> Vec<KvEventBatch> {
    let KvEventBatch { epoch, mut first_sequence, events: all } = batch;
    let mut batches = Vec::new();
    let mut part = Vec::new();
    let mut part_units = 0;
    for event in all {
        let more = match &event {
            KvEvent::Stored { units, .. } | KvEvent::Removed { units, .. } => units.len(),
            KvEvent::Cleared | KvEvent::ResumePoint { .. } => 0,
        };
        if !part.is_empty() && (part.len() == events || part_units + more > units) {
            let sent = std::mem::take(&mut part);
            part_units = 0;
            let count = sent.len() as u64;
            batches.push(KvEventBatch { epoch, first_sequence, events: sent });
            first_sequence += count;
        }
        part_units += more;
        part.push(event);
    }
    if !part.is_empty() {
        batches.push(KvEventBatch { epoch, first_sequence, events: part });
    }
    batches
}

/// Coordinator's end of one worker's event stream.
#[derive(Debug)]
pub struct KvEventReceiver {
    frames: FrameReader<KvFrame>,
}

impl KvEventReceiver {
    pub(super) fn new(stream: RecvStream) -> Self {
        Self { frames: FrameReader::new(stream, Cap::Events) }
    }

    /// Returns the next batch, or `None` at a clean end. Does not check sequence numbers; the index detects
    /// gaps. After [`CodecError::UnknownVariant`](proto::codec::CodecError::UnknownVariant) the stream
    /// continues with the following frame. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<KvEventBatch, Error>> {
        match self.frames.next_bytes().await {
            Ok(Some(frame)) => {
                let frame = decode_kv_frame(&frame).map_err(Error::from);
                Some(frame.map(|KvFrame::Events(batch)| batch))
            }
            Ok(None) => None,
            Err(error) => Some(Err(error)),
        }
    }
}

/// Reply to a coordinator's request for a snapshot.
#[derive(Debug)]
pub struct KvSnapshotReply {
    frames: FrameWriter<KvSnapshotFrame>,
}

impl KvSnapshotReply {
    pub(super) fn new(stream: SendStream) -> Self {
        Self { frames: FrameWriter::new(stream, Cap::Events) }
    }

    /// Sends the snapshot, split into frames.
    pub async fn send(mut self, snapshot: &KvSnapshot) -> Result<(), Error> {
        let (epoch, sequence) = (snapshot.epoch, snapshot.sequence);
        self.frames.write(&KvSnapshotFrame::Begin { epoch, sequence }).await?;
        for part in split_runs(&snapshot.runs, UNITS_PER_FRAME) {
            self.frames.write(&KvSnapshotFrame::Runs(part)).await?;
        }
        for part in snapshot.resume_points.chunks(MAX_RUNS_PER_FRAME) {
            self.frames.write(&KvSnapshotFrame::ResumePoints(part.to_vec())).await?;
        }
        self.frames.write(&KvSnapshotFrame::End).await?;
        self.frames.finish();
        Ok(())
    }
}

/// Splits `runs` into parts of at most `units` units. A run that does not fit continues in the next part as
/// a run below its last unit. A run without units counts as one unit, so that a part stays bounded.
fn split_runs(runs: &[KvRun], units: usize) -> Vec<Vec<KvRun>> {
    let mut parts = Vec::new();
    let mut part = Vec::new();
    let mut room = units;
    for (parent, ids, medium) in runs {
        let mut parent = *parent;
        let mut rest = ids.as_slice();
        loop {
            let (now, rest_of_run) = rest.split_at(rest.len().min(room));
            part.push((parent, now.to_vec(), *medium));
            room -= now.len().max(1).min(room);
            if room == 0 {
                parts.push(std::mem::take(&mut part));
                room = units;
            }
            let Some(last) = now.last().filter(|_| !rest_of_run.is_empty()) else { break };
            (parent, rest) = (*last, rest_of_run);
        }
    }
    if !part.is_empty() {
        parts.push(part);
    }
    parts
}

pub(super) async fn read_snapshot(stream: RecvStream) -> Result<KvSnapshot, Error> {
    let mut frames = FrameReader::<KvSnapshotFrame>::new(stream, Cap::Events);
    let cut = Error::StreamCut { what: "a snapshot's first frame" };
    let KvSnapshotFrame::Begin { epoch, sequence } = frames.next().await?.ok_or(cut)? else {
        return Err(Error::Protocol("a snapshot does not begin with its position"));
    };
    let (mut runs, mut resume_points) = (Vec::new(), Vec::new());
    let mut units = 0;
    let mut count = |more: usize| {
        units += more;
        if units > MAX_SNAPSHOT_UNITS { Err(Error::Protocol("a snapshot is too large")) } else { Ok(()) }
    };
    loop {
        match frames.next().await?.ok_or(Error::StreamCut { what: "a snapshot's last frame" })? {
            KvSnapshotFrame::Runs(part) => {
                count(part.iter().map(|(_, ids, _)| ids.len().max(1)).sum())?;
                runs.extend(part);
            }
            KvSnapshotFrame::ResumePoints(part) => {
                count(part.len())?;
                resume_points.extend(part);
            }
            KvSnapshotFrame::End => return Ok(KvSnapshot { epoch, sequence, runs, resume_points }),
            KvSnapshotFrame::Begin { .. } => return Err(Error::Protocol("a snapshot begins twice")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::block::BlockId;
    use proto::event::Medium;
    use proto::ids::Epoch;

    fn id(n: u8) -> BlockId {
        BlockId([n; 16])
    }

    #[test]
    fn long_runs_are_continued_below_their_last_unit() {
        let runs = vec![
            (id(0), (1..=5).map(id).collect(), Medium::Device),
            (id(9), vec![], Medium::Host),
            (id(5), vec![id(6)], Medium::Disk),
        ];
        let parts = split_runs(&runs, 3);
        assert_eq!(
            parts,
            vec![
                vec![(id(0), vec![id(1), id(2), id(3)], Medium::Device)],
                vec![(id(3), vec![id(4), id(5)], Medium::Device), (id(9), vec![], Medium::Host)],
                vec![(id(5), vec![id(6)], Medium::Disk)],
            ]
        );
    }

    #[test]
    fn long_batches_are_split_and_keep_their_numbers() {
        let removed =
            |units| KvEvent::Removed { units: (0..units).map(id).collect(), medium: Medium::Device };
        let all = vec![removed(2), KvEvent::Cleared, removed(2), removed(9), KvEvent::Cleared, removed(1)];
        let batch = KvEventBatch { epoch: Epoch(1), first_sequence: 10, events: all.clone() };
        let parts = split(batch, 2, 4);
        let numbers: Vec<_> = parts.iter().map(|part| (part.first_sequence, part.events.len())).collect();
        assert_eq!(numbers, [(10, 2), (12, 1), (13, 1), (14, 2)]);
        assert_eq!(parts.into_iter().flat_map(|part| part.events).collect::<Vec<_>>(), all);
    }
}
