use super::super::device::record;
use super::*;
use fake::{EARLY, calls, fail, forget_failures};

mod fake;

/// Codes after which the process must end according to CUDA's documentation, and three undefined codes.
const STICKY: [u32; 24] = [
    4,
    46,
    201,
    214,
    220,
    226,
    700,
    702,
    709,
    710,
    714,
    715,
    716,
    717,
    718,
    719,
    721,
    802,
    810,
    909,
    999,
    722,
    5000,
    u32::MAX,
];

fn open() -> Gpu {
    forget_failures();
    Gpu::open_with(&fake::DRIVER, 0, Duration::from_secs(60)).unwrap()
}

fn compiled(cubin: &[u8], ptx: &str) -> Compiled {
    let (source_name, ptx, log) = ("a.cu".into(), ptx.into(), String::new());
    Compiled { source_name, arch: Arch::SM_90, cubin: cubin.into(), ptx, log }
}

#[test]
fn every_status_but_a_refusal_loses_the_device() {
    for code in STICKY {
        let mut gpu = open();
        fail("cuEventQuery", code);
        let error = gpu.synchronize().unwrap_err();
        assert!(matches!(error, CudaError::Lost { call: "cuEventQuery", .. }), "{code}: {error}");
        assert!(error.to_string().contains(&code.to_string()), "{error}");
        // The device stays lost, whatever the driver returns next.
        forget_failures();
        assert_eq!(gpu.allocate(1).unwrap_err(), error);
    }
    for (code, invalid) in [(1, true), (701, true), (209, false), (500, false), (801, false), (900, false)] {
        let mut gpu = open();
        fail("cuMemsetD8Async", code);
        let ptr = gpu.allocate(8).unwrap();
        match (gpu.fill(ptr, 0, 8).unwrap_err(), invalid) {
            (CudaError::Invalid { .. }, true) | (CudaError::Call { .. }, false) => {}
            (error, _) => panic!("{code}: {error}"),
        }
        forget_failures();
        gpu.fill(ptr, 0, 8).unwrap();
    }
}

#[test]
fn errors_of_launches_and_copies_lose_the_device_too() {
    for call in ["cuLaunchKernelEx", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuGraphLaunch"] {
        let mut gpu = open();
        let kernel = gpu.load(&compiled(b"\x7fELF", ""), &["a"]).unwrap()[0];
        let ptr = gpu.allocate(64).unwrap();
        let arguments = [ptr.into(), 1u32.into()];
        let launch =
            Launch { kernel, grid: [1; 3], block: [32, 1, 1], shared_bytes: 0, arguments: &arguments };
        let graph = record(&mut gpu, |device| device.launch(&launch)).unwrap().unwrap();
        fail(call, 226);
        let failed = match call {
            "cuLaunchKernelEx" => gpu.launch(&launch),
            "cuMemcpyHtoDAsync" => gpu.upload(ptr, &[1; 64]),
            "cuMemcpyDtoHAsync" => gpu.download(ptr, &mut [0; 64]),
            _ => gpu.replay(graph),
        };
        let error = failed.unwrap_err();
        assert_eq!(error, CudaError::Lost { call, status: "CUDA error 226".into() });
        forget_failures();
        assert_eq!(gpu.synchronize(), Err(error));
    }
}

#[test]
fn kernels_that_wait_for_earlier_ones_may_start_before_those_end() {
    for (arch, off, early) in
        [(Arch::SM_90, false, true), (Arch::SM_121A, true, false), (Arch::of(8, 9), false, false)]
    {
        let mut gpu = open();
        gpu.dependent_launches = !off;
        let kernel = gpu.load(&Compiled { arch, ..compiled(b"\x7fELF", "") }, &["a"]).unwrap()[0];
        let arguments = [0u32.into(), 1u32.into()];
        gpu.launch(&Launch {
            kernel,
            grid: [1; 3],
            block: [32, 1, 1],
            shared_bytes: 0,
            arguments: &arguments,
        })
        .unwrap();
        assert_eq!(calls().contains(&EARLY), early, "{arch}");
    }
}

#[test]
fn a_wait_that_does_not_end_loses_the_device_and_frees_nothing() {
    forget_failures();
    let mut gpu = Gpu::open_with(&fake::DRIVER, 0, Duration::from_millis(5)).unwrap();
    gpu.allocate(8).unwrap();
    fail("cuEventQuery", api::NOT_READY);
    let error = gpu.synchronize().unwrap_err();
    assert!(error.to_string().contains("not finished after 0.005 s"), "{error}");
    forget_failures();
    assert_eq!(gpu.synchronize(), Err(error));
    let before = calls();
    drop(gpu);
    assert_eq!(calls(), before, "a hung driver may never return");
}

#[test]
fn resources_are_freed_once_the_stream_is_idle() {
    let mut gpu = open();
    gpu.allocate(8).unwrap();
    let before = calls().len();
    drop(gpu);
    let given_back = calls().split_off(before);
    let at =
        |call: &str| given_back.iter().position(|found| *found == call).unwrap_or_else(|| panic!("{call}"));
    assert!(at("cuEventQuery") < at("cuMemFree") && at("cuMemFree") < at("cuDevicePrimaryCtxRelease"));
}

