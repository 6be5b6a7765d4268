//! `documents` of a chat: retrieved texts, put into the prompt in an order that lets requests share prefixes.
//! Ordered by rank, the same documents rarely form a common prefix. Ordered by popularity, frequent documents
//! come first and always in the same order.
//!
//! The prompt states the rank after the documents. Popularity is counted at this coordinator, for each
//! tenant; coordinators with the same traffic have about the same counts.

use super::error::ApiError;
use super::fields::Fields;
use super::params::Bounded;
use parking_lot::Mutex;
use serde::Deserialize;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use text::chat_template::Message;

pub const MAX_DOCUMENTS: usize = 256;
/// Longest id of a document, in bytes.
pub const MAX_DOCUMENT_ID: usize = 128;
/// Documents with a count, at about 64 bytes each.
const MAX_COUNTED: usize = 1 << 17;
/// All counts are halved after this many counted documents.
const HALVE_AFTER: usize = 1 << 18;
/// Counts below this are removed.
const FORGOTTEN: f32 = 0.75;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    id: String,
    text: String,
}

#[derive(Deserialize)]
struct RawDocument {
    id: Option<String>,
    text: Option<String>,
}

/// Reads `documents`, in order of rank. Empty without the field.
pub fn documents(fields: &Fields<'_>) -> Result<Vec<Document>, ApiError> {
    const NAME: &str = "documents";
    let Some(raw) = fields.get::<Bounded<RawDocument, MAX_DOCUMENTS>>(NAME)? else { return Ok(Vec::new()) };
    let mut seen = HashSet::new();
    let read = |(at, RawDocument { id, text }): (usize, RawDocument)| {
        let text = text.ok_or_else(|| ApiError::field(format!("{NAME}[{at}].text"), "is missing"))?;
        let id = id.unwrap_or_else(|| digest(&["", &text]).to_hex()[..8].to_owned());
        let field = || format!("{NAME}[{at}].id");
        if id.is_empty() || id.len() > MAX_DOCUMENT_ID || id.chars().any(|c| c.is_control() || c == '"') {
            let reason =
                format!("must be 1 to {MAX_DOCUMENT_ID} bytes without quotes and control characters");
            return Err(ApiError::field(field(), reason));
        }
        if !seen.insert(id.clone()) {
            return Err(ApiError::field(field(), format!("{id:?} is the id of another document too")));
        }
        Ok(Document { id, text })
    };
    raw.0.into_iter().enumerate().map(read).collect()
}

