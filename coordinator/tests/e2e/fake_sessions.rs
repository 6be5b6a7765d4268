//! The fake worker's audio operations: windows of 512 samples, with the speech probability in the first
//! sample. Each word is spoken as a message of samples of its length.

use parking_lot::Mutex;
use proto::operation::{
    Language, MAX_FRAME_WINDOWS, OpenedOperation, Operation, OperationError, OperationInput,
    OperationOptions, OperationOutput, OperationRequest, Pcm, SpeakOptions, SpokenText, SpokenWord,
    TurnScore, VoiceWindow,
};
use tokio::sync::watch;
use transport::{OperationCall, OperationInputs, OperationReplier};

pub(crate) const WINDOW: u64 = 512;
pub(crate) const IDLE_MS: u64 = 25_000;
/// Sample rate of spoken texts.
pub(crate) const SPOKEN_RATE: u32 = 22_050;
/// Samples of a message of the word `endless`.
const ENDLESS: usize = 60_000;

/// State of the sessions, and the requests received.
pub(crate) struct FakeSessions {
    requests: Mutex<Vec<OperationRequest>>,
    /// The backends that the requests name.
    pub(crate) backends: Mutex<Vec<Option<String>>>,
    /// If set, sessions are refused with this error.
    refuse: Mutex<Option<OperationError>>,
    draining: watch::Sender<bool>,
    open: watch::Sender<u32>,
    /// While true, sessions neither read nor answer.
    stalled: watch::Sender<bool>,
    /// If true, each audio frame is answered by the maximum of windows of a frame.
    pub(crate) loud: Mutex<bool>,
    /// Number of such answers sent.
    pub(crate) replies_sent: watch::Sender<u64>,
}

impl Default for FakeSessions {
    fn default() -> Self {
        Self {
            requests: Mutex::default(),
            backends: Mutex::default(),
            refuse: Mutex::default(),
            draining: watch::Sender::new(false),
            open: watch::Sender::new(0),
            stalled: watch::Sender::new(false),
            loud: Mutex::default(),
            replies_sent: watch::Sender::new(0),
        }
    }
}

impl FakeSessions {
    pub(crate) fn requests(&self) -> Vec<OperationRequest> {
        self.requests.lock().clone()
    }

    pub(crate) fn refuse(&self, error: Option<OperationError>) {
        *self.refuse.lock() = error;
    }

    pub(crate) fn drain(&self, draining: bool) {
        self.draining.send_replace(draining);
    }

    pub(crate) fn stall(&self, stalled: bool) {
        self.stalled.send_replace(stalled);
    }

    pub(crate) fn open(&self) -> u32 {
        *self.open.borrow()
    }
}

/// The speech probability of a window by its first sample.
pub(crate) fn probability(sample: i16) -> f32 {
    f32::from(sample.unsigned_abs().min(32_767)) / 32_767.0
}

pub(crate) async fn serve(sessions: &FakeSessions, call: OperationCall) {
    let OperationCall { request, backend, inputs, mut reply } = call;
    sessions.requests.lock().push(request.clone());
    sessions.backends.lock().push(backend.clone());
    let refused = sessions.refuse.lock().clone();
    let speaks = request.operation == Operation::Tts;
    let unsupported = (!speaks && request.sample_rate != 16_000 && request.sample_rate != 8_000).then(|| {
        let reason = format!("{} is none of 8000 and 16000", request.sample_rate);
        OperationError::InvalidField { field: "sample_rate".into(), reason }
    });
    if let Some(error) = refused.or(unsupported) {
        let _ = reply.end(&OperationOutput::Failed(error)).await;
        return;
    }
    let opened = OpenedOperation {
        backend: backend.unwrap_or_else(|| "fake".into()),
        model: request.model.clone().unwrap(),
        sample_rate: if speaks { SPOKEN_RATE } else { request.sample_rate },
        window: if request.operation == Operation::Vad { WINDOW as u32 } else { 0 },
        idle_timeout_ms: IDLE_MS,
    };
    let _ = reply.send(&OperationOutput::Opened(opened)).await;
    sessions.open.send_modify(|open| *open += 1);
    let cancelled = reply.cancelled();
    let mut draining = sessions.draining.subscribe();
    tokio::select! {
        ended = run_session(sessions, &request, inputs, &mut reply) => {
            if let Ok(output) = ended {
                let _ = reply.end(&output).await;
            }
        }
        () = cancelled => {}
        () = async { drop(draining.wait_for(|draining| *draining).await) } => {
            // A real worker waits for its deadline.
            let _ = reply.end(&OperationOutput::Failed(OperationError::Draining)).await;
        }
    }
    sessions.open.send_modify(|open| *open -= 1);
}

