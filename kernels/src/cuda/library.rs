//! Where CUDA's libraries are, and which versions of them do.
//!
//! NVRTC is looked for in the folder that [`VARIABLE`] names, on the loader's path, in toolkits, among pip wheels
//! (`nvidia-cuda-nvrtc`) of virtual environments and of the system's Python. What is found first is taken, or refused.

#![allow(unsafe_code)]

use super::CudaError;
use std::ffi::{CString, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Names a folder with `libnvrtc.so.13` and its builtins.
pub(crate) const VARIABLE: &str = "KVASIR_CUDA_LIBRARIES";

/// The minor version of NVRTC 13 whose CUBINs every driver of the 13 line loads.
pub(crate) const NVRTC_MINOR: i32 = 0;

/// What the driver must be: the first that knows CUDA 13.0 (driver 580), as `cuDriverGetVersion` counts.
pub(crate) const DRIVER_VERSION: i32 = 13_000;

const NVRTC: &str = "libnvrtc.so.13";
/// NVRTC finds its builtins only among the libraries that are loaded already.
const BUILTINS: &str = "libnvrtc-builtins.so.13";
/// A virtual environment of this name is looked for around the executable; `./test` makes one.
const OWN_ENVIRONMENT: &str = "cuda-venv";

/// Where a library may be.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Folder(PathBuf),
    LoaderPath,
}

/// Places to look for NVRTC in, first to last.
fn places(variable: impl Fn(&str) -> Option<OsString>, executable: Option<&Path>) -> Vec<Place> {
    let folder = |name: &str, inside: &str| variable(name).map(|path| PathBuf::from(path).join(inside));
    let mut folders = vec![folder(VARIABLE, "").map(Place::Folder), Some(Place::LoaderPath)];
    let toolkits = [folder("CUDA_PATH", "lib64"), Some("/usr/local/cuda/lib64".into())];
    folders.extend(toolkits.map(|path| path.map(Place::Folder)));
    let around = |executable: &Path| {
        let above = executable.ancestors().skip(1).take(3);
        above.map(|folder| folder.join(OWN_ENVIRONMENT)).collect::<Vec<_>>()
    };
    let mut prefixes: Vec<PathBuf> =
        [folder("VIRTUAL_ENV", ""), folder("HOME", ".local")].into_iter().flatten().collect();
    prefixes.extend(["/usr/local".into(), "/usr".into()]);
    prefixes.extend(executable.map(around).unwrap_or_default());
    let wheels = prefixes.iter().flat_map(|prefix| wheels(prefix));
    folders.into_iter().flatten().chain(wheels.map(Place::Folder)).collect()
}

/// Folders where pip puts NVRTC under a prefix: one for each Python that has packages there, or the pattern of none.
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    let inside = Path::new("nvidia/cu13/lib");
    let lib = prefix.join("lib");
    let named = |entry: std::io::Result<std::fs::DirEntry>| Some(entry.ok()?.file_name());
    let mut pythons: Vec<_> = std::fs::read_dir(&lib)
        .into_iter()
        .flatten()
        .filter_map(named)
        .filter(|name| name.as_bytes().starts_with(b"python3"))
        .collect();
    pythons.sort();
    let packages = ["site-packages", "dist-packages"];
    let found: Vec<_> = pythons
        .iter()
        .flat_map(|python| packages.map(|packages| lib.join(python).join(packages).join(inside)))
        .filter(|folder| folder.is_dir())
        .collect();
    if found.is_empty() { vec![lib.join("python3*/site-packages").join(inside)] } else { found }
}

/// Loads NVRTC, so that it is found by its name afterwards, and says where it was. What is found stays for the process.
///
/// # Errors
/// [`CudaError::Missing`]; [`CudaError::Call`] for one that is there and cannot be loaded.
pub(crate) fn load_nvrtc() -> Result<String, CudaError> {
    static FOUND: OnceLock<Result<String, CudaError>> = OnceLock::new();
    FOUND.get_or_init(search).clone()
}

fn search() -> Result<String, CudaError> {
    let executable = std::env::current_exe().ok();
    let places = places(|name| std::env::var_os(name), executable.as_deref());
    for place in &places {
        match place {
            Place::LoaderPath => {
                if open_global(Path::new(NVRTC)).is_ok() {
                    return known(place);
                }
            }
            Place::Folder(folder) => {
                let Some(builtins) = builtins(folder).filter(|_| folder.join(NVRTC).is_file()) else {
                    continue;
                };
                open_global(&builtins)?;
                open_global(&folder.join(NVRTC))?;
                return known(place);
            }
        }
    }
    Err(CudaError::Missing { library: "NVRTC", looked_for: places.iter().map(ToString::to_string).collect() })
}

/// What was loaded must be what cudarc finds: its calls end the process where it finds nothing.
fn known(place: &Place) -> Result<String, CudaError> {
    // SAFETY: it opens a library by name and closes it again; the library's initialisers are NVIDIA's.
    if unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Ok(place.to_string());
    }
    Err(CudaError::Missing { library: "NVRTC", looked_for: vec![format!("what {place} should have given")] })
}

/// Loads the driver.
///
/// # Errors
/// [`CudaError::Missing`].
pub(crate) fn load_driver() -> Result<(), CudaError> {
    // SAFETY: it opens a library by name and closes it again; the library's initialisers are NVIDIA's.
    if unsafe { cudarc::driver::sys::is_culib_present() } {
        return Ok(());
    }
    let looked_for = ["libcuda.so", "libcuda.so.1"].map(|name| format!("{name} on the loader's path"));
    Err(CudaError::Missing { library: "CUDA driver", looked_for: looked_for.into() })
}

/// The builtins of whatever minor version lie in a folder.
fn builtins(folder: &Path) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(BUILTINS.as_bytes())))
        .collect();
    found.sort();
    // The longest name has the whole version; the others are links to it.
    found.pop()
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

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Folder(folder) => folder.display().fmt(f),
            Self::LoaderPath => write!(f, "{NVRTC} on the loader's path"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(path: impl Into<PathBuf>) -> Place {
        Place::Folder(path.into())
    }

    #[test]
    fn a_named_folder_comes_first_then_the_loader_toolkits_and_wheels() {
        let root = std::env::temp_dir().join(format!("kvasir-cuda-places-{}", std::process::id()));
        let of_environment = root.join("environment/lib/python3.11/site-packages/nvidia/cu13/lib");
        let own = root.join("target/cuda-venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        for path in [&of_environment, &own] {
            std::fs::create_dir_all(path).unwrap();
        }
        let variable = |name: &str| match name {
            VARIABLE => Some("/named".into()),
            "CUDA_PATH" => Some("/toolkit".into()),
            "VIRTUAL_ENV" => Some(root.join("environment").into_os_string()),
            _ => None,
        };
        let found = places(variable, Some(&root.join("target/debug/deps/test")));
        let none_there = found.contains(&folder(
            root.join("target/debug/cuda-venv/lib/python3*/site-packages/nvidia/cu13/lib"),
        ));
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            found[..5],
            [
                folder("/named"),
                Place::LoaderPath,
                folder("/toolkit/lib64"),
                folder("/usr/local/cuda/lib64"),
                folder(of_environment),
            ]
        );
        assert!(found.contains(&folder(own)) && none_there, "{found:?}");
    }

    #[test]
    fn a_folder_without_builtins_is_passed_over() {
        assert_eq!(builtins(Path::new("/nowhere")), None);
    }
}
