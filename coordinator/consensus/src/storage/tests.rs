use super::*;
use crate::message::EntryBody;
use crate::table::{
    AuthorityRecord, Change, ClientId, Entry, Level, OpenSession, Outcome, SessionChange, encode_entry,
};
use parking_lot::Mutex;
use proptest::prelude::*;
use proto::codec::encode;
use redb::StorageBackend;
use std::io;

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn founded() -> Loaded {
    let identity = Identity { group: GroupId(1), node: node("c0"), incarnation: Incarnation(5) };
    let quic = "127.0.0.1:1".to_owned();
    let seat = GroupMember { node: node("c0"), incarnation: Incarnation(5), quic, level: Level::OWN };
    Loaded::founded(identity, vec![seat]).unwrap()
}

/// A file whose unsynced writes may be lost in a power cut, completely or in part.
#[derive(Debug, Clone, Default)]
struct File(Arc<Mutex<Sectors>>);

#[derive(Debug, Default)]
struct Sectors {
    synced: Vec<u8>,
    now: Vec<u8>,
    pending: Vec<(u64, Vec<u8>)>,
    /// Operations until the power cut; `None`: no power cut.
    power: Option<usize>,
    failing_sync: bool,
    full: bool,
}

impl Sectors {
    fn operate(&mut self) -> io::Result<()> {
        if self.full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        match &mut self.power {
            Some(0) => Err(io::Error::other("no power")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

fn put(bytes: &mut Vec<u8>, offset: u64, data: &[u8]) {
    let (start, end) = (offset as usize, offset as usize + data.len());
    bytes.resize(bytes.len().max(end), 0);
    bytes[start..end].copy_from_slice(data);
}

impl StorageBackend for File {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.lock().now.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let file = self.0.lock();
        let start = offset as usize;
        let range = file.now.get(start..start + out.len());
        out.copy_from_slice(range.ok_or_else(|| io::Error::other("past the end"))?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut file = self.0.lock();
        file.operate()?;
        file.now.resize(len as usize, 0);
        file.synced.resize(len as usize, 0);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut file = self.0.lock();
        file.operate()?;
        if file.failing_sync {
            return Err(io::Error::other("EIO"));
        }
        file.pending.clear();
        file.synced = file.now.clone();
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut file = self.0.lock();
        file.operate()?;
        put(&mut file.now, offset, data);
        file.pending.push((offset, data.to_vec()));
        Ok(())
    }
}

impl File {
    /// The file after a power cut: synced data, plus the part of each unsynced write that `lucky` returns.
    fn after_power_cut(&self, mut lucky: impl FnMut(usize) -> usize) -> Self {
        let file = self.0.lock();
        let mut bytes = file.synced.clone();
        for (offset, data) in &file.pending {
            put(&mut bytes, *offset, &data[..lucky(data.len() + 1)]);
        }
        Self::holding(bytes)
    }

    fn holding(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(Sectors { synced: bytes.clone(), now: bytes, ..Sectors::default() })))
    }
}

fn entry(index: u64, term: u64) -> LogEntry {
    LogEntry { term, index, body: EntryBody::Plain(vec![index as u8; 40]) }
}

fn snapshot(index: u64, term: u64) -> Snapshot {
    let meta = SnapshotMeta { index, term, voters: vec![1], learners: vec![2] };
    Snapshot { meta, data: vec![index as u8; 5000].into() }
}

fn writes() -> Vec<Write> {
    let hard = |term, commit| Some(HardState { term, vote: 7, commit });
    vec![
        Write { entries: vec![entry(2, 1), entry(3, 1)], hard: hard(1, 1), ..Write::default() },
        Write { entries: vec![entry(4, 1), entry(5, 1), entry(6, 2)], ..Write::default() },
        Write { entries: vec![entry(5, 3)], hard: hard(3, 4), ..Write::default() },
        Write { compact: Some((snapshot(4, 1), (3, 1))), hard: hard(3, 5), ..Write::default() },
        Write { install: Some(snapshot(20, 4)), hard: hard(4, 20), ..Write::default() },
        Write { entries: vec![entry(21, 4)], ..Write::default() },
    ]
}

#[test]
fn records_of_another_format_are_refused_with_both_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("raft.redb");
    let (mut disk, _) = Disk::open(&path, &node("c0")).unwrap();
    disk.format(&founded()).unwrap();
    for (format, found) in [(Some(3), 3), (None, 0)] {
        disk.set_format(format);
        drop(disk);
        let refused = Disk::open(&path, &node("c0")).map(drop).unwrap_err();
        assert!(
            matches!(refused, StorageError::Format { found: other, own: 2 } if other == found),
            "{refused}"
        );
        assert!(refused.to_string().contains(&format!("format {found}")), "{refused}");
        disk = Disk::unread(&path);
    }
}

/// Of an authority, which is a change of level 2.
fn authority(index: u64) -> LogEntry {
    let record = AuthorityRecord { roots_pem: "roots".into(), sealed_key: vec![1] };
    let change = SessionChange { client: ClientId(1), seq: 1, change: Change::AuthoritySet(record) };
    let bytes = encode_entry(&Entry::Change(change)).unwrap();
    LogEntry { term: 1, index, body: EntryBody::Plain(bytes) }
}

#[test]
fn a_disk_gets_the_format_of_the_highest_level_that_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let open = |name: &str| Disk::open(&dir.path().join(name), &node("c0")).unwrap().0;
    let mut disk = open("entries");
    disk.format(&founded()).unwrap();
    disk.write(&Write { entries: vec![entry(2, 1)], ..Write::default() }).unwrap();
    assert_eq!(disk.format_number(), 1);
    disk.write(&Write { entries: vec![entry(3, 1), authority(4)], ..Write::default() }).unwrap();
    assert_eq!(disk.format_number(), 2);
    drop(disk);
    assert_eq!(open("entries").format_number(), 2);

