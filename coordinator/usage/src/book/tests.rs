use super::*;
use crate::row::{Counter, OTHER};
use proptest::prelude::*;
use proto::ids::NodeId;

const NOW: u64 = 1_796_000_400;

fn account(tenant: &str) -> Account {
    Account { tenant: tenant.into(), key: None, model: "m".into() }
}

fn owner(node: &str, run: u64) -> Owner {
    Owner { node: NodeId::new(node).unwrap(), run }
}

fn book(node: &str, run: u64) -> Book {
    Book::new(owner(node, run), Limits::default())
}

fn requests(book: &Book, since: u64, by: &[Dimension]) -> Vec<(String, u64)> {
    let groups = book.query(since, by).groups;
    let name = |group: &Group| group.tenant.as_deref().unwrap_or("-").to_owned();
    groups.iter().map(|(group, counters)| (name(group), counters.get(Counter::Requests))).collect()
}

fn give(from: &mut Book, to: &mut Book) {
    from.number_changes();
    to.merge(NOW, from.changes_after(&to.versions()));
}

#[test]
fn usage_is_grouped_by_what_is_asked_for() {
    let mut book = book("a", 1);
    let keyed = Account { key: Some("k".into()), ..account("t") };
    book.count(NOW, &keyed, &[(Counter::Requests, 2), (Counter::PromptTokens, 10)]);
    book.count(NOW, &account("t"), &[(Counter::Requests, 1)]);
    book.count(NOW + 3600, &account("u"), &[(Counter::Requests, 5)]);
    book.expire(NOW);
    assert_eq!(requests(&book, NOW, &[]), [("-".into(), 8)]);
    assert_eq!(requests(&book, NOW, &[Dimension::Tenant]), [("t".into(), 3), ("u".into(), 5)]);
    assert_eq!(requests(&book, NOW + 3600, &[Dimension::Tenant]), [("u".into(), 5)]);
    assert_eq!(requests(&book, NOW, &[Dimension::Tenant, Dimension::Key]).len(), 3);
    assert_eq!(requests(&book, NOW, &[Dimension::Hour]).len(), 2);
    let days = book.query(NOW, &[Dimension::Day]).groups;
    assert_eq!(days.values().map(|day| day.get(Counter::Requests)).collect::<Vec<_>>(), [8]);
}

#[test]
fn hours_expire_and_their_days_stay() {
    let mut book = book("a", 1);
    for day in 0..10 {
        book.count(NOW + day * 86_400, &account("t"), &[(Counter::Requests, 1)]);
    }
    let now = NOW + 9 * 86_400;
    book.expire(now);
    assert_eq!(requests(&book, NOW, &[]), [("-".into(), 10)], "each counts once, in its hour or its day");
    assert_eq!(requests(&book, NOW, &[Dimension::Day]).len(), 10);
    assert_eq!(requests(&book, NOW, &[Dimension::Hour]).len(), 4);
    assert_eq!(requests(&book, now - 3 * 86_400, &[]), [("-".into(), 4)]);
    book.expire(now + 402 * 86_400);
    assert!(book.query(0, &[]).groups.is_empty());
    let dropped = book.take_unsaved();
    assert!(dropped.iter().flat_map(|unsaved| &unsaved.rows).all(|(_, row)| row.is_none()));
}

#[test]
fn accounts_beyond_the_limit_are_one_row() {
    let limits = Limits { hour_accounts: 3, day_accounts: 3, totals: 3, ..Limits::default() };
    let mut book = Book::new(owner("a", 1), limits);
    for tenant in ["t", "u", "v", "w", "x", "t"] {
        book.count(NOW, &account(tenant), &[(Counter::Requests, 1)]);
    }
    let expected = [(OTHER.into(), 2), ("t".into(), 2), ("u".into(), 1), ("v".into(), 1)];
    assert_eq!(requests(&book, NOW, &[Dimension::Tenant]), expected);
    assert_eq!(book.totals().len(), 4);
}

#[test]
fn the_oldest_rows_make_room() {
    let mut book = Book::new(owner("a", 1), Limits { rows: 40, ..Limits::default() });
    for hour in 0..48 {
        book.count(NOW + hour * 3600, &account("t"), &[(Counter::Requests, 1)]);
    }
    book.expire(NOW + 47 * 3600);
    assert!(book.owners.values().map(|rows| rows.rows.len()).sum::<usize>() <= 40);
    assert_eq!(requests(&book, NOW, &[]), [("-".into(), 48)], "the days still have them");
}

#[test]
fn a_lost_message_is_repaired_and_a_repeated_one_changes_nothing() {
    let (mut a, mut b) = (book("a", 1), book("b", 2));
    a.count(NOW, &account("t"), &[(Counter::Requests, 1)]);
    a.number_changes();
    let first = a.changes_after(&b.versions());
    a.count(NOW, &account("u"), &[(Counter::Requests, 1)]);
    a.number_changes();
    let second = a.changes_after(&Versions::from([(owner("a", 1), first[0].upto)]));
    b.merge(NOW, second);
    assert_eq!(requests(&b, NOW, &[]), [], "its predecessor is missing");
    for _ in 0..2 {
        give(&mut a, &mut b);
        b.merge(NOW, first.clone());
    }
    assert_eq!(requests(&b, NOW, &[Dimension::Tenant]), [("t".into(), 1), ("u".into(), 1)]);
    // A third coordinator gets the rows of the first one from the second one.
    let mut c = book("c", 3);
    give(&mut b, &mut c);
    assert_eq!(requests(&c, NOW, &[]), [("-".into(), 2)]);
}

