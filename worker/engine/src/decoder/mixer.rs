//! A layer's mixer: attention, delta net, Mamba-2, short convolution.

use super::{Buffers, LayerCache, job, normed};
use crate::Error;
use crate::weights::{
    AttentionWeights, ConvWeights, DeltaNetWeights, KvWeights, LatentWeights, LayerWeights, Linear,
    Mamba2Weights, MixerWeights, ShortConvWeights,
};
use kernels::backend::{
    AttentionOp, Backend, BufferId, ConvOp, DeltaNetOp, GateActivation, GateOp, GatedNormOp, HeadMatmulOp,
    HeadPart, KvLayerId, KvWrite, Mamba2Op, MatrixId, QkvOp, StateLayerId,
};

/// `x = out(x + scale * post(mixer(pre(x))))`; of two parallel mixers the sum.
pub(super) fn run(
    backend: &mut dyn Backend,
    b: &Buffers,
    layer: &LayerWeights,
    scale: f32,
    cache: LayerCache,
) -> Result<(), Error> {
    let input = normed(backend, b, layer.mixer_norm.as_ref(), b.normed, &readers(layer))?;
    let norm = layer.mixer_post_norm.as_ref();
    let adds = norm.is_none() && scale == 1.0 && layer.parallel_mixer.is_none();
    for (place, mixer) in layer.mixers().enumerate() {
        let (mixed, out) = match (mixer, cache) {
            (MixerWeights::Attention(weights), LayerCache { kv: Some(kv), .. }) => {
                attention(backend, b, weights, input, kv)?
            }
            (MixerWeights::DeltaNet(weights), LayerCache { state: Some(state), .. }) => {
                delta_net(backend, b, weights, input, state)?
            }
            (MixerWeights::Mamba2(weights), LayerCache { state: Some(state), .. }) => {
                mamba2(backend, b, weights, input, state)?
            }
            (MixerWeights::ShortConv(weights), LayerCache { state: Some(state), .. }) => {
                short_conv(backend, b, weights, input, state)?
            }
            (_, LayerCache { .. }) => {
                return Err(Error::Invariant("a mixer has no cache of its kind".to_owned()));
            }
        };
        let to = if adds { b.x } else { b.branch };
        backend.matmul(mixed, &[job(out, to, adds || place > 0)])?;
    }
    if !adds {
        backend.add(b.x, b.branch, norm, scale)?;
    }
    match &layer.mixer_out_norm {
        Some(norm) => Ok(backend.norm(b.x, norm, b.x)?),
        None => Ok(()),
    }
}

/// Returns the matrices that are multiplied with the normalised input of a layer, if nothing else reads it.
fn readers(layer: &LayerWeights) -> Vec<MatrixId> {
    let MixerWeights::Attention(weights) = &layer.mixer else { return Vec::new() };
    let AttentionWeights { q, kv, gate, .. } = &**weights;
    let own: Vec<&Linear> = match kv {
        KvWeights::Own(kv) => [&kv.k].into_iter().chain(&kv.v).collect(),
        KvWeights::Shared => Vec::new(),
        KvWeights::Latent(_) => return Vec::new(),
    };
    if layer.parallel || layer.parallel_mixer.is_some() {
        return Vec::new();
    }
    [q].into_iter().chain(gate).chain(own).map(|linear| linear.matrix).collect()
}

/// The mixer's output, and the projection that follows it.
type Mixed<'a> = (BufferId, &'a Linear);

/// Like [`run`] for a layer with attention, but only writes its keys and values.
pub(super) fn write_kv(
    backend: &mut dyn Backend,
    b: &Buffers,
    layer: &LayerWeights,
    cache: LayerCache,
) -> Result<(), Error> {
    let (MixerWeights::Attention(weights), Some(kv)) = (&layer.mixer, cache.kv) else {
        return Err(Error::Invariant("keys and values of a layer without attention".to_owned()));
    };
    let input = normed(backend, b, layer.mixer_norm.as_ref(), b.normed, &[])?;
    qkv(backend, b, weights, input, kv, None)
}

