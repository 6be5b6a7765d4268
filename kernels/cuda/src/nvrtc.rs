//! Compilation of CUDA C++ to PTX and CUBIN.

#![allow(unsafe_code)]

use super::library::{self, functions};
use super::source::{HEADERS, Source};
use super::{Arch, CudaError};
use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use std::ffi::{CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::OnceLock;

mod cache;

pub use cache::CubinCache;

functions! {
    Functions of "NVRTC", declared in sys with nvrtcResult {
        version = nvrtcVersion(*mut c_int, *mut c_int);
        count_architectures = nvrtcGetNumSupportedArchs(*mut c_int);
        architectures = nvrtcGetSupportedArchs(*mut c_int);
        create = nvrtcCreateProgram(
            *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        );
        destroy = nvrtcDestroyProgram(*mut nvrtcProgram);
        compile = nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
        log_size = nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
        log = nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
        ptx_size = nvrtcGetPTXSize(nvrtcProgram, *mut usize);
        ptx = nvrtcGetPTX(nvrtcProgram, *mut c_char);
        cubin_size = nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
        cubin = nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
    }
}

/// Version that the kernels are checked with, and that compiles the kernels shipped with the program.
const CHECKED_VERSION: (i32, i32) = (13, library::NVRTC_MINOR);

/// A source, compiled for one architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    pub source_name: String,
    pub arch: Arch,
    /// CUBIN that the driver loads. Empty if the compiler does not support the architecture; then the driver
    /// compiles the PTX.
    pub cubin: Vec<u8>,
    /// PTX of the same code, for the interpreter and for the driver. Empty in shipped kernels.
    pub ptx: String,
    /// Log of the compiler: registers, shared memory and spills of each kernel.
    pub log: String,
}

/// The loaded library.
#[derive(Debug, Clone)]
struct Nvrtc {
    functions: Functions,
    found_at: String,
    version: (i32, i32),
    /// Compute capabilities that it compiles for: ten times the major plus the minor number.
    architectures: Vec<u32>,
}

/// NVRTC, kernels that were compiled elsewhere, or both.
#[derive(Debug)]
pub struct Compiler {
    /// The library, or the reason why there is none.
    nvrtc: Result<Nvrtc, CudaError>,
    prebuilt: Option<PathBuf>,
}

/// Environment variable with the folder of precompiled kernels, as
/// [`CubinCache::prebuild`] fills it.
const PREBUILT: &str = "KVASIR_CUBINS";

/// Output of the compiler for a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    /// CUBIN, and the PTX that it comes from.
    MachineCode(Arch),
    /// PTX of an older architecture, for a device that is newer than the compiler. The driver compiles it.
    Ptx(u32),
}

impl Nvrtc {
    /// Looks for the library once and keeps the result.
    fn here() -> Result<Self, CudaError> {
        static FOUND: OnceLock<Result<Nvrtc, CudaError>> = OnceLock::new();
        FOUND.get_or_init(Self::find).clone()
    }

    fn find() -> Result<Self, CudaError> {
        let (loaded, found_at) = library::load_nvrtc()?;
        let functions = Functions::load(loaded)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to local integers.
        check("nvrtcVersion", unsafe { (functions.version)(&raw mut major, &raw mut minor) })?;
        if major != 13 {
            let found = format!("{major}.{minor}, at {found_at}");
            return Err(CudaError::Version { library: "NVRTC", found, required: "13.x, best 13.0" });
        }
        if minor != library::NVRTC_MINOR {
            tracing::info!(
                found = format!("{major}.{minor}"),
                "this NVRTC is newer than 13.0, the version that the kernels were tested with"
            );
        }
        let mut count = 0;
        // SAFETY: the pointer is to a local integer.
        check("nvrtcGetNumSupportedArchs", unsafe { (functions.count_architectures)(&raw mut count) })?;
        let mut architectures: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the buffer has as many integers as the library has just reported.
        check("nvrtcGetSupportedArchs", unsafe { (functions.architectures)(architectures.as_mut_ptr()) })?;
        let architectures = architectures.into_iter().map(c_int::unsigned_abs).collect();
        Ok(Self { functions, found_at, version: (major, minor), architectures })
    }

    fn compile(&self, source: &Source, arch: Arch) -> Result<Compiled, CudaError> {
        let target = target(&self.architectures, arch);
        let program = OwnedProgram::new(&self.functions, source)?;
        let options: Vec<CString> = options(target).into_iter().map(c_string).collect::<Result<_, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is live; there are as many strings as the call gets, and they outlive the
        // call.
        let status =
            unsafe { (self.functions.compile)(program.program, pointers.len() as c_int, pointers.as_ptr()) };
        let Functions { log_size, log, ptx_size, ptx, cubin_size, cubin, .. } = self.functions;
        let log = text(program.bytes("nvrtcGetProgramLog", log_size, log)?);
        if status == COMPILATION {
            return Err(CudaError::Compile { source_name: source.name.into(), arch: arch.to_string(), log });
        }
        check("nvrtcCompileProgram", status)?;
        let ptx = text(program.bytes("nvrtcGetPTX", ptx_size, ptx)?);
        let cubin = match target {
            Target::MachineCode(_) => program.bytes("nvrtcGetCUBIN", cubin_size, cubin)?,
            Target::Ptx(_) => Vec::new(),
        };
        Ok(Compiled { source_name: source.name.into(), arch, cubin, ptx, log })
    }
}

