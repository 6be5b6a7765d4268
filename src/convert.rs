//! `kvasir models convert`: writes a model as one GGUF file.
//!
//! The tensors are written in pieces, so memory does not depend on the model. `FILE.part` is what an interrupted
//! conversion left, and `FILE.part.json` says of which sources it is and how many of its bytes are on disk.

use crate::config::ConfigError;
use crate::progress::Bar;
use anyhow::{Context, bail};
use hub::catalog::Progress;
use kernels::quant;
use model::gguf::writer::Writer;
use model::header::TensorInfo;
use model::{GgmlType, ModelFile, ModelSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Values of a piece: whole blocks of every type.
const PIECE: u64 = 1 << 20;
/// Bytes between syncs. At most this much is written again after an interruption.
const SYNC_EVERY: u64 = 256 << 20;
/// Disk space that a conversion leaves free.
const SPARE: u64 = 64 << 20;

/// Writes a model, such as a Hugging Face folder, as one GGUF file. An interrupted conversion is continued.
///
/// Without --type every tensor keeps its type and the file gives the same logits, bit for bit. FP8, INT8, INT5 and INT4
/// are types of Kvasir's own, as are some keys: other engines do not read such a file.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir models convert ./Qwen3-0.6B --out qwen3-0.6b.gguf --type q8_0")]
pub(crate) struct Convert {
    /// Catalog name, https:// or hf:// address, or path of a Hugging Face folder or a .gguf file
    model: String,
    /// File to write
    #[arg(long, value_name = "FILE.gguf")]
    out: PathBuf,
    /// Type of matrices that are F32, F16, BF16, or of a type of Kvasir's own. NVFP4, MXFP4 and other types of GGUF stay.
    #[arg(long = "type", value_name = "TYPE")]
    ty: Option<MatrixType>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum MatrixType {
    Bf16,
    F16,
    #[value(name = "q8_0")]
    Q8_0,
}

impl MatrixType {
    fn type_of(self) -> GgmlType {
        match self {
            Self::Bf16 => GgmlType::BF16,
            Self::F16 => GgmlType::F16,
            Self::Q8_0 => GgmlType::Q8_0,
        }
    }
}

impl Convert {
    /// The model to convert. An error if the file cannot be written.
    pub(crate) fn model(&self) -> Result<&str, ConfigError> {
        match self.out.exists() {
            true => {
                let rule = "the file exists; remove it, or name another one";
                Err(ConfigError::field("out", self.out.display(), rule))
            }
            false => Ok(&self.model),
        }
    }

    /// Converts the model at `path`.
    pub(crate) fn run(&self, path: &Path) -> anyhow::Result<()> {
        let file = ModelFile::open(path)?;
        // Refuses what could not be served.
        ModelSpec::from_file(&file)?;
        let conversion = Conversion::new(&file, self.ty)?;
        let own: BTreeSet<&str> = conversion
            .writer
            .tensors()
            .iter()
            .map(TensorInfo::ty)
            .filter(is_own)
            .map(GgmlType::name)
            .collect();
        conversion.write(&self.out, SYNC_EVERY, &mut Bar::new())?;
        if !own.is_empty() {
            let own: Vec<&str> = own.into_iter().collect();
            eprintln!("the file has tensors of Kvasir's types ({}); --type q8_0 avoids them", own.join(", "));
        }
        writeln!(std::io::stdout(), "{}", self.out.display())?;
        Ok(())
    }
}

/// Whether the type is Kvasir's, not GGUF's.
fn is_own(ty: &GgmlType) -> bool {
    ty.id() >= GgmlType::FP8.id()
}

/// The type that a tensor is written in.
fn target(info: &TensorInfo, ty: Option<MatrixType>) -> GgmlType {
    let is_float = matches!(info.ty(), GgmlType::F32 | GgmlType::F16 | GgmlType::BF16);
    // Small, and read as F32 by every engine.
    let stays = ["norm", "ffn_gate_inp", "conv", "position_embd", "token_types"];
    let is_matrix = info.dims().len() > 1
        && info.name().ends_with(".weight")
        && !stays.iter().any(|part| info.name().contains(part));
    match ty.map(MatrixType::type_of) {
        Some(ty) if is_own(&info.ty()) || is_float && is_matrix => {
            let whole = info.dims().first().is_some_and(|row| row.is_multiple_of(ty.block_len() as u64));
            if whole { ty } else { info.ty() }
        }
        _ => info.ty(),
    }
}

/// What `FILE.part` is of.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    /// Paths, lengths and times of change of the files with the tensors.
    sources: Vec<(PathBuf, u64, u128)>,
    /// Bytes of the part that are on disk.
    have: u64,
}

/// A run of a tensor's values that is converted at once.
struct Piece<'a> {
    source: &'a TensorInfo,
    ty: GgmlType,
    /// From the first of the tensor's values on.
    start: u64,
    values: u64,
    /// Zeros that follow in the file.
    padding: u64,
}

