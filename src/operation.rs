//! `kvasir operation`: runs one operation on a sound file, or a text, in this process, with a worker session's
//! results.

mod speak;

use crate::config::UsageError;
use crate::models::resolve_bundle;
use anyhow::{Context, Result};
use engine::cgroup::cpus;
use proto::operation::{
    DiarizationOptions, MAX_FRAME_SAMPLES, Operation, OperationOptions, OperationOutput, SpeakOptions,
    SpeakerSegment, SpeakerVector, SpeechOptions, SpokenWord, TranscribeOptions, TurnOptions, VoiceWindow,
    WakewordOptions, WordWindow,
};
use serde_json::{Value, json};
use sound::Taken;
use speech::{Choice, encode_speech, load_audio_models};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Longest recording, in seconds.
const MAX_SECONDS: u64 = 3_600;

/// Runs one operation on a sound file, or a text, without a cluster
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    kvasir operation vad --audio call.wav --json\n  \
    kvasir operation vad --audio call.wav --backend onnx\n  \
    kvasir operation turn_detection --audio said.wav --bundle ./my-bundle\n  \
    kvasir operation asr --audio call.wav --language de\n  \
    kvasir operation wakeword --audio room.wav --words alexa,hey_jarvis\n  \
    kvasir operation speaker --audio call.wav --reference known.wav\n  \
    kvasir operation diarization --audio call.wav --rttm\n  \
    kvasir operation tts --text \"Hello, world!\" --out hello.wav")]
pub(crate) struct OperationCommand {
    /// Operation: vad (when somebody speaks), turn_detection (whether the speaker has finished), asr (transcript),
    /// wakeword (when a word of a fixed set is spoken), speaker (vector of the voice), diarization (which speaker speaks
    /// when), tts (speech for a text)
    #[arg(value_name = "OPERATION", value_parser = operation)]
    operation: Operation,
    /// Recording: WAV of PCM, MP3, FLAC, Vorbis in Ogg, or AAC in MP4 or ADTS; an hour at most. The mean of its channels
    /// counts, at 16 kHz (for vad also at 8 kHz)
    #[arg(long, value_name = "FILE", required_unless_present = "text")]
    audio: Option<PathBuf>,
    /// Catalog name, or directory with a folder named like the operation [default: silero-vad for vad, smart-turn for
    /// turn_detection, whisper-base for asr, openwakeword for wakeword, resemblyzer for speaker,
    /// pyannote-diarization for diarization, piper-joe for tts]
    #[arg(long, value_name = "BUNDLE")]
    bundle: Option<String>,
    /// Backend: kernels (this engine's arithmetic) or onnx (a runtime for files in that format) [default: that of
    /// KVASIR_VAD_BACKEND and the like, else kernels if it can serve]
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Probability above which a window is speech, a turn is complete, or a word was spoken; for speaker the least cosine
    /// of one voice, for diarization the largest distance of one voice, 0 to 2 [default: the model authors' recommendation]
    #[arg(long, value_name = "P")]
    threshold: Option<f32>,
    /// For asr: the spoken language, such as en [default: detected]
    #[arg(long, value_name = "CODE")]
    language: Option<String>,
    /// For asr: translate to English
    #[arg(long)]
    translate: bool,
    /// For asr: preceding text, which sets style and spelling
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// For asr: also print the times of words
    #[arg(long)]
    word_times: bool,
    /// For asr: temperature of the draws, 0 to 1 [default: 0, with higher ones for texts that are no good]
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// For asr: write the encoder's output for the first 30 s as 32-bit floats, and exit
    #[arg(long, value_name = "F", hide = true)]
    encoded: Option<PathBuf>,
    /// For wakeword: the words to listen for, separated by commas [default: all of the model]
    #[arg(long, value_name = "WORD", value_delimiter = ',')]
    words: Vec<String>,
    /// For wakeword: milliseconds in which a word is not reported again [default: 1000]
    #[arg(long, value_name = "MS")]
    debounce: Option<u32>,
    /// For speaker: recording of a voice to compare with
    #[arg(long, value_name = "FILE")]
    reference: Option<PathBuf>,
    /// For diarization: the number of speakers [default: found from the voices]
    #[arg(long, value_name = "N", conflicts_with_all = ["min_speakers", "max_speakers"])]
    num_speakers: Option<u32>,
    /// For diarization: the least number of speakers [default: 1]
    #[arg(long, value_name = "N")]
    min_speakers: Option<u32>,
    /// For diarization: the largest number of speakers [default: no limit]
    #[arg(long, value_name = "N")]
    max_speakers: Option<u32>,
    /// For diarization: print a Rich Transcription Time Marked (RTTM) file
    #[arg(long, conflicts_with = "json")]
    rttm: bool,
    /// For tts: the text
    #[arg(long, value_name = "TEXT", requires = "out", conflicts_with = "audio")]
    text: Option<String>,
    /// For tts: the WAV file to write
    #[arg(long, value_name = "F.wav")]
    out: Option<PathBuf>,
    /// For tts: name of a voice of the model [default: its first one]
    #[arg(long, value_name = "NAME")]
    voice: Option<String>,
    /// For tts: times as fast as the voice speaks by itself, 0.25 to 4 [default: 1]
    #[arg(long, value_name = "N")]
    speed: Option<f32>,
    /// Also print each window's probability
    #[arg(long)]
    windows: bool,
    /// Samples per frame
    #[arg(long, value_name = "N", default_value_t = 1600, value_parser = clap::value_parser!(u32).range(1..=MAX_FRAME_SAMPLES as i64))]
    chunk: u32,
    /// Print one JSON object: {"operation","backend","model","sample_rate","samples","events":[{"type",..}]}
    #[arg(long)]
    json: bool,
}

