//! Container images under the settings of Kubernetes' restricted pods, run by runc. `./test images` builds
//! the images first; without them these tests do not run.

mod names;

use kvasir_cluster_tests::file_server::FileServer;
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

/// The user of the images.
const USER: u32 = 65532;
const QEMU: &str = "/usr/bin/qemu-aarch64-static";
/// The node's own directory in an image.
const HOME: &str = "/var/lib/kvasir";

/// Directory of the images built by `./test images`.
fn images() -> PathBuf {
    binary::target().join("images")
}

fn podman() -> Command {
    let storage = images().join("podman");
    let mut command = Command::new("podman");
    command.args(["--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "none"]);
    command.args(["--storage-driver", "vfs", "--root"]).arg(storage.join("root"));
    command.arg("--runroot").arg(storage.join("run")).stdin(Stdio::null());
    command
}

/// Loads an image of an architecture, once.
fn image(kind: &str, arch: &str) -> String {
    let name = format!("localhost/kvasir-{kind}:{arch}");
    static LOADING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _lock = LOADING.lock().unwrap();
    let from = format!("oci:{}:{arch}", images().join(format!("kvasir-{kind}")).display());
    let pulled = podman().args(["pull", "--quiet", &from]).output().unwrap();
    let id = text(&pulled);
    assert!(pulled.status.success(), "{}: run `./test images`", String::from_utf8_lossy(&pulled.stderr));
    assert!(podman().args(["tag", &id, &name]).status().unwrap().success());
    name
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// `podman run` as a restricted pod: no capabilities, no new privileges, the runtime's seccomp filter, a
/// read-only root. Uses this host's network, so that tests can reach the ports.
fn restricted(name: &str, mounts: &[(&Path, &str, bool)]) -> Command {
    let mut command = podman();
    command.args([
        "run",
        "--rm",
        "--name",
        name,
        "--network",
        "host",
        "--read-only",
        "--read-only-tmpfs=false",
    ]);
    command.args(["--cap-drop", "all", "--security-opt", "no-new-privileges"]);
    // Without these, runc requests more than a machine without CAP_SYS_RESOURCE can grant.
    command.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]);
    for (from, to, writable) in mounts {
        let mode = if *writable { "rw" } else { "ro" };
        command.arg("-v").arg(format!("{}:{to}:{mode}", from.display()));
    }
    command
}

fn unique_name() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    format!("kvasir-test-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Runs a container until it exits.
fn run(image: &str, mounts: &[(&Path, &str, bool)], more: &[&str], arguments: &[&str]) -> Output {
    restricted(&unique_name(), mounts).args(more).arg(image).args(arguments).output().unwrap()
}

/// A container that runs until this is dropped.
struct Container {
    name: String,
    process: Child,
    /// The node's announcement.
    node: Value,
}

impl Container {
    /// Starts a node and waits for its announcement.
    fn start(image: &str, mounts: &[(&Path, &str, bool)], more: &[&str], arguments: &[&str]) -> Self {
        let name = unique_name();
        let mut command = restricted(&name, mounts);
        command.args(more).arg(image).args(arguments).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let mut container = Self { name, process, node: Value::Null };
        container.node = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        container
    }

    fn address(&self, port: &str) -> SocketAddr {
        self.node[port].as_str().unwrap().parse().unwrap()
    }

    /// Process id of its first process, on this host.
    fn pid(&self) -> u32 {
        let inspected =
            podman().args(["inspect", "--format", "{{.State.Pid}}", &self.name]).output().unwrap();
        text(&inspected).parse().unwrap()
    }

    fn until_ready(&self) {
        let ops = self.address("ops");
        let ready = || http::get(ops, "/readyz").is_ok_and(|answer| answer.status == 200).then_some(());
        wait::until("the node is ready", binary::NODE_TIMEOUT, ready).unwrap();
    }

    fn expect_an_answer(&self) {
        let body = json!({"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0});
        let answer = http::post(self.address("http"), "/v1/completions", &body).unwrap().ok().unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // Fails only if the container has exited.
        let _ = podman().args(["kill", &self.name]).output();
        let _ = self.process.wait();
    }
}

/// A directory that the image's user can write.
fn volume() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    give(dir.path());
    dir
}

/// Changes the owner of a directory and its contents to the image's user.
fn give(path: &Path) {
    chown(path, Some(USER), Some(USER)).unwrap();
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            give(&entry.unwrap().path());
        }
    }
}

/// The tiny model in its own directory.
fn model() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(crate::tiny_model(), dir.path().join("tiny.gguf")).unwrap();
    give(dir.path());
    dir
}