impl Piece<'_> {
    /// Bytes in the file.
    fn bytes(&self) -> u64 {
        bytes_of(self.ty, self.values) + self.padding
    }
}

/// Bytes of whole blocks.
fn bytes_of(ty: GgmlType, values: u64) -> u64 {
    values / ty.block_len() as u64 * ty.block_bytes() as u64
}

struct Conversion<'a> {
    file: &'a ModelFile,
    /// The file to write; its tensors have the source's order.
    writer: Writer,
}

impl<'a> Conversion<'a> {
    fn new(file: &'a ModelFile, ty: Option<MatrixType>) -> anyhow::Result<Self> {
        let mut writer = Writer::new(file.metadata().clone())?;
        for info in file.tensors() {
            writer.tensor(info.name(), target(info, ty), info.dims())?;
        }
        Ok(Self { file, writer })
    }

    /// Writes `out`, or continues where an interrupted call stopped. Returns the number of bytes that were there.
    fn write(&self, out: &Path, sync_every: u64, bar: &mut Bar) -> anyhow::Result<u64> {
        let (path, state_path) = (with_suffix(out, ".part"), with_suffix(out, ".part.json"));
        let at_part = || path.display().to_string();
        let options = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let mut part = options.with_context(at_part)?;
        match part.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("{}: another process writes this file", path.display()),
            Err(TryLockError::Error(error)) => return Err(error).with_context(at_part),
        }
        let start = self.writer.start();
        let mut state = State { sources: self.sources()?, have: 0 };
        let have = resumable(&mut part, &start, &state_path, &state.sources);
        let mut pieces = self.pieces().peekable();
        let mut at = 0;
        if have >= start.len() as u64 {
            at = start.len() as u64;
            while let Some(piece) = pieces.next_if(|piece| at + piece.bytes() <= have) {
                at += piece.bytes();
            }
        }
        let resumed = at;
        let total = start.len() as u64 + self.writer.data_bytes();
        check_room(out, total - resumed)?;
        bar.step(format!("writing {}", out.display()), Some(total));
        part.set_len(at).and_then(|()| part.seek(SeekFrom::Start(at))).with_context(at_part)?;
        if at == 0 {
            part.write_all(&start).with_context(at_part)?;
            at = start.len() as u64;
        }
        let (mut synced, mut buffers) = (resumed, Buffers::default());
        for piece in pieces {
            self.convert(&piece, &mut buffers)?;
            part.write_all(&buffers.converted).with_context(at_part)?;
            at += piece.bytes();
            bar.at(at);
            if at - synced >= sync_every {
                part.sync_data().with_context(at_part)?;
                (synced, state.have) = (at, at);
                write_state(&state_path, &state)?;
            }
        }
        if self.sources()? != state.sources {
            bail!("{}: a file of the model changed while it was read", out.display());
        }
        part.sync_all().with_context(at_part)?;
        std::fs::rename(&path, out).with_context(|| out.display().to_string())?;
        if state_path.exists() {
            std::fs::remove_file(&state_path).with_context(|| state_path.display().to_string())?;
        }
        let dir = dir_of(out);
        File::open(dir).and_then(|dir| dir.sync_all()).with_context(|| dir.display().to_string())?;
        Ok(resumed)
    }

    /// The whole file after its start, piece by piece.
    fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        self.file.tensors().zip(self.writer.tensors()).flat_map(|(source, target)| {
            let values = source.elements();
            // Some tensors are made as a whole, however little of them is read.
            let step = if self.file.reads_parts(source.name()) { PIECE } else { values.max(1) };
            let (ty, padding) = (target.ty(), self.writer.padding(target));
            (0..values).step_by(usize::try_from(step).unwrap_or(usize::MAX)).map(move |start| {
                let count = step.min(values - start);
                let padding = if start + count == values { padding } else { 0 };
                Piece { source, ty, start, values: count, padding }
            })
        })
    }

    fn convert(&self, piece: &Piece<'_>, buffers: &mut Buffers) -> anyhow::Result<()> {
        let (from, name) = (piece.source.ty(), piece.source.name());
        let Buffers { stored, values, converted } = buffers;
        converted.clear();
        let len = usize::try_from(bytes_of(from, piece.values)).context("a tensor larger than the memory")?;
        let read = if from == piece.ty { &mut *converted } else { &mut *stored };
        read.resize(len, 0);
        self.file.read_tensor(name, bytes_of(from, piece.start), read)?;
        if from != piece.ty {
            values.resize(piece.values as usize, 0.0);
            let kernel_type = |ty: GgmlType| quant::GgmlType::from_id(ty.id());
            quant::dequantize(kernel_type(from)?, stored, values)
                .with_context(|| format!("tensor {name}"))?;
            quant::encode(kernel_type(piece.ty)?, values, converted)
                .with_context(|| format!("tensor {name}"))?;
        }
        converted.resize(converted.len() + piece.padding as usize, 0);
        Ok(())
    }

    fn sources(&self) -> anyhow::Result<Vec<(PathBuf, u64, u128)>> {
        let source = |path: &Path| {
            let read = || -> std::io::Result<_> {
                let file = path.metadata()?;
                let changed = file.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
                Ok((path.to_owned(), file.len(), changed.as_nanos()))
            };
            read().with_context(|| path.display().to_string())
        };
        self.file.files().map(source).collect()
    }
}

