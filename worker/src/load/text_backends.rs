//! Selects the backend of an encoder: this engine's kernels, or the ONNX file of its bundle. As for audio
//! ([`speech::backends`]), the selection follows [`kernels::registry`].

use super::encoder::{kernel_encoder, onnx_encoder};
use super::{DeviceChoice, EngineOptions, Progress};
use crate::Error;
use engine::encoder::Encoder;
use kernels::backend::KvType;
use kernels::registry::{Operation as Served, Refusal, Registry};
use proto::operation::Operation;
use speech::backends::{Backend, KERNELS, KERNELS_RANK};
use speech::onnx::{self, the_file};
use std::path::{Path, PathBuf};

/// A text model, and how to run it.
pub(super) struct TextModel {
    /// The model's file. Its directory is the bundle.
    pub(super) path: PathBuf,
    pub(super) options: EngineOptions,
}

impl TextModel {
    fn folder(&self, operation: Operation) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(operation.name())
    }
}

/// Loads a text model.
type LoadEncoder = dyn Fn(&TextModel, &mut Progress<'_>) -> Result<Encoder, Error> + Send + Sync;

/// [`Operation::Embed`].
enum Embed {}

impl Served for Embed {
    type Request = TextModel;
    type Service = LoadEncoder;
    const NAME: &'static str = "embed";
}

/// [`Operation::Rerank`].
enum Rerank {}

impl Served for Rerank {
    type Request = TextModel;
    type Service = LoadEncoder;
    const NAME: &'static str = "rerank";
}

/// Registry of a text operation: this engine's kernels, and the bundle's ONNX file.
fn of_texts<O>(operation: Operation, can_serve: fn(&TextModel) -> Result<(), Refusal>) -> Registry<O>
where
    O: Served<Request = TextModel, Service = LoadEncoder> + 'static,
{
    let kernels: Box<LoadEncoder> =
        Box::new(|model, progress| kernel_encoder(&model.path, &model.options, progress));
    let fault = |refusal: Refusal| engine::Error::Config { option: "operation", reason: refusal.to_string() };
    let onnx: Box<LoadEncoder> = Box::new(move |model, _| {
        let file = the_file(&model.folder(operation), "").map_err(fault)?;
        onnx_encoder(&model.path, &file, operation, &model.options)
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
        ("kv-type", options.kv_type != KvType::F32.into()),
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
pub(super) fn load_encoder(
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
            Err(engine::Error::Config { option: "operation", reason }.into())
        }
    }
}

#[cfg(test)]
mod tests;
