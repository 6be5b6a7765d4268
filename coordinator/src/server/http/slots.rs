//! The connections of a listener. If all are in use, a new connection replaces the one that was idle longest.
//! If none is idle, a small reserve of connections is accepted, which only get a refusal or the paths that
//! are always served.

use super::activity::ConnectionActivity;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::task::{AbortHandle, Id};

const RESERVE: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionClass {
    /// A connection within the limit.
    Regular,
    Reserve,
    /// The connection is not accepted.
    None,
}

#[derive(Debug)]
pub(super) struct ConnectionSlots {
    limit: usize,
    taken: HashMap<Id, Taken>,
    /// Connections beyond the limit.
    reserve: usize,
    /// Whether the last new connection replaced an idle one.
    made_room: bool,
}

#[derive(Debug)]
struct Taken {
    task: AbortHandle,
    activity: Arc<ConnectionActivity>,
    class: ConnectionClass,
}

impl ConnectionSlots {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, taken: HashMap::new(), reserve: 0, made_room: false }
    }

    pub(super) fn taken(&self) -> usize {
        self.taken.len()
    }

    /// The class of a new connection. Closes an idle connection if necessary.
    pub(super) fn classify(&mut self) -> ConnectionClass {
        self.made_room = false;
        if self.taken.len() - self.reserve < self.limit || self.make_room(ConnectionClass::Regular) {
            ConnectionClass::Regular
        } else if self.reserve < RESERVE || self.make_room(ConnectionClass::Reserve) {
            ConnectionClass::Reserve
        } else {
            ConnectionClass::None
        }
    }

    /// Whether an idle connection was closed for the last new one.
    pub(super) fn made_room(&self) -> bool {
        self.made_room
    }

    /// Registers a new connection of the class from [`Self::classify`].
    pub(super) fn take(
        &mut self,
        task: AbortHandle,
        activity: Arc<ConnectionActivity>,
        class: ConnectionClass,
    ) {
        self.reserve += usize::from(class == ConnectionClass::Reserve);
        self.taken.insert(task.id(), Taken { task, activity, class });
    }

    pub(super) fn leave(&mut self, id: Id) {
        if let Some(left) = self.taken.remove(&id) {
            self.reserve -= usize::from(left.class == ConnectionClass::Reserve);
        }
    }

    /// Closes the connection of this class that was idle longest. Returns `false` if none is idle.
    fn make_room(&mut self, class: ConnectionClass) -> bool {
        let idle = self.taken.iter().filter(|(_, taken)| taken.class == class);
        let idle = idle.filter_map(|(id, taken)| Some((taken.activity.idle_since()?, *id)));
        let Some((_, id)) = idle.min_by_key(|(since, _)| *since) else { return false };
        // A request may have arrived in the meantime.
        let closed = self.taken.get(&id).filter(|taken| taken.activity.close());
        let Some(taken) = closed else { return false };
        taken.task.abort();
        self.leave(id);
        self.made_room = true;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::task::JoinSet;
    use tokio::time::Instant;

    #[tokio::test]
    async fn idle_connections_make_room_and_busy_ones_leave_the_reserve() {
        let (began, mut tasks) = (Instant::now(), JoinSet::new());
        let mut slots = ConnectionSlots::new(2);
        let mut connect = |slots: &mut ConnectionSlots, class| {
            let activity = Arc::new(ConnectionActivity::new(began));
            slots.take(tasks.spawn(std::future::pending::<()>()), Arc::clone(&activity), class);
            activity
        };
        assert_eq!(slots.classify(), ConnectionClass::Regular);
        let first = connect(&mut slots, ConnectionClass::Regular);
        assert_eq!(slots.classify(), ConnectionClass::Regular);
        let second = connect(&mut slots, ConnectionClass::Regular);
        assert!(first.begin() && second.begin());
        // Both are busy: further connections use the reserve.
        for _ in 0..RESERVE {
            assert_eq!(slots.classify(), ConnectionClass::Reserve);
            assert!(connect(&mut slots, ConnectionClass::Reserve).begin());
        }
        assert_eq!(
            (slots.classify(), slots.taken(), slots.made_room()),
            (ConnectionClass::None, 2 + RESERVE, false)
        );
        second.end();
        assert_eq!((slots.classify(), slots.made_room()), (ConnectionClass::Regular, true));
        assert!(second.is_closed() && !first.is_closed());
        assert_eq!(slots.taken(), 1 + RESERVE);
    }

    #[tokio::test(start_paused = true)]
    async fn the_connection_idle_longest_is_closed_first() {
        let mut tasks = JoinSet::new();
        let mut slots = ConnectionSlots::new(2);
        let began = Instant::now();
        let activities: Vec<_> = (0..2).map(|_| Arc::new(ConnectionActivity::new(began))).collect();
        for activity in &activities {
            let task = tasks.spawn(std::future::pending::<()>());
            assert!(activity.begin());
            slots.take(task, Arc::clone(activity), ConnectionClass::Regular);
        }
        activities[1].end();
        tokio::time::advance(std::time::Duration::from_millis(2)).await;
        activities[0].end();
        assert_eq!(slots.classify(), ConnectionClass::Regular);
        assert!(activities[1].is_closed() && !activities[0].is_closed());
    }
}