#[derive(Default)]
struct Buffers {
    stored: Vec<u8>,
    values: Vec<f32>,
    converted: Vec<u8>,
}

/// Bytes of `part` that can be kept: those on disk, if they are of the same sources and begin with `start`.
fn resumable(part: &mut File, start: &[u8], state_path: &Path, sources: &[(PathBuf, u64, u128)]) -> u64 {
    let read = || -> Option<State> { serde_json::from_slice(&std::fs::read(state_path).ok()?).ok() };
    let Some(state) = read().filter(|state| state.sources == sources) else { return 0 };
    let mut found = vec![0; start.len()];
    let same = part.read_exact(&mut found).is_ok() && found == start;
    let length = part.metadata().map_or(0, |part| part.len());
    if same && state.have <= length { state.have } else { 0 }
}

fn write_state(path: &Path, state: &State) -> anyhow::Result<()> {
    let new = with_suffix(path, ".new");
    let write = || -> std::io::Result<()> {
        std::fs::write(&new, serde_json::to_vec(state)?)?;
        File::open(&new)?.sync_all()?;
        std::fs::rename(&new, path)
    };
    write().with_context(|| path.display().to_string())
}

fn check_room(out: &Path, needed: u64) -> anyhow::Result<()> {
    let dir = dir_of(out);
    let disk = rustix::fs::statvfs(dir).with_context(|| dir.display().to_string())?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < needed.saturating_add(SPARE) {
        bail!("{} has {} MiB free, but the file needs {} MiB", dir.display(), free >> 20, needed >> 20);
    }
    Ok(())
}

