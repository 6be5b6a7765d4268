//! Requests for deployed models that no worker has ready. A stream begins at once and tells in comments how far the
//! model is; any other request waits for a limited time.

use super::auth::Caller;
use super::error::ApiError;
use super::fields::Fields;
use super::ollama;
use super::progress::Status;
use dispatch::Dispatch;
use dispatch::models::{DeployedModel, LoadProgress, Models};
use proto::deployment::ModelState;
use proto::ids::ModelId;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of the comments in a stream.
pub(super) const COMMENT_EVERY: Duration = Duration::from_secs(5);

/// Interval of looks at a model whose tokenizer is not here yet.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Longest wait for the agreed table, which a coordinator reads after its start.
const TABLE_WAIT: Duration = Duration::from_secs(5);

/// Waits until a deployed model can be planned for: until its files are known and its tokenizer is here. Returns at once
/// if the request names another model, or one that cannot be loaded; after `wait` planning refuses it. While deployed
/// models may be missing here, waits for a model that is not found, too.
pub(super) async fn until_known(models: &Models, caller: &Caller, body: &[u8], wait: Duration) {
    let now = Instant::now();
    let (until, table_until) = (now + wait, now + wait.min(TABLE_WAIT));
    let unread = |model: &DeployedModel| {
        let hopeless = model.refused.is_some() || model.progress.state == ModelState::BadFile;
        model.active.is_none() && !hopeless
    };
    if !models.is_incomplete() && !models.deployed().models().values().any(unread) {
        return;
    }
    let Ok(fields) = Fields::parse(body, &["model", "name"]) else { return };
    let Ok(Some(name)) = ollama::model_name(&fields) else { return };
    if !ModelId::parse(name.clone()).is_ok_and(|id| caller.may_use(&id)) {
        return;
    }
    while models.is_incomplete() && models.get(&name).is_none() && Instant::now() < table_until {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    while models.deployed().model(&name).is_some_and(unread) && Instant::now() < until {
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// A request's wait for its model.
#[derive(Debug, Clone)]
pub struct Loading {
    models: Arc<Models>,
    version: ModelId,
    /// When a request that is not streamed is refused.
    pub until: Instant,
}

impl Loading {
    /// `None` if a worker has the model ready, or if it is not a deployed one.
    pub fn of(dispatch: &Dispatch, models: &Arc<Models>, version: &ModelId, wait: Duration) -> Option<Self> {
        let waits = version.is_version() && !dispatch.serves(version);
        let (models, version, until) = (Arc::clone(models), version.clone(), Instant::now() + wait);
        waits.then_some(Self { models, version, until })
    }

    pub fn progress(&self) -> LoadProgress {
        let deployed = self.models.deployed();
        let model = deployed.model(self.version.as_str());
        model.map_or_else(LoadProgress::absent, |model| model.progress.clone())
    }

    pub(super) fn status(&self) -> Status {
        let LoadProgress { state, permille, eta, .. } = self.progress();
        Status::Loading { model: self.version.name().to_owned(), state, percent: permille / 10, eta }
    }

    /// The error when the wait is over.
    pub fn too_long(&self) -> ApiError {
        ApiError::ModelLoading { model: self.version.name().to_owned(), progress: self.progress() }
    }

    /// The error for the request, with the reason if its model cannot be loaded.
    pub fn explain(&self, error: ApiError) -> ApiError {
        let reason = self.models.deployed().model(self.version.as_str()).map(|model| model.refused.clone());
        match (error, reason.flatten()) {
            (ApiError::NoWorker, Some(reason)) => {
                ApiError::ModelUnavailable { model: self.version.name().to_owned(), reason }
            }
            (error, _) => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::Keys;
    use proto::block::ClusterKey;

    #[tokio::test]
    async fn a_request_waits_for_the_table_of_a_coordinator_that_has_just_started() {
        let models = Arc::new(Models::open(&[], false).unwrap());
        models.set_incomplete(true);
        let caller = Keys::new(&[], ClusterKey([1; 32]), None).unwrap().local();
        let until_known = move |wait| {
            let (models, caller) = (Arc::clone(&models), caller.clone());
            (Arc::clone(&models), async move {
                until_known(&models, &caller, br#"{"model":"m"}"#, wait).await;
            })
        };
        until_known(Duration::ZERO).1.await;
        let (models, waiting) = until_known(Duration::from_secs(60));
        let waiting = tokio::spawn(waiting);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        models.set_incomplete(false);
        tokio::time::timeout(Duration::from_secs(3), waiting).await.unwrap().unwrap();
    }
}
