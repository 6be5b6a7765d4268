//! From CUDA C++ to PTX and CUBIN.

#![allow(unsafe_code)]

use super::source::{HEADERS, Source};
use super::{Arch, CudaError, library};
use cudarc::nvrtc::sys;
use std::ffi::{CString, c_char};
use std::path::PathBuf;

/// A source, compiled for one architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// Which source.
    pub source_name: String,
    /// What for.
    pub arch: Arch,
    /// What the driver loads.
    pub cubin: Vec<u8>,
    /// The same for readers and interpreters.
    pub ptx: String,
    /// What the compiler said: registers, shared memory and spills of each kernel.
    pub log: String,
}

/// NVRTC, kernels that it has compiled elsewhere, or both. There is one in a process.
#[derive(Debug)]
pub struct Compiler {
    version: (i32, i32),
    found_at: String,
    /// Why there is no library here, only what it has made.
    absent: Option<CudaError>,
    prebuilt: Option<PathBuf>,
}

/// Names a folder of compiled kernels that came with the program, as [`CubinCache::prebuild`](super::CubinCache::prebuild)
/// fills it.
const PREBUILT: &str = "KVASIR_CUBINS";

impl Compiler {
    /// Looks for the library, and for kernels in the folder that `KVASIR_CUBINS` names; these do without it.
    ///
    /// # Errors
    /// [`CudaError::Missing`] and [`CudaError::Version`].
    pub fn find() -> Result<Self, CudaError> {
        let prebuilt = std::env::var_os(PREBUILT).map(PathBuf::from).filter(|folder| folder.is_dir());
        let found_at = match (library::load_nvrtc(), &prebuilt) {
            (Ok(found_at), _) => found_at,
            (Err(absent @ CudaError::Missing { .. }), Some(folder)) => {
                let version = (13, library::NVRTC_MINOR);
                let found_at = format!("{} (compiled before, no NVRTC here)", folder.display());
                return Ok(Self { version, found_at, absent: Some(absent), prebuilt });
            }
            (Err(error), _) => return Err(error),
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is there; both point to integers of ours.
        check("nvrtcVersion", unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) })?;
        if major != 13 {
            let found = format!("{major}.{minor}, at {found_at}");
            return Err(CudaError::Version { library: "NVRTC", found, wanted: "13.x, best 13.0" });
        }
        if minor != library::NVRTC_MINOR {
            tracing::info!(
                found = format!("{major}.{minor}"),
                "this NVRTC is newer than 13.0, which the kernels were checked with"
            );
        }
        Ok(Self { version: (major, minor), found_at, absent: None, prebuilt })
    }

    /// Major and minor, of what is there or of what the kernels were compiled with.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The folder where the library was found, or words for the loader's path.
    pub fn found_at(&self) -> &str {
        &self.found_at
    }

    /// For each architecture that the kernels are checked for, how many of all sources came compiled by the version that
    /// is used here, whole and in the place where [`Self::compile`] looks; empty where no folder was named.
    pub fn prebuilt(&self) -> Vec<(Arch, usize)> {
        let Some(folder) = &self.prebuilt else { return Vec::new() };
        let there = |source: &Source, arch| {
            let path = super::cache::path(folder, self.version, source, arch);
            super::cache::read(&path, source, arch).is_some()
        };
        let count = |arch| super::source::all().filter(|source| there(source, arch)).count();
        Arch::CHECKED.map(|arch| (arch, count(arch))).into()
    }

    /// Compiles a source, unless it came compiled.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's words; [`CudaError::Missing`] where it came not compiled for this
    /// architecture and there is no compiler.
    pub fn compile(&self, source: &Source, arch: Arch) -> Result<Compiled, CudaError> {
        if let Some(found) = self.prebuilt.as_ref().and_then(|folder| {
            super::cache::read(&super::cache::path(folder, self.version, source, arch), source, arch)
        }) {
            return Ok(found);
        }
        if let Some(absent) = &self.absent {
            return Err(absent.clone());
        }
        let program = Program::new(source)?;
        let options: Vec<CString> = options(arch).into_iter().map(c_string).collect::<Result<_, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program lives; as many strings as it says, which outlive the call.
        let status = unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr()) };
        let log = text(program.bytes(
            "nvrtcGetProgramLog",
            sys::nvrtcGetProgramLogSize,
            sys::nvrtcGetProgramLog,
        )?);
        if status != sys::nvrtcResult::NVRTC_SUCCESS {
            return Err(CudaError::Compile { source_name: source.name.into(), arch, log });
        }
        let ptx = text(program.bytes("nvrtcGetPTX", sys::nvrtcGetPTXSize, sys::nvrtcGetPTX)?);
        let cubin = program.bytes("nvrtcGetCUBIN", sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN)?;
        Ok(Compiled { source_name: source.name.into(), arch, cubin, ptx, log })
    }
}

