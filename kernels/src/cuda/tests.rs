//! What needs NVRTC but no GPU.

use super::{Arch, Compiled, Compiler, CubinCache, source};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

mod gate;
pub(crate) mod sim;

/// A compiled source: once in a process, and kept among what is built, since compiling all takes half a minute.
pub(crate) fn compiled(source: &source::Source, arch: Arch) -> &'static Compiled {
    static COMPILED: Mutex<BTreeMap<String, &'static OnceLock<Compiled>>> = Mutex::new(BTreeMap::new());
    let cell = {
        let mut all = COMPILED.lock().unwrap();
        *all.entry(format!("{} {arch}", source.name)).or_insert_with(|| Box::leak(Box::default()))
    };
    cell.get_or_init(|| {
        let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/cubins");
        CubinCache::new(kept).compile(&Compiler::find().unwrap(), source, arch).unwrap()
    })
}

#[test]
fn every_source_compiles_for_every_checked_architecture() {
    for source in source::ALL {
        for arch in Arch::CHECKED {
            let compiled = compiled(source, arch);
            assert!(compiled.cubin.starts_with(b"\x7fELF"), "{}", compiled.log);
            for kernel in source.kernels {
                assert!(compiled.ptx.contains(&format!(".entry {kernel}(")), "{kernel} in {}", source.name);
            }
        }
    }
}
