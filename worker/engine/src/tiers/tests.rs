use super::*;
use std::time::Instant;

const ROOT: BlockId = BlockId([1; 16]);

fn origin(class: &str) -> Origin {
    Origin {
        model_digest: [1; 32],
        tokenizer_digest: [2; 32],
        numeric_class: class.to_owned(),
        block_tokens: 16,
        block_bytes: vec![100],
    }
}

fn config(host_bytes: u64, disk: Option<(&std::path::Path, u64)>) -> TiersConfig {
    let disk = disk.map(|(dir, bytes)| DiskConfig { dir: dir.to_owned(), bytes });
    TiersConfig { host_bytes, disk, ..TiersConfig::default() }
}

fn open(config: &TiersConfig) -> Tiers {
    Tiers::open(config, &origin("a")).unwrap().unwrap()
}

/// Keys of `count` pieces of one prefix.
fn keys(tiers: &Tiers, count: u32) -> Vec<PieceKey> {
    let tokens: Vec<u32> = (0..count * 16).collect();
    let names = tiers.names(ROOT, &tokens);
    (1..=count).map(|unit| names.piece(0, unit * 16).unwrap()).collect()
}

/// Waits until all of these have been read or have failed.
fn load(tiers: &mut Tiers, keys: &[PieceKey]) {
    assert!(tiers.load(keys));
    let deadline = Instant::now() + Duration::from_secs(20);
    while keys.iter().any(|key| tiers.is_loading(*key)) {
        assert!(Instant::now() < deadline, "nothing is read");
        std::thread::yield_now();
        tiers.receive();
    }
}

fn file_of(dir: &std::path::Path, key: PieceKey) -> PathBuf {
    file::path_of(dir, key)
}

#[test]
fn nothing_is_opened_without_a_configured_tier() {
    assert!(Tiers::open(&TiersConfig::default(), &origin("a")).unwrap().is_none());
}

#[test]
fn keys_depend_on_everything_that_the_bytes_depend_on() {
    let tiers = open(&config(100, None));
    let other = Tiers::open(&config(100, None), &origin("b")).unwrap().unwrap();
    let tokens: Vec<u32> = (0..40).collect();
    let mut changed = tokens.clone();
    changed[3] += 1;
    let names = tiers.names(ROOT, &tokens);
    let piece = names.piece(0, 32).unwrap();
    assert_eq!(tiers.names(ROOT, &tokens[..32]).piece(0, 32), Some(piece));
    let others = [
        names.piece(1, 32),
        names.piece(0, 16),
        tiers.names(ROOT, &changed).piece(0, 32),
        tiers.names(BlockId([2; 16]), &tokens).piece(0, 32),
        other.names(ROOT, &tokens).piece(0, 32),
    ];
    assert!(others.iter().all(|other| other.is_some_and(|other| other != piece)));
    assert_eq!((names.piece(0, 48), names.piece(0, 0)), (None, None));
}

#[test]
fn host_memory_keeps_its_budget_and_the_most_recently_used_pieces() {
    let mut tiers = open(&config(300, None));
    let keys = keys(&tiers, 4);
    for (n, key) in (0..3).zip(&keys) {
        assert!(tiers.lacks(*key, 100));
        tiers.put(*key, vec![n; 100]);
    }
    assert!(!tiers.lacks(keys[0], 100));
    tiers.put(keys[3], vec![3; 100]);
    assert!(tiers.get(keys[1]).is_none() && !tiers.holds(keys[1]));
    assert_eq!(tiers.get(keys[0]).as_deref(), Some(&[0; 100][..]));
    assert_eq!(tiers.stats(), TierStats { host_bytes: 300, ..TierStats::default() });
    assert!(!tiers.lacks(keys[1], 301), "it would never fit");
    assert!(!tiers.load(&keys[1..2]), "there are no files");
}

