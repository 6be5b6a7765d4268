//! Operations between the projections and attention: head norms, rotation, and writes of keys and values to
//! the cache.

use super::kv::KvBlock;
use super::source::{CacheSource, QKV_KERNELS, Source};
use super::step::StepPointers;
use super::{Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch};
use kernels::Error;
use kernels::attention::check_len;
use kernels::backend::{KvShape, RopeSource};

#[cfg(test)]
mod tests;

const WARPS: usize = 4;

/// Kernels for layers of one shape.
#[derive(Debug, Clone)]
pub struct QkvKernels {
    shape: KvShape,
    block: KvBlock,
    rope_angles: KernelId,
    run_factors: KernelId,
    qkv: KernelId,
}

/// A rotary embedding in its kernel's format.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceRope {
    /// Rotation per position of each pair, in 2^-64 of a full turn.
    turns: Vec<u64>,
    interleaved: bool,
    magnitude: f32,
}

/// Cosines and sines of a step's rows.
#[derive(Debug, Clone, Copy)]
pub struct RopeAngles {
    /// `[rows][pairs][2]`, as written by [`QkvKernels::angles`].
    pub angles: DevicePtr,
    /// Rotating pairs of a head.
    pub pairs: usize,
    /// Pairs are (2i, 2i + 1) if true, otherwise (i, i + pairs).
    pub interleaved: bool,
}

/// RMS norm of each run of a row.
#[derive(Debug, Clone, Copy)]
pub struct HeadNorm {
    /// Address and number of values, either those of a run or those of the row. `None` multiplies by one.
    pub weight: Option<(DevicePtr, usize)>,
    /// Added to the mean square.
    pub eps: f32,
    pub width: usize,
}

/// Keys and values to write to the cache. These buffers are not changed.
#[derive(Debug, Clone, Copy)]
pub struct KeysValues {
    /// `[rows][kv_heads * head_dim]`
    pub k: DevicePtr,
    /// `[rows][kv_heads * v_head_dim]`; may be `k`. Not read if the cache is latent.
    pub v: DevicePtr,
    pub k_norm: Option<HeadNorm>,
    pub v_norm: Option<HeadNorm>,
}

/// q, k and v of one layer.
#[derive(Debug, Clone, Copy)]
pub struct QkvCall<'a> {
    /// `[rows][heads * head_dim]`, changed in place.
    pub q: DevicePtr,
    pub q_norm: Option<HeadNorm>,
    /// `None` if the layer uses another layer's keys and values.
    pub kv: Option<KeysValues>,
    /// `None` for no rotation.
    pub rope: Option<RopeAngles>,
    /// Factors of q, and the number of positions of each.
    pub growth: Option<(DevicePtr, usize)>,
    pub arena: DevicePtr,
    pub step: &'a StepPointers,
    /// Rows of the step.
    pub rows: usize,
    pub group: usize,
    /// Byte offset of the layer inside a block.
    pub layer_offset: usize,
    /// [`QkvKernels::scratch_bytes`] bytes.
    pub scratch: DevicePtr,
}

impl DeviceRope {
    /// # Errors
    /// [`Error::Length`] for an odd number of rotating elements, or if the number of factors is not half of
    /// it.
    pub fn new(source: &RopeSource) -> Result<Self, Error> {
        let pairs = source.n_rot / 2;
        check_len("rotating elements of a head", pairs * 2, source.n_rot)?;
        if let Some(factors) = &source.factors {
            check_len("rope factors", pairs, factors.len())?;
        }
        let turn = |i: usize| {
            let exponent = -2.0 * i as f64 / source.n_rot as f64;
            let factor = source.factors.as_ref().map_or(1.0, |factors| f64::from(factors[i]));
            let radians = f64::from(source.base).powf(exponent) / factor * f64::from(source.freq_scale);
            // Whole turns make no difference at integer positions.
            let turns = (radians / std::f64::consts::TAU).rem_euclid(1.0);
            (turns * 2f64.powi(64)) as u64
        };
        let turns = (0..pairs).map(turn).collect();
        Ok(Self { turns, interleaved: source.interleaved, magnitude: source.magnitude })
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.turns.iter().flat_map(|turn| turn.to_ne_bytes()).collect()
    }

    /// Returns the bytes of the angles of `rows` rows.
    pub fn angle_bytes(&self, rows: usize) -> usize {
        rows * self.turns.len() * 2 * size_of::<f32>()
    }
}