fn operation(name: &str) -> Result<Operation, String> {
    let names = || Operation::ALL.iter().map(|operation| operation.name()).collect::<Vec<_>>().join(", ");
    Operation::from_name(name).ok_or_else(|| format!("unknown operation; known are {}", names()))
}

impl OperationCommand {
    fn choice(&self) -> Choice<'_> {
        let named = |backend| Choice::Named { option: "--backend", backend };
        self.backend.as_deref().map_or(Choice::Selected, named)
    }

    /// Runs the command.
    pub(crate) fn run(self) -> Result<()> {
        let operation = self.operation;
        if self.windows && ![Operation::Vad, Operation::Wakeword].contains(&operation) {
            let (flag, other, reason) = ("--windows", operation.name(), "only vad and wakeword have windows");
            return Err(UsageError { flag, other, reason }.into());
        }
        let (asr, wakeword, diarization) = (Operation::Asr, Operation::Wakeword, Operation::Diarization);
        let tts = Operation::Tts;
        let of_one = [
            (asr, "--language", self.language.is_some()),
            (asr, "--translate", self.translate),
            (asr, "--prompt", self.prompt.is_some()),
            (asr, "--word-times", self.word_times),
            (asr, "--temperature", self.temperature.is_some()),
            (asr, "--encoded", self.encoded.is_some()),
            (wakeword, "--words", !self.words.is_empty()),
            (wakeword, "--debounce", self.debounce.is_some()),
            (Operation::Speaker, "--reference", self.reference.is_some()),
            (diarization, "--num-speakers", self.num_speakers.is_some()),
            (diarization, "--min-speakers", self.min_speakers.is_some()),
            (diarization, "--max-speakers", self.max_speakers.is_some()),
            (diarization, "--rttm", self.rttm),
            (tts, "--text", self.text.is_some()),
            (tts, "--out", self.out.is_some()),
            (tts, "--voice", self.voice.is_some()),
            (tts, "--speed", self.speed.is_some()),
        ];
        if let Some((_, flag, _)) = of_one.into_iter().find(|(of, _, given)| *given && *of != operation) {
            let (other, reason) = (operation.name(), "the flag is for another operation");
            return Err(UsageError { flag, other, reason }.into());
        }
        if operation == tts && self.audio.is_some() {
            let (flag, other, reason) = ("--audio", operation.name(), "tts speaks a --text");
            return Err(UsageError { flag, other, reason }.into());
        }
        if self.threshold.is_some() && [Operation::Asr, tts].contains(&operation) {
            let (flag, other, reason) = ("--threshold", operation.name(), "it has no threshold");
            return Err(UsageError { flag, other, reason }.into());
        }
        let bundle = match (&self.bundle, operation) {
            (Some(bundle), _) => bundle,
            (None, Operation::Vad) => "silero-vad",
            (None, Operation::TurnDetection) => "smart-turn",
            (None, Operation::Asr) => "whisper-base",
            (None, Operation::Wakeword) => "openwakeword",
            (None, Operation::Speaker) => "resemblyzer",
            (None, Operation::Diarization) => "pyannote-diarization",
            (None, Operation::Tts) => "piper-joe",
            // No catalog model serves this operation; the registry reports whether anything does.
            (None, _) => ".",
        };
        let bundle = resolve_bundle(bundle)?;
        if let (Some(text), Some(out)) = (&self.text, &self.out) {
            let options = SpeakOptions { input: text.clone(), voice: self.voice.clone(), speed: self.speed };
            return speak::run(&bundle, self.choice(), options, out, self.json);
        }
        let audio = self.audio.as_deref().context("--audio is missing")?;
        let sound = || read(operation, audio).with_context(|| audio.display().to_string());
        if let Some(path) = &self.encoded {
            let (rate, sound) = sound()?;
            let encoded = encode_speech(&bundle, rate, &sound, cpus())?;
            let bytes: Vec<u8> = encoded.iter().flat_map(|value| value.to_le_bytes()).collect();
            return std::fs::write(path, bytes).with_context(|| path.display().to_string());
        }
        let environment = |name: &str| std::env::var(name).ok();
        let ((backend, model), _) =
            load_audio_models(operation, &bundle, self.choice(), environment, cpus())?;
        let (rate, sound) = sound()?;
        let options = match operation {
            Operation::Vad => OperationOptions::Speech(SpeechOptions {
                threshold: self.threshold,
                windows: self.windows,
                ..SpeechOptions::default()
            }),
            Operation::TurnDetection => OperationOptions::Turn(TurnOptions { threshold: self.threshold }),
            Operation::Asr => OperationOptions::Transcribe(TranscribeOptions {
                language: self.language.clone(),
                translate: self.translate,
                prompt: self.prompt.clone().unwrap_or_default(),
                words: self.word_times,
                temperature: self.temperature.unwrap_or_default(),
            }),
            Operation::Wakeword => OperationOptions::Wakeword(WakewordOptions {
                threshold: self.threshold,
                words: self.words.clone(),
                debounce_ms: self.debounce,
                windows: self.windows,
            }),
            Operation::Diarization => OperationOptions::Diarization(DiarizationOptions {
                num_speakers: self.num_speakers,
                min_speakers: self.min_speakers,
                max_speakers: self.max_speakers,
                threshold: self.threshold,
            }),
            _ => OperationOptions::Default,
        };
        let run = |rate, sound: &[f32]| -> Result<Vec<OperationOutput>> {
            let mut session = model.open(rate, &options)?;
            let mut outputs = Vec::new();
            for piece in sound.chunks(self.chunk as usize) {
                session.push(piece, &mut outputs)?;
            }
            session.segment(true, &mut outputs)?;
            while session.continue_segment(&mut outputs)? {}
            Ok(outputs)
        };
        let outputs = run(rate, &sound)?;
        let mut events: Vec<Value> = outputs.iter().flat_map(events).collect();
        let verified = match &self.reference {
            Some(path) => {
                let (rate, sound) = read(operation, path).with_context(|| path.display().to_string())?;
                Some(verified(&outputs, &run(rate, &sound)?, self.threshold)?)
            }
            None => None,
        };
        if let Some((score, same, threshold)) = verified {
            events.push(json!({"type": "verified", "score": score, "same": same, "threshold": threshold}));
        }
        let mut out = std::io::stdout().lock();
        if self.json {
            let answer = json!({
                "operation": operation.name(),
                "backend": backend,
                "model": bundle.id.as_str(),
                "sample_rate": rate,
                "samples": sound.len(),
                "events": events,
            });
            writeln!(out, "{answer}")?;
        } else if self.rttm {
            // A field of the format has no spaces.
            let name = audio.file_stem().map(|name| name.to_string_lossy().replace(char::is_whitespace, "_"));
            let name = name.unwrap_or_default();
            for output in &outputs {
                if let OperationOutput::Speakers(speakers) = output {
                    for segment in &speakers.segments {
                        writeln!(out, "{}", segment.rttm(&name, rate))?;
                    }
                }
            }
        } else {
            for output in &outputs {
                write_text(&mut out, output, rate)?;
            }
            if let Some((score, same, threshold)) = verified {
                let word = if same { "same" } else { "another" };
                writeln!(out, "{word} voice (cosine {score:.4}, threshold {threshold})")?;
            }
        }
        Ok(())
    }
}

