//! `kvasir models`: the catalog, the model cache and file inspection. Also resolves MODEL arguments to files.

use crate::access::Access;
use crate::columns::columns;
use crate::config::{ConfigError, UsageError};
use crate::convert::Convert;
use crate::deploy::{self, Deploy, Promote, Rollback, Set, Undeploy};
use crate::home;
use crate::http_client::network;
use crate::progress::Bar;
use anyhow::Context;
use hub::catalog::{self, Address, Downloaded, Entry, Listed, ModelName, Speed, Store};
use model::ModelFile;
use model::checkpoint::has_weights;
use model::inspect::Summary;
use model::shard::ChunkId;
use proto::ids::ModelId;
use speech::Bundle;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Prefix of a digest given as MODEL.
pub(crate) const DIGEST: &str = "blake3:";

/// Lists, pulls, inspects, converts and verifies models; deploys them in a cluster.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir models list\n  kvasir models pull smollm2-135m\n  \
    kvasir models inspect ./my-model.gguf")]
pub(crate) struct Models {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    List(List),
    Pull(Pull),
    Inspect(Inspect),
    Convert(Convert),
    Verify(Verify),
    Deploy(Deploy),
    Undeploy(Undeploy),
    Set(Set),
    Promote(Promote),
    Rollback(Rollback),
}

/// Lists the catalog and the models in the cache, or the deployed models of a cluster.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir models list --json\n\n\
    MEMORY covers the weights and a few sequences of 8,192 tokens. TOKENS/S is the decode speed of one sequence on a DGX \
    Spark, measured with other engines, or an upper bound (~); --wide shows the source. DIGEST says how the bytes were \
    verified: pinned in this program, given by the user, or unverified.")]
struct List {
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
    /// Also show architecture, machines, addresses and sources.
    #[arg(long, conflicts_with = "json")]
    wide: bool,
    /// List the deployed models of a cluster: where they are, how far, and why not.
    #[arg(long, conflicts_with = "wide")]
    deployed: bool,
    #[command(flatten)]
    access: Access,
}

/// Downloads a model into the cache and prints its path. MODEL is a catalog name or an https:// or hf:// address.
///
/// An interrupted download is resumed. Any file of a split set selects the whole set. hf://OWNER/REPO is the repository
/// as a folder: its safetensors, tokenizer and settings. https_proxy, http_proxy, all_proxy
/// and no_proxy set proxies; SSL_CERT_FILE adds certificates; HF_ENDPOINT and HF_TOKEN have the meaning of the hub's own
/// tools.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir models pull smollm2-135m\n  \
    kvasir models pull hf://ggml-org/gpt-oss-20b-GGUF/gpt-oss-20b-MXFP4.gguf\n  \
    kvasir models pull hf://Qwen/Qwen3-0.6B\n  \
    kvasir models pull https://models.example/m.gguf --sha256 3b1e...")]
struct Pull {
    /// Catalog name, https://HOST/FILE.gguf, hf://OWNER/REPO/FILE.gguf or hf://OWNER/REPO (REPO@REVISION selects a
    /// revision)
    #[arg(value_parser = pulled)]
    model: Source,
    /// Expected SHA-256 of the file at an address, in hexadecimal; once for each file of a split set, in order.
    #[arg(long, value_parser = sha256)]
    sha256: Vec<String>,
    /// Allow http:// addresses of other machines, as KVASIR_ALLOW_HTTP=1 does.
    #[arg(long)]
    allow_http: bool,
}

/// Shows the content of a model file: architecture, layers, tensors, tokenizer.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir models inspect smollm2-135m --json")]
struct Inspect {
    /// Catalog name, https:// or hf:// address, or path of a .gguf file or a Hugging Face folder.
    model: String,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
    /// Print only the model's digest, in the form that `kvasir worker --from` accepts as MODEL.
    #[arg(long, conflicts_with = "json")]
    digest: bool,
}

/// Compares a pulled model with its checksum: the pinned one, else the one recorded at the download.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir models verify smollm2-135m")]
struct Verify {
    /// Catalog name, or the address that the model was pulled from.
    #[arg(value_parser = pulled)]
    model: Source,
}

