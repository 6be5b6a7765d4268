use super::*;

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn open(directory: &Path) -> Arc<Store> {
    Store::open(Some(directory), node("c-1"), Limits::default()).unwrap()
}

fn tenant(name: &str) -> Arc<str> {
    name.into()
}

fn uploaded(store: &Arc<Store>, owner: &str, text: &str) -> FileRecord {
    let mut upload = store.upload(&tenant(owner)).unwrap();
    upload.write(text.as_bytes()).unwrap();
    upload.finish("in.jsonl".into(), None).unwrap()
}

fn new_batch(file: &FileRecord) -> NewBatch {
    NewBatch {
        key: None,
        endpoint: "/v1/completions".into(),
        input_file_id: file.id.clone(),
        metadata: None,
        keep_output_s: None,
    }
}

fn line(id: usize) -> String {
    let body = r#"{"model":"m","prompt":"x"}"#;
    format!("{{\"custom_id\":\"{id}\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{body}}}\n")
}

fn content(store: &Store, tenant: &str, id: &str) -> String {
    io::read_to_string(store.read(tenant, id).unwrap().1).unwrap()
}

fn result(number: u64) -> (u64, Outcome, Vec<u8>) {
    let outcome = if number.is_multiple_of(3) { Outcome::Failed } else { Outcome::Completed };
    (number, outcome, number.to_string().into_bytes())
}

/// Runs a batch as its runner does, from wherever it is.
fn run(store: &Store, id: &str) -> BatchRecord {
    let batch = store.present(id).unwrap();
    if batch.status.is_final() {
        return batch;
    }
    let mut results = store.results(&batch).unwrap();
    if let Some(end) = batch.ends_as {
        return store.finish(id, &results, end).unwrap();
    }
    let lines = store.lines(&batch).unwrap().unwrap();
    store.begin(id, lines.order().len() as u64).unwrap();
    for at in lines.order() {
        results.append(&[result(at.number)]).unwrap();
    }
    store.finish(id, &results, Status::Completed).unwrap()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

#[test]
fn a_journal_cut_at_any_byte_is_a_state_that_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let input = uploaded(&store, "a", &(0..5).map(line).collect::<String>());
    let batch = store.create_batch("a", new_batch(&input)).unwrap();
    let (some, all) = (directory.path().join("some"), directory.path().join("all"));
    let mut results = store.results(&batch).unwrap();
    results.append(&[(2, Outcome::Completed, b"2".to_vec())]).unwrap();
    copy(&directory.path().join(RESULTS), &some);
    store.begin(&batch.id, 5).unwrap();
    for number in [1, 3, 4, 5] {
        results.append(&[result(number)]).unwrap();
    }
    copy(&directory.path().join(RESULTS), &all);
    store.finish(&batch.id, &results, Status::Completed).unwrap();
    drop((results, store));
    let journal = fs::read(directory.path().join(JOURNAL)).unwrap();
    let (mut without_file, mut without_batch) = (0, 0);
    // Of the bytes of a record, the first, the middle and the last: journal.rs cuts at all of them.
    let mut cuts = vec![0];
    for line in journal.split_inclusive(|byte| *byte == b'\n') {
        let before = cuts[cuts.len() - 1];
        cuts.extend([1, line.len() / 2, line.len() - 1, line.len()].map(|part| before + part));
    }
    for (&cut, kept) in cuts.iter().flat_map(|cut| [(cut, &some), (cut, &all)]) {
        let crashed = tempfile::tempdir().unwrap();
        copy(directory.path(), crashed.path());
        copy(kept, &crashed.path().join(RESULTS));
        fs::write(crashed.path().join(JOURNAL), &journal[..cut]).unwrap();
        let store = open(crashed.path());
        if store.file("a", &input.id).is_err() {
            without_file += 1;
            assert!(!crashed.path().join(CONTENTS).join(&input.id).exists(), "strays are removed");
            continue;
        }
        assert_eq!(content(&store, "a", &input.id).lines().count(), 5);
        if store.batch("a", &batch.id).is_err() {
            without_batch += 1;
            continue;
        }
        if kept == &some && store.present(&batch.id).unwrap().ends_as.is_some() {
            // All results were on disk by then.
            continue;
        }
        let ended = run(&store, &batch.id);
        assert_eq!(
            (ended.status, ended.counts),
            (Status::Completed, Counts { total: 5, completed: 4, failed: 1 })
        );
        let mut lines: Vec<String> = [&ended.output_file_id, &ended.error_file_id]
            .into_iter()
            .flat_map(|id| {
                content(&store, "a", id.as_ref().unwrap()).lines().map(str::to_owned).collect::<Vec<_>>()
            })
            .collect();
        lines.sort_unstable();
        assert_eq!(lines, ["1", "2", "3", "4", "5"], "cut at {cut}");
        assert_eq!(fs::read_dir(crashed.path().join(RESULTS)).unwrap().count(), 0);
    }
    assert!(without_file > 0 && without_batch > 0 && without_file + without_batch < 2 * cuts.len());
}

