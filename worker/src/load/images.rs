//! Images of prompts: the vision tower of a model's file as the engine's [`ImageEncoder`].

use super::hosted::HostedSource;
use super::{Arriving, DeviceChoice, EngineOptions, environment, pool_config};
use crate::Error;
use engine::decoder::Decoder;
use engine::engine::ImageEncoder;
use engine::images::{EncodedImage, PlacedImage};
use engine::vision::{Pixels, VisionTower};
use engine::weights::TensorSource;
use kernels::backend::{ActivationMode, MemoryUse};
use kernels::cpu::{CpuBackend, CpuConfig};
use kernels::pool::{Pool, PoolConfig};
use model::ModelFile;
use model::spec::VisionSpec;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use vision::ImageProcessor;

/// The part of a model that sees images.
pub struct ModelVision {
    processor: ImageProcessor,
    tower: VisionTower,
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
        let config = CpuConfig::select(ActivationMode::F32, environment)?;
        let pool = Pool::new(PoolConfig { spin: Duration::ZERO, cpus: None, ..pool_config(options) })?;
        let rows = self.step_rows();
        let backend = Box::new(CpuBackend::new(config, Arc::new(pool))?);
        let tower = VisionTower::load(self.spec, source, backend, rows)?;
        Ok(ModelVision { processor: self.processor, tower })
    }
}

/// Loads the part of a model that sees images, if there is one and the device of `decoder` computes rows of images. A
/// tower that is not supported is logged: the model then serves text alone.
pub(super) fn of_model(
    file: &ModelFile,
    decoder: &Decoder,
    options: &EngineOptions,
) -> Result<Option<ModelVision>, Error> {
    let description = match Description::read(file) {
        Ok(Some(description)) => description,
        Ok(None) => return Ok(None),
        Err(error) => {
            tracing::warn!(%error, "prompts with images are refused: the model's vision tower is not supported");
            return Ok(None);
        }
    };
    match decoder.image_rules() {
        Some(_) => load(file, description, options).map(Some),
        None => {
            tracing::warn!("prompts with images are refused: only a CPU with all layers computes them");
            Ok(None)
        }
    }
}

/// Bytes of buffers and cache of the tower that [`of_model`] will load. `None`: it will load none, as far as that is
/// known without weights.
pub(super) fn needed_bytes(file: &ModelFile, options: &EngineOptions) -> Option<u64> {
    let description = Description::read(file).ok().flatten()?;
    let (device, _) = options.device.resolve(options.gpu).ok()?;
    let computes = matches!(device, DeviceChoice::Auto | DeviceChoice::Cpu);
    computes.then(|| description.scratch_bytes().saturating_add(options.image_cache_bytes))
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

    pub(super) fn memory(&self) -> MemoryUse {
        self.tower.memory()
    }

    /// Bytes of buffers and caches of a step.
    pub(super) fn buffer_bytes(&self) -> u64 {
        let MemoryUse { activations, kv, .. } = self.memory();
        (activations + kv) as u64
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