fn dir_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> ModelFile {
        ModelFile::open(Path::new("tests/fixtures/hf").join(name)).unwrap()
    }

    fn write(file: &ModelFile, ty: Option<MatrixType>, out: &Path) -> u64 {
        Conversion::new(file, ty).unwrap().write(out, 10_000, &mut Bar::new()).unwrap()
    }

    #[test]
    fn a_file_has_the_tensors_and_keys_of_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["fmt-awq-gemm", "fmt-fp8-block-ct", "fmt-mxfp4-gptoss", "fmt-nvfp4-ct", "qwen3_5_moe"] {
            let (folder, out) = (folder(name), dir.path().join(name));
            assert_eq!(write(&folder, None, &out), 0);
            let file = ModelFile::open(&out).unwrap();
            assert_eq!(file.metadata(), folder.metadata());
            assert_eq!(file.digest().unwrap(), folder.digest().unwrap(), "{name}: the same model");
        }
    }

    #[test]
    fn matrices_take_the_type_and_what_gguf_has_stays() {
        let dir = tempfile::tempdir().unwrap();
        for (name, ty, expected) in [
            ("fmt-awq-gemm", MatrixType::Q8_0, &["F32", "Q8_0"][..]),
            ("fmt-fp8-block-ct", MatrixType::Bf16, &["F32", "BF16"]),
            ("fmt-nvfp4-ct", MatrixType::Q8_0, &["F32", "NVFP4", "Q8_0"]),
            ("llama3-rope", MatrixType::F16, &["F32", "F16"]),
        ] {
            let (folder, out) = (folder(name), dir.path().join(name));
            write(&folder, Some(ty), &out);
            let file = ModelFile::open(&out).unwrap();
            let types: BTreeSet<&str> = file.tensors().map(|info| info.ty().name()).collect();
            assert_eq!(types, expected.iter().copied().collect(), "{name}");
            ModelSpec::from_file(&file).unwrap();
            for info in file.tensors() {
                let vector = info.dims().len() == 1 || info.name().contains("norm");
                assert!(!vector || info.ty() == GgmlType::F32, "{name}: {}", info.name());
            }
        }
    }

    #[test]
    fn an_interrupted_conversion_is_continued_and_not_of_another_model() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, out) = (folder("fmt-nvfp4-ct"), dir.path().join("m.gguf"));
        write(&folder, None, &out);
        let whole = std::fs::read(&out).unwrap();
        let (part, state_path) = (dir.path().join("m.gguf.part"), dir.path().join("m.gguf.part.json"));
        let sources = Conversion::new(&folder, None).unwrap().sources().unwrap();
        let interrupted = |sources: &[(PathBuf, u64, u128)], have: usize| {
            std::fs::remove_file(&out).unwrap();
            // Bytes after the recorded ones may not have reached the disk.
            std::fs::write(&part, [&whole[..have], &[0xff; 999]].concat()).unwrap();
            write_state(&state_path, &State { sources: sources.to_vec(), have: have as u64 }).unwrap();
        };
        interrupted(&sources, whole.len() / 2);
        let resumed = write(&folder, None, &out) as usize;
        assert!(resumed > whole.len() / 4 && resumed <= whole.len() / 2, "{resumed} of {}", whole.len());
        assert!(std::fs::read(&out).unwrap() == whole && !part.exists() && !state_path.exists());
        let mut others = sources.clone();
        others[0].2 += 1;
        interrupted(&others, whole.len() / 2);
        assert_eq!(write(&folder, None, &out), 0, "a file changed since");
        assert!(std::fs::read(&out).unwrap() == whole);
        interrupted(&sources, whole.len() / 2);
        assert_eq!(write(&folder, Some(MatrixType::Q8_0), &out), 0, "another type was asked for");
        ModelFile::open(&out).unwrap();
    }

    #[test]
    fn values_that_do_not_fit_name_their_tensor() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(metadata::Metadata::default()).unwrap();
        writer.tensor("a.weight", GgmlType::F32, &[32, 2]).unwrap();
        let path = dir.path().join("a.gguf");
        let bytes: Vec<u8> = (0..64).flat_map(|_| 1e6_f32.to_le_bytes()).collect();
        writer.write(&mut File::create(&path).unwrap(), |_| bytes.clone()).unwrap();
        let file = ModelFile::open(&path).unwrap();
        let conversion = Conversion::new(&file, Some(MatrixType::F16)).unwrap();
        let error = conversion.write(&dir.path().join("b.gguf"), 1, &mut Bar::new()).unwrap_err();
        assert_eq!(format!("{error:#}"), "tensor a.weight: F16 cannot hold the value 1000000");
    }
}
