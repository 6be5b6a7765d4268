//! FLAC of one channel of 16 bit samples, written while it is computed.

use flacenc::bitsink::ByteSink;
use flacenc::component::{BitRepr, Stream, StreamInfo};
use flacenc::config::Encoder;
use flacenc::encode_fixed_size_frame;
use flacenc::error::{Verified, Verify};
use flacenc::source::{Fill, FrameBuf};

/// Samples of each frame but the last.
const FRAME: usize = 4096;

/// Samples that do not fill a frame wait for the next ones or for the end.
#[derive(Debug)]
pub(super) struct Flac {
    config: Verified<Encoder>,
    /// The length and the digest in it are unknown, since the audio is sent while it is computed.
    info: StreamInfo,
    buffer: FrameBuf,
    waiting: Vec<i32>,
    frames: usize,
}

impl Flac {
    /// Fails for a rate that a file cannot have: 0, or above 655,350 Hz.
    pub(super) fn new(sample_rate: u32) -> Option<Self> {
        let mut info = StreamInfo::new(sample_rate as usize, 1, 16).ok()?;
        info.set_block_sizes(FRAME, FRAME).ok()?;
        info.set_frame_sizes(0, 0).ok()?;
        let config = Encoder::default().into_verified().ok()?;
        let buffer = FrameBuf::with_size(1, FRAME).ok()?;
        Some(Self { config, info, buffer, waiting: Vec::new(), frames: 0 })
    }

    pub(super) fn header(&self) -> Option<Vec<u8>> {
        let mut header = ByteSink::new();
        Stream::with_stream_info(self.info.clone()).write(&mut header).ok()?;
        Some(header.into_inner())
    }

    /// Frames that are full with these samples.
    pub(super) fn write(&mut self, samples: &[i16]) -> Option<Vec<u8>> {
        self.waiting.extend(samples.iter().map(|sample| i32::from(*sample)));
        let waiting = std::mem::take(&mut self.waiting);
        let (full, rest) = waiting.split_at(waiting.len() / FRAME * FRAME);
        self.waiting.extend(rest);
        self.frames_of(full)
    }

    /// The last frame.
    pub(super) fn finish(&mut self) -> Option<Vec<u8>> {
        let rest = std::mem::take(&mut self.waiting);
        self.frames_of(&rest)
    }

    fn frames_of(&mut self, samples: &[i32]) -> Option<Vec<u8>> {
        let mut bytes = ByteSink::new();
        for samples in samples.chunks(FRAME) {
            self.buffer.fill_interleaved(samples).ok()?;
            let frame = encode_fixed_size_frame(&self.config, &self.buffer, self.frames, &self.info).ok()?;
            frame.write(&mut bytes).ok()?;
            self.frames += 1;
        }
        Some(bytes.into_inner())
    }
}
