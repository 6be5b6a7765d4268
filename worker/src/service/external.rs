//! A worker whose engine is a server of another project. Each run of the server is an epoch: when the server is
//! lost, coordinators retry its requests elsewhere and forget its cache.

use super::pool::later_epoch;
use super::{Loaded, Node, NodeContext, NodeRun};
use crate::external_engine::EngineSupervisor;
use proto::ids::{Epoch, ModelId};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

/// Pause after a server that was found unfit, until it is looked at again.
const UNFIT_PAUSE: Duration = Duration::from_secs(10);

/// Runs epochs, one after the other. `run` is the first, which has its server. `reasons` receives why it ended.
pub(super) async fn run_epochs(
    supervisor: &EngineSupervisor,
    model: &ModelId,
    context: &NodeContext,
    (mut run, mut reasons): (NodeRun, mpsc::UnboundedReceiver<String>),
    node_tx: &watch::Sender<Arc<Node>>,
) {
    // The sender is in the node, which this function keeps.
    while let Some(reason) = reasons.recv().await {
        let epoch: Epoch = run.node.epoch();
        tracing::warn!(epoch = epoch.0, reason, "the engine was lost; its requests go on elsewhere");
        run.end();
        supervisor.replace().await;
        let (reason_tx, next_reasons) = mpsc::unbounded_channel();
        reasons = next_reasons;
        run = context.begin(later_epoch(&epoch), Some(reason_tx));
        node_tx.send_replace(Arc::clone(&run.node));
        let opened = loop {
            match supervisor.open().await {
                Ok(opened) => break opened,
                Err(error) => {
                    tracing::error!(%error, "the engine is not fit any more");
                    sleep(UNFIT_PAUSE).await;
                }
            }
        };
        run.loaded(Loaded::External(Box::new(opened)), Some(model));
        tracing::info!(epoch = run.node.epoch().0, "the engine serves again");
    }
}