/// Computes queries, writes keys and values into the cache, and computes the projection `gate` if there is
/// one.
fn qkv(
    backend: &mut dyn Backend,
    b: &Buffers,
    weights: &AttentionWeights,
    input: BufferId,
    layer: KvLayerId,
    gate: Option<&Linear>,
) -> Result<(), Error> {
    if let KvWeights::Latent(latent) = &weights.kv {
        return latent_qkv(backend, b, weights, latent, input, layer);
    }
    let mut jobs = vec![job(&weights.q, b.q, false)];
    let mut write = None;
    if let KvWeights::Own(kv) = &weights.kv {
        jobs.push(job(&kv.k, b.k, false));
        jobs.extend(kv.v.as_ref().map(|v| job(v, b.v, false)));
        let v = if kv.v.is_some() { b.v } else { b.k };
        write = Some(KvWrite { k: b.k, v, k_norm: kv.k_norm, v_norm: kv.v_norm });
    }
    jobs.extend(gate.map(|gate| job(gate, b.mixer_gate, false)));
    backend.matmul(input, &jobs)?;
    let AttentionWeights { q_norm, q_growth, rope, .. } = *weights;
    Ok(backend.qkv(&QkvOp { q: b.q, q_norm, kv: write, rope, q_growth, layer })?)
}

/// Like [`qkv`] for latent attention.
fn latent_qkv(
    backend: &mut dyn Backend,
    b: &Buffers,
    weights: &AttentionWeights,
    latent: &LatentWeights,
    input: BufferId,
    layer: KvLayerId,
) -> Result<(), Error> {
    let LatentWeights { heads, rotating, width, .. } = *latent;
    let q_jobs = [job(&weights.q, b.q_plain, false), job(&latent.q_rope, b.q_rope, false)];
    let kv_jobs = [job(&latent.latent, b.v, false), job(&latent.k_rope, b.k_rope, false)];
    match &latent.q_down {
        None => backend.matmul(input, &[&q_jobs[..], &kv_jobs].concat())?,
        Some((down, norm)) => {
            backend.matmul(input, &[&[job(down, b.q_down, false)], &kv_jobs[..]].concat())?;
            backend.norm(b.q_down, norm, b.q_down)?;
            backend.matmul(b.q_down, &q_jobs)?;
        }
    }
    backend.norm(b.v, &latent.latent_norm, b.v)?;
    let part = |buffer, at| HeadPart { buffer, width, at };
    backend.place_heads(b.k_rope, 1, &part(b.k, 0))?;
    backend.place_heads(b.v, 1, &part(b.k, rotating))?;
    backend.place_heads(b.q_rope, heads, &part(b.q, 0))?;
    backend.head_matmul(&head_op(&latent.k_up, heads, b.q_plain, part(b.q, rotating)))?;
    let write = KvWrite { k: b.k, v: b.k, k_norm: None, v_norm: None };
    let AttentionWeights { rope, q_growth, .. } = *weights;
    Ok(backend.qkv(&QkvOp { q: b.q, q_norm: None, kv: Some(write), rope, q_growth, layer })?)
}

fn head_op(linear: &Linear, heads: usize, x: BufferId, out: HeadPart) -> HeadMatmulOp {
    HeadMatmulOp { x, matrix: linear.matrix, heads, scale: linear.scale, out }
}

fn attention<'a>(
    backend: &mut dyn Backend,
    b: &Buffers,
    weights: &'a AttentionWeights,
    input: BufferId,
    layer: KvLayerId,
) -> Result<Mixed<'a>, Error> {
    qkv(backend, b, weights, input, layer, weights.gate.as_ref())?;
    let latent = match &weights.kv {
        KvWeights::Latent(latent) => Some(latent),
        KvWeights::Own(_) | KvWeights::Shared => None,
    };
    backend.attention(&AttentionOp {
        q: b.q,
        out: if latent.is_some() { b.mixed_latent } else { b.mixed },
        scale: weights.scale,
        softcap: weights.softcap,
        sinks: weights.sinks,
        layer,
    })?;
    if let Some(latent) = latent {
        let values = HeadPart { buffer: b.mixed, width: latent.value, at: 0 };
        backend.head_matmul(&head_op(&latent.v_up, latent.heads, b.mixed_latent, values))?;
    }
    let mut mixed = b.mixed;
    if weights.gate.is_some() {
        let activation = GateActivation::Sigmoid;
        backend.gate(&GateOp { gate: b.mixer_gate, up: Some(b.mixed), up_from: 0, activation })?;
        mixed = b.mixer_gate;
    }
    Ok((mixed, &weights.o))
}

