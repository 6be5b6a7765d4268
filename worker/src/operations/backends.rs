//! Selects the backend of each operation.
//!
//! A bundle is a directory with a folder for each of its operations, named after the operation. A backend
//! inspects that folder to decide whether it can serve. The selection follows [`kernels::registry`]:
//! `KVASIR_VAD_BACKEND` (and the like for other operations), then `KVASIR_BACKEND`, must be honored.
//! Otherwise the backend with the highest rank that can serve is used.

use super::flushed::Flushed;
use super::session::Hears;
use super::silero::Silero;
use super::smart_turn::SmartTurn;
use super::{onnx, onnx::the_file, whisper};
use crate::Error;
use crate::encoder::Encoder;
use crate::load::{DeviceChoice, EngineOptions, Progress};
use kernels::backend::KvType;
use kernels::registry::{Operation as Served, Provider, Refusal, Registry};
use proto::ids::ModelId;
use proto::operation::Operation;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A directory with a folder for each of its operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    /// Name in the API.
    pub id: ModelId,
    pub dir: PathBuf,
}

impl Bundle {
    pub fn folder(&self, operation: Operation) -> PathBuf {
        self.dir.join(operation.name())
    }

    /// The operations that it has a folder for.
    pub fn operations(&self) -> Vec<Operation> {
        Operation::ALL.into_iter().filter(|operation| self.folder(*operation).is_dir()).collect()
    }
}

/// A text model, and how to run it.
#[derive(Clone)]
pub struct TextModel {
    /// The model's file. Its directory is the bundle.
    pub path: PathBuf,
    pub options: EngineOptions,
}

impl TextModel {
    fn folder(&self, operation: Operation) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(operation.name())
    }
}

/// Loads an audio model.
pub type LoadHearing = dyn Fn(&Bundle) -> Result<Arc<dyn Hears>, Error> + Send + Sync;
/// Loads a text model.
pub type LoadEncoder = dyn Fn(&TextModel, &mut Progress<'_>) -> Result<Encoder, Error> + Send + Sync;

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident: $request:ty => $service:ty = $text:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name;

        impl Served for $name {
            type Request = $request;
            type Service = $service;
            const NAME: &'static str = $text;
        }
    )*};
}

operations! {
    /// [`Operation::Embed`].
    Embed: TextModel => LoadEncoder = "embed";
    /// [`Operation::Rerank`].
    Rerank: TextModel => LoadEncoder = "rerank";
    /// [`Operation::Vad`].
    Vad: Bundle => LoadHearing = "vad";
    /// [`Operation::TurnDetection`].
    TurnDetection: Bundle => LoadHearing = "turn_detection";
    /// [`Operation::Asr`].
    Asr: Bundle => LoadHearing = "asr";
    /// [`Operation::Tts`].
    Tts: Bundle => LoadHearing = "tts";
}

/// A way to serve one operation.
struct Backend<O: Served> {
    name: &'static str,
    rank: i32,
    can_serve: fn(&O::Request) -> Result<(), Refusal>,
    service: Box<O::Service>,
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

/// Name of the backend that uses this engine's own kernels.
pub const KERNELS: &str = "kernels";
const KERNELS_RANK: i32 = 20;

/// Prefixes of ONNX file names.
const SILERO: &str = "silero_vad";
const SMART_TURN: &str = "smart-turn-v3";

fn no_fault(refusal: Refusal) -> Error {
    let reason = refusal.to_string();
    Error::Config { option: "operation", reason }
}

/// Loads the only file with this prefix in an operation's folder.
fn hearing<H: Hears + 'static>(
    operation: Operation,
    begins: &'static str,
    load: fn(&Path) -> Result<H, Error>,
) -> Box<LoadHearing> {
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
        service: hearing(Operation::Vad, SILERO, Silero::load),
    }));
    registry
}

fn turn_detection() -> Registry<TurnDetection> {
    let mut registry = Registry::empty();
    registry.register(Box::new(Backend {
        name: onnx::NAME,
        rank: onnx::RANK,
        can_serve: |bundle: &Bundle| the_file(&bundle.folder(Operation::TurnDetection), SMART_TURN).map(drop),
        service: hearing(Operation::TurnDetection, SMART_TURN, SmartTurn::load),
    }));
    registry
}

fn asr() -> Registry<Asr> {
    let mut registry = Registry::empty();
    let load: Box<LoadHearing> =
        Box::new(|bundle| Ok(Arc::new(whisper::Shared::load(&bundle.folder(Operation::Asr))?)));
    registry.register(Box::new(Backend {
        name: KERNELS,
        rank: KERNELS_RANK,
        can_serve: |bundle: &Bundle| whisper::is_in(&bundle.folder(Operation::Asr)),
        service: load,
    }));
    registry
}