#[test]
fn waits_inside_the_driver_do_not_spin() {
    let gpu = open();
    let made_calls = calls();
    let at = |call: &str| made_calls.iter().position(|found| *found == call).unwrap();
    assert!(at("cuDevicePrimaryCtxSetFlags blocking") < at("cuDevicePrimaryCtxRetain"));
    drop(gpu);
    forget_failures();
    fail("cuDevicePrimaryCtxSetFlags blocking", api::PRIMARY_CONTEXT_ACTIVE);
    assert!(Gpu::open_with(&fake::DRIVER, 0, LONGEST_WAIT).is_ok(), "a context that is there already");
    // Before there is a context, nothing is lost: 46 means that another process has exclusive use of the
    // GPU.
    for call in ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"] {
        forget_failures();
        fail(call, 46);
        let error = Gpu::open_with(&fake::DRIVER, 0, LONGEST_WAIT).unwrap_err();
        assert_eq!(error, CudaError::Call { call, status: "CUDA error 46".into() });
    }
}

#[test]
fn a_grid_beyond_the_devices_limits_is_refused_without_a_driver_call() {
    let mut gpu = open();
    let kernel = gpu.load(&compiled(b"\x7fELF", ""), &["a"]).unwrap()[0];
    let arguments = [1u32.into(), 1u32.into()];
    for (grid, good) in [
        ([i32::MAX as u32, 65_535, 65_535], true),
        ([1 << 31, 1, 1], false),
        ([1, 65_536, 1], false),
        ([1, 1, 65_536], false),
        ([0, 1, 1], false),
    ] {
        let launch = Launch { kernel, grid, block: [32, 1, 1], shared_bytes: 0, arguments: &arguments };
        let launched = gpu.launch(&launch);
        assert_eq!(launched.is_ok(), good, "{grid:?}: {launched:?}");
    }
}

#[test]
fn the_driver_compiles_the_ptx_if_it_refuses_the_cubin() {
    for (cubin, ptx, refusal, loads) in [
        (b"\x7fELF".as_slice(), "ptx", None, Ok("cuModuleLoadData machine code")),
        (b"", "ptx", None, Ok("cuModuleLoadData text")),
        (b"\x7fELF", "ptx", Some(209), Ok("cuModuleLoadData text")),
        (b"\x7fELF", "ptx", Some(200), Ok("cuModuleLoadData text")),
        (b"\x7fELF", "", Some(209), Err("CUDA error 209")),
        // Other errors do not cause a retry with PTX.
        (b"\x7fELF", "ptx", Some(222), Err("CUDA error 222")),
        (b"text", "ptx", None, Err("no machine code")),
    ] {
        let mut gpu = open();
        if let Some(code) = refusal {
            fail("cuModuleLoadData machine code", code);
        }
        let loaded = gpu.load(&compiled(cubin, ptx), &["a"]);
        match (loaded, loads) {
            (Ok(_), Ok(call)) => assert!(calls().contains(&call), "{cubin:?} {refusal:?}"),
            (Err(error), Err(expected)) => assert!(error.to_string().contains(expected), "{error}"),
            (found, expected) => panic!("{found:?}, not {expected:?}"),
        }
    }
}

#[test]
fn an_error_in_a_recording_ends_it() {
    let mut gpu = open();
    let ptr = gpu.allocate(8).unwrap();
    let wrong = record(&mut gpu, |device| {
        device.fill(ptr, 0, 8)?;
        device.fill(ptr, 0, 9)
    });
    assert!(wrong.unwrap_err().to_string().contains("9 bytes"));
    // These calls are refused during a recording, so the recording has ended.
    gpu.synchronize().unwrap();
    gpu.free(ptr).unwrap();
}

#[test]
fn all_devices_are_described_and_others_refused() {
    forget_failures();
    assert_eq!(count(&fake::DRIVER), Ok(2));
    let (_, info) = describe(&fake::DRIVER, 1).unwrap();
    assert_eq!((info.ordinal, info.name.as_str(), info.arch), (1, "Fake 1", Arch::SM_90));
    assert_eq!((info.multiprocessors, info.memory_bytes), (132, 80 << 30));
    let error = Gpu::open_with(&fake::DRIVER, 2, LONGEST_WAIT).unwrap_err();
    assert_eq!(error, CudaError::Call { call: "cuDeviceGet", status: "CUDA error 101".into() });
    fail("cuDriverGetVersion", 1);
    assert!(count(&fake::DRIVER).is_err());
}

/// A GPU that does not report its clock gets the usual one.
#[test]
fn the_compute_estimate_follows_multiprocessors_and_clock() {
    forget_failures();
    let (_, info) = describe(&fake::DRIVER, 0).unwrap();
    assert_eq!(info.compute(), 132 * 1_980_000_000 * 190);
    let silent = GpuInfo { clock_khz: 0, ..info };
    assert_eq!(silent.compute(), 132 * 1_500_000_000 * 190);
}

#[test]
fn a_library_without_a_function_is_refused_by_the_functions_name() {
    let other = library::open("libc.so.6".as_ref(), libc::RTLD_NOW).unwrap();
    let looked_for = vec!["the function cuInit".into()];
    assert_eq!(Driver::load(other).unwrap_err(), CudaError::Missing { library: "CUDA driver", looked_for });
}

/// Opening works if there is a driver and a GPU. Otherwise the error names what is missing. Neither ends
/// the process.
#[test]
fn without_a_driver_the_error_lists_the_searched_files() {
    match Gpu::open(0) {
        Ok(gpu) => assert!(gpu.info().memory_bytes > 0),
        Err(CudaError::Missing { library, looked_for }) => {
            assert_eq!(library, "CUDA driver");
            assert!(looked_for.iter().any(|name| name.contains("libcuda.so")), "{looked_for:?}");
        }
        Err(other) => assert!(!other.to_string().is_empty()),
    }
}
