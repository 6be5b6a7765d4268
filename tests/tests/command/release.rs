//! The files of a release: the same bytes twice, a signature that a changed byte breaks, an installation into an
//! empty root, and units that systemd accepts.

use kvasir_cluster_tests::binary;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// Exposure by `systemd-analyze security`, times ten: 100 is a unit without any protection.
const MOST_EXPOSED: &str = "20";
const DIGEST: &str = "sha256:3bf4c53800dbdf29e5c237332b4026be70fc04525727b4a5b88e5438c0f19274";

fn run(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).current_dir(binary::workspace()).output();
    output.unwrap_or_else(|error| panic!("{program}: {error}; `./test setup` installs it"))
}

fn must(program: &str, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn arch() -> &'static str {
    if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" }
}

/// An output of deploy/images/build: the binary under test, and two layouts with an index.
fn built(dir: &Path) -> PathBuf {
    let from = dir.join("images");
    std::fs::create_dir_all(from.join("bin")).unwrap();
    std::fs::copy(binary::kvasir().unwrap(), from.join(format!("bin/kvasir-cuda-{}", arch()))).unwrap();
    for kind in ["cpu", "cuda"] {
        let layout = from.join(format!("kvasir-{kind}"));
        std::fs::create_dir(&layout).unwrap();
        let tagged = |tag: &str, digest: &str| serde_json::json!({"digest": digest, "annotations": {"org.opencontainers.image.ref.name": tag}});
        let index = serde_json::json!({"manifests": [tagged("amd64", "sha256:0"), tagged("latest", DIGEST)]});
        std::fs::write(layout.join("index.json"), index.to_string()).unwrap();
    }
    from
}

/// All files of a folder by name.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .collect()
}

/// A release signed by a key of this test, made twice, and its public key.
fn release() -> (TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let from = built(dir.path());
    let [public, secret] = ["key.pub", "key"].map(|name| dir.path().join(name));
    must("minisign", &["-G", "-W", "-p", text(&public), "-s", text(&secret)]);
    let outs = ["first", "second"].map(|name| dir.path().join(name));
    for out in &outs {
        must(
            "deploy/release",
            &[
                "--from",
                text(&from),
                "--arch",
                arch(),
                "--registry",
                "images.example/team",
                "--key",
                text(&secret),
                "--out",
                text(out),
            ],
        );
    }
    let [first, second] = outs.each_ref().map(|out| files(out));
    assert!(first.keys().eq(second.keys()), "{:?} {:?}", first.keys(), second.keys());
    for (name, bytes) in &first {
        assert!(*bytes == second[name], "{name} differs between two runs");
    }
    let [out, _] = outs;
    (dir, out, public)
}