async fn run_session(
    sessions: &FakeSessions,
    request: &OperationRequest,
    mut inputs: OperationInputs,
    reply: &mut OperationReplier,
) -> Result<OperationOutput, transport::Error> {
    let (threshold, windows) = match &request.options {
        OperationOptions::Speech(options) => (options.threshold.unwrap_or(0.5), options.windows),
        OperationOptions::Turn(options) => (options.threshold.unwrap_or(0.5), false),
        OperationOptions::Wakeword(options) => (options.threshold.unwrap_or(0.5), options.windows),
        _ => (0.5, false),
    };
    let turns = request.operation == Operation::TurnDetection;
    let (mut samples, mut all, mut speaking) = (Vec::<f32>::new(), 0, false);
    loop {
        let _ = sessions.stalled.subscribe().wait_for(|stalled| !*stalled).await;
        let Some(input) = inputs.next().await? else { return Ok(OperationOutput::Finished { samples: all }) };
        match input {
            OperationInput::Samples(pcm) => {
                let before = samples.len() as u64;
                all += pcm.len() as u64;
                if *sessions.loud.lock() {
                    let window = |start| VoiceWindow { start, probability: 0.125 };
                    let windows: Vec<VoiceWindow> = (0..MAX_FRAME_WINDOWS as u64).map(window).collect();
                    reply.send(&OperationOutput::Windows(windows)).await?;
                    sessions.replies_sent.send_modify(|count| *count += 1);
                    continue;
                }
                samples.extend(pcm.into_f32());
                let mut results = Vec::new();
                for start in (before / WINDOW..samples.len() as u64 / WINDOW).map(|n| n * WINDOW) {
                    if turns || request.operation == Operation::Asr {
                        break;
                    }
                    let first = (samples[start as usize] * 32_768.0) as i16;
                    let probability = probability(first);
                    results.push(VoiceWindow { start, probability });
                    if speaking != (probability >= threshold) {
                        speaking = !speaking;
                        let event = match speaking {
                            true => OperationOutput::SpeechStarted { at: start },
                            false => OperationOutput::SpeechEnded { at: start },
                        };
                        reply.send(&event).await?;
                    }
                }
                if windows && !results.is_empty() {
                    reply.send(&OperationOutput::Windows(results)).await?;
                }
            }
            OperationInput::Finish if request.operation == Operation::Tts => {
                let OperationOptions::Speak(SpeakOptions { input, .. }) = &request.options else {
                    return Ok(OperationOutput::Failed(OperationError::Internal));
                };
                for word in input.split_whitespace() {
                    match word {
                        "nothing" => continue,
                        // Until the test says so.
                        "wait" => {
                            let _ = sessions.stalled.subscribe().wait_for(|stalled| *stalled).await;
                            continue;
                        }
                        "broken" => return Ok(OperationOutput::Failed(OperationError::Internal)),
                        "endless" => loop {
                            reply.send(&OperationOutput::Audio(Pcm::I16(vec![7; ENDLESS]))).await?;
                            sessions.replies_sent.send_modify(|count| *count += 1);
                        },
                        _ => {}
                    }
                    let audio = vec![word.len() as i16; word.len()];
                    reply.send(&OperationOutput::Audio(Pcm::I16(audio))).await?;
                }
                reply.send(&OperationOutput::Segmented { at: 0 }).await?;
                return Ok(OperationOutput::Finished { samples: 0 });
            }
            OperationInput::Segment | OperationInput::Finish => {
                let at = samples.len() as u64;
                if std::mem::take(&mut speaking) {
                    reply.send(&OperationOutput::SpeechEnded { at }).await?;
                }
                if turns {
                    let mean =
                        samples.iter().map(|x| f64::from(x.abs())).sum::<f64>() / samples.len().max(1) as f64;
                    let probability = mean as f32;
                    let complete = probability > threshold;
                    reply.send(&OperationOutput::Turn(TurnScore { at, complete, probability })).await?;
                }
                if request.operation == Operation::Asr {
                    let language = Language { code: "en".into(), probability: 0.75 };
                    reply.send(&OperationOutput::Language(language)).await?;
                    let text = SpokenText {
                        text: format!(" heard {at}"),
                        start: 0,
                        end: at,
                        window: 0,
                        tokens: vec![7],
                        mean_log: -0.25,
                        silence: 0.125,
                        temperature: 0.0,
                        repetition: 1.5,
                        words: vec![SpokenWord {
                            text: " heard".into(),
                            start: 0,
                            end: at,
                            probability: 0.5,
                        }],
                    };
                    reply.send(&OperationOutput::Text(text)).await?;
                }
                reply.send(&OperationOutput::Segmented { at }).await?;
                if input == OperationInput::Finish {
                    return Ok(OperationOutput::Finished { samples: all });
                }
            }
            OperationInput::Reset => {
                samples.clear();
                speaking = false;
                reply.send(&OperationOutput::Restarted).await?;
            }
            OperationInput::Close => return Ok(OperationOutput::Finished { samples: all }),
        }
    }
}
