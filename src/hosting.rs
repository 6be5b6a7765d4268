//! Settings of a worker that loads models by order: its memory, its labels, and where named models come from.

use crate::config::ConfigError;
use crate::http_client::network;
use crate::models::require_weights;
use hub::catalog::{ModelName, Progress, Step, Store};
use proto::deployment::{MAX_LABEL, MAX_LABELS};
use std::path::PathBuf;
use worker::service::{ModelResolver, ResolveError};

/// Checks labels, `key=value`.
///
/// # Errors
/// With the label and the rule that it breaks.
pub(crate) fn check_labels(labels: &[String]) -> Result<(), ConfigError> {
    if labels.len() > MAX_LABELS {
        return Err(ConfigError::field("labels", labels.len(), format!("at most {MAX_LABELS} labels")));
    }
    let sound = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/');
    for (at, label) in labels.iter().enumerate() {
        let rule = match label.split_once('=') {
            _ if label.len() > MAX_LABEL => format!("at most {MAX_LABEL} characters"),
            Some((key, value)) if !key.is_empty() && key.bytes().chain(value.bytes()).all(sound) => {
                let same = |other: &String| other.split_once('=').is_some_and(|(other, _)| other == key);
                if !labels.iter().take(at).any(same) {
                    continue;
                }
                "the key is there twice".to_owned()
            }
            _ => "must be key=value of A-Z, a-z, 0-9, '-', '_', '.' and '/'".to_owned(),
        };
        return Err(ConfigError::field("labels", label, rule));
    }
    Ok(())
}

/// Finds and downloads models by catalog name or address, in the model cache.
#[derive(Debug)]
pub(crate) struct HubResolver;

fn refused(reason: impl ToString, permanent: bool) -> ResolveError {
    ResolveError { reason: reason.to_string(), permanent }
}

/// What a name stands for.
fn resolve(name: &str) -> Result<(Store, PathBuf, ModelName), ResolveError> {
    let store = Store::from_env().map_err(|error| refused(error, false))?;
    let resolved = store.resolve(name).map_err(|error| refused(error, true))?;
    match &resolved.given {
        ModelName::Path => Err(refused(format!("{name} is neither an address nor a catalog name"), true)),
        ModelName::Name(entry) if entry.operation().is_some() => {
            Err(refused(format!("{name} is for an operation and not for text"), true))
        }
        _ => Ok((store, resolved.path, resolved.given)),
    }
}

impl ModelResolver for HubResolver {
    fn find(&self, name: &str) -> Result<Option<PathBuf>, ResolveError> {
        let (store, path, given) = resolve(name)?;
        let here = match &given {
            ModelName::Name(entry) => store.is_present(entry),
            ModelName::Address(address) => store.is_downloaded(address),
            ModelName::Path => false,
        };
        if here {
            require_weights(&path).map_err(|error| refused(error, true))?;
        }
        Ok(here.then_some(path))
    }

    fn fetch(&self, name: &str, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<PathBuf, ResolveError> {
        let (store, _, given) = resolve(name)?;
        let network = network(false).map_err(|error| refused(error, true))?;
        let mut progress = Download { progress, total: 0, wanted: true };
        let fetched = match given {
            ModelName::Name(entry) => store.pull(entry, &network, &mut progress),
            ModelName::Address(address) => store.fetch(&address, &[], &network, &mut progress),
            ModelName::Path => return Err(refused("not a name", true)),
        };
        fetched.map_err(|error| refused(error, false))
    }
}

struct Download<'a> {
    progress: &'a mut dyn FnMut(u64, u64) -> bool,
    /// Bytes of the present step; 0 if they are unknown.
    total: u64,
    wanted: bool,
}

impl Progress for Download<'_> {
    fn begin(&mut self, _: Step<'_>, total: Option<u64>) {
        self.total = total.unwrap_or(0);
        self.at(0);
    }

    fn at(&mut self, bytes: u64) {
        self.wanted &= (self.progress)(bytes, self.total);
    }

    fn is_wanted(&self) -> bool {
        self.wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_pairs_with_one_value_for_each_key() {
        let check = |labels: &[&str]| {
            check_labels(&labels.iter().map(|label| (*label).to_owned()).collect::<Vec<_>>())
        };
        assert!(check(&["zone=a", "gpu=", "k8s.io/arch=arm64"]).is_ok());
        let long = format!("k={}", "v".repeat(MAX_LABEL));
        for wrong in [&["zone"][..], &["=a"], &["a=b c"], &["a=1", "b=1", "a=2"], &[&long]] {
            let error = check(wrong).unwrap_err().to_string();
            assert!(error.contains("`labels`"), "{error}");
        }
        let many: Vec<String> = (0..=MAX_LABELS).map(|n| format!("k{n}=v")).collect();
        assert!(check_labels(&many).is_err());
    }

    #[test]
    fn only_names_and_addresses_are_resolved() {
        for wrong in ["no-such-model", "/tmp/model.gguf", "silero-vad"] {
            assert!(HubResolver.find(wrong).unwrap_err().permanent, "{wrong}");
        }
    }
}
