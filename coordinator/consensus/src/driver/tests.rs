use super::*;
use crate::member::Incarnation;
use crate::message::GroupId;
use crate::storage::{Disk, Identity, Write};
use crate::table::{GroupMember, Level, PolicyAdvanced};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;

const TICK: Duration = Duration::from_millis(10);

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn far_deadline() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn policy(from: u64, to: u64) -> Change {
    Change::PolicyAdvanced(PolicyAdvanced { from, to })
}

fn loaded(name: &str, all: &[&str]) -> Loaded {
    let seat = |name: &&str| GroupMember {
        node: node(name),
        incarnation: Incarnation(1),
        quic: "127.0.0.1:1".into(),
        level: Level::OWN,
    };
    let identity = Identity { group: GroupId(3), node: node(name), incarnation: Incarnation(1) };
    Loaded::founded(identity, all.iter().map(seat).collect()).unwrap()
}

/// Delivers frames directly to running drivers.
#[derive(Clone, Default)]
struct Switch(Arc<Mutex<BTreeMap<NodeId, Handle>>>);

struct Port(NodeId, Switch);

impl Network for Port {
    fn send(&self, outbound: Outbound) {
        let target = self.1.0.lock().get(&outbound.to).cloned();
        if let Some(target) = target {
            let frame = Frame::from_bytes(&outbound.frame.to_bytes().unwrap()).unwrap();
            target.receive(self.0.clone(), frame);
        }
    }
}

fn start(dir: &Path, name: &str, all: &[&str], switch: &Switch) -> Driver {
    let (mut disk, found) = Disk::open(&dir.join(name), &node(name)).unwrap();
    let loaded = found.unwrap_or_else(|| {
        let loaded = loaded(name, all);
        disk.format(&loaded).unwrap();
        loaded
    });
    let port = Port(node(name), switch.clone());
    let on_fatal: OnFatal = Box::new(|fatal| panic!("{fatal}"));
    let driver = Driver::start(
        Settings::default(),
        TICK,
        loaded,
        Box::new(disk),
        port,
        RaftMetrics::default(),
        on_fatal,
    )
    .unwrap();
    switch.0.lock().insert(node(name), driver.handle());
    driver
}