impl QkvKernels {
    /// Returns the source for a shape.
    ///
    /// # Errors
    /// As [`KvBlock::new`].
    pub fn source(shape: &KvShape) -> Result<&'static Source, Error> {
        let types = KvBlock::new(shape)?.type_numbers();
        Ok(CacheSource::Qkv { types, latent: shape.latent }.get())
    }

    /// Loads the compiled [`Self::source`].
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for another compiled source, [`CudaError::Invalid`] for an unsupported
    /// shape; errors of the device.
    pub fn load(device: &mut dyn Device, compiled: &Compiled, shape: KvShape) -> Result<Self, CudaError> {
        let block = KvBlock::new(&shape).map_err(|error| CudaError::Invalid { what: error.to_string() })?;
        let kernels = device.load(compiled, QKV_KERNELS)?;
        let [rope_angles, run_factors, qkv] = kernels[..] else {
            return Err(CudaError::NoKernel {
                name: "qkv".into(),
                source_name: compiled.source_name.clone(),
            });
        };
        Ok(Self { shape, block, rope_angles, run_factors, qkv })
    }

    /// Checks a call. Returns the bytes of device memory that [`Self::launch`] needs besides its buffers.
    /// They are for norms whose runs are not heads.
    ///
    /// # Errors
    /// [`Error::Length`] for a norm that does not divide a row, a weight whose length is neither the run's
    /// nor the row's, or a head that is narrower than the rotating elements.
    pub fn scratch_bytes(&self, call: &QkvCall<'_>) -> Result<usize, Error> {
        let (head_dim, rotates) = (self.shape.head_dim, call.rope.map_or(0, |rope| 2 * rope.pairs));
        if rotates > head_dim {
            return Err(Error::Length { what: "head width", expected: rotates, found: head_dim });
        }
        let mut runs = 0;
        for (norm, width, heads) in self.norms(call) {
            let Some(norm) = norm else { continue };
            let row = width * heads;
            if norm.width == 0 || !row.is_multiple_of(norm.width) {
                return Err(Error::Length { what: "norm input", expected: norm.width, found: row });
            }
            if let Some((_, len)) = norm.weight
                && len != norm.width
                && len != row
            {
                return Err(Error::Length { what: "norm weight", expected: norm.width, found: len });
            }
            runs += if norm.width == width { 0 } else { call.rows * (row / norm.width) };
        }
        Ok(runs * size_of::<f32>())
    }

    /// Computes cosines and sines of the step's rows, once per step for each rotary embedding. `turns` are
    /// [`DeviceRope::bytes`]; `angles` has room for [`DeviceRope::angle_bytes`].
    ///
    /// # Errors
    /// Errors of the device.
    pub fn angles(
        &self,
        device: &mut dyn Device,
        rope: &DeviceRope,
        turns: DevicePtr,
        step: &StepPointers,
        rows: usize,
        angles: DevicePtr,
    ) -> Result<RopeAngles, CudaError> {
        let pairs = rope.turns.len();
        let threads = rows * pairs;
        if threads > 0 {
            let (pairs, rows) = ((pairs as u32).into(), (rows as u32).into());
            let arguments =
                [angles.into(), turns.into(), step.positions.into(), rope.magnitude.into(), pairs, rows];
            device.launch(&Launch {
                kernel: self.rope_angles,
                grid: [threads.div_ceil(128) as u32, 1, 1],
                block: [128, 1, 1],
                shared_bytes: 0,
                arguments: &arguments,
            })?;
        }
        Ok(RopeAngles { angles, pairs, interleaved: rope.interleaved })
    }

    /// Normalises, rotates and writes the step's rows. [`Self::scratch_bytes`] has checked the call.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn launch(&self, device: &mut dyn Device, call: &QkvCall<'_>) -> Result<(), CudaError> {
        if call.rows == 0 {
            return Ok(());
        }
        let number = |n: usize| Argument::from(n as u32);
        let none = DevicePtr::default();
        let (k, v) = call.kv.map_or((none, none), |kv| (kv.k, kv.v));
        let mut pointers = vec![call.q, k, v];
        let mut numbers: Vec<Argument> = Vec::new();
        let mut factors = call.scratch;
        for ((norm, width, heads), x) in self.norms(call).into_iter().zip([call.q, k, v]) {
            let Some(norm) = norm else {
                pointers.extend([none, none]);
                numbers.extend([number(0), number(1), 0.0f32.into()]);
                continue;
            };
            let runs = call.rows * heads * width / norm.width;
            let mut own = none;
            if norm.width != width {
                own = factors;
                factors = factors.offset(runs * size_of::<f32>());
                device.launch(&Launch {
                    kernel: self.run_factors,
                    grid: [runs.div_ceil(WARPS) as u32, 1, 1],
                    block: [128, 1, 1],
                    shared_bytes: 0,
                    arguments: &[own.into(), x.into(), number(norm.width), norm.eps.into(), number(runs)],
                })?;
            }
            let (weight, len) = norm.weight.unwrap_or((none, 1));
            pointers.extend([weight, own]);
            numbers.extend([number(norm.width), number(len), norm.eps.into()]);
        }
        let rope = call.rope.unwrap_or(RopeAngles { angles: none, pairs: 0, interleaved: false });
        let KvShape { heads, kv_heads, head_dim, v_head_dim, latent, .. } = self.shape;
        pointers.extend([rope.angles, call.arena, call.step.tables, call.step.table_starts(call.group)]);
        pointers.extend([call.step.positions, call.step.row_sequences]);
        let mut arguments: Vec<Argument> = pointers.into_iter().map(Argument::from).collect();
        arguments.push((call.layer_offset as u64).into());
        arguments.extend(numbers);
        arguments.extend([number(rope.pairs), u32::from(rope.interleaved).into()]);
        arguments.extend([heads, kv_heads, head_dim, v_head_dim].map(number));
        arguments.push(self.block.block_shift().into());
        arguments.extend([self.block.k_stripe(), self.block.v_stripe()].map(number));
        arguments.extend([true, false].map(|keys| number(self.block.rotation(keys))));
        let (growth, every) = call.growth.unwrap_or((none, 1));
        arguments.extend([growth.into(), number(every)]);
        let of_each = if latent { 1 } else { 2 };
        let all = if call.kv.is_some() { heads + of_each * kv_heads } else { heads };
        device.launch(&Launch {
            kernel: self.qkv,
            grid: [call.rows as u32, all.div_ceil(WARPS) as u32, 1],
            block: [128, 1, 1],
            shared_bytes: 0,
            arguments: &arguments,
        })
    }

    /// Returns norm, head width and number of heads of q, k and v.
    fn norms(&self, call: &QkvCall<'_>) -> [(Option<HeadNorm>, usize, usize); 3] {
        let KvShape { heads, kv_heads, head_dim, v_head_dim, .. } = self.shape;
        let (k, v) = call.kv.map_or((None, None), |kv| (kv.k_norm, kv.v_norm));
        [(call.q_norm, head_dim, heads), (k, head_dim, kv_heads), (v, v_head_dim, kv_heads)]
    }
}
