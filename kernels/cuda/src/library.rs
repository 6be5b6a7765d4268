//! Locations of CUDA's libraries, and the versions that are supported.
//!
//! The search for NVRTC tries the folder that [`VARIABLE`] names, the loader's path, toolkits, and pip
//! wheels (`nvidia-cuda-nvrtc`) of virtual environments and of the system's Python. The first library that
//! can be loaded is used.

#![allow(unsafe_code)]

use super::CudaError;
use std::ffi::{CString, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

mod symbols;

pub(super) use symbols::{Loaded, functions};

/// Environment variable with a folder that contains `libnvrtc.so.13` and its builtins.
pub(super) const VARIABLE: &str = "KVASIR_CUDA_LIBRARIES";

/// Minor version of NVRTC 13 whose CUBINs every driver of the 13 line loads.
pub(super) const NVRTC_MINOR: i32 = 0;

/// Oldest supported driver: the first with CUDA 13.0 (driver 580), as `cuDriverGetVersion` counts.
pub(super) const DRIVER_VERSION: i32 = 13_000;

/// File names of the driver on the loader's path.
const DRIVER: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// Folders where containers, WSL and distributions install the driver outside the loader's path.
const DRIVER_FOLDERS: [&str; 3] =
    ["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/usr/lib/x86_64-linux-gnu/nvidia/current"];

/// Makes symbols visible to libraries that are loaded later. NVRTC finds its builtins this way.
const GLOBAL: libc::c_int = libc::RTLD_NOW | libc::RTLD_GLOBAL;

const NVRTC: &str = "libnvrtc.so.13";
/// NVRTC finds its builtins only among the libraries that are loaded already.
const BUILTINS: &str = "libnvrtc-builtins.so.13";
/// Name of a virtual environment that is searched for next to the executable and above; `./test` creates
/// one.
const OWN_ENVIRONMENT: &str = "cuda-venv";

/// Location of a library.
#[derive(Debug, Clone, PartialEq, Eq)]
enum LibraryLocation {
    Folder(PathBuf),
    LoaderPath,
}

/// Returns the locations to search for NVRTC, in order.
fn locations(variable: impl Fn(&str) -> Option<OsString>, executable: Option<&Path>) -> Vec<LibraryLocation> {
    let folder = |name: &str, inside: &str| variable(name).map(|path| PathBuf::from(path).join(inside));
    let mut folders =
        vec![folder(VARIABLE, "").map(LibraryLocation::Folder), Some(LibraryLocation::LoaderPath)];
    let toolkits = [folder("CUDA_PATH", "lib64"), Some("/usr/local/cuda/lib64".into())];
    folders.extend(toolkits.map(|path| path.map(LibraryLocation::Folder)));
    let around = |executable: &Path| {
        let above = executable.ancestors().skip(1).take(3);
        above.map(|folder| folder.join(OWN_ENVIRONMENT)).collect::<Vec<_>>()
    };
    let mut prefixes: Vec<PathBuf> =
        [folder("VIRTUAL_ENV", ""), folder("HOME", ".local")].into_iter().flatten().collect();
    prefixes.extend(["/usr/local".into(), "/usr".into()]);
    prefixes.extend(executable.map(around).unwrap_or_default());
    let wheels = prefixes.iter().flat_map(|prefix| wheels(prefix));
    folders.into_iter().flatten().chain(wheels.map(LibraryLocation::Folder)).collect()
}

/// Returns the folders where pip installs NVRTC under a prefix: one for each Python that has packages
/// there, or the pattern if there is none.
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

/// Finds and loads NVRTC, which stays loaded. Returns it with its location. A library that is found and
/// cannot be loaded is skipped.
///
/// # Errors
/// [`CudaError::Missing`]; the first [`CudaError::Call`] if a library was found and none could be loaded.
pub(super) fn load_nvrtc() -> Result<(Loaded, String), CudaError> {
    let executable = std::env::current_exe().ok();
    nvrtc_among(&locations(|name| std::env::var_os(name), executable.as_deref()))
}

fn nvrtc_among(locations: &[LibraryLocation]) -> Result<(Loaded, String), CudaError> {
    let mut broken = None;
    for location in locations {
        let loaded = match location {
            LibraryLocation::LoaderPath => open(Path::new(NVRTC), GLOBAL).ok(),
            LibraryLocation::Folder(folder) => {
                match builtins(folder).filter(|_| folder.join(NVRTC).is_file()) {
                    Some(builtins) => {
                        let library = folder.join(NVRTC);
                        let opened = open(&builtins, GLOBAL).and_then(|_| open(&library, GLOBAL));
                        opened.map_err(|error| broken.get_or_insert(error).clone()).ok()
                    }
                    None => None,
                }
            }
        };
        if let Some(loaded) = loaded {
            return Ok((loaded, location.to_string()));
        }
    }
    let looked_for = locations.iter().map(ToString::to_string).collect();
    Err(broken.unwrap_or(CudaError::Missing { library: "NVRTC", looked_for }))
}

/// Loads the driver.
///
/// # Errors
/// [`CudaError::Missing`].
pub(super) fn load_driver() -> Result<Loaded, CudaError> {
    let folders = DRIVER_FOLDERS.map(|folder| Path::new(folder).join(DRIVER[0]));
    let mut candidates = DRIVER.map(PathBuf::from).into_iter().chain(folders);
    if let Some(loaded) = candidates.find_map(|path| open(&path, libc::RTLD_NOW).ok()) {
        return Ok(loaded);
    }
    let mut looked_for: Vec<String> = DRIVER.map(|name| format!("{name} on the loader's path")).into();
    looked_for.extend(DRIVER_FOLDERS.map(str::to_owned));
    Err(CudaError::Missing { library: "CUDA driver", looked_for })
}

/// Returns the builtins in a folder, of any minor version.
fn builtins(folder: &Path) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(BUILTINS.as_bytes())))
        .collect();
    found.sort();
    // The longest name has the full version; the others are links to it.
    found.pop()
}