impl Compiler {
    /// Looks for the library, and for kernels in the folder that `KVASIR_CUBINS` names. With that folder, a
    /// missing or broken library is no error.
    ///
    /// # Errors
    /// [`CudaError::Missing`], [`CudaError::Version`] and [`CudaError::Call`] if there is neither.
    pub fn find() -> Result<Self, CudaError> {
        let prebuilt = std::env::var_os(PREBUILT).map(PathBuf::from).filter(|folder| folder.is_dir());
        Self::of(Nvrtc::here(), prebuilt)
    }

    fn of(nvrtc: Result<Nvrtc, CudaError>, prebuilt: Option<PathBuf>) -> Result<Self, CudaError> {
        match (&nvrtc, &prebuilt) {
            (Err(error), None) => return Err(error.clone()),
            (Err(CudaError::Missing { .. }), Some(_)) | (Ok(_), _) => {}
            (Err(error), Some(_)) => {
                tracing::warn!(%error, "NVRTC cannot be used; kernels are loaded from {PREBUILT} only");
            }
        }
        Ok(Self { nvrtc, prebuilt })
    }

    /// Returns (major, minor) of the library, or without one of the compiler of the shipped kernels.
    pub fn version(&self) -> (i32, i32) {
        self.nvrtc.as_ref().map_or(CHECKED_VERSION, |nvrtc| nvrtc.version)
    }

    /// Returns the folder of the library, or text about the loader's path.
    pub fn found_at(&self) -> String {
        match (&self.nvrtc, &self.prebuilt) {
            (Ok(nvrtc), _) => nvrtc.found_at.clone(),
            (Err(_), Some(folder)) => format!("{} (compiled before, no NVRTC here)", folder.display()),
            (Err(error), None) => error.to_string(),
        }
    }

    /// Returns for each checked architecture the number of sources with a valid precompiled file where
    /// [`Self::compile`] looks. Empty if no folder was named.
    pub fn prebuilt(&self) -> Vec<(Arch, usize)> {
        if self.prebuilt.is_none() {
            return Vec::new();
        }
        let there = |source: &Source, arch| self.came_compiled(source, arch).is_some();
        let count = |arch| super::source::all(arch).filter(|source| there(source, arch)).count();
        Arch::CHECKED.map(|arch| (arch, count(arch))).into()
    }

    /// Reads a precompiled source. It may come from this library's version, or from the version that the
    /// kernels were checked with, so that a newer compiler on this machine does not force a recompilation.
    fn came_compiled(&self, source: &Source, arch: Arch) -> Option<Compiled> {
        let folder = self.prebuilt.as_ref()?;
        let read = |version| cache::read(&cache::path(folder, version, source, arch), source, arch);
        read(self.version()).or_else(|| read(CHECKED_VERSION))
    }

    /// Compiles a source, unless there is a precompiled one.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's log; the error of the missing compiler, if there is no
    /// precompiled source for this architecture.
    pub fn compile(&self, source: &Source, arch: Arch) -> Result<Compiled, CudaError> {
        match (self.came_compiled(source, arch), &self.nvrtc) {
            (Some(found), _) => Ok(found),
            (None, Ok(nvrtc)) => nvrtc.compile(source, arch),
            (None, Err(absent)) => Err(absent.clone()),
        }
    }
}

/// Returns the target for a device of `arch`. `supported`: the numbers of the compiler's architectures.
fn target(supported: &[u32], arch: Arch) -> Target {
    let older = supported.iter().copied().filter(|number| *number < arch.number()).max();
    match older {
        Some(older) if !supported.contains(&arch.number()) => Target::Ptx(older),
        // An architecture older than all known ones is refused by the compiler itself.
        _ => Target::MachineCode(arch),
    }
}

/// Returns the compiler's options.
fn options(target: Target) -> Vec<String> {
    let (architecture, machine_code) = match target {
        Target::MachineCode(arch) => (arch.to_string(), true),
        Target::Ptx(number) => (format!("compute_{number}"), false),
    };
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".into(),
        "-default-device".into(),
        "--generate-line-info".into(),
    ];
    if machine_code {
        options.push("--ptxas-options=-v".into());
    }
    options
}

/// Returns the options that are part of a cached file's name. A compiler that does not
/// support the architecture uses other options. These depend on its version, which is part of the name too.
fn named_options(arch: Arch) -> Vec<String> {
    options(Target::MachineCode(arch))
}

/// A program that is destroyed on drop.
struct OwnedProgram<'a> {
    functions: &'a Functions,
    program: nvrtcProgram,
}