    let mut table = Table::from_bytes(&founded().snapshot.data).unwrap();
    let LogEntry { body: EntryBody::Plain(bytes), .. } = authority(9) else { panic!("a plain entry") };
    let opened = encode_entry(&Entry::OpenSession(OpenSession { nonce: 1 })).unwrap();
    table.apply(1, &opened, false);
    let outcome = table.apply(9, &bytes, false).outcome;
    assert_eq!(outcome, Outcome::Done);
    let image = Snapshot { data: table.to_bytes().unwrap().into(), ..snapshot(9, 1) };
    for write in [
        Write { install: Some(image.clone()), ..Write::default() },
        Write { compact: Some((image, (1, 1))), ..Write::default() },
    ] {
        let mut disk = open(if write.install.is_some() { "installed" } else { "compacted" });
        disk.format(&founded()).unwrap();
        disk.write(&write).unwrap();
        assert_eq!(disk.format_number(), 2);
    }
}

#[test]
fn written_data_is_read_back_and_a_second_owner_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("raft.redb");
    let (mut disk, loaded) = Disk::open(&path, &node("c0")).unwrap();
    assert_eq!(loaded, None);
    let mut model = founded();
    disk.format(&model).unwrap();
    for write in writes() {
        disk.write(&write).unwrap();
        model.take(&write);
        assert!(Disk::open(&path, &node("c0")).is_err(), "two processes have one disk");
        drop(disk);
        let (again, loaded) = Disk::open(&path, &node("c0")).unwrap();
        assert_eq!(loaded.as_ref(), Some(&model));
        disk = again;
    }
    drop(disk);
    let foreign = Disk::open(&path, &node("c1"));
    assert!(matches!(foreign, Err(StorageError::Foreign { .. })), "{foreign:?}");
}

#[test]
fn a_failed_sync_is_an_error_and_so_is_everything_after_it() {
    let file = File::default();
    let (mut disk, _) = Disk::on(file.clone(), &node("c0")).unwrap();
    disk.format(&founded()).unwrap();
    file.0.lock().failing_sync = true;
    assert!(disk.write(&writes()[0]).is_err());
    file.0.lock().failing_sync = false;
    assert!(disk.write(&writes()[0]).is_err(), "what the disk holds is not known any more");
}

/// Cuts the power after every single operation on the file.
#[test]
fn a_power_cut_loses_nothing_acknowledged_and_tears_nothing() {
    let mut random = 1u64;
    for power in 0.. {
        let file = File::default();
        let (mut disk, _) = Disk::on(file.clone(), &node("c0")).unwrap();
        let mut model = founded();
        disk.format(&model).unwrap();
        file.0.lock().power = Some(power);
        let mut attempted = model.clone();
        let mut survived = true;
        for write in writes() {
            attempted.take(&write);
            if disk.write(&write).is_err() {
                survived = false;
                break;
            }
            model.take(&write);
        }
        for _ in 0..3 {
            let after = file.after_power_cut(|bound| {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                // Complete, absent, or partial.
                match (random >> 33) % 4 {
                    0 => 0,
                    1 => (random >> 40) as usize % bound,
                    _ => bound - 1,
                }
            });
            let (_, loaded) = Disk::on(after, &node("c0")).unwrap();
            let loaded = loaded.unwrap();
            assert!(loaded == model || loaded == attempted, "power cut after {power} operations: {loaded:?}");
        }
        if survived {
            assert!(power > 12, "the power was never cut");
            return;
        }
    }
}

