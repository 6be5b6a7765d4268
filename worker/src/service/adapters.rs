//! The adapters of the node's model: loaded at the start, or by orders of coordinators.

use super::Node;
use super::runner::Runner;
use crate::load::{read_adapter, served_digest};
use engine::engine::EngineAdapter;
use engine::engine::thread::EngineHandle;
use proto::adapter::{AdapterOrder, AdapterRefusal, MAX_ADAPTER_PATH, MAX_ADAPTERS, OfferedAdapter};
use proto::ids::ModelId;
use proto::served_model::ServedModel;
use std::path::PathBuf;
use std::sync::Arc;

/// An adapter of the node's model.
#[derive(Debug, Clone)]
pub(super) struct NodeAdapter {
    /// As coordinators are told of it.
    pub(super) offered: OfferedAdapter,
    /// Digest of the adapter alone.
    pub(super) digest: [u8; 32],
}

impl NodeAdapter {
    /// `ordered`: a coordinator had it loaded.
    pub(super) fn new(model: &ServedModel, adapter: &EngineAdapter, ordered: bool) -> Self {
        let offered = OfferedAdapter {
            name: adapter.name.clone(),
            parent: model.id.clone(),
            digest: served_digest(&model.model_digest, &adapter.digest),
            rank: u32::try_from(adapter.rank).unwrap_or(u32::MAX),
            path: adapter.path.display().to_string(),
            ordered,
        };
        Self { offered, digest: adapter.digest }
    }
}

fn refused(reason: impl ToString) -> AdapterRefusal {
    AdapterRefusal::Refused { reason: reason.to_string() }
}

fn built_in(engine: &Runner) -> Result<&EngineHandle, AdapterRefusal> {
    engine.built_in().ok_or_else(|| refused("the engine of this worker takes no adapters"))
}

/// Loads an adapter and reports it.
pub(super) async fn load(
    node: &Arc<Node>,
    engine: &Runner,
    order: AdapterOrder,
) -> Result<(), AdapterRefusal> {
    let AdapterOrder { name, parent, path } = order;
    let _turn = node.adapter_change.lock().await;
    let offer = node.offer().ok_or_else(|| refused("the model is not loaded"))?;
    let model = offer.model.clone().filter(|model| model.id == parent);
    let model = model.ok_or_else(|| refused(format!("this worker does not serve {parent}")))?;
    let engine = built_in(engine)?;
    let base = offer.path.clone().ok_or_else(|| refused("the model takes no adapters"))?;
    if name == model.id {
        return Err(refused(format!("{name} is the name of the model")));
    }
    let others = node.adapters.borrow().iter().filter(|adapter| adapter.offered.name != name).count();
    if others >= MAX_ADAPTERS {
        return Err(refused(format!("{others} adapters are loaded, the limit is {MAX_ADAPTERS}")));
    }
    let folder = PathBuf::from(&path);
    if path.len() > MAX_ADAPTER_PATH || !folder.is_absolute() {
        return Err(refused(format!("the path must be absolute, with at most {MAX_ADAPTER_PATH} bytes")));
    }
    let (read_name, read_folder) = (name.clone(), folder.clone());
    let read = tokio::task::spawn_blocking(move || read_adapter(&base, &read_name, &read_folder));
    let adapter = read.await.map_err(refused)?.map_err(refused)?;
    let loaded_name = name.clone();
    let load = engine.call(move |engine| {
        engine.load_adapter(&loaded_name, &adapter, &folder)?;
        let loaded = engine.adapters().iter().find(|adapter| adapter.name == loaded_name);
        Ok::<_, engine::Error>(loaded.cloned())
    });
    let loaded = load.await.map_err(refused)?.map_err(refused)?;
    let loaded = loaded.ok_or_else(|| refused("the adapter was unloaded"))?;
    tracing::info!(adapter = %name, rank = loaded.rank, bytes = loaded.bytes, path, "an adapter was loaded");
    node.adapters.send_modify(|adapters| {
        if !adapters.iter().any(|adapter| adapter.offered.name == name) {
            Arc::make_mut(adapters).push(NodeAdapter::new(&model, &loaded, true));
        }
    });
    Ok(())
}

/// Unloads an adapter and reports it. New requests for it are refused at once.
pub(super) async fn unload(node: &Arc<Node>, engine: &Runner, name: ModelId) -> Result<(), AdapterRefusal> {
    let _turn = node.adapter_change.lock().await;
    let engine = built_in(engine)?;
    node.adapters
        .send_modify(|adapters| Arc::make_mut(adapters).retain(|adapter| adapter.offered.name != name));
    let unloaded = name.clone();
    match engine.call(move |engine| engine.unload_adapter(&unloaded)).await.map_err(refused)? {
        true => {
            tracing::info!(adapter = %name, "an adapter was unloaded");
            Ok(())
        }
        false => Err(AdapterRefusal::Unknown(name)),
    }
}