#[tokio::test(flavor = "multi_thread")]
async fn three_agree_lose_their_majority_and_remember_everything() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["c0", "c1", "c2"];
    let switch = Switch::default();
    let mut drivers: Vec<Driver> =
        names.iter().map(|name| start(dir.path(), name, &names, &switch)).collect();
    let client = drivers[0].handle().open_session(far_deadline()).await.unwrap();
    for (seq, driver) in (1..).zip(&drivers) {
        let outcome = driver.handle().propose(policy(seq - 1, seq), client, seq, far_deadline()).await;
        assert_eq!(outcome, Ok(Outcome::Done));
    }
    for driver in &drivers {
        assert_eq!(driver.handle().read(far_deadline()).await.unwrap().policy(), 3);
    }
    // Repeated at another coordinator: answered, but not applied again.
    assert_eq!(drivers[1].handle().propose(policy(2, 3), client, 3, far_deadline()).await, Ok(Outcome::Done));

    // The leader stops and transfers leadership, so the others need no election timeout.
    let leads = |driver: &Driver| driver.handle().status().role == RaftRole::Leader;
    let leader = drivers.iter().position(leads).unwrap();
    let stopped = drivers.remove(leader);
    tokio::task::spawn_blocking(move || stopped.stop(Duration::from_secs(10))).await.unwrap();
    let handle = drivers[0].handle();
    assert_eq!(handle.propose(policy(3, 4), client, 4, far_deadline()).await, Ok(Outcome::Done));

    // One of three is no majority.
    let second = drivers.remove(1);
    tokio::task::spawn_blocking(move || second.stop(Duration::ZERO)).await.unwrap();
    let short = || Instant::now() + Duration::from_millis(300);
    let began = Instant::now();
    let refused = handle.propose(policy(4, 5), client, 5, short()).await;
    assert_eq!(refused, Err(ConsensusError::NoQuorum));
    assert_eq!(handle.read(short()).await, Err(ConsensusError::NoQuorum));
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!(handle.table().borrow().policy(), 4, "what was agreed on stays readable");

    // All stop and restart from their disks.
    let last = drivers.remove(0);
    tokio::task::spawn_blocking(move || last.stop(Duration::ZERO)).await.unwrap();
    assert_eq!(handle.read(far_deadline()).await, Err(ConsensusError::Stopped));
    let drivers: Vec<Driver> = names.iter().map(|name| start(dir.path(), name, &names, &switch)).collect();
    let table = drivers[2].handle().read(far_deadline()).await.unwrap();
    assert!((4..=5).contains(&table.policy()), "the change without a majority may yet be made, once");
    let again = drivers[0].handle().propose(policy(4, 5), client, 5, far_deadline()).await;
    assert_eq!(again, Ok(Outcome::Done));
    assert_eq!(drivers[1].handle().read(far_deadline()).await.unwrap().policy(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_disk_ends_the_driver() {
    struct Failing(u32);
    impl Storage for Failing {
        fn write(&mut self, _: &Write) -> Result<(), StorageError> {
            self.0 += 1;
            assert!(self.0 <= 5, "it goes on after a failed write");
            if self.0 == 5 { Err(StorageError::Disk("EIO".into())) } else { Ok(()) }
        }

        fn recover(&mut self) -> Result<(), StorageError> {
            unreachable!("a disk that fails is not tried again")
        }

        fn reserve_space(&mut self) -> Result<bool, StorageError> {
            Ok(true)
        }
    }
    let (sender, fatal) = oneshot::channel();
    let on_fatal: OnFatal = Box::new(|fatal| sender.send(fatal).unwrap());
    let (disk, port) = (Box::new(Failing(0)), Port(node("c0"), Switch::default()));
    let driver = Driver::start(
        Settings::default(),
        TICK,
        loaded("c0", &["c0"]),
        disk,
        port,
        RaftMetrics::default(),
        on_fatal,
    )
    .unwrap();
    let handle = driver.handle();
    let mut seen = Ok(());
    for _ in 0..10 {
        seen = handle.open_session(far_deadline()).await.map(|_| ());
        if seen.is_err() {
            break;
        }
    }
    assert_eq!(seen, Err(ConsensusError::Stopped));
    assert!(matches!(fatal.await.unwrap(), Fatal::Storage(StorageError::Disk(_))));
}

/// A disk with room for a number of writes, of which one can be reserved.
#[derive(Clone)]
struct Small(Arc<Mutex<Sheet>>);

struct Sheet {
    room: u32,
    reserve: bool,
    loaded: Loaded,
}

impl Storage for Small {
    fn write(&mut self, write: &Write) -> Result<(), StorageError> {
        let mut sheet = self.0.lock();
        sheet.room = sheet.room.checked_sub(1).ok_or(StorageError::Full)?;
        sheet.loaded.take(write);
        Ok(())
    }

    fn recover(&mut self) -> Result<(), StorageError> {
        let mut sheet = self.0.lock();
        if std::mem::take(&mut sheet.reserve) {
            sheet.room += 1;
        }
        Ok(())
    }

    fn reserve_space(&mut self) -> Result<bool, StorageError> {
        let mut sheet = self.0.lock();
        if !sheet.reserve && sheet.room > 1 {
            sheet.room -= 1;
            sheet.reserve = true;
        }
        Ok(sheet.reserve)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_refuses_changes_and_takes_them_again_when_there_is_room() {
    let loaded = loaded("c0", &["c0"]);
    let small = Small(Arc::new(Mutex::new(Sheet { room: 1000, reserve: false, loaded: loaded.clone() })));
    let start = |loaded| {
        let (port, disk) = (Port(node("c0"), Switch::default()), Box::new(small.clone()));
        let on_fatal: OnFatal = Box::new(|fatal| panic!("{fatal}"));
        Driver::start(Settings::default(), TICK, loaded, disk, port, RaftMetrics::default(), on_fatal)
            .unwrap()
    };
    let driver = start(loaded);
    let handle = driver.handle();
    let client = handle.open_session(far_deadline()).await.unwrap();
    assert_eq!(handle.propose(policy(0, 1), client, 1, far_deadline()).await, Ok(Outcome::Done));
    let reserved = async || {
        while !small.0.lock().reserve {
            tokio::time::sleep(TICK).await;
        }
    };
    reserved().await;
    small.0.lock().room = 0;
    // A pending change uses the reserve or waits. New changes and linearizable reads are refused. The table
    // stays readable.
    let mut made = 1;
    let no_room = ConsensusError::Refused(ProposeError::NoRoom);
    let deadline = || Instant::now() + Duration::from_millis(500);
    loop {
        match handle.propose(policy(made, made + 1), client, made + 1, deadline()).await {
            Ok(Outcome::Done) => made += 1,
            Err(error) if error == no_room => break,
            other => assert_eq!(other, Err(ConsensusError::NoQuorum)),
        }
    }
    while handle.status().role == RaftRole::Leader {
        tokio::time::sleep(TICK).await;
    }
    assert_eq!(handle.read(deadline()).await, Err(ConsensusError::NoQuorum));
    assert!(handle.table().borrow().policy() >= 1);
    // With room, the driver continues: the waiting change is applied once.
    small.0.lock().room = 1000;
    reserved().await;
    let table = handle.read(far_deadline()).await.unwrap();
    let last = table.policy();
    assert!((made..=made + 1).contains(&last), "{last} of {made}");
    while handle.propose(policy(last, last + 1), client, 100, far_deadline()).await != Ok(Outcome::Done) {
        tokio::time::sleep(TICK).await;
    }
    tokio::task::spawn_blocking(move || driver.stop(Duration::ZERO)).await.unwrap();
    let again = small.0.lock().loaded.clone();
    assert_eq!(start(again).handle().read(far_deadline()).await.unwrap().policy(), last + 1);
}