/// Inserts the documents, given by rank, into a chat. `order` has their indices in the order of the prompt.
/// They are appended to a leading system message, or else prepended to the first user message.
pub fn insert(messages: &mut [Message<'_>], documents: &[Document], order: &[usize]) -> Result<(), ApiError> {
    let mut text = String::from("Documents:\n");
    for Document { id, text: document } in order.iter().filter_map(|at| documents.get(*at)) {
        text += &format!("<document id=\"{id}\">\n{document}\n</document>\n");
    }
    let ranks: Vec<&str> = documents.iter().map(|document| document.id.as_str()).collect();
    text += &format!("Most relevant first: {}", ranks.join(", "));
    let system = messages.first().is_some_and(|first| matches!(first.role.as_str(), "system" | "developer"));
    let target = messages.iter_mut().find(|message| system || message.role == "user");
    let Some(content) = target.and_then(|message| message.content.as_mut()) else {
        return Err(ApiError::field("documents", "need a leading system message or a user message"));
    };
    let given = std::mem::take(content);
    *content = match system {
        true => given.between("", &format!("\n\n{text}")),
        false => given.between(&format!("{text}\n\n"), ""),
    };
    Ok(())
}

/// Request counts of documents, for each tenant.
#[derive(Debug)]
pub struct Popularity(Mutex<Counts>);

impl Default for Popularity {
    fn default() -> Self {
        Self(Mutex::new(Counts::new(MAX_COUNTED, HALVE_AFTER)))
    }
}

#[derive(Debug)]
struct Counts {
    by_key: HashMap<u128, Count>,
    max_counted: usize,
    halve_after: usize,
    /// Documents counted since the last halving.
    counted: usize,
}

/// How often a document was requested. Older requests weigh less, since all counts are halved periodically.
#[derive(Debug, Clone, Copy)]
struct Count {
    times: f32,
    /// The logarithm of `times`, rounded down, so that small differences do not change the order.
    level: i16,
}

impl Popularity {
    /// Counts the tenant's documents and returns their indices in the order of the prompt.
    pub fn count(&self, tenant: &str, documents: &[Document]) -> Vec<usize> {
        let keys = keys(tenant, documents);
        let mut counts = self.0.lock();
        keys.iter().for_each(|key| counts.count(*key));
        counts.order(documents, &keys)
    }

    pub fn order(&self, tenant: &str, documents: &[Document]) -> Vec<usize> {
        let keys = keys(tenant, documents);
        self.0.lock().order(documents, &keys)
    }
}

impl Counts {
    fn new(max_counted: usize, halve_after: usize) -> Self {
        Self { by_key: HashMap::new(), max_counted, halve_after, counted: 0 }
    }

    fn count(&mut self, key: u128) {
        let count = self.by_key.entry(key).or_insert(Count { times: 0.0, level: 0 });
        count.times += 1.0;
        count.level = count.level.max(count.times.log2() as i16);
        self.counted += 1;
        while self.counted >= self.halve_after || self.by_key.len() > self.max_counted {
            self.counted = 0;
            self.by_key.retain(|_, count| {
                *count = Count { times: count.times / 2.0, level: count.level - 1 };
                count.times >= FORGOTTEN
            });
        }
    }

    fn order(&self, documents: &[Document], keys: &[u128]) -> Vec<usize> {
        let level = |at: usize| keys.get(at).and_then(|key| self.by_key.get(key)).map(|count| count.level);
        let mut order: Vec<usize> = (0..documents.len()).collect();
        order.sort_by_key(|at| (Reverse(level(*at)), documents.get(*at).map(|document| &document.id)));
        order
    }
}

fn keys(tenant: &str, documents: &[Document]) -> Vec<u128> {
    let key = |document: &Document| {
        let hash = digest(&[tenant, &document.id, &document.text]);
        hash.as_bytes().iter().take(16).fold(0, |key, byte| key << 8 | u128::from(*byte))
    };
    documents.iter().map(key).collect()
}

/// Hashes each part with its length, so that different lists of parts have different input.
fn digest(fields: &[&str]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_derive_key("kvasir 2026-11 documents by popularity");
    for field in fields {
        hasher.update(&(field.len() as u64).to_le_bytes()).update(field.as_bytes());
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const FIELDS: &[&str] = &["documents"];

    fn read(value: Value) -> Result<Vec<Document>, ApiError> {
        let body = json!({ "documents": value }).to_string();
        documents(&Fields::parse(body.as_bytes(), FIELDS).unwrap())
    }

    fn named(ids: &[&str]) -> Vec<Document> {
        ids.iter().map(|id| Document { id: (*id).to_owned(), text: format!("text of {id}") }).collect()
    }

    #[test]
    fn documents_have_an_id_or_get_one_from_their_text() {
        let read_ids = |value| read(value).map(|list| list.into_iter().map(|d| d.id).collect::<Vec<_>>());
        assert_eq!(
            read_ids(json!([{"id": "b", "text": "x"}, {"id": "a", "text": "x"}])).unwrap(),
            ["b", "a"]
        );
        let [one, again, other] = ["x", "x", "y"].map(|text| read_ids(json!([{"text": text}])).unwrap());
        assert!(one == again && one != other && one[0].len() == 8);
        assert_eq!(read(Value::Null).unwrap(), []);
        for (wrong, field) in [
            (json!({}), "documents"),
            (json!([{"id": "a"}]), "documents[0].text"),
            (json!([{"text": "x"}, {"text": "x"}]), "documents[1].id"),
            (json!([{"id": "", "text": "x"}]), "documents[0].id"),
            (json!([{"id": "a\"b", "text": "x"}]), "documents[0].id"),
            (json!([{"id": "a".repeat(129), "text": "x"}]), "documents[0].id"),
            (json!(vec![json!({"text": "x"}); 257]), "documents"),
        ] {
            match read(wrong.clone()) {
                Err(ApiError::InvalidField { field: named, .. }) => assert_eq!(named, field, "{wrong}"),
                other => panic!("{wrong}: {other:?}"),
            }
        }
    }

    #[test]
    fn documents_are_appended_to_the_system_or_prepended_to_the_user_message() {
        let documents = named(&["b", "a"]);
        let text = "Documents:\n<document id=\"a\">\ntext of a\n</document>\n\
                    <document id=\"b\">\ntext of b\n</document>\nMost relevant first: b, a";
        let insert_into = |roles: &[&str]| {
            let mut messages: Vec<Message> = roles.iter().map(|role| Message::new(*role, "hi")).collect();
            insert(&mut messages, &documents, &[1, 0])?;
            Ok::<_, ApiError>(
                messages
                    .into_iter()
                    .map(|m| m.content.unwrap().texts().collect::<String>())
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(insert_into(&["system", "user"]).unwrap(), [format!("hi\n\n{text}"), "hi".to_owned()]);
        assert_eq!(insert_into(&["assistant", "user"]).unwrap(), ["hi".to_owned(), format!("{text}\n\nhi")]);
        assert!(insert_into(&["assistant"]).is_err());
    }

    #[test]
    fn popular_documents_come_first_for_the_tenant_that_requests_them() {
        let popularity = Popularity::default();
        for _ in 0..4 {
            popularity.count("a", &named(&["z"]));
        }
        assert_eq!(popularity.count("a", &named(&["x", "z", "y"])), [1, 0, 2]);
        // Ties are ordered by id, not by rank.
        assert_eq!(popularity.order("a", &named(&["y", "z", "x"])), [1, 2, 0]);
        assert_eq!(popularity.order("b", &named(&["y", "z", "x"])), [2, 0, 1]);
        // The same id with another text is another document.
        let mut other = named(&["x", "z"]);
        other[1].text.push('!');
        assert_eq!(popularity.order("a", &other), [0, 1]);
    }

    #[test]
    fn small_differences_of_popularity_do_not_change_the_order() {
        let popularity = Popularity::default();
        for _ in 0..9 {
            popularity.count("a", &named(&["b", "a"]));
        }
        for _ in 0..5 {
            assert_eq!(popularity.count("a", &named(&["b"])), [0]);
            assert_eq!(popularity.order("a", &named(&["b", "a"])), [1, 0]);
        }
    }

    #[test]
    fn the_number_of_counts_is_bounded_and_popular_documents_stay() {
        let mut counts = Counts::new(100, 1_000);
        for key in 0..300 {
            counts.count(key);
            counts.count(u128::MAX);
            assert!(counts.by_key.len() <= 100);
        }
        assert!(counts.by_key.contains_key(&u128::MAX));
        // Older requests weigh less.
        for _ in 0..20_000 {
            counts.count(7);
        }
        assert!(!counts.by_key.contains_key(&u128::MAX));
    }
}