/// A downloadable source; paths are excluded.
#[derive(Debug, Clone)]
enum Source {
    Entry(&'static Entry),
    Address(Address),
}

/// Parses a catalog name or an address.
fn pulled(model: &str) -> Result<Source, String> {
    if Address::looks_like(model) {
        return Address::parse(model).map(Source::Address).map_err(|error| error.to_string());
    }
    let names = || catalog::CATALOG.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ");
    let entry = catalog::find(model).map(Source::Entry);
    entry.ok_or_else(|| format!("neither an address nor a catalog name; the catalog has {}", names()))
}

/// Parses 64 hexadecimal digits.
fn sha256(text: &str) -> Result<String, String> {
    let sound = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if sound { Ok(text.to_ascii_lowercase()) } else { Err("a SHA-256 has 64 hexadecimal digits".into()) }
}

impl Models {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let store = Store::from_env()?;
        let mut out = std::io::stdout().lock();
        match self.action {
            Action::List(list) if list.deployed => deploy::print(&list.access, list.json, &mut out)?,
            Action::Deploy(deploy) => deploy.run()?,
            Action::Undeploy(undeploy) => undeploy.run()?,
            Action::Set(set) => set.run()?,
            Action::Promote(promote) => promote.run()?,
            Action::Rollback(rollback) => rollback.run()?,
            Action::List(list) => {
                let (listed, downloads) = (store.list(), store.downloads());
                let text = if list.json {
                    json_list(&listed, &downloads) + "\n"
                } else {
                    table(&listed, &downloads, list.wide)
                };
                write!(out, "{text}")?;
            }
            Action::Pull(pull) => {
                let network = network(pull.allow_http)?;
                let path = match &pull.model {
                    Source::Address(address) => {
                        store.fetch(address, &pull.sha256, &network, &mut Bar::new())?
                    }
                    Source::Entry(entry) => {
                        if !pull.sha256.is_empty() {
                            let reason = "the catalog has a checksum for this model";
                            return Err(UsageError { flag: "--sha256", other: entry.name, reason }.into());
                        }
                        store.pull(entry, &network, &mut Bar::new())?
                    }
                };
                writeln!(out, "{}", path.display())?;
            }
            Action::Inspect(inspect) => {
                let file = ModelFile::open(resolve_or_pull(&inspect.model)?.path)?;
                if inspect.digest {
                    if let Some(digests) = home::digests() {
                        digests.fill(&file)?;
                    }
                    writeln!(out, "{}{}", DIGEST, ChunkId(file.digest()?))?;
                    return Ok(());
                }
                let summary = Summary::of(&file)?;
                if inspect.json {
                    writeln!(out, "{}", serde_json::to_string(&summary)?)?;
                } else {
                    write!(out, "{summary}")?;
                }
            }
            Action::Convert(convert) => convert.run(&resolve_or_pull(convert.model()?)?.path)?,
            Action::Verify(verify) => {
                let text = match verify.model {
                    Source::Entry(entry) => {
                        store.verify(entry, &mut Bar::new())?;
                        let state = if entry.sha256().is_empty() {
                            "unchanged since its download"
                        } else {
                            "the pinned file"
                        };
                        format!("{} is {state}", store.path(entry).display())
                    }
                    Source::Address(address) => {
                        let record = store.verify_download(&address, &mut Bar::new())?;
                        format!("{address} is unchanged since its download ({})", record.verification.word())
                    }
                };
                writeln!(out, "{text}")?;
            }
        }
        Ok(())
    }
}