/// A directory with a stub `libcuda.so.1` that reports a device of an architecture.
fn stub_driver(arch: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/network/stub_libcuda.c");
    let mut compiler = Command::new(if arch == "arm64" { "aarch64-linux-gnu-gcc" } else { "cc" });
    compiler.args(["-shared", "-fPIC", "-o"]).arg(dir.path().join("libcuda.so.1")).arg(source);
    assert!(compiler.status().unwrap().success());
    dir
}

/// Directory where NVIDIA's runtime mounts the driver in a Debian-based image.
fn driver_path(arch: &str) -> &'static str {
    match arch {
        "arm64" => "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
        _ => "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    }
}

/// An image's mounted files.
struct Mounted {
    image: String,
    path: PathBuf,
}

impl Mounted {
    fn of(image: &str) -> Self {
        let mounted = podman().args(["image", "mount", image]).output().unwrap();
        assert!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
        Self { image: image.to_owned(), path: text(&mounted).into() }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = podman().args(["image", "unmount", &self.image]).output();
    }
}

const ALONE: [&str; 9] =
    ["worker", "--http", "127.0.0.1:0", "--ops", "127.0.0.1:0", "--threads", "1", "--kv-bytes", "64MiB"];

#[test]
#[ignore = "needs images: ./test images"]
fn k8s_image_hardening() {
    let (image, model, home) = (image("cpu", "amd64"), model(), volume());
    let mounts = [(model.path(), "/models", false), (home.path(), HOME, true)];
    let arguments = [&ALONE[..], &["--model", "/models/tiny.gguf"]].concat();
    let node = Container::start(&image, &mounts, &[], &arguments);
    node.until_ready();
    node.expect_an_answer();
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.pid())).unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(&format!("{name}:"))).unwrap();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    assert_eq!((field("Uid"), field("Gid")), (USER.to_string(), USER.to_string()));
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&field(set), 16), Ok(0), "{set}");
    }
    assert_eq!((field("NoNewPrivs").as_str(), field("Seccomp").as_str()), ("1", "2"));
    let refused = run(&image, &mounts, &[], &["ca", "init", "--dir", "/ca", "--cluster", "c"]);
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && stderr.contains("Read-only file system"), "{stderr}");
    assert!(
        run(&image, &mounts, &[], &["ca", "init", "--dir", "/var/lib/kvasir/ca", "--cluster", "c"])
            .status
            .success()
    );
    let shell = run(&image, &mounts, &["--entrypoint", "/bin/sh"], &["-c", "true"]);
    assert!(!shell.status.success(), "there is a shell in the image");
    let bill =
        std::fs::read(format!("/proc/{}/root/usr/local/share/kvasir/sbom.cdx.json", node.pid())).unwrap();
    let bill: Value = serde_json::from_slice(&bill).unwrap();
    let components = bill["components"].as_array().unwrap();
    for linked in ["rustls", "libc6-dev"] {
        assert!(
            components.iter().any(|component| component["name"] == linked),
            "{linked} is not in the bill"
        );
    }
}

/// A static program cannot load libraries, not even those that NVIDIA's runtime mounts. It reports this and
/// continues.
#[test]
#[ignore = "needs images: ./test images"]
fn the_cpu_image_computes_on_the_cpu_also_where_a_driver_is_mounted() {
    let (image, model, home, driver) = (image("cpu", "amd64"), model(), volume(), stub_driver("amd64"));
    let library = driver.path().join("libcuda.so.1");
    let mounts = [
        (home.path(), HOME, true),
        (library.as_path(), driver_path("amd64"), false),
        (model.path(), "/models", false),
    ];
    let report = report_of(&run(&image, &mounts, &[], &["gpu-check", "--json"]));
    assert!(report["missing"][0].as_str().unwrap().contains("no CUDA driver here"), "{report}");
    let arguments = [&ALONE[..], &["--model", "/models/tiny.gguf", "--device", "auto"]].concat();
    let node = Container::start(&image, &mounts, &[], &arguments);
    node.until_ready();
    node.expect_an_answer();
}

#[test]
#[ignore = "needs images: ./test images"]
fn the_arm64_image_starts_and_computes_under_qemu() {
    let (image, model, home) = (image("cpu", "arm64"), model(), volume());
    let mounts =
        [(model.path(), "/models", false), (home.path(), HOME, true), (Path::new(QEMU), "/qemu", false)];
    let more = ["--entrypoint", "/qemu"];
    let version = run(&image, &mounts, &more, &["/usr/local/bin/kvasir", "--version"]);
    assert!(text(&version).starts_with("kvasir "), "{}", String::from_utf8_lossy(&version.stderr));
    // In one process: the emulator does not support all socket options of QUIC.
    let arguments = ["run", "/models/tiny.gguf", "-p", "hello there", "-n", "4", "--temperature", "0"];
    let computed = run(&image, &mounts, &more, &[&["/usr/local/bin/kvasir"][..], &arguments].concat());
    let stderr = String::from_utf8_lossy(&computed.stderr);
    assert!(computed.status.success() && stderr.contains("4 tokens generated"), "{stderr}");
}

