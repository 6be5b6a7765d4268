//! Selects the backend of each audio operation.
//!
//! A bundle is a directory with a folder for each of its operations, named after the operation. A backend
//! inspects that folder to decide whether it can serve. The selection follows [`kernels::registry`]:
//! `KVASIR_VAD_BACKEND` (and the like for other operations), then `KVASIR_BACKEND`, must be honored.
//! Otherwise the backend with the highest rank that can serve is used, and a worker loads the others too, for
//! sessions that choose one.

use crate::Error;
use crate::bundle::Bundle;
use crate::flushed::Flushed;
use crate::session::AudioModel;
use crate::silero::{self, Silero};
use crate::smart_turn::SmartTurn;
use crate::speaker::{SpeakerModel, resemblyzer};
use crate::wakeword::Wakewords;
use crate::{diarization, onnx, onnx::the_file, tts, wakeword, whisper};
use kernels::registry::{Operation as Served, Provider, Refusal, Registry};
use proto::operation::Operation;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

/// Loads an audio model.
pub type LoadAudioModel = dyn Fn(&Bundle) -> Result<Arc<dyn AudioModel>, Error> + Send + Sync;

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name;

        impl Served for $name {
            type Request = Bundle;
            type Service = LoadAudioModel;
            const NAME: &'static str = $text;
        }
    )*};
}

operations! {
    /// [`Operation::Vad`].
    Vad = "vad";
    /// [`Operation::TurnDetection`].
    TurnDetection = "turn_detection";
    /// [`Operation::Asr`].
    Asr = "asr";
    /// [`Operation::Tts`].
    Tts = "tts";
    /// [`Operation::Wakeword`].
    Wakeword = "wakeword";
    /// [`Operation::Speaker`].
    Speaker = "speaker";
    /// [`Operation::Diarization`].
    Diarization = "diarization";
}

/// A way to serve one operation.
pub struct Backend<O: Served> {
    pub name: &'static str,
    pub rank: i32,
    pub can_serve: fn(&O::Request) -> Result<(), Refusal>,
    pub service: Box<O::Service>,
}

impl<O: Served> Provider<O> for Backend<O>
where
    O::Service: Send + Sync,
{
    fn name(&self) -> &str {
        self.name
    }

    fn rank(&self) -> i32 {
        self.rank
    }

    /// Always available: all run on the CPU, or find their device when they load.
    fn available(&self) -> Result<(), String> {
        Ok(())
    }

    fn can_serve(&self, request: &O::Request) -> Result<(), Refusal> {
        (self.can_serve)(request)
    }

    fn service(&self) -> &O::Service {
        &self.service
    }
}

/// A backend that needs espeak-ng.
struct WithEspeak(Backend<Tts>);

impl Provider<Tts> for WithEspeak {
    fn name(&self) -> &str {
        self.0.name
    }

    fn rank(&self) -> i32 {
        self.0.rank
    }

    fn available(&self) -> Result<(), String> {
        tts::available()
    }

    fn can_serve(&self, request: &Bundle) -> Result<(), Refusal> {
        (self.0.can_serve)(request)
    }

    fn service(&self) -> &LoadAudioModel {
        &self.0.service
    }
}

/// Name of the backend that uses this engine's own kernels.
pub const KERNELS: &str = "kernels";
pub const KERNELS_RANK: i32 = 20;

/// Prefixes of ONNX file names.
const SILERO: &str = "silero_vad";
const SMART_TURN: &str = "smart-turn-v3";

fn no_fault(refusal: Refusal) -> Error {
    let reason = refusal.to_string();
    Error::Config { option: "operation", reason }
}

/// Loads the only file with this prefix in an operation's folder.
fn audio_model<H: AudioModel + 'static>(
    operation: Operation,
    begins: &'static str,
    load: fn(&Path) -> Result<H, Error>,
) -> Box<LoadAudioModel> {
    Box::new(move |bundle| {
        let file = the_file(&bundle.folder(operation), begins).map_err(no_fault)?;
        Ok(Arc::new(load(&file)?))
    })
}

fn vad() -> Registry<Vad> {
    let mut registry = Registry::empty();
    registry.register(Box::new(Backend {
        name: onnx::NAME,
        rank: onnx::RANK,
        can_serve: |bundle: &Bundle| the_file(&bundle.folder(Operation::Vad), SILERO).map(drop),
        service: audio_model(Operation::Vad, SILERO, Silero::on_onnx),
    }));
    registry.register(Box::new(Backend {
        name: KERNELS,
        rank: KERNELS_RANK,
        can_serve: |bundle: &Bundle| silero::is_in(&the_file(&bundle.folder(Operation::Vad), SILERO)?),
        service: audio_model(Operation::Vad, SILERO, Silero::on_kernels),
    }));
    registry
}

fn turn_detection() -> Registry<TurnDetection> {
    let mut registry = Registry::empty();
    registry.register(Box::new(Backend {
        name: onnx::NAME,
        rank: onnx::RANK,
        can_serve: |bundle: &Bundle| the_file(&bundle.folder(Operation::TurnDetection), SMART_TURN).map(drop),
        service: audio_model(Operation::TurnDetection, SMART_TURN, SmartTurn::load),
    }));
    registry
}