impl<'a> OwnedProgram<'a> {
    fn new(functions: &'a Functions, source: &Source) -> Result<Self, CudaError> {
        let (body, name) = (c_string(source.text.into())?, c_string(source.name.into())?);
        let c_strings = |texts: [&str; HEADERS.len()]| -> Result<Vec<CString>, CudaError> {
            texts.into_iter().map(|text| c_string(text.into())).collect()
        };
        let names = c_strings(HEADERS.map(|(name, _)| name))?;
        let texts = c_strings(HEADERS.map(|(_, text)| text))?;
        let pointers = |strings: &[CString]| strings.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (names_at, texts_at) = (pointers(&names), pointers(&texts));
        let mut program = std::ptr::null_mut();
        // SAFETY: strings that end with a zero, and as many headers as names. NVRTC copies all of them.
        check("nvrtcCreateProgram", unsafe {
            (functions.create)(
                &raw mut program,
                body.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as c_int,
                texts_at.as_ptr(),
                names_at.as_ptr(),
            )
        })?;
        Ok(Self { functions, program })
    }

    /// Returns the result of one pair of calls: one for the length, one for the bytes.
    fn bytes(
        &self,
        call: &'static str,
        size: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> u32,
        get: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> u32,
    ) -> Result<Vec<u8>, CudaError> {
        let mut len = 0;
        // SAFETY: the program is live, and `len` is a local variable.
        check(call, unsafe { size(self.program, &raw mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the buffer has as many bytes as the library has just reported.
        check(call, unsafe { get(self.program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: created by nvrtcCreateProgram and destroyed nowhere else.
        unsafe { (self.functions.destroy)(&raw mut self.program) };
    }
}

const SUCCESS: u32 = nvrtcResult::NVRTC_SUCCESS as u32;
const COMPILATION: u32 = nvrtcResult::NVRTC_ERROR_COMPILATION as u32;

fn check(call: &'static str, status: u32) -> Result<(), CudaError> {
    match status {
        SUCCESS => Ok(()),
        other => Err(CudaError::Call { call, status: format!("NVRTC error {other}") }),
    }
}

fn c_string(text: String) -> Result<CString, CudaError> {
    CString::new(text).map_err(|_| CudaError::Invalid { what: "a source with a zero byte".into() })
}

/// Cuts the text at the zero that NVRTC ends it with.
fn text(mut bytes: Vec<u8>) -> String {
    bytes.truncate(bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len()));
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::super::source::ROWWISE;
    use super::*;

    #[test]
    fn without_nvrtc_only_precompiled_kernels_are_used() {
        let folder = std::env::temp_dir().join(format!("kvasir-prebuilt-{}", std::process::id()));
        let compiler = Compiler::find().unwrap();
        let made = CubinCache::new(&folder).compile(&compiler, &ROWWISE, Arch::SM_90).unwrap();
        let old = CudaError::Version { library: "NVRTC", found: "12.8".into(), required: "13.x" };
        let broken = CudaError::Call { call: "dlopen", status: "cannot load it".into() };
        let absent = CudaError::Missing { library: "NVRTC", looked_for: vec!["everywhere".into()] };
        for error in [absent, broken, old] {
            assert_eq!(Compiler::of(Err(error.clone()), None).unwrap_err(), error);
            let alone = Compiler::of(Err(error.clone()), Some(folder.clone())).unwrap();
            if compiler.version() == CHECKED_VERSION {
                assert_eq!(alone.prebuilt(), [(Arch::SM_90, 1), (Arch::SM_121A, 0)]);
                assert_eq!(alone.compile(&ROWWISE, Arch::SM_90), Ok(made.clone()));
            }
            assert_eq!(alone.compile(&ROWWISE, Arch::SM_121A), Err(error));
        }
        // A compiler of another version uses precompiled kernels too.
        let newer = Nvrtc { version: (13, 99), ..Nvrtc::here().unwrap() };
        let both = Compiler::of(Ok(newer), Some(folder.clone())).unwrap();
        if compiler.version() == CHECKED_VERSION {
            let marked = both.compile(&ROWWISE, Arch::SM_90).unwrap();
            assert_eq!(marked, made);
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn an_unknown_architecture_gets_ptx_of_the_newest_older_one() {
        let supported = [75, 90, 120, 121];
        for (arch, expected) in [
            (Arch::SM_90, Target::MachineCode(Arch::SM_90)),
            (Arch::SM_121A, Target::MachineCode(Arch::SM_121A)),
            (Arch::of(13, 0), Target::Ptx(121)),
            (Arch::of(10, 3), Target::Ptx(90)),
            (Arch::of(7, 0), Target::MachineCode(Arch::of(7, 0))),
        ] {
            assert_eq!(target(&supported, arch), expected, "{arch}");
        }
        assert_eq!(target(&[], Arch::SM_90), Target::MachineCode(Arch::SM_90));
        let newest = Nvrtc::here().unwrap();
        let unknown = Arch::of(90, 0);
        let made = newest.compile(&ROWWISE, unknown).unwrap();
        assert!(made.cubin.is_empty() && made.arch == unknown);
        let highest = newest.architectures.iter().max().unwrap();
        assert!(made.ptx.contains(&format!(".target sm_{highest}")), "{}", &made.ptx[..200]);
    }
}
