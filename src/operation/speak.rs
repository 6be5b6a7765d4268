//! `kvasir operation tts`: speaks a text into a WAV file.

use anyhow::{Context, Result};
use engine::cgroup::cpus;
use hound::{SampleFormat, WavSpec, WavWriter};
use proto::operation::{Operation, OperationOptions, OperationOutput, Pcm, SpeakOptions};
use serde_json::json;
use speech::{Bundle, Choice, load_audio_models};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

/// Speaks a text and prints how long it took.
pub(super) fn run(
    bundle: &Bundle,
    choice: Choice<'_>,
    options: SpeakOptions,
    path: &Path,
    as_json: bool,
) -> Result<()> {
    let operation = Operation::Tts;
    let environment = |name: &str| std::env::var(name).ok();
    let ((backend, model), _) = load_audio_models(operation, bundle, choice, environment, cpus())?;
    let start = Instant::now();
    let mut session = model.open(0, &OperationOptions::Speak(options))?;
    let sample_rate = session.rate().context("the voice has no sample rate")?;
    let spec = WavSpec { channels: 1, sample_rate, bits_per_sample: 16, sample_format: SampleFormat::Int };
    let mut file = WavWriter::create(path, spec).with_context(|| path.display().to_string())?;
    let (mut samples, mut first) = (0u64, None);
    let mut outputs = Vec::new();
    session.segment(true, &mut outputs)?;
    loop {
        let more = session.continue_segment(&mut outputs)?;
        for output in outputs.drain(..) {
            if let OperationOutput::Audio(Pcm::I16(audio)) = output {
                first.get_or_insert_with(|| start.elapsed().as_secs_f64());
                samples += audio.len() as u64;
                audio.into_iter().try_for_each(|sample| file.write_sample(sample))?;
            }
        }
        if !more {
            break;
        }
    }
    file.finalize()?;
    let (took, spoken) = (start.elapsed().as_secs_f64(), samples as f64 / f64::from(sample_rate));
    let first = first.context("the text has nothing that the voice can speak")?;
    let mut out = std::io::stdout().lock();
    if as_json {
        let answer = json!({
            "operation": operation.name(),
            "backend": backend,
            "model": bundle.id.as_str(),
            "sample_rate": sample_rate,
            "samples": samples,
            "first_audio_s": first,
            "compute_s": took,
        });
        writeln!(out, "{answer}")?;
    } else {
        let path = path.display();
        writeln!(out, "{path}: {spoken:.2} s, computed in {took:.2} s, the first audio after {first:.2} s")?;
    }
    Ok(())
}