#[test]
fn a_tenant_reaches_only_its_own_objects() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let (a, b) = (uploaded(&store, "a", &line(0)), uploaded(&store, "b", &line(1)));
    let batch = store.create_batch("a", new_batch(&a)).unwrap();
    let unknown = |id: &str| FilesError::Unknown(id.to_owned());
    assert_eq!(store.file("b", &a.id), Err(unknown(&a.id)));
    assert_eq!(store.read("b", &a.id).unwrap_err(), unknown(&a.id));
    assert_eq!(store.delete("b", &a.id), Err(unknown(&a.id)));
    assert_eq!(store.batch("b", &batch.id), Err(unknown(&batch.id)));
    assert_eq!(store.cancel("b", &batch.id), Err(unknown(&batch.id)));
    assert_eq!(store.create_batch("b", new_batch(&a)), Err(unknown(&a.id)));
    let paging = Paging { limit: 10, ..Paging::default() };
    assert_eq!(store.files("b", None, &paging).unwrap().items, std::slice::from_ref(&b));
    assert_eq!(store.batches("b", &paging).unwrap().items, []);
    let after = Paging { after: Some(a.id.clone()), ..paging };
    assert_eq!(store.files("b", None, &after), Err(unknown(&a.id)));
    // The input of a batch that has not ended stays.
    assert!(matches!(store.delete("a", &a.id), Err(FilesError::InUse { .. })));
    run(&store, &batch.id);
    store.delete("a", &a.id).unwrap();
    assert_eq!(store.file("a", &a.id), Err(unknown(&a.id)));
    assert_eq!(store.create_batch("a", new_batch(&a)), Err(unknown(&a.id)));
    assert!(!directory.path().join(CONTENTS).join(&a.id).exists());
}

#[test]
fn an_id_names_its_coordinator() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let file = uploaded(&store, "a", "x");
    let batch = store.create_batch("a", new_batch(&file)).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let other = Store::open(Some(elsewhere.path()), node("c2"), Limits::default()).unwrap();
    let owner = |error: FilesError| match error {
        FilesError::Elsewhere { owner, .. } => Some(owner),
        _ => None,
    };
    assert_eq!(owner(other.file("a", &file.id).unwrap_err()).as_deref(), Some("c-1"));
    assert_eq!(owner(other.batch("a", &batch.id).unwrap_err()).as_deref(), Some("c-1"));
    for unknown in
        ["file-1", "file-zz", "", "batch_", &file.id.replace("c-1", "c2"), &file.id.replace("c-1", "../x")]
    {
        assert_eq!(owner(other.file("a", unknown).unwrap_err()), None, "{unknown}");
    }
}

#[test]
fn lists_have_pages_in_both_orders() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let ids: Vec<String> = (0..5).map(|n| uploaded(&store, "a", &n.to_string()).id).collect();
    assert!(ids.is_sorted());
    let page = |after: Option<usize>, limit, order| {
        let paging = Paging { after: after.map(|at| ids[at].clone()), limit, order };
        let page = store.files("a", Some(Purpose::Batch), &paging).unwrap();
        let at = |file: &FileRecord| ids.iter().position(|id| *id == file.id).unwrap();
        (page.items.iter().map(at).collect::<Vec<_>>(), page.has_more)
    };
    assert_eq!(page(None, 3, Order::Ascending), (vec![0, 1, 2], true));
    assert_eq!(page(Some(2), 3, Order::Ascending), (vec![3, 4], false));
    assert_eq!(page(None, 2, Order::Descending), (vec![4, 3], true));
    assert_eq!(page(Some(1), 2, Order::Descending), (vec![0], false));
    let outputs =
        store.files("a", Some(Purpose::BatchOutput), &Paging { limit: 9, ..Paging::default() }).unwrap();
    assert_eq!(outputs.items, []);
}