/// Loads a library, which stays loaded until the process ends.
pub(super) fn open(path: &Path, flags: libc::c_int) -> Result<Loaded, CudaError> {
    let failed = |status: String| CudaError::Call { call: "dlopen", status };
    let name =
        CString::new(path.as_os_str().as_bytes()).map_err(|_| failed("a path with a zero byte".into()))?;
    // SAFETY: the name ends with a zero. The handle is never closed, so no symbol of it dangles. The
    // initialisers that run are NVIDIA's.
    let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
    if handle.is_null() {
        return Err(failed(format!("cannot load {}", path.display())));
    }
    Ok(Loaded::new(handle))
}

impl std::fmt::Display for LibraryLocation {
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

    fn folder(path: impl Into<PathBuf>) -> LibraryLocation {
        LibraryLocation::Folder(path.into())
    }

    #[test]
    fn the_named_folder_is_searched_before_loader_path_toolkits_and_wheels() {
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
        let found = locations(variable, Some(&root.join("target/debug/deps/test")));
        let none_there = found.contains(&folder(
            root.join("target/debug/cuda-venv/lib/python3*/site-packages/nvidia/cu13/lib"),
        ));
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            found[..5],
            [
                folder("/named"),
                LibraryLocation::LoaderPath,
                folder("/toolkit/lib64"),
                folder("/usr/local/cuda/lib64"),
                folder(of_environment),
            ]
        );
        assert!(found.contains(&folder(own)) && none_there, "{found:?}");
    }

    #[test]
    fn a_folder_without_builtins_is_skipped() {
        assert_eq!(builtins(Path::new("/nowhere")), None);
    }

    #[test]
    fn a_library_that_cannot_be_loaded_does_not_hide_the_next_one() {
        let root = std::env::temp_dir().join(format!("kvasir-cuda-broken-{}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        for name in [NVRTC, "libnvrtc-builtins.so.13.0"] {
            std::fs::write(root.join(name), "no library").unwrap();
        }
        let broken = folder(&root);
        let alone = nvrtc_among(std::slice::from_ref(&broken)).unwrap_err();
        let whole = load_nvrtc().unwrap().1;
        let location = if whole.starts_with('/') { folder(&whole) } else { LibraryLocation::LoaderPath };
        let found = nvrtc_among(&[broken, location]).map(|(_, at)| at);
        std::fs::remove_dir_all(&root).unwrap();
        assert!(matches!(alone, CudaError::Call { call: "dlopen", .. }), "{alone}");
        assert_eq!(found, Ok(whole));
    }
}