#[test]
fn a_large_difference_takes_several_messages() {
    let (mut a, mut b) = (book("a", 1), book("b", 2));
    for hour in 0..3 {
        for tenant in 0..1_000 {
            a.count(NOW - hour * 3600, &account(&format!("t{tenant}")), &[(Counter::Requests, 1)]);
        }
    }
    let mut messages = 0;
    while requests(&b, NOW - 7200, &[]) != [("-".into(), 3_000)] {
        give(&mut a, &mut b);
        messages += 1;
        assert!(messages < 10);
    }
    assert!(messages > 1);
}

#[test]
fn counters_of_a_later_version_are_kept() {
    let (mut a, mut b) = (book("a", 1), book("b", 2));
    let mut later = Counters::default();
    later.add_all(&proto::codec::decode(&[20; 21], proto::codec::Cap::Stream).unwrap());
    let key = RowKey { period: Period::Hour(Period::hour_of(NOW)), account: account("t") };
    a.restore(owner("z", 9), 1, vec![(key, Row { version: 1, counters: later.clone() })]);
    give(&mut a, &mut b);
    let groups = b.query(NOW, &[]).groups;
    assert_eq!(groups.values().next(), Some(&later));
}

#[derive(Debug, Clone)]
enum Event {
    Count {
        at: usize,
        tenant: usize,
        amount: u64,
    },
    /// A message, which may be an old one.
    Send {
        from: usize,
        to: usize,
        delayed: bool,
    },
    /// The coordinator restarts with what its disk has, or with an empty disk.
    Restart {
        at: usize,
        wiped: bool,
    },
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        (0..3usize, 0..4usize, 1..9u64).prop_map(|(at, tenant, amount)| Event::Count { at, tenant, amount }),
        (0..3usize, 0..3usize, any::<bool>()).prop_map(|(from, to, delayed)| Event::Send {
            from,
            to,
            delayed
        }),
        (0..3usize, any::<bool>()).prop_map(|(at, wiped)| Event::Restart { at, wiped }),
    ];
    proptest::collection::vec(event, 0..120)
}

fn saved(book: &mut Book) -> Vec<crate::store::SavedOwner> {
    book.number_changes();
    let rows = |rows: &Rows| rows.rows.iter().map(|(key, row)| (key.clone(), row.clone())).collect();
    book.owners.iter().map(|(owner, known)| (owner.clone(), known.version, rows(known))).collect()
}

proptest! {
    /// Coordinators that restart, lose their disk, and repeat and delay messages end with equal rows, whose sum is what
    /// was counted, less what a lost disk had alone.
    #[test]
    fn all_coordinators_end_with_the_sum(events in events()) {
        let nodes = ["a", "b", "c"];
        let mut books: Vec<Book> = nodes.iter().map(|node| book(node, 0)).collect();
        let (mut counted, mut old) = ([0u64; 4], Vec::new());
        for (run, event) in (1u64..).zip(events) {
            match event {
                Event::Count { at, tenant, amount } => {
                    books[at].count(NOW, &account(&format!("t{tenant}")), &[(Counter::Requests, amount)]);
                    counted[tenant] += amount;
                }
                Event::Send { from, to, delayed } => {
                    books[from].number_changes();
                    let known = books[to].versions();
                    let mut message = books[from].changes_after(&known);
                    if delayed {
                        old.push(message);
                        message = old[run as usize % old.len()].clone();
                    }
                    books[to].merge(NOW, message);
                }
                Event::Restart { at, wiped } => {
                    let disk = saved(&mut books[at]);
                    if wiped {
                        // Another coordinator has it all.
                        let message = books[at].changes_after(&books[(at + 1) % 3].versions());
                        books[(at + 1) % 3].merge(NOW, message);
                    }
                    books[at] = book(nodes[at], run);
                    for (owner, version, rows) in disk.into_iter().filter(|_| !wiped) {
                        books[at].restore(owner, version, rows);
                    }
                }
            }
        }
        for _ in 0..3 {
            for (from, to) in [(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)] {
                books[from].number_changes();
                let message = books[from].changes_after(&books[to].versions());
                books[to].merge(NOW, message);
            }
        }
        let expected: Vec<_> = (0..4).filter(|t| counted[*t] > 0).map(|t| (format!("t{t}"), counted[t])).collect();
        for book in &books {
            prop_assert_eq!(&requests(book, NOW, &[Dimension::Tenant]), &expected);
            prop_assert_eq!(book.query(NOW, &[Dimension::Day]).groups.len(), usize::from(!expected.is_empty()));
        }
    }
}