#[test]
fn limits_hold_and_are_named() {
    let limits = Limits {
        file_bytes: 10,
        files: 2,
        tenant_bytes: 15,
        total_bytes: 20,
        batches: 1,
        kept_batches: 2,
        ..Limits::default()
    };
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(Some(directory.path()), node("c"), limits).unwrap();
    let refused = |owner: &str, bytes: usize| {
        let upload = store.upload(&tenant(owner)).and_then(|mut upload| upload.write(&vec![b'x'; bytes]));
        match upload {
            Err(FilesError::Limit { field, value, limit }) => Some((field, value, limit)),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused("a", 11), Some(("file bytes", 11, 10)));
    // An upload counts until it is given up.
    let mut open = store.upload(&tenant("a")).unwrap();
    open.write(b"123456789").unwrap();
    assert_eq!(refused("a", 7), Some(("bytes of all files of the tenant", 16, 15)));
    let other = uploaded(&store, "b", "1234567890");
    assert_eq!(refused("c", 2), Some(("bytes of all files at this coordinator", 21, 20)));
    drop(open);
    uploaded(&store, "a", "1");
    let second = uploaded(&store, "a", &"x".repeat(9));
    assert_eq!(refused("a", 1), Some(("files of the tenant", 3, 2)));
    let batch = store.create_batch("b", new_batch(&other)).unwrap();
    let more = store.create_batch("b", new_batch(&other)).unwrap_err();
    assert_eq!(more, FilesError::Limit { field: "unfinished batches of the tenant", value: 2, limit: 1 });
    let created = |file: &FileRecord| store.create_batch("b", new_batch(file)).unwrap().id;
    let mut ids = vec![batch.id];
    for _ in 0..3 {
        store.fail(ids.last().unwrap(), Vec::new()).unwrap();
        ids.push(created(&other));
    }
    let listed = store.batches("b", &Paging { limit: 9, ..Paging::default() }).unwrap().items;
    assert_eq!(listed.iter().map(|batch| &batch.id).collect::<Vec<_>>(), [&ids[3], &ids[2]]);
    assert!(store.file("a", &second.id).is_ok());
}

#[test]
fn old_files_and_batches_are_forgotten() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let mut upload = store.upload(&tenant("a")).unwrap();
    upload.write(line(0).as_bytes()).unwrap();
    let short = upload.finish("x".into(), Some(3600)).unwrap();
    let long = uploaded(&store, "a", &line(0));
    let batch = store.create_batch("a", new_batch(&short)).unwrap();
    store.expire(now() + 7200).unwrap();
    assert!(store.file("a", &short.id).is_ok(), "a batch reads it");
    let ended = run(&store, &batch.id);
    store.expire(now() + 7200).unwrap();
    assert!(store.file("a", &short.id).is_err() && store.file("a", &long.id).is_ok());
    store.expire(now() + 31 * DAY_S).unwrap();
    assert!(store.batch("a", &batch.id).is_err() && store.file("a", &long.id).is_err());
    assert!(store.file("a", ended.output_file_id.as_ref().unwrap()).is_err());
    assert_eq!(fs::read_dir(directory.path().join(CONTENTS)).unwrap().count(), 0);
}

#[test]
fn a_batch_is_cancelled_until_it_ends() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let file = uploaded(&store, "a", &line(0));
    let batch = store.create_batch("a", new_batch(&file)).unwrap();
    let cancelling = store.cancel("a", &batch.id).unwrap();
    assert_eq!(cancelling.status, Status::Cancelling);
    assert_eq!(store.begin(&batch.id, 1).unwrap().status, Status::Cancelling);
    assert_eq!(store.cancel("a", &batch.id).unwrap().cancelling_at, cancelling.cancelling_at);
    let results = store.results(&batch).unwrap();
    let ended = store.finish(&batch.id, &results, Status::Cancelled).unwrap();
    assert_eq!((ended.status, ended.output_file_id, ended.finalizing_at), (Status::Cancelled, None, None));
    assert!(matches!(store.cancel("a", &batch.id), Err(FilesError::Ended { .. })));
}

#[test]
fn a_long_journal_is_rewritten_and_a_damaged_one_is_set_aside() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let file = uploaded(&store, "a", "x");
    let errors = vec![LineError { code: "c".into(), message: "m".repeat(90_000), param: None, line: None }];
    for _ in 0..40 {
        let batch = store.create_batch("a", new_batch(&file)).unwrap();
        store.fail(&batch.id, errors.clone()).unwrap();
        store.state.lock().records.batches.remove(&batch.id);
    }
    let path = directory.path().join(JOURNAL);
    assert!(fs::metadata(&path).unwrap().len() < 2 * REWRITE_BYTES);
    assert_eq!(store.file("a", &file.id).unwrap(), file);
    drop(store);
    assert_eq!(open(directory.path()).file("a", &file.id).unwrap(), file);
    let mut text = fs::read(&path).unwrap();
    text[20] ^= 1;
    text.extend_from_slice(&fs::read(&path).unwrap());
    fs::write(&path, text).unwrap();
    assert!(open(directory.path()).file("a", &file.id).is_err());
    assert!(directory.path().join("journal.damaged").exists());
}

#[test]
fn a_store_without_a_directory_ends_with_its_files() {
    let store = Store::open(None, node("c"), Limits::default()).unwrap();
    let (directory, temporary) = store.place();
    let directory = directory.to_owned();
    assert!(temporary && directory.exists());
    assert_eq!(store.limits().total_bytes, Limits::TEMPORARY_BYTES);
    uploaded(&store, "a", "x");
    drop(store);
    assert!(!directory.exists());
}