fn table(listed: &[Listed], downloads: &[Downloaded], wide: bool) -> String {
    let mut rows = vec![["NAME", "SIZE", "MEMORY", "TOKENS/S", "DIGEST", "HERE"].map(str::to_owned).to_vec()];
    if wide {
        rows[0].extend(["ARCH", "FOR", "FIGURE FROM", "FROM"].map(str::to_owned));
    }
    for Listed { entry, path, present, .. } in listed {
        let speed = entry.about.speed;
        let tokens = speed.tokens_per_second().map_or("-".to_owned(), |tokens| {
            let prefix = if matches!(speed, Speed::Ceiling { .. }) { "~" } else { "" };
            format!("{prefix}{tokens:.0}")
        });
        let digest = match (entry.not_served(), entry.sha256().is_empty()) {
            (Some(_), _) => "-",
            (None, true) => "unverified",
            (None, false) => "pinned",
        };
        let here = match (present, entry.not_served()) {
            (_, Some(_)) => "not served",
            (true, None) => "yes",
            (false, None) => "no",
        };
        let mut row = vec![entry.name.to_owned(), size(entry.bytes), size(entry.about.memory), tokens];
        row.extend([digest, here].map(str::to_owned));
        if wide {
            let from = match (entry.not_served(), present) {
                (Some(why), _) => why.to_owned(),
                (None, true) => path.display().to_string(),
                (None, false) => entry.address().unwrap_or("Python packages, with pip").to_owned(),
            };
            let about = entry.about;
            row.extend([about.arch, about.hardware, speed.source(), &from].map(str::to_owned));
        }
        rows.push(row);
    }
    let mut text = columns(&rows);
    if !downloads.is_empty() {
        let mut rows = vec![["DOWNLOADED", "SIZE", "DIGEST", "HERE", "FROM"].map(str::to_owned).to_vec()];
        for Downloaded { id, record, present, .. } in downloads {
            let here = if *present { "yes" } else { "in part" };
            let (word, bytes) = (record.verification.word(), record.bytes());
            rows.push(vec![id.clone(), size(bytes), word.into(), here.into(), record.address.clone()]);
        }
        text += &format!("\n{}", columns(&rows));
    }
    text
}