/// The cosine of the voices of two runs, whether it reaches the threshold, and the threshold.
fn verified(
    outputs: &[OperationOutput],
    reference: &[OperationOutput],
    threshold: Option<f32>,
) -> Result<(f32, bool, f32)> {
    fn voice(outputs: &[OperationOutput]) -> Option<&SpeakerVector> {
        outputs.iter().rev().find_map(|output| match output {
            OperationOutput::Speaker(vector) => Some(vector),
            _ => None,
        })
    }
    let (Some(voice), Some(other)) = (voice(outputs), voice(reference)) else {
        anyhow::bail!("a file is too short for a vector");
    };
    let score = voice.cosine(&other.values).context("the vectors have no direction")?;
    let threshold = threshold.unwrap_or(voice.threshold);
    Ok((score, score >= threshold, threshold))
}

/// A recording's sample rate and samples, full scale 1.
fn read(operation: Operation, path: &Path) -> Result<(u32, Vec<f32>)> {
    let taken = Taken { rates: operation.recording_rates(), seconds: MAX_SECONDS };
    let recording = sound::read(&std::fs::read(path)?, taken)?;
    Ok((recording.sample_rate, recording.into_f32()))
}

fn word_event(word: &SpokenWord) -> Value {
    let SpokenWord { text, start, end, probability } = word;
    json!({"word": text, "start": start, "end": end, "probability": probability})
}