fn delta_net<'a>(
    backend: &mut dyn Backend,
    b: &Buffers,
    weights: &'a DeltaNetWeights,
    input: BufferId,
    layer: StateLayerId,
) -> Result<Mixed<'a>, Error> {
    let jobs = [
        job(&weights.qkv, b.conv, false),
        job(&weights.gate, b.mixer_gate, false),
        job(&weights.beta, b.beta, false),
        job(&weights.alpha, b.dt, false),
    ];
    backend.matmul(input, &jobs)?;
    backend.conv(&conv_op(&weights.conv, b.conv, true, layer))?;
    backend.delta_net(&DeltaNetOp {
        qkv: b.conv,
        beta: b.beta,
        alpha: b.dt,
        a: weights.a,
        dt_bias: weights.dt_bias,
        k_heads: weights.k_heads,
        tiled: weights.tiled,
        l2_eps: weights.l2_eps,
        out: b.mixed,
        layer,
    })?;
    backend.gated_norm(&GatedNormOp {
        x: b.mixed,
        gate: b.mixer_gate,
        norm: weights.norm,
        gate_first: false,
    })?;
    Ok((b.mixed, &weights.out))
}

fn mamba2<'a>(
    backend: &mut dyn Backend,
    b: &Buffers,
    weights: &'a Mamba2Weights,
    input: BufferId,
    layer: StateLayerId,
) -> Result<Mixed<'a>, Error> {
    let jobs = [
        job(&weights.xbc, b.conv, false),
        job(&weights.z, b.mixer_gate, false),
        job(&weights.dt, b.dt, false),
    ];
    backend.matmul(input, &jobs)?;
    backend.conv(&conv_op(&weights.conv, b.conv, true, layer))?;
    backend.mamba2(&Mamba2Op {
        xbc: b.conv,
        dt: b.dt,
        a: weights.a,
        d: weights.d,
        dt_bias: weights.dt_bias,
        groups: weights.groups,
        out: b.mixed,
        layer,
    })?;
    let Some(norm) = weights.norm else {
        let activation = GateActivation::Silu;
        backend.gate(&GateOp { gate: b.mixer_gate, up: Some(b.mixed), up_from: 0, activation })?;
        return Ok((b.mixer_gate, &weights.out));
    };
    let gate_first = !weights.norm_first;
    backend.gated_norm(&GatedNormOp { x: b.mixed, gate: b.mixer_gate, norm, gate_first })?;
    Ok((b.mixed, &weights.out))
}

fn short_conv<'a>(
    backend: &mut dyn Backend,
    b: &Buffers,
    weights: &'a ShortConvWeights,
    input: BufferId,
    layer: StateLayerId,
) -> Result<Mixed<'a>, Error> {
    let jobs = [
        job(&weights.x, b.conv, false),
        job(&weights.b, b.mixer_gate, false),
        job(&weights.c, b.mixed, false),
    ];
    backend.matmul(input, &jobs)?;
    let product = |gate, up| GateOp { gate, up: Some(up), up_from: 0, activation: GateActivation::Identity };
    backend.gate(&product(b.conv, b.mixer_gate))?;
    backend.conv(&conv_op(&weights.conv, b.conv, false, layer))?;
    backend.gate(&product(b.mixed, b.conv))?;
    Ok((b.mixed, &weights.out))
}

fn conv_op(weights: &ConvWeights, x: BufferId, silu: bool, layer: StateLayerId) -> ConvOp {
    ConvOp { x, weight: weights.weight, bias: weights.bias, silu, layer }
}