/// Formats bytes: MiB below one GiB, else GiB.
fn size(bytes: u64) -> String {
    match bytes >> 30 {
        0 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

fn json_list(listed: &[Listed], downloads: &[Downloaded]) -> String {
    let models = listed.iter().map(|Listed { entry, path, present, .. }| {
        let sums = entry.sha256();
        let about = entry.about;
        serde_json::json!({
            "name": entry.name,
            "bytes": entry.bytes,
            // SHA-256 of the file, or of the first file of a split set.
            "sha256": sums.first(),
            "present": present,
            "path": path,
            "files_sha256": sums,
            "verification": if sums.is_empty() { "unverified" } else { "pinned" },
            "address": entry.address(),
            "arch": about.arch,
            "memory_bytes": about.memory,
            "hardware": about.hardware,
            "spark_tokens_per_second": about.speed.tokens_per_second(),
            "spark_tokens_per_second_source": about.speed.source(),
            "not_served": entry.not_served(),
        })
    });
    let downloads = downloads.iter().map(|Downloaded { id, path, record, present, .. }| {
        serde_json::json!({
            "name": id,
            "bytes": record.bytes(),
            "files_sha256": record.files.iter().map(|file| &file.sha256).collect::<Vec<_>>(),
            "verification": record.verification.word(),
            "address": record.address,
            "present": present,
            "path": path,
        })
    });
    let (models, downloads) = (models.collect::<Vec<_>>(), downloads.collect::<Vec<_>>());
    serde_json::json!({"models": models, "downloads": downloads}).to_string()
}

/// A model as a file and its name in the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resolved {
    pub(crate) path: PathBuf,
    pub(crate) id: ModelId,
}

/// Resolves MODEL to a file. Catalog names and addresses are downloaded on first use.
pub(crate) fn resolve_or_pull(model: &str) -> anyhow::Result<Resolved> {
    if Path::new(model).is_dir() {
        return resolve_folder(Path::new(model));
    }
    let store = Store::from_env()?;
    let resolved = store.resolve(model)?;
    let path = match resolved.given {
        ModelName::Path => resolved.path,
        ModelName::Name(entry) if entry.operation().is_some() => {
            let operation = entry.operation().unwrap_or_default();
            let rule = format!(
                "the model is for the operation {operation}; serve it with `kvasir worker --operation {model}`"
            );
            return Err(ConfigError::field("model", model, rule).into());
        }
        ModelName::Name(entry) => {
            if !store.is_present(entry) {
                eprintln!("pulling {model} ({})", size(entry.bytes));
            }
            store.pull(entry, &network(false)?, &mut Bar::new())?
        }
        ModelName::Address(address) => {
            if !store.is_downloaded(&address) {
                eprintln!("pulling {address}");
            }
            store.fetch(&address, &[], &network(false)?, &mut Bar::new())?
        }
    };
    path.metadata().with_context(|| path.display().to_string())?;
    // Make the path absolute, because children of `up` have another working directory. Symbolic links are
    // kept: files beside the link belong to the model.
    let path = std::path::absolute(&path).with_context(|| path.display().to_string())?;
    Ok(Resolved { path, id: ModelId::new(resolved.id)? })
}

/// A folder of a Hugging Face repository.
fn resolve_folder(folder: &Path) -> anyhow::Result<Resolved> {
    let path = folder.canonicalize().with_context(|| folder.display().to_string())?;
    if !path.join("tokenizer.json").is_file() && !has_weights(&path) {
        let rule = "the folder has neither tokenizer.json nor model.safetensors; name a .gguf file, or a folder of a Hugging Face repository";
        return Err(ConfigError::field("model", folder.display(), rule).into());
    }
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Ok(Resolved { id: ModelId::new(name)?, path })
}

/// Refuses a folder without weights, which only engines of other projects serve.
pub(crate) fn require_weights(path: &Path) -> Result<(), ConfigError> {
    match path.is_dir() && !has_weights(path) {
        true => Err(ConfigError::field(
            "model",
            path.display(),
            "a folder without model.safetensors or model.safetensors.index.json, which only engines of other projects serve",
        )),
        false => Ok(()),
    }
}

/// Like [`resolve_or_pull`], but without a download: `None` if the model is not on this machine.
pub(crate) fn resolve_here(model: &str) -> anyhow::Result<Option<Resolved>> {
    let store = Store::from_env()?;
    let Ok(resolved) = store.resolve(model) else { return Ok(None) };
    let here = match resolved.given {
        ModelName::Name(entry) => store.is_present(entry),
        ModelName::Path => resolved.path.exists(),
        ModelName::Address(address) => store.is_downloaded(&address),
    };
    Ok(here.then_some(Resolved { path: resolved.path, id: ModelId::new(resolved.id)? }))
}

/// Resolves a bundle: a catalog name, downloaded on first use, or a directory, given as path or as `ID=DIR`.
pub(crate) fn resolve_bundle(bundle: &str) -> anyhow::Result<Bundle> {
    let (id, origin) = match bundle.split_once('=') {
        Some((id, origin)) if !Path::new(bundle).exists() => (Some(id), origin),
        _ => (None, bundle),
    };
    let refuse = |rule: &str| ConfigError::field("operation", bundle, rule);
    let dir = match catalog::find(origin) {
        Some(entry) if entry.operation().is_some() => {
            let store = Store::from_env()?;
            if !store.is_present(entry) {
                eprintln!("pulling {origin} ({})", size(entry.bytes));
            }
            let file = store.pull(entry, &network(false)?, &mut Bar::new())?;
            // The parent of FOLDER/FILE.
            file.ancestors().nth(2).unwrap_or(&file).to_path_buf()
        }
        _ if Path::new(origin).is_dir() => PathBuf::from(origin),
        Some(_) => return Err(refuse("this is not a bundle of operations; name it as the model").into()),
        None => return Err(refuse("must be a catalog name of a bundle of operations, or a directory").into()),
    };
    let dir = dir.canonicalize().with_context(|| dir.display().to_string())?;
    let own = dir.file_name().map(|name| name.to_string_lossy().into_owned());
    let id = ModelId::new(id.map(str::to_owned).or(own).unwrap_or_default());
    Ok(Bundle { id: id.map_err(|error| refuse(&error.to_string()))?, dir })
}

/// Like [`resolve_or_pull`], but `ID=MODEL` sets the model's name in the API.
pub(crate) fn resolve_named(model: &str) -> anyhow::Result<Resolved> {
    match model.split_once('=') {
        Some((id, path)) if !Address::looks_like(id) && !Path::new(model).exists() => {
            Ok(Resolved { id: ModelId::new(id)?, ..resolve_or_pull(path)? })
        }
        _ => resolve_or_pull(model),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hub::catalog::{Record, RecordedFile, Verification};

    #[test]
    fn the_catalog_is_listed_for_people_and_for_scripts() {
        let dir = tempfile::tempdir().unwrap();
        let listed = Store::at(dir.path()).list();
        let file = RecordedFile { name: "m.gguf".into(), bytes: 5 << 30, sha256: "ab".repeat(32) };
        let record = Record {
            address: "https://a.example/m.gguf".into(),
            files: vec![file],
            verification: Verification::Unverified,
            folder: None,
        };
        let downloads = [Downloaded { id: "m".into(), path: "/d/m.gguf".into(), record, present: true }];
        let json: serde_json::Value = serde_json::from_str(&json_list(&listed, &downloads)).unwrap();
        assert_eq!(json["models"].as_array().unwrap().len(), catalog::CATALOG.len());
        for model in catalog::CATALOG {
            assert!(table(&listed, &[], false).contains(model.name));
        }
        let wide = table(&listed, &downloads, true);
        for shown in ["gpt-oss", "hf://", "not served", "5.0 GiB", "unverified", "https://a.example/m.gguf"] {
            assert!(wide.contains(shown), "{shown} in\n{wide}");
        }
        assert_eq!(json["downloads"][0]["verification"], "unverified");
        assert_eq!(json["models"][0]["present"], false);
    }

    #[test]
    fn a_folder_is_a_model_of_other_engines_alone() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("my-model");
        std::fs::create_dir(&folder).unwrap();
        let error = resolve_or_pull(folder.to_str().unwrap()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
        std::fs::write(folder.join("tokenizer.json"), "{}").unwrap();
        let resolved = resolve_named(&format!("its-name={}", folder.display())).unwrap();
        assert_eq!(resolved.id.as_str(), "its-name");
        assert_eq!(resolve_or_pull(folder.to_str().unwrap()).unwrap().id.as_str(), "my-model");
        let error = require_weights(&resolved.path).unwrap_err().to_string();
        assert!(error.contains("`model`") && error.contains("a folder"), "{error}");
    }

    #[test]
    fn a_bundle_is_a_directory_or_a_name_for_operations() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap().join("mine");
        std::fs::create_dir(&path).unwrap();
        let named = |id: &str| Bundle { id: ModelId::new(id).unwrap(), dir: path.clone() };
        assert_eq!(resolve_bundle(path.to_str().unwrap()).unwrap(), named("mine"));
        assert_eq!(resolve_bundle(&format!("other={}", path.display())).unwrap(), named("other"));
        for wrong in ["smollm2-135m", "no-such-bundle"] {
            let error = resolve_bundle(wrong).unwrap_err();
            assert!(error.is::<ConfigError>() && error.to_string().contains(wrong), "{error}");
        }
        let error = resolve_or_pull("silero-vad").unwrap_err();
        assert!(error.is::<ConfigError>() && error.to_string().contains("--operation"), "{error}");
    }

    #[test]
    fn a_path_is_resolved_to_the_whole_path_and_its_stem() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tiny-f32.gguf");
        std::fs::write(&file, "").unwrap();
        let resolved = resolve_or_pull(file.to_str().unwrap()).unwrap();
        assert_eq!(resolved.id.as_str(), "tiny-f32");
        assert!(resolved.path.is_absolute());
        let named = resolve_named(&format!("mine={}", file.display())).unwrap();
        assert_eq!((named.id.as_str(), &named.path), ("mine", &resolved.path));
        let signed = resolve_named("https://a.example/m.bin?signature=x").unwrap_err().to_string();
        assert!(signed.contains(".gguf") && !signed.contains("signature"), "{signed}");
        assert!(resolve_or_pull("no-such-model").unwrap_err().to_string().contains("smollm2-135m"));
    }
}