fn flip_a_byte(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_release_is_reproducible_signed_and_installs_into_an_empty_root() {
    let (dir, out, public) = release();
    let version = env!("CARGO_PKG_VERSION");
    let name = format!("kvasir-{version}-linux-{}", arch());
    let tarball = out.join(format!("{name}.tar.gz"));
    let images = std::fs::read_to_string(out.join("images.yaml")).unwrap();
    for image in ["images.example/team/kvasir", "images.example/team/kvasir-cuda"] {
        let named = format!("newName: {image}\n  digest: {DIGEST}\n");
        assert!(images.contains(&named), "{images}");
    }

    installs(&dir.path().join("root"), &tarball);

    let signature = || run("minisign", &["-V", "-p", text(&public), "-m", text(&out.join("SHA256SUMS"))]);
    let sums = || Command::new("sha256sum").args(["-c", "SHA256SUMS"]).current_dir(&out).output().unwrap();
    let verified = signature();
    let comment = String::from_utf8_lossy(&verified.stdout).into_owned();
    assert!(verified.status.success() && comment.contains(&format!("kvasir {version}")), "{comment}");
    assert!(sums().status.success());
    flip_a_byte(&tarball);
    assert!(!sums().status.success(), "a changed tarball passes");
    flip_a_byte(&out.join("SHA256SUMS"));
    assert!(!signature().status.success(), "changed checksums pass");
}

/// Installs a tarball into an empty root, as the guide does, and runs the binary there.
fn installs(root: &Path, tarball: &Path) {
    let local = root.join("usr/local");
    std::fs::create_dir_all(&local).unwrap();
    must("tar", &["-xzf", text(tarball), "-C", text(&local), "--strip-components", "1"]);
    let kvasir = local.join("bin/kvasir");
    assert_eq!(std::fs::metadata(&kvasir).unwrap().mode() & 0o7777, 0o755);
    let mut command = Command::new(&kvasir);
    // As root in a file system of nothing but the installation and the libraries of the system.
    if std::fs::metadata("/proc/self").unwrap().uid() == 0 {
        let libraries = must("ldd", &[text(&kvasir)]);
        for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
            let to = root.join(library.trim_start_matches('/'));
            std::fs::create_dir_all(to.parent().unwrap()).unwrap();
            std::fs::copy(library, to).unwrap();
        }
        command = Command::new("chroot");
        command.args([text(root), "/usr/local/bin/kvasir"]);
    }
    let output = command
        .arg("--version")
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin")
        .current_dir(root)
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(stdout.trim(), format!("kvasir {}", env!("CARGO_PKG_VERSION")), "{output:?}");

    for file in [
        "share/man/man1/kvasir.1.gz",
        "share/man/man1/kvasir-keys-create.1.gz",
        "share/bash-completion/completions/kvasir",
        "share/zsh/site-functions/_kvasir",
        "share/fish/vendor_completions.d/kvasir.fish",
        "share/kvasir/sbom.cdx.json",
        "share/doc/kvasir/LICENSE",
        "lib/sysusers.d/kvasir.conf",
    ] {
        let path = local.join(file);
        assert!(path.metadata().is_ok_and(|file| file.len() > 0 && file.mode() & 0o777 == 0o644), "{file}");
    }
    for role in ["coordinator", "worker"] {
        let settings = local.join(format!("share/doc/kvasir/{role}.toml"));
        let checked = must(text(&kvasir), &[role, "--config", text(&settings), "--check-config"]);
        assert!(checked.contains("identity = \"/var/lib/kvasir/"), "{checked}");
    }
    units_are_accepted(root, &local.join("lib/systemd/system"));
}

/// Both units are valid for systemd and at most as exposed as the limit.
fn units_are_accepted(root: &Path, units: &Path) {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        println!("not checked by systemd-analyze, which is not here");
        return;
    }
    // Targets and slices that the units refer to.
    let system = root.join("usr/lib/systemd/system");
    std::fs::create_dir_all(&system).unwrap();
    for entry in std::fs::read_dir("/usr/lib/systemd/system").unwrap().flatten() {
        if entry.path().extension().is_some_and(|end| end == "target" || end == "slice") {
            std::fs::copy(entry.path(), system.join(entry.file_name())).unwrap();
        }
    }
    for unit in ["kvasir-coordinator.service", "kvasir-worker.service"] {
        let verify = ["--root", text(root), "--man=no", "--recursive-errors=no", "verify", unit];
        let output = run("systemd-analyze", &verify);
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && complaints.is_empty(), "{unit}: {complaints}");
        let path = units.join(unit);
        must(
            "systemd-analyze",
            &["security", "--offline=true", &format!("--threshold={MOST_EXPOSED}"), text(&path)],
        );
    }
}

/// A unit's limits fit the program's: the stop lasts longer than a drain, and the settings' exit codes end it.
#[test]
fn units_fit_the_program() {
    for role in ["coordinator", "worker"] {
        let path = binary::workspace().join(format!("deploy/systemd/kvasir-{role}.service"));
        let unit = std::fs::read_to_string(path).unwrap();
        let value = |key: &str| {
            let found = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
            found.unwrap_or_else(|| panic!("{role} has no {key}"))
        };
        let settings = binary::workspace().join(format!("deploy/systemd/{role}.toml"));
        let checked =
            must(text(&binary::kvasir().unwrap()), &[role, "--config", text(&settings), "--check-config"]);
        let drain = checked.lines().find_map(|line| line.strip_prefix("drain_timeout = \"")).unwrap();
        let drain: u32 = drain.trim_end_matches("s\"").parse().unwrap();
        assert!(value("TimeoutStopSec").parse::<u32>().unwrap() >= drain + 15, "{role}");
        assert_eq!(value("RestartPreventExitStatus"), "2 64");
        let start = format!("/usr/local/bin/kvasir {role} --config /etc/kvasir/{role}.toml");
        assert_eq!(value("ExecStart"), start);
    }
}