/// Registry of a text operation: this engine's kernels, and the bundle's ONNX file.
fn of_texts<O>(operation: Operation, can_serve: fn(&TextModel) -> Result<(), Refusal>) -> Registry<O>
where
    O: Served<Request = TextModel, Service = LoadEncoder> + 'static,
{
    let kernels: Box<LoadEncoder> =
        Box::new(|model, progress| crate::load::kernel_encoder(&model.path, &model.options, progress));
    let onnx: Box<LoadEncoder> = Box::new(move |model, _| {
        let file = the_file(&model.folder(operation), "").map_err(no_fault)?;
        crate::load::onnx_encoder(&model.path, &file, operation, &model.options)
    });
    let builtin = Backend { name: KERNELS, rank: KERNELS_RANK, can_serve: |_| Ok(()), service: kernels };
    let mut registry = Registry::new(Box::new(builtin));
    registry.register(Box::new(Backend { name: onnx::NAME, rank: onnx::RANK, can_serve, service: onnx }));
    registry
}

/// Checks that the bundle has the file, and that no option is set that the runtime would ignore.
fn onnx_serves(model: &TextModel, operation: Operation) -> Result<(), Refusal> {
    the_file(&model.folder(operation), "")?;
    let options = &model.options;
    let unheeded = [
        ("device", !matches!(options.device, DeviceChoice::Auto | DeviceChoice::Cpu)),
        ("kv-type", options.kv_type != KvType::F32),
        ("kv-bytes", options.kv_bytes.is_some()),
    ];
    match unheeded.into_iter().find(|(_, set)| *set) {
        Some((argument, _)) => Err(Refusal::Argument { argument }),
        None => Ok(()),
    }
}

fn embed() -> Registry<Embed> {
    of_texts(Operation::Embed, |model| onnx_serves(model, Operation::Embed))
}

fn rerank() -> Registry<Rerank> {
    of_texts(Operation::Rerank, |model| onnx_serves(model, Operation::Rerank))
}

/// Loads the backend that `environment` and the bundle select for an audio operation. Returns its name, too.
///
/// # Errors
/// [`Error::Backend`] if no backend can serve, or the selected one cannot; errors of the model.
pub fn load_hearing(
    operation: Operation,
    bundle: &Bundle,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<(String, Arc<dyn Hears>), Error> {
    fn load<O: Served<Request = Bundle, Service = LoadHearing>>(
        registry: &Registry<O>,
        bundle: &Bundle,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<(String, Arc<dyn Hears>), Error> {
        let provider = registry.select(bundle, environment)?;
        let model = Flushed::load(|| provider.service()(bundle))?;
        Ok((provider.name().to_owned(), Arc::new(model)))
    }
    match operation {
        Operation::Vad => load(&vad(), bundle, environment),
        Operation::TurnDetection => load(&turn_detection(), bundle, environment),
        Operation::Asr => load(&asr(), bundle, environment),
        Operation::Tts => load(&Registry::<Tts>::empty(), bundle, environment),
        Operation::Embed | Operation::Rerank => {
            let reason = format!("{operation} is for texts: it is served with the model of a worker");
            Err(Error::Config { option: "operation", reason })
        }
    }
}

/// Maps names of kernel backends to this engine's backend, because the general variable also selects among
/// kernels.
fn kernels_too(environment: impl Fn(&str) -> Option<String>) -> impl Fn(&str) -> Option<String> {
    move |name| {
        let value = environment(name)?;
        let kernel = name == "KVASIR_BACKEND" && value.starts_with("cpu-");
        Some(if kernel { KERNELS.to_owned() } else { value })
    }
}

/// Loads the backend that `environment` and the bundle select for a text model. `operation` is the model's
/// task.
///
/// # Errors
/// [`Error::Backend`] if the selected backend cannot serve; errors of the model.
pub fn load_encoder(
    operation: Operation,
    model: &TextModel,
    environment: impl Fn(&str) -> Option<String>,
    progress: &mut Progress<'_>,
) -> Result<Encoder, Error> {
    let environment = kernels_too(environment);
    match operation {
        Operation::Embed => embed().select(model, environment)?.service()(model, progress),
        Operation::Rerank => rerank().select(model, environment)?.service()(model, progress),
        other => {
            let reason = format!("{other} is not for texts");
            Err(Error::Config { option: "operation", reason })
        }
    }
}

#[cfg(test)]
mod tests;