#[test]
fn files_outlive_the_process_and_loads_are_verified() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("kv");
    let config = config(0, Some((&at, 10_000)));
    let mut tiers = open(&config);
    let keys = keys(&tiers, 4);
    for (n, key) in (0..4).zip(&keys) {
        assert!(tiers.lacks(*key, 100));
        tiers.put(*key, vec![n; 100]);
        assert!(!tiers.lacks(*key, 100), "it is on its way");
    }
    drop(tiers);
    std::fs::write(at.join("notes.txt"), "not ours").unwrap();
    std::fs::write(at.join("torn.unfinished"), "x").unwrap();
    let mut damaged = std::fs::read(file_of(&at, keys[1])).unwrap();
    *damaged.last_mut().unwrap() ^= 1;
    std::fs::write(file_of(&at, keys[1]), damaged).unwrap();

    let mut tiers = open(&config);
    assert!(!at.join("torn.unfinished").exists() && at.join("notes.txt").exists());
    std::fs::remove_file(file_of(&at, keys[2])).unwrap();
    assert!(keys.iter().all(|key| tiers.holds(*key) && !tiers.is_here(*key)));
    load(&mut tiers, &keys);
    let here: Vec<Option<u8>> = keys.iter().map(|key| tiers.get(*key).map(|bytes| bytes[0])).collect();
    assert_eq!(here, [Some(0), None, None, Some(3)]);
    assert!(!tiers.holds(keys[1]) && !tiers.holds(keys[2]) && !file_of(&at, keys[1]).exists());
    let stats = tiers.stats();
    assert_eq!((stats.loads, stats.load_failures, stats.write_failures), (2, 2, 0));

    // Two requests wait for one piece: it stays until both are done.
    assert!(tiers.load(&keys[..1]));
    tiers.done_with(&keys);
    assert!(tiers.is_here(keys[0]) && !tiers.is_here(keys[3]));
    tiers.done_with(&keys[..1]);
    assert!(!tiers.is_here(keys[0]) && tiers.holds(keys[0]));
    assert_eq!(tiers.awaited_bytes, 0);

    // A damaged piece is written again.
    assert!(tiers.lacks(keys[1], 100));
    tiers.put(keys[1], vec![1; 100]);
    drop(tiers);
    let mut tiers = open(&config);
    load(&mut tiers, &keys[1..2]);
    assert_eq!(tiers.get(keys[1]).as_deref(), Some(&[1; 100][..]));
}

#[test]
fn pieces_read_from_files_stay_in_host_memory() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(150, Some((dir.path(), 10_000)));
    let mut tiers = open(&config);
    let keys = keys(&tiers, 2);
    keys.iter().for_each(|key| tiers.put(*key, vec![7; 100]));
    assert!(!tiers.is_here(keys[0]) && tiers.is_here(keys[1]));
    drop(tiers);
    let mut tiers = open(&config);
    load(&mut tiers, &keys[..1]);
    tiers.done_with(&keys[..1]);
    assert!(tiers.is_here(keys[0]));
}

#[test]
fn the_directory_keeps_its_budget_even_if_it_is_too_full_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let bytes_in = || -> u64 {
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
    };
    let mut tiers = open(&config(0, Some((dir.path(), 1000))));
    let keys = keys(&tiers, 20);
    for key in &keys {
        tiers.put(*key, vec![5; 100]);
    }
    drop(tiers);
    let full = bytes_in();
    assert!((700..=1000).contains(&full), "{full}");
    let tiers = open(&config(0, Some((dir.path(), 400))));
    assert_eq!(tiers.stats().disk_bytes, bytes_in());
    assert!((200..=400).contains(&bytes_in()), "{}", bytes_in());
    assert!(!tiers.holds(keys[0]), "the oldest went first");
}

#[test]
fn a_directory_that_cannot_be_written_only_counts_failures() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("kv");
    let mut tiers = open(&config(0, Some((&at, 10_000))));
    std::fs::remove_dir_all(&at).unwrap();
    let key = keys(&tiers, 1)[0];
    tiers.put(key, vec![1; 100]);
    let deadline = Instant::now() + Duration::from_secs(20);
    while tiers.stats().write_failures == 0 {
        assert!(Instant::now() < deadline, "it is written to nowhere");
        std::thread::yield_now();
    }
    assert!(!tiers.holds(key) && tiers.lacks(key, 100) && tiers.has_room());
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(Tiers::open(&config(0, Some((&file, 100))), &origin("a")).is_err());
}

#[test]
fn a_forgotten_piece_is_never_served_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(10_000, Some((dir.path(), 10_000)));
    let mut tiers = open(&config);
    let keys = keys(&tiers, 3);
    for (key, byte) in keys.iter().zip(1..) {
        tiers.put(*key, vec![byte; 100]);
    }
    // Also while it is queued for writing.
    tiers.forget(keys[0]);
    tiers.forget(keys[1]);
    assert!(!tiers.holds(keys[0]) && tiers.file(keys[1]).is_none() && tiers.holds(keys[2]));
    drop(tiers);
    let mut next = open(&config);
    assert_eq!(keys.iter().map(|key| next.holds(*key)).collect::<Vec<_>>(), [false, false, true]);
    assert!(!file_of(dir.path(), keys[0]).exists());
    // It can be stored again.
    assert!(next.lacks(keys[0], 100));
    next.put(keys[0], vec![9; 100]);
    drop(next);
    let mut last = open(&config);
    load(&mut last, &keys[..1]);
    assert_eq!(last.get(keys[0]).as_deref(), Some(&[9; 100][..]));
}

#[test]
fn a_directory_serves_one_process_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(0, Some((dir.path(), 10_000)));
    let tiers = open(&config);
    let error = Tiers::open(&config, &origin("a")).unwrap_err().to_string();
    let expected = "is in use by another process; stop that process, or give this one its own directory";
    assert_eq!(error, format!("{} {expected}", dir.path().display()));
    drop(tiers);
    open(&config);
}