/// Runs `kvasir gpu-check --json` in the `cuda` image of an architecture, with or without a stub driver.
/// Returns the report and stderr. The report ends with a failure, because a stub cannot compute.
fn gpu_check(arch: &str, driver: Option<(&TempDir, &str)>) -> (Value, String) {
    let (image, home) = (image("cuda", arch), volume());
    let library = driver.map(|(driver, _)| driver.path().join("libcuda.so.1"));
    let mut mounts = vec![(home.path(), HOME, true)];
    mounts.extend(library.iter().map(|library| (library.as_path(), driver_path(arch), false)));
    let gpu = driver.map(|(_, gpu)| format!("STUB_ARCH={gpu}"));
    let mut more = Vec::new();
    more.extend(gpu.iter().flat_map(|gpu| ["--env", gpu.as_str()]));
    let mut arguments = vec!["gpu-check", "--json"];
    if arch == "arm64" {
        mounts.push((Path::new(QEMU), "/qemu", false));
        more.extend(["--entrypoint", "/qemu"]);
        arguments.insert(0, "/usr/local/bin/kvasir");
    }
    let output = run(&image, &mounts, &more, &arguments);
    assert_eq!(output.status.code(), Some(1));
    (report_of(&output), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
#[ignore = "needs images: ./test images"]
fn the_cuda_image_opens_a_mounted_driver_and_reports_its_devices() {
    let (report, _) = gpu_check("amd64", None);
    assert!(report["missing"][0].as_str().unwrap().contains("no CUDA driver here"), "{report}");
    // NVIDIA's runtime looks for this file to choose where to mount the driver.
    let root = Mounted::of(&image("cuda", "amd64"));
    assert!(root.path.join("etc/debian_version").is_file());
    // No variable and no loader cache contains the driver's path.
    let (report, _) = gpu_check("amd64", Some((&stub_driver("amd64"), "121")));
    assert_eq!((&report["driver"], &report["missing"]), (&"13.0".into(), &json!([])), "{report}");
    let device = &report["devices"][0];
    assert_eq!((&device["name"], &device["arch"]), (&"A stub of a GPU".into(), &"sm_121a".into()));
    assert_eq!(report["nvrtc"]["version"], "13.0", "{report}");
    let found = report["nvrtc"]["found_at"].as_str().unwrap();
    assert!(found.starts_with("/usr/local/share/kvasir/cubin") && found.contains("no NVRTC"), "{found}");
    // Using the stub device fails with an error text.
    assert!(device["failed"].as_str().is_some_and(|why| why.contains("device memory")), "{report}");
}

/// The drivers of both architectures receive machine code from the image's own folder; nothing there could
/// compile it. A Spark is arm64 with sm_121a.
#[test]
#[ignore = "needs images: ./test images"]
fn the_cuda_images_have_every_kernel_for_both_architectures() {
    for image_arch in ["amd64", "arm64"] {
        let driver = stub_driver(image_arch);
        for (number, arch) in [("90", "sm_90a"), ("121", "sm_121a")] {
            let (report, stderr) = gpu_check(image_arch, Some((&driver, number)));
            let device = &report["devices"][0];
            assert_eq!(device["arch"], arch, "{report}");
            let prebuilt = report["nvrtc"]["prebuilt"].as_object().unwrap();
            assert_eq!(prebuilt.keys().collect::<Vec<_>>(), ["sm_121a", "sm_90a"]);
            let kernels = &prebuilt[arch];
            assert!(kernels["of"].as_u64().unwrap() > 10 && kernels["found"] == kernels["of"], "{kernels}");
            assert!(stderr.contains(&format!("the stub has loaded a module for sm_{number}")), "{stderr}");
            // The failure comes after the kernels were loaded.
            assert!(device["failed"].as_str().is_some_and(|why| why.contains("device memory")), "{report}");
        }
    }
    // An unsupported architecture gets the error that the compiler would be needed.
    let (report, _) = gpu_check("amd64", Some((&stub_driver("amd64"), "80")));
    let failed = report["devices"][0]["failed"].as_str().unwrap();
    assert!(failed.contains("no NVRTC here"), "{failed}");
}

/// The printed report of `gpu-check --json`.
fn report_of(output: &Output) -> Value {
    serde_json::from_str(&text(output))
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
#[ignore = "needs images: ./test images"]
fn a_pod_with_an_empty_volume_becomes_ready_by_a_fetch() {
    let (image, served, etc) = (image("cpu", "amd64"), model(), volume());
    let server = FileServer::start(served.path()).unwrap();
    // By a Service's name, as in a cluster: the static binary must resolve it without loading a library.
    let resolver = etc.path().join("resolv.conf");
    names::serve("files", &resolver);
    let address = server.url().replace("127.0.0.1", "files") + "/tiny.gguf";
    // As in the manifests: the Job writes the volume, and the serving pods read it.
    let (job, worker, models, downloads) = (volume(), volume(), volume(), volume());
    let mounts = |home: &TempDir, writable| {
        [
            (home.path().to_owned(), HOME, true),
            (models.path().to_owned(), "/var/lib/kvasir/models", writable),
            (downloads.path().to_owned(), "/var/lib/kvasir/downloads", writable),
            (resolver.clone(), "/etc/resolv.conf", false),
        ]
    };
    let more = ["--env", "KVASIR_ALLOW_HTTP=1"];
    let fetched = run(&image, &borrowed(&mounts(&job, true)), &more, &["models", "pull", &address]);
    assert!(fetched.status.success(), "{}", String::from_utf8_lossy(&fetched.stderr));
    assert!(text(&fetched).starts_with("/var/lib/kvasir/downloads/"), "{}", text(&fetched));
    let requests = server.requests().len();
    let arguments = [&ALONE[..], &["--model", &address]].concat();
    let node = Container::start(&image, &borrowed(&mounts(&worker, false)), &[], &arguments);
    node.until_ready();
    node.expect_an_answer();
    assert_eq!(server.requests().len(), requests, "what the fetch has left is served");
}

fn borrowed<'a>(mounts: &'a [(PathBuf, &'a str, bool)]) -> Vec<(&'a Path, &'a str, bool)> {
    mounts.iter().map(|(from, to, writable)| (from.as_path(), *to, *writable)).collect()
}

#[test]
#[ignore = "needs images: ./test images"]
fn a_pod_with_an_empty_volume_becomes_ready_from_a_peer_alone() {
    let (image, model) = (image("cpu", "amd64"), model());
    let identities = tempfile::tempdir().unwrap();
    let path = |name: &str| identities.path().join(name).to_str().unwrap().to_owned();
    binary::stdout(&["ca", "init", "--dir", &path("ca"), "--cluster", "pods"]).unwrap();
    for (role, node) in [("coordinator", "c0"), ("worker", "w0"), ("worker", "w1")] {
        let issue =
            ["ca", "issue", "--dir", &path("ca"), "--role", role, "--node", node, "--out", &path(node)];
        binary::stdout(&issue).unwrap();
    }
    give(identities.path());
    // A port that was free just now; no other process here takes ports.
    let quic = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let homes = [volume(), volume(), volume()];
    let start = |home: &TempDir, with_model: bool, arguments: &[&str]| {
        let mut mounts = vec![(home.path(), HOME, true), (identities.path(), "/identities", false)];
        if with_model {
            mounts.push((model.path(), "/models", false));
        }
        Container::start(&image, &mounts, &[], &[arguments, &["--ops", "127.0.0.1:0"]].concat())
    };
    let addresses = ["--identity", "/identities/c0", "--quic", &quic, "--http", "127.0.0.1:0"];
    let coordinator =
        start(&homes[0], true, &[&["coordinator", "--models", "/models/tiny.gguf"][..], &addresses].concat());
    let worker = |identity: &'static str| {
        let joined =
            ["--identity", identity, "--coordinators", &quic, "--quic", "127.0.0.1:0", "--threads", "1"];
        [&["worker", "--kv-bytes", "64MiB"][..], &joined]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let strings = |arguments: &[String], more: &[&str]| -> Vec<String> {
        arguments.iter().cloned().chain(more.iter().map(|more| (*more).to_owned())).collect()
    };
    let holder = strings(&worker("/identities/w0"), &["--model", "/models/tiny.gguf"]);
    let holder = start(&homes[1], true, &holder.iter().map(String::as_str).collect::<Vec<_>>());
    holder.until_ready();
    let peer = holder.node["quic"].as_str().unwrap();
    let receiver = strings(&worker("/identities/w1"), &["--model", "tiny", "--from", peer]);
    let receiver = start(&homes[2], false, &receiver.iter().map(String::as_str).collect::<Vec<_>>());
    receiver.until_ready();
    // Only the worker that started without a file remains.
    drop(holder);
    let answered = || {
        let body = json!({"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0});
        let answer = http::post(coordinator.address("http"), "/v1/completions", &body).ok()?;
        (answer.header("x-kvasir-worker") == Some("w1") && answer.status == 200).then_some(())
    };
    wait::until("w1 answers", binary::NODE_TIMEOUT, answered).unwrap();
}
