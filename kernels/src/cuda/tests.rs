//! What needs NVRTC but no GPU.

use super::{Arch, Compiler, source};

mod gate;

#[test]
fn every_source_compiles_for_every_checked_architecture() {
    let compiler = Compiler::find().unwrap();
    for source in source::ALL {
        for arch in Arch::CHECKED {
            let compiled = compiler.compile(source, arch).unwrap();
            assert!(compiled.cubin.starts_with(b"\x7fELF"), "{}", compiled.log);
            for kernel in source.kernels {
                assert!(compiled.ptx.contains(&format!(".entry {kernel}(")), "{kernel} in {}", source.name);
            }
        }
    }
}
