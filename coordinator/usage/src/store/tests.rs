use super::*;
use crate::book::{Book, Dimension, Limits};
use crate::row::{Account, Counter};
use proto::ids::NodeId;
use std::os::unix::fs::PermissionsExt;

const NOW: u64 = 1_796_000_400;

fn book(run: u64) -> Book {
    Book::new(Owner { node: NodeId::new("a").unwrap(), run }, Limits::default())
}

fn count(book: &mut Book, tenant: &str) {
    let account = Account { tenant: tenant.into(), key: Some("k".into()), model: "m".into() };
    book.count(NOW, &account, &[(Counter::Requests, 1)]);
    book.number_changes();
}

#[test]
fn rows_come_back_after_a_restart_and_dropped_ones_do_not() {
    let directory = tempfile::tempdir().unwrap();
    let (store, saved) = Store::open(directory.path()).unwrap();
    assert_eq!(saved, []);
    assert_eq!(std::fs::metadata(directory.path().join(FILE)).unwrap().permissions().mode() & 0o77, 0);
    let mut first = book(1);
    count(&mut first, "t");
    store.save(&first.take_unsaved()).unwrap();
    count(&mut first, "t");
    count(&mut first, "u");
    store.save(&first.take_unsaved()).unwrap();
    assert_eq!(first.take_unsaved(), []);
    drop(store);
    let (store, saved) = Store::open(directory.path()).unwrap();
    let mut second = book(2);
    for (owner, version, rows) in saved {
        second.restore(owner, version, rows);
    }
    assert_eq!(second.query(0, &[Dimension::Tenant]), first.query(0, &[Dimension::Tenant]));
    assert_eq!(second.versions(), first.versions());
    second.expire(NOW + 500 * 86_400);
    store.save(&second.take_unsaved()).unwrap();
    drop(store);
    let (_, saved) = Store::open(directory.path()).unwrap();
    assert_eq!(saved, []);
}

#[test]
fn a_damaged_file_is_renamed_and_that_of_a_later_version_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE);
    std::fs::write(&path, [7; 9000]).unwrap();
    drop(Store::open(directory.path()).unwrap());
    assert!(directory.path().join("usage.damaged").exists());
    let database = Database::create(&path).unwrap();
    let txn = database.begin_write().unwrap();
    txn.open_table(STATE).unwrap().insert(FORMAT, FORMAT_OWN + 1).unwrap();
    txn.commit().unwrap();
    drop(database);
    let error = Store::open(directory.path()).unwrap_err().to_string();
    assert!(error.contains("format 2, this version reads format 1"), "{error}");
}
