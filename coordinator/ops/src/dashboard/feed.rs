//! The dashboard's data: computed once a second for all pages, and not at all without pages.

use super::snapshot::{Observer, initial_data};
use crate::Ops;
use api::error::ApiError;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream;
use parking_lot::Mutex;
use serde_json::Value;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{self, Receiver, Sender};
use tokio::time::MissedTickBehavior;

const INTERVAL: Duration = Duration::from_secs(1);
/// Most concurrent pages.
const MAX_VIEWERS: usize = 64;
/// Snapshots that a slow page may lag behind; beyond that it starts over.
const MAX_LAG: usize = 4;

#[derive(Debug, Default)]
pub struct Feed(Mutex<Option<Sender<Bytes>>>);

impl Feed {
    /// Subscribes to all further snapshots. The first viewer starts the task, which ends after the last
    /// viewer.
    fn join(&self, ops: &Arc<Ops>) -> Result<Receiver<Bytes>, ApiError> {
        let mut sender = self.0.lock();
        if let Some(sender) = &*sender {
            return match sender.receiver_count() < MAX_VIEWERS {
                true => Ok(sender.subscribe()),
                false => Err(ApiError::Refused {
                    why: format!("{MAX_VIEWERS} dashboards are already open, the limit"),
                }),
            };
        }
        let (new, receiver) = broadcast::channel(MAX_LAG);
        *sender = Some(new.clone());
        // The observer is created here and not in the task, so that nothing in between is missed.
        tokio::spawn(publish(Arc::clone(ops), Observer::new(ops), new));
        Ok(receiver)
    }

    /// Whether the last viewer is gone. If so, the task ends and the next viewer starts a new one.
    fn is_over(&self, frames: &Sender<Bytes>) -> bool {
        let mut sender = self.0.lock();
        let unwatched = frames.receiver_count() == 0;
        if unwatched {
            *sender = None;
        }
        unwatched
    }
}

async fn publish(ops: Arc<Ops>, mut observer: Observer, frames: Sender<Bytes>) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if ops.feed.is_over(&frames) {
            return;
        }
        let look = observer.take_snapshot(&ops).await;
        // Fails only if the last page is gone.
        let _ = frames.send(frame("look", &look));
    }
}

fn frame(event: &str, data: &Value) -> Bytes {
    format!("event: {event}\ndata: {data}\n\n").into()
}

/// The server-sent events of a page: the initial data, then a snapshot each second. A page that lags too far
/// gets the initial data again.
pub(super) fn events(ops: Arc<Ops>) -> Result<Response, ApiError> {
    // Subscribed before the initial data is read, so that nothing in between is missed.
    let frames = ops.feed.join(&ops)?;
    let events = stream::unfold((ops, frames, true), |(ops, mut frames, begins)| async move {
        if begins {
            let first = frame("begin", &initial_data(&ops));
            return Some((first, (ops, frames, false)));
        }
        match frames.recv().await {
            Ok(look) => Some((look, (ops, frames, false))),
            Err(RecvError::Lagged(_)) => {
                let again = frame("begin", &initial_data(&ops));
                Some((again, (ops, frames, false)))
            }
            Err(RecvError::Closed) => None,
        }
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        // Proxies must not buffer this response.
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    let events = futures::StreamExt::map(events, Ok::<_, Infallible>);
    Ok((headers, Body::from_stream(events)).into_response())
}