/// A flipped bit in any kind of record, anywhere in the file, makes the disk refused.
#[test]
fn every_kind_of_record_is_checked() {
    let file = File::default();
    let (mut disk, _) = Disk::on(file.clone(), &node("c0")).unwrap();
    let mut model = founded();
    disk.format(&model).unwrap();
    let hard = HardState { term: 1 << 40, vote: 1 << 50, commit: 2 };
    let write = Write { entries: vec![entry(2, 1 << 40)], hard: Some(hard), ..Write::default() };
    disk.write(&write).unwrap();
    model.take(&write);
    drop(disk);
    let records = [
        ("identity", encode(&model.identity, Cap::Control).unwrap()),
        ("hard-state", encode(&hard, Cap::Control).unwrap()),
        ("snapshot", encode(&model.snapshot.meta, Cap::Control).unwrap()),
        ("snapshot-data", model.snapshot.data.to_vec()),
        ("entry 2", encode(&write.entries[0], Cap::Control).unwrap()),
    ];
    let whole = file.0.lock().now.clone();
    for (name, encoded) in records {
        let mut refused = 0;
        // Unused pages may hold the record too.
        for at in (0..whole.len() - encoded.len()).filter(|&at| whole[at..].starts_with(&encoded)) {
            let mut bytes = whole.clone();
            bytes[at + encoded.len() / 2] ^= 1;
            match Disk::on(File::holding(bytes), &node("c0")) {
                Err(StorageError::Damaged { .. }) => refused += 1,
                Ok((_, loaded)) => assert_eq!(loaded.as_ref(), Some(&model)),
                Err(error) => panic!("a flipped bit in {name}: {error}"),
            }
        }
        assert!(refused > 0, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A bit flipped at rest is detected, or was in an unused page.
    #[test]
    fn damage_is_found(at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let file = File::default();
        let (mut disk, _) = Disk::on(file.clone(), &node("c0")).unwrap();
        let mut model = founded();
        disk.format(&model).unwrap();
        for write in writes().iter().take(3) {
            disk.write(write).unwrap();
            model.take(write);
        }
        drop(disk);
        let mut bytes = file.0.lock().now.clone();
        // Most of a file is empty: flip only bytes that are not 0.
        let nonzero: Vec<usize> = (0..bytes.len()).filter(|&i| bytes[i] != 0).collect();
        bytes[*at.get(&nonzero)] ^= 1 << bit;
        if let Ok((_, Some(loaded))) = Disk::on(File::holding(bytes), &node("c0")) {
            prop_assert_eq!(loaded, model);
        }
    }
}

#[test]
fn a_full_disk_is_distinguished_from_a_failed_one() {
    let file = File::default();
    let (mut disk, _) = Disk::on(file.clone(), &node("c0")).unwrap();
    disk.format(&founded()).unwrap();
    let write = &writes()[0];
    file.0.lock().full = true;
    assert!(matches!(disk.write(write), Err(StorageError::Full)));
    // The same error of a sync is different, since its losses are unknown.
    let file = File::default();
    let (mut disk, _) = Disk::on(file.clone(), &node("c0")).unwrap();
    disk.format(&founded()).unwrap();
    file.0.lock().failing_sync = true;
    assert!(matches!(disk.write(write), Err(StorageError::Disk(_))));
}

#[test]
fn the_reserve_is_created_once_and_released_when_needed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("raft.redb");
    let (mut disk, _) = Disk::open(&path, &node("c0")).unwrap();
    let mut model = founded();
    disk.format(&model).unwrap();
    assert!(disk.reserve_space().unwrap() && disk.reserve_space().unwrap());
    let reserve = path.with_extension("reserve");
    assert!(reserve.metadata().unwrap().len() > 0);
    // Recovers between writes, as after a full disk; the last write is repeated.
    for write in writes() {
        disk.write(&write).unwrap();
        disk.recover().unwrap();
        assert!(!reserve.exists());
        disk.write(&write).unwrap();
        model.take(&write);
    }
    drop(disk);
    assert_eq!(Disk::open(&path, &node("c0")).unwrap().1, Some(model));
}

#[test]
fn an_interrupted_first_start_leaves_no_database() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("consensus.redb");
    let unfinished = path.with_extension("unfinished");
    std::fs::write(&unfinished, [0; 4096]).unwrap();
    let (disk, loaded) = Disk::open(&path, &node("a")).unwrap();
    assert_eq!(loaded, None);
    assert!(!unfinished.exists());
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    drop(disk);
    // If the file cannot be created, nothing is left for a later start to find.
    let path = dir.path().join("missing/consensus.redb");
    assert!(matches!(Disk::open(&path, &node("a")), Err(StorageError::Disk(_))));
    std::fs::create_dir(dir.path().join("missing")).unwrap();
    Disk::open(&path, &node("a")).unwrap();
}
