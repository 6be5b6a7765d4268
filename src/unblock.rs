//! `kvasir unblock`: removes a model file from the block list.

use crate::access::Access;
use crate::status::Cluster;
use anyhow::{Context, bail};
use std::time::Duration;

/// Coordinators accept or refuse a change within two seconds.
const CHANGE_LIMIT: Duration = Duration::from_secs(10);

/// Unblocks a model file that is not placed because a worker could not load it.
///
/// Another file under the same name has another digest and is not blocked. Use this command for the same bytes once the
/// workers have a version that can load them. `kvasir undrain` is for a worker that drains because it sent wrong bytes.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir unblock 758fb7f48fe952c6")]
pub(crate) struct Unblock {
    /// Digest of the file or a unique beginning of it, as listed by `kvasir status`.
    #[arg(value_name = "DIGEST")]
    digest: String,
    #[command(flatten)]
    access: Access,
}

impl Unblock {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let blocked = Cluster::fetch(&self.access)?.blocked;
        let mut begin_so = blocked.iter().filter(|file| file.digest.starts_with(&self.digest));
        let file = begin_so.next();
        let file =
            file.with_context(|| format!("no blocked file has a digest that begins with {}", self.digest))?;
        if begin_so.next().is_some() {
            bail!("several blocked files have a digest that begins with {}", self.digest);
        }
        let path = format!("/admin/v1/files/{}/pardon", file.digest);
        self.access.send("POST", &path, None, CHANGE_LIMIT)?.text()?.success()?;
        println!("file {}.. is unblocked", file.digest.get(..16).unwrap_or(&file.digest));
        Ok(())
    }
}
