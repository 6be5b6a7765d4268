//! Images of prompts: the vision tower of a model's file as the engine's [`ImageEncoder`].

use super::hosted::HostedSource;
use super::{
    Arriving, DeviceChoice, EngineOptions, Memory, TowerPlace, digest, environment, host, pool_config,
};
use crate::Error;
use engine::decoder::Decoder;
use engine::images::{EncodedImage, ImageEncoder, PlacedImage};
use engine::kv_cache::memory::{MemoryFloor, MemoryRefused};
use engine::vision::{Pixels, VisionTower};
use engine::weights::TensorSource;
use kernels::backend::{ActivationMode, Backend, MemoryUse};
use kernels::cpu::{CpuBackend, CpuConfig};
use kernels::pool::{Pool, PoolConfig};
use model::ModelFile;
use model::spec::VisionSpec;
use model::vision::is_vision_tensor;
use proto::ids::ModelId;
use proto::message::image_encoder::OfferedTower;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use vision::ImageProcessor;

/// The part of a model that sees images.
pub struct ModelVision {
    processor: ImageProcessor,
    tower: VisionTower,
    class: String,
}

/// The parts of a model that see images, beside its decoder.
pub(super) struct Sight {
    /// `None`: the towers of other workers encode.
    vision: Option<ModelVision>,
    /// Class of the tower that is loaded, or would be. The embeddings of other workers must be of the same.
    pub(super) tower_class: String,
}

/// A vision tower without its model, for other workers.
pub struct LoadedTower {
    vision: ModelVision,
    model_digest: [u8; 32],
    cache_bytes: u64,
}

/// Description of images in a model's file.
struct Description {
    processor: ImageProcessor,
    spec: VisionSpec,
}

impl Description {
    /// `None` for a model without a vision tower.
    ///
    /// # Errors
    /// For a tower or a preprocessing that is not supported.
    fn read(file: &ModelFile) -> Result<Option<Self>, Error> {
        let Some(spec) = VisionSpec::from_file(file)? else { return Ok(None) };
        let processor = ImageProcessor::from_metadata(file.metadata())?;
        Ok(processor.map(|processor| Self { processor, spec }))
    }

    /// Patches of the largest picture that is encoded at once.
    fn step_rows(&self) -> usize {
        self.processor.largest_picture().div_ceil(self.spec.patches.side.pow(2))
    }

    /// Bytes of the tower's buffers, an upper estimate.
    fn scratch_bytes(&self) -> u64 {
        VisionTower::scratch_bytes(&self.spec, self.step_rows())
    }

    /// Loads the tower, with threads of its own: those of the steps would wait for each of its products.
    fn load(self, source: &dyn TensorSource, options: &EngineOptions) -> Result<ModelVision, Error> {
        let backend = backend(PoolConfig { spin: Duration::ZERO, cpus: None, ..pool_config(options) })?;
        let (rows, class) = (self.step_rows(), class(&backend));
        let tower = VisionTower::load(self.spec, source, Box::new(backend), rows)?;
        Ok(ModelVision { processor: self.processor, tower, class })
    }
}

fn backend(pool: PoolConfig) -> Result<CpuBackend, Error> {
    let config = CpuConfig::select(ActivationMode::F32, environment)?;
    Ok(CpuBackend::new(config, Arc::new(Pool::new(pool)?))?)
}

/// Towers of one model with equal classes give bit-equal values.
fn class(backend: &CpuBackend) -> String {
    let info = backend.info();
    format!("tower/{}/{}/{}", info.device, info.isa, info.weight_path)
}

/// Loads the part of a model that sees images, if there is one and the device of `decoder` computes rows of images. A
/// tower that is not supported is logged: the model then serves text alone.
pub(super) fn of_model(
    file: &ModelFile,
    decoder: &Decoder,
    options: &EngineOptions,
) -> Result<Option<Sight>, Error> {
    let description = match Description::read(file) {
        Ok(Some(description)) => description,
        Ok(None) => return Ok(None),
        Err(error) => {
            tracing::warn!(%error, "prompts with images are refused: the model's vision tower is not supported");
            return Ok(None);
        }
    };
    if decoder.image_rules().is_none() {
        tracing::warn!("prompts with images are refused: only a CPU with all layers computes them");
        return Ok(None);
    }
    Ok(Some(match options.vision_tower {
        TowerPlace::Here | TowerPlace::Alone => {
            let vision = load(file, description, options)?;
            Sight { tower_class: vision.class.clone(), vision: Some(vision) }
        }
        TowerPlace::Elsewhere => {
            let tower_class = class(&backend(PoolConfig::new(NonZeroUsize::MIN))?);
            Sight { tower_class, vision: None }
        }
    }))
}

/// Bytes of the tensors of the tower if it is not loaded with the model.
pub(super) fn left_out_bytes(file: &ModelFile, options: &EngineOptions) -> u64 {
    match options.vision_tower {
        TowerPlace::Here | TowerPlace::Alone => 0,
        TowerPlace::Elsewhere => tower_bytes(file),
    }
}

