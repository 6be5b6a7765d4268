//! Where CUDA's libraries are: `KVASIR_CUDA_LIBRARIES`, the loader's path, a toolkit, pip wheels.

#![allow(unsafe_code)]

use super::CudaError;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Names a folder with `libnvrtc.so.13` and its builtins.
pub(crate) const VARIABLE: &str = "KVASIR_CUDA_LIBRARIES";

/// The libraries of one folder, in the order in which they have to be loaded: NVRTC finds its builtins only among those
/// that are loaded already.
const FILES: [&str; 2] = ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"];

/// Folders to look in, first to last.
fn folders() -> Vec<PathBuf> {
    let named = std::env::var_os(VARIABLE).map(PathBuf::from);
    let toolkit = std::env::var_os("CUDA_PATH").map(|path| PathBuf::from(path).join("lib64"));
    named.into_iter().chain(toolkit).chain([PathBuf::from("/usr/local/cuda/lib64")]).collect()
}

/// Loads NVRTC, so that it is found by its name afterwards.
///
/// # Errors
/// [`CudaError::Missing`].
pub(crate) fn load_nvrtc() -> Result<(), CudaError> {
    let folders = folders();
    let found = folders.iter().find(|folder| FILES.iter().all(|file| folder.join(file).is_file()));
    if let Some(folder) = found {
        for file in FILES {
            open_global(&folder.join(file))?;
        }
    }
    // SAFETY: it opens a library by name and closes it again; the library's initialisers are NVIDIA's.
    if unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Ok(());
    }
    let mut looked_for: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
    looked_for.push("libnvrtc.so.13 on the loader's path".into());
    Err(CudaError::Missing { library: "NVRTC", looked_for })
}

/// Loads a library for good, its symbols visible to what is loaded later.
fn open_global(path: &Path) -> Result<(), CudaError> {
    let failed = |status: String| CudaError::Call { call: "dlopen", status };
    let name =
        CString::new(path.as_os_str().as_bytes()).map_err(|_| failed("a path with a zero byte".into()))?;
    // SAFETY: the name ends with a zero; the handle is never closed, so nothing that is taken from it dangles.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        return Err(failed(format!("cannot load {}", path.display())));
    }
    Ok(())
}