fn events(output: &OperationOutput) -> Vec<Value> {
    match output {
        OperationOutput::Windows(windows) => {
            let event = |VoiceWindow { start, probability }: &VoiceWindow| json!({"type": "window", "start": start, "probability": probability});
            windows.iter().map(event).collect()
        }
        OperationOutput::SpeechStarted { at } => vec![json!({"type": "speech_started", "at": at})],
        OperationOutput::SpeechEnded { at } => vec![json!({"type": "speech_ended", "at": at})],
        OperationOutput::Turn(turn) => vec![json!({
            "type": "turn",
            "at": turn.at,
            "complete": turn.complete,
            "probability": turn.probability,
        })],
        OperationOutput::Text(text) => {
            vec![json!({
                "type": "text",
                "text": text.text,
                "start": text.start,
                "end": text.end,
                "window": text.window,
                "tokens": text.tokens,
                "avg_logprob": text.mean_log,
                "no_speech_prob": text.silence,
                "temperature": text.temperature,
                "compression_ratio": text.repetition,
                "words": text.words.iter().map(word_event).collect::<Vec<_>>(),
            })]
        }
        OperationOutput::Language(language) => {
            vec![json!({"type": "language", "code": language.code, "probability": language.probability})]
        }
        OperationOutput::WordWindows(windows) => {
            let event = |WordWindow { start, word, probability }: &WordWindow| json!({"type": "window", "start": start, "word": word, "probability": probability});
            windows.iter().map(event).collect()
        }
        OperationOutput::Wakeword(heard) => vec![json!({
            "type": "wakeword",
            "word": heard.word,
            "at": heard.at,
            "probability": heard.probability,
        })],
        OperationOutput::Speaker(vector) => {
            vec![json!({"type": "embedding", "at": vector.at, "embedding": vector.values})]
        }
        OperationOutput::Speakers(speakers) => {
            let segment = |segment: &SpeakerSegment| json!({"type": "segment", "start": segment.start, "end": segment.end, "speaker": segment.label()});
            speakers.segments.iter().map(segment).collect()
        }
        OperationOutput::Opened(_)
        | OperationOutput::Segmented { .. }
        | OperationOutput::Restarted
        | OperationOutput::Finished { .. }
        | OperationOutput::Failed(_)
        | OperationOutput::Audio(_) => Vec::new(),
    }
}

fn write_text(out: &mut impl Write, output: &OperationOutput, rate: u32) -> std::io::Result<()> {
    let seconds = |at: u64| at as f64 / f64::from(rate);
    match output {
        OperationOutput::Windows(windows) => {
            for VoiceWindow { start, probability } in windows {
                writeln!(out, "{:9.3} s  {probability:.3}", seconds(*start))?;
            }
        }
        OperationOutput::SpeechStarted { at } => writeln!(out, "{:9.3} s  speech", seconds(*at))?,
        OperationOutput::SpeechEnded { at } => writeln!(out, "{:9.3} s  silence", seconds(*at))?,
        OperationOutput::Turn(turn) => {
            let word = if turn.complete { "complete" } else { "incomplete" };
            writeln!(out, "{:9.3} s  turn {word} ({:.3})", seconds(turn.at), turn.probability)?;
        }
        OperationOutput::Text(text) => {
            writeln!(out, "{:9.3} s  {}", seconds(text.start), text.text)?;
            for SpokenWord { text, start, end, .. } in &text.words {
                writeln!(out, "{:9.3} s - {:9.3} s {text}", seconds(*start), seconds(*end))?;
            }
        }
        OperationOutput::WordWindows(windows) => {
            for WordWindow { start, word, probability } in windows {
                writeln!(out, "{:9.3} s  {word} {probability:.3}", seconds(*start))?;
            }
        }
        OperationOutput::Wakeword(heard) => {
            writeln!(out, "{:9.3} s  {} ({:.3})", seconds(heard.at), heard.word, heard.probability)?;
        }
        OperationOutput::Speakers(speakers) => {
            for segment in &speakers.segments {
                let (start, end) = (seconds(segment.start), seconds(segment.end));
                writeln!(out, "{start:9.3} s - {end:9.3} s  {}", segment.label())?;
            }
        }
        OperationOutput::Speaker(vector) => {
            let values: Vec<String> = vector.values.iter().map(f32::to_string).collect();
            writeln!(out, "{}", values.join(" "))?;
        }
        _ => {}
    }
    Ok(())
}