fn tower_bytes(file: &ModelFile) -> u64 {
    file.tensors().filter(|tensor| is_vision_tensor(tensor.name())).map(|tensor| tensor.bytes()).sum()
}

/// Bytes of buffers and cache of the tower that [`of_model`] will load. `None`: it will load none, as far as that is
/// known without weights.
pub(super) fn needed_bytes(file: &ModelFile, options: &EngineOptions) -> Option<u64> {
    let description = Description::read(file).ok().flatten()?;
    let (device, _) = options.device.resolve(options.gpu).ok()?;
    let computes = matches!(device, DeviceChoice::Auto | DeviceChoice::Cpu);
    let scratch = match options.vision_tower {
        TowerPlace::Here | TowerPlace::Alone => description.scratch_bytes(),
        TowerPlace::Elsewhere => 0,
    };
    computes.then(|| scratch.saturating_add(options.image_cache_bytes))
}

/// Loads the vision tower of the model in a file, and nothing else of it. It computes on CPUs, whatever the device is.
/// Reads the whole file if its digest is not in the options' cache.
///
/// # Errors
/// For a model without a tower, a tower or a preprocessing that is not supported, and memory that is not free; errors
/// of the file.
pub fn tower(path: &Path, options: &EngineOptions) -> Result<LoadedTower, Error> {
    let options = &EngineOptions { device: DeviceChoice::Cpu, ..options.clone() };
    let file = ModelFile::open(path)?;
    let description = Description::read(&file)?.ok_or(Error::WrongTask {
        does: "sees no images",
        instead: "a worker with the role encode needs one with a vision tower",
    })?;
    let floor = MemoryFloor { bytes: crate::defaults::floor(host(options)?).value };
    let bytes = tower_bytes(&file)
        .saturating_add(description.scratch_bytes())
        .saturating_add(options.image_cache_bytes);
    let refused = |refused: MemoryRefused| engine::Error::KvMemory { reason: refused.to_string() };
    floor.admit(&Memory::Host, "the vision tower", bytes).map_err(refused)?;
    let vision = load(&file, description, options)?;
    Ok(LoadedTower { vision, model_digest: digest(&file, options)?, cache_bytes: options.image_cache_bytes })
}

impl LoadedTower {
    /// As it is reported to coordinators.
    pub(crate) fn offered(&self, model: ModelId) -> OfferedTower {
        OfferedTower { model, model_digest: self.model_digest, numeric_class: self.vision.class.clone() }
    }

    pub(crate) fn model_digest(&self) -> [u8; 32] {
        self.model_digest
    }

    /// Values of a row.
    pub(crate) fn width(&self) -> usize {
        self.vision.tower.spec().out
    }

    /// The encoder, and bytes of its cache.
    pub(crate) fn into_encoder(self) -> (Box<dyn ImageEncoder>, u64) {
        (Box::new(self.vision), self.cache_bytes)
    }
}

impl Sight {
    pub(super) fn memory(&self) -> MemoryUse {
        self.vision.as_ref().map(|vision| vision.tower.memory()).unwrap_or_default()
    }

    /// Bytes of buffers and caches of a step.
    pub(super) fn buffer_bytes(&self) -> u64 {
        let MemoryUse { activations, kv, .. } = self.memory();
        (activations + kv) as u64
    }

    pub(super) fn encoder(self) -> Option<Box<dyn ImageEncoder>> {
        self.vision.map(|vision| Box::new(vision) as Box<dyn ImageEncoder>)
    }
}

/// Loads the vision tower in a model's file.
fn load(file: &ModelFile, description: Description, options: &EngineOptions) -> Result<ModelVision, Error> {
    let load = |source: &dyn TensorSource| match &options.hosted {
        Some(hosted) => description.load(&HostedSource::new(source, file, hosted), options),
        None => description.load(source, options),
    };
    match &options.arrivals {
        Some(arrivals) => load(&Arriving { file, arrivals }),
        None => load(file),
    }
}

impl ModelVision {
    /// The part of the model in a file that sees images, for use in one process. `None`: it has none.
    ///
    /// # Errors
    /// For a tower or a preprocessing that is not supported; errors of the file and the device.
    pub fn open(path: &Path, options: &EngineOptions) -> Result<Option<Self>, Error> {
        let file = ModelFile::open(path)?;
        let description = Description::read(&file)?;
        description.map(|description| load(&file, description, options)).transpose()
    }

    pub fn processor(&self) -> &ImageProcessor {
        &self.processor
    }

    pub fn tower(&mut self) -> &mut VisionTower {
        &mut self.tower
    }
}

impl ImageEncoder for ModelVision {
    fn encode(&mut self, file: &[u8], place: &PlacedImage) -> Result<EncodedImage, String> {
        let image = self.processor.process(file).map_err(|error| error.to_string())?;
        if image.digest != place.digest {
            return Err("the file has other pixels than those of its digest".to_owned());
        }
        let values = image.pixels();
        let pixels = Pixels { values: &values, shape: &image.shape, grid: image.grid };
        let encoded = self.tower.encode(&[pixels]).map_err(|error| error.to_string())?;
        encoded.into_iter().next().ok_or_else(|| "the image has no rows".to_owned())
    }
}