/// What the compiler is told.
pub(super) fn options(arch: Arch) -> [String; 5] {
    [
        format!("--gpu-architecture={arch}"),
        "--std=c++17".into(),
        "-default-device".into(),
        "--generate-line-info".into(),
        "--ptxas-options=-v".into(),
    ]
}

/// A program that is destroyed in the end.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: &Source) -> Result<Self, CudaError> {
        let (body, name) = (c_string(source.text.into())?, c_string(source.name.into())?);
        let c_strings = |texts: [&str; HEADERS.len()]| -> Result<Vec<CString>, CudaError> {
            texts.into_iter().map(|text| c_string(text.into())).collect()
        };
        let names = c_strings(HEADERS.map(|(name, _)| name))?;
        let texts = c_strings(HEADERS.map(|(_, text)| text))?;
        let pointers = |strings: &[CString]| strings.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (names_at, texts_at) = (pointers(&names), pointers(&texts));
        let mut program = std::ptr::null_mut();
        // SAFETY: strings that end with a zero, as many headers as names of them; NVRTC copies all of them.
        check("nvrtcCreateProgram", unsafe {
            sys::nvrtcCreateProgram(
                &raw mut program,
                body.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as i32,
                texts_at.as_ptr(),
                names_at.as_ptr(),
            )
        })?;
        Ok(Self(program))
    }

    /// What one pair of calls, for length and bytes, says of the program.
    fn bytes(
        &self,
        call: &'static str,
        size: unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult,
        get: unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult,
    ) -> Result<Vec<u8>, CudaError> {
        let mut len = 0;
        // SAFETY: the program lives and `len` is ours.
        check(call, unsafe { size(self.0, &raw mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: as many bytes as the library has just asked for.
        check(call, unsafe { get(self.0, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by nvrtcCreateProgram and destroyed nowhere else.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn check(call: &'static str, status: sys::nvrtcResult) -> Result<(), CudaError> {
    match status {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => Err(CudaError::Call { call, status: format!("{other:?}") }),
    }
}

fn c_string(text: String) -> Result<CString, CudaError> {
    CString::new(text).map_err(|_| CudaError::Invalid { what: "a source with a zero byte".into() })
}

/// Up to the zero that NVRTC ends texts with.
fn text(mut bytes: Vec<u8>) -> String {
    bytes.truncate(bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len()));
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::super::CubinCache;
    use super::super::source::ROWWISE;
    use super::*;

    #[test]
    fn without_the_library_what_it_has_made_is_taken_and_nothing_else() {
        let folder = std::env::temp_dir().join(format!("kvasir-prebuilt-{}", std::process::id()));
        let compiler = Compiler::find().unwrap();
        let made = CubinCache::new(&folder).compile(&compiler, &ROWWISE, Arch::SM_90).unwrap();
        let absent = CudaError::Missing { library: "NVRTC", looked_for: vec!["everywhere".into()] };
        let alone = Compiler {
            found_at: String::new(),
            absent: Some(absent.clone()),
            prebuilt: Some(folder.clone()),
            ..compiler
        };
        assert_eq!(alone.prebuilt(), [(Arch::SM_90, 1), (Arch::SM_121A, 0)]);
        assert_eq!(alone.compile(&ROWWISE, Arch::SM_90), Ok(made));
        assert_eq!(alone.compile(&ROWWISE, Arch::SM_121A), Err(absent));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