fn asr(cpus: NonZeroUsize) -> Registry<Asr> {
    let mut registry = Registry::empty();
    let load: Box<LoadAudioModel> =
        Box::new(move |bundle| Ok(Arc::new(whisper::Shared::load(&bundle.folder(Operation::Asr), cpus)?)));
    registry.register(Box::new(Backend {
        name: KERNELS,
        rank: KERNELS_RANK,
        can_serve: |bundle: &Bundle| whisper::is_in(&bundle.folder(Operation::Asr)),
        service: load,
    }));
    registry
}

fn tts(cpus: NonZeroUsize) -> Registry<Tts> {
    let mut registry = Registry::empty();
    let load: Box<LoadAudioModel> =
        Box::new(move |bundle| Ok(Arc::new(tts::Voices::load(&bundle.folder(Operation::Tts), cpus)?)));
    registry.register(Box::new(WithEspeak(Backend {
        name: onnx::NAME,
        rank: onnx::RANK,
        can_serve: |bundle: &Bundle| tts::is_in(&bundle.folder(Operation::Tts)),
        service: load,
    })));
    registry
}

fn wakeword() -> Registry<Wakeword> {
    let mut registry = Registry::empty();
    let load: Box<LoadAudioModel> =
        Box::new(|bundle| Ok(Arc::new(Wakewords::load(&bundle.folder(Operation::Wakeword))?)));
    registry.register(Box::new(Backend {
        name: onnx::NAME,
        rank: onnx::RANK,
        can_serve: |bundle: &Bundle| wakeword::is_in(&bundle.folder(Operation::Wakeword)),
        service: load,
    }));
    registry
}

fn speaker(cpus: NonZeroUsize) -> Registry<Speaker> {
    let mut registry = Registry::empty();
    let load: Box<LoadAudioModel> = Box::new(move |bundle| {
        Ok(Arc::new(SpeakerModel::new(resemblyzer::load(&bundle.folder(Operation::Speaker), cpus)?)))
    });
    registry.register(Box::new(Backend {
        name: KERNELS,
        rank: KERNELS_RANK,
        can_serve: |bundle: &Bundle| resemblyzer::is_in(&bundle.folder(Operation::Speaker)),
        service: load,
    }));
    registry
}

fn diarization(cpus: NonZeroUsize) -> Registry<Diarization> {
    let mut registry = Registry::empty();
    let load: Box<LoadAudioModel> = Box::new(move |bundle| {
        Ok(Arc::new(diarization::Diarization::load(&bundle.folder(Operation::Diarization), cpus)?))
    });
    registry.register(Box::new(Backend {
        name: KERNELS,
        rank: KERNELS_RANK,
        can_serve: |bundle: &Bundle| diarization::is_in(&bundle.folder(Operation::Diarization)),
        service: load,
    }));
    registry
}

/// A loaded backend: its name and the model.
pub type LoadedBackend = (String, Arc<dyn AudioModel>);

/// Which backends to load.
#[derive(Debug, Clone, Copy)]
pub enum Choice<'a> {
    /// The one that the environment and the bundle select.
    Selected,
    /// The selected one, then the others that can serve, unless the environment names one. Others that fail to
    /// load are left out with a warning.
    All,
    /// The one of this name. The option is for errors.
    Named { option: &'a str, backend: &'a str },
}

/// Loads the backends of an audio operation, at least one. This process can run `cpus` threads at a time.
///
/// # Errors
/// [`Error::Backend`] if no backend can serve, or the selected one cannot; errors of the model.
pub fn load_audio_models(
    operation: Operation,
    bundle: &Bundle,
    choice: Choice<'_>,
    environment: impl Fn(&str) -> Option<String>,
    cpus: NonZeroUsize,
) -> Result<(LoadedBackend, Vec<LoadedBackend>), Error> {
    fn load<O: Served<Request = Bundle, Service = LoadAudioModel>>(
        registry: &Registry<O>,
        bundle: &Bundle,
        choice: Choice<'_>,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<(LoadedBackend, Vec<LoadedBackend>), Error> {
        let load = |provider: &dyn Provider<O>| -> Result<LoadedBackend, Error> {
            let model = Flushed::load(|| provider.service()(bundle))?;
            Ok((provider.name().to_owned(), Arc::new(model)))
        };
        let (selected, others) = match choice {
            Choice::Selected => (registry.select(bundle, environment)?, Vec::new()),
            Choice::All => registry.candidates(bundle, environment)?,
            Choice::Named { option, backend } => (registry.named(option, backend, bundle)?, Vec::new()),
        };
        let warn = |name: &str, error: &Error| {
            tracing::warn!(operation = O::NAME, backend = name, model = %bundle.id, %error, "a backend is left out");
        };
        let selected = load(selected)?;
        let others = others.into_iter();
        let others = others
            .filter_map(|other| load(other).inspect_err(|error| warn(other.name(), error)).ok())
            .collect();
        Ok((selected, others))
    }
    match operation {
        Operation::Vad => load(&vad(), bundle, choice, environment),
        Operation::TurnDetection => load(&turn_detection(), bundle, choice, environment),
        Operation::Asr => load(&asr(cpus), bundle, choice, environment),
        Operation::Tts => load(&tts(cpus), bundle, choice, environment),
        Operation::Wakeword => load(&wakeword(), bundle, choice, environment),
        Operation::Speaker => load(&speaker(cpus), bundle, choice, environment),
        Operation::Diarization => load(&diarization(cpus), bundle, choice, environment),
        Operation::Embed | Operation::Rerank => {
            let reason = format!("{operation} is for texts: it is served with the model of a worker");
            Err(Error::Config { option: "operation", reason })
        }
    }
}

#[cfg(test)]
mod tests;
