use super::*;

fn write(path: &Path) -> Vec<PackedRegion> {
    let mut writer = PackedWriter::begin(path).unwrap().unwrap_err();
    let regions = vec![
        writer.add("a", 100, |region| region.piece(0, &[1; 100])).unwrap(),
        writer
            .add("b", 200_000, |region| {
                // In any order.
                region.piece(150_000, &[3; 50_000]);
                region.piece(0, &[2; 150_000]);
            })
            .unwrap(),
    ];
    writer.finish().unwrap();
    regions
}

fn region(path: &Path, name: &str) -> Option<Vec<u8>> {
    Some(PackedFile::open(path).unwrap()?.region(name)?.as_ref().to_vec())
}

fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    // Set the time explicitly: file times are coarse, and this change follows the write immediately.
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
}

#[test]
fn regions_are_what_was_written_and_start_at_pages() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("packed/m.pack");
    assert!(PackedFile::open(&path).unwrap().is_none());
    let written = write(&path);
    for (name, region_written) in ["a", "b"].into_iter().zip(&written) {
        let region = PackedFile::open(&path).unwrap().unwrap().region(name).unwrap();
        assert_eq!(region.as_ref(), region_written.as_ref());
        assert_eq!(region.as_ref().as_ptr().addr() % 4096, 0);
    }
    assert_eq!(region(&path, "c"), None);
    assert!(PackedWriter::begin(&path).unwrap().is_ok(), "it is there");
}

#[test]
fn a_damaged_file_is_removed_and_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.pack");
    write(&path);
    let length = fs::metadata(&path).unwrap().len();
    for at in [0, REGION_START + 5, REGION_START + 199_999, length - 60, length - 20, length - 1] {
        flip(&path, at);
        assert!(PackedFile::open(&path).unwrap().is_none(), "byte {at}");
        assert!(!path.exists());
        write(&path);
        assert_eq!(region(&path, "a").unwrap(), [1; 100]);
    }
    for length in [0, 10, length - 1] {
        File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        assert!(PackedFile::open(&path).unwrap().is_none(), "{length} bytes");
        write(&path);
    }
}

#[test]
fn a_region_must_be_written_completely_and_within_its_bounds() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = PackedWriter::begin(&dir.path().join("m.pack")).unwrap().unwrap_err();
    for pieces in
        [&[(0, 4)][..], &[(0, 4), (5, 5)], &[(0, 6), (4, 6)], &[(0, 4), (4, 7)], &[(u64::MAX, 2)], &[]]
    {
        let written = writer.add("a", 10, |region| {
            pieces.iter().for_each(|(offset, bytes)| region.piece(*offset, &vec![1; *bytes]));
        });
        assert!(matches!(written, Err(StoreError::Io { .. })), "{pieces:?}");
    }
    let region = writer.add("a", 10, |region| region.piece(0, &[9; 10])).unwrap();
    assert_eq!(region.as_ref(), [9; 10]);
}

#[test]
fn an_unfinished_writer_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.pack");
    let mut writer = PackedWriter::begin(&path).unwrap().unwrap_err();
    let region = writer.add("a", 10, |region| region.piece(0, &[7; 10])).unwrap();
    drop(writer);
    assert!(!path.exists());
    assert_eq!(region.as_ref(), [7; 10], "what is in use stays");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the lock");
}

/// Overlapping pieces would each be hashed, so a small file could cost unbounded work. They are refused.
#[test]
fn regions_lie_apart_and_within_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.pack");
    let region = |name: &str, start: u64, bytes: u64| Region {
        name: name.into(),
        start,
        bytes,
        pieces: vec![Piece {
            bytes,
            blake3: blake3::hash(&[7; 100][..bytes.min(100) as usize]).to_hex().to_string(),
        }],
    };
    let opens = |index: &[Region]| {
        let mut file = vec![7; 100];
        let index = serde_json::to_vec(index).unwrap();
        file.extend(&index);
        file.extend((index.len() as u64).to_le_bytes());
        file.extend(blake3::hash(&index).as_bytes());
        file.extend(MAGIC);
        fs::write(&path, file).unwrap();
        PackedFile::open(&path).unwrap().is_some()
    };
    assert!(opens(&[region("a", 0, 60), region("b", 60, 40)]));
    assert!(!opens(&[region("a", 0, 60), region("b", 59, 40)]), "one byte is both's");
    assert!(!opens(&[region("a", 0, 100), region("b", 0, 100)]));
    assert!(!opens(&[region("a", 50, 50), region("b", 0, 50)]), "not in their order");
    for (start, bytes) in [(0, 101), (0, u64::MAX), (u64::MAX, 2), (u64::MAX, 0), (1 << 40, 1)] {
        assert!(!opens(&[region("a", start, bytes)]), "{start} {bytes}");
    }
}
