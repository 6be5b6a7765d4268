//! `kvasir unblock`: removes a model file from the block list.

use crate::access::Access;
use crate::status::Cluster;
use anyhow::{Context, bail};
use std::time::Duration;

/// Coordinators accept or refuse a change within two seconds.
const CHANGE_LIMIT: Duration = Duration::from_secs(10);

/// Has a model file placed again that is placed nowhere, because a worker could not load it for what it says.
///
/// Another file under the same name has another digest and is not blocked; this is for the same bytes, once the workers
/// are of a version that can load them. A worker that drains because it has sent wrong bytes is taken back by `kvasir
/// undrain`.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir unblock 758fb7f48fe952c6")]
pub(crate) struct Unblock {
    /// The file's digest, or how it begins, as `kvasir status` shows it.
    #[arg(value_name = "DIGEST")]
    digest: String,
    #[command(flatten)]
    access: Access,
}

impl Unblock {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let blocked = Cluster::ask(&self.access)?.blocked;
        let mut begin_so = blocked.iter().filter(|file| file.digest.starts_with(&self.digest));
        let file = begin_so.next();
        let file = file.with_context(|| format!("no file {}.. is kept from being placed", self.digest))?;
        if begin_so.next().is_some() {
            bail!("several files begin with {}", self.digest);
        }
        let path = format!("/admin/v1/files/{}/pardon", file.digest);
        self.access.send("POST", &path, None, CHANGE_LIMIT)?.text()?.success()?;
        println!("file {}.. is placed again", file.digest.get(..16).unwrap_or(&file.digest));
        Ok(())
    }
}
