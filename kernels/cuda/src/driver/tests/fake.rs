//! A driver that does nothing, records its calls, and fails where a test requests it. Each test thread has
//! its own.

#![allow(
    unsafe_code,
    clippy::undocumented_unsafe_blocks,
    reason = "every pointer is one that the code under test hands over"
)]

use super::super::api::{Driver, INVALID_VALUE, SUCCESS};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphExec, CUlaunchAttributeID, CUlaunchConfig, CUmodule, CUstream, CUstreamCaptureMode,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Name of a call of `cuLaunchKernelEx` with which the kernel may start before earlier ones have ended.
pub(super) const EARLY: &str = "an early start";

thread_local! {
    static FAILURES: RefCell<HashMap<&'static str, u32>> = RefCell::default();
    static CALLS: RefCell<Vec<&'static str>> = RefCell::default();
}

/// Makes every later call of this function return `status`.
pub(super) fn fail(call: &'static str, status: u32) {
    FAILURES.with_borrow_mut(|failures| failures.insert(call, status));
}

pub(super) fn forget_failures() {
    FAILURES.take();
    CALLS.take();
}

/// Returns the calls since the last reset.
pub(super) fn calls() -> Vec<&'static str> {
    CALLS.with_borrow(Clone::clone)
}

fn called(call: &'static str) -> u32 {
    CALLS.with_borrow_mut(|calls| calls.push(call));
    FAILURES.with_borrow(|failures| failures.get(call).copied().unwrap_or(SUCCESS))
}

fn some_handle<T>() -> *mut T {
    std::ptr::dangling_mut::<u64>().cast()
}

unsafe fn write_out<T>(to: *mut T, value: T) {
    unsafe { to.write(value) };
}

macro_rules! does_nothing {
    ($($name:ident $call:literal ($($argument:ty),*);)*) => {
        $(unsafe extern "C" fn $name($(_: $argument),*) -> u32 {
            called($call)
        })*
    };
}

macro_rules! writes_out {
    ($($name:ident $call:literal $value:expr => $out:ty $(, $argument:ty)*;)*) => {
        $(unsafe extern "C" fn $name(out: *mut $out $(, _: $argument)*) -> u32 {
            unsafe { write_out(out, $value) };
            called($call)
        })*
    };
}

does_nothing! {
    init "cuInit" (c_uint);
    error_name_of "cuGetErrorName" ();
    release_context "cuDevicePrimaryCtxRelease" (CUdevice);
    set_current "cuCtxSetCurrent" (CUcontext);
    free "cuMemFree" (CUdeviceptr);
    free_host "cuMemFreeHost" (*mut c_void);
    upload "cuMemcpyHtoDAsync" (CUdeviceptr, *const c_void, usize, CUstream);
    download "cuMemcpyDtoHAsync" (*mut c_void, CUdeviceptr, usize, CUstream);
    copy "cuMemcpyDtoDAsync" (CUdeviceptr, CUdeviceptr, usize, CUstream);
    fill "cuMemsetD8Async" (CUdeviceptr, u8, usize, CUstream);
    unload_module "cuModuleUnload" (CUmodule);
    set_function_attribute "cuFuncSetAttribute" (CUfunction, CUfunction_attribute, c_int);
    destroy_stream "cuStreamDestroy" (CUstream);
    begin_capture "cuStreamBeginCapture" (CUstream, CUstreamCaptureMode);
    destroy_graph "cuGraphDestroy" (CUgraph);
    launch_graph "cuGraphLaunch" (CUgraphExec, CUstream);
    destroy_instance "cuGraphExecDestroy" (CUgraphExec);
    record_event "cuEventRecord" (CUevent, CUstream);
    query_event "cuEventQuery" (CUevent);
    destroy_event "cuEventDestroy" (CUevent);
}

/// Records launches of kernels that may start early under another name.
unsafe extern "C" fn launch(
    config: *const CUlaunchConfig,
    _: CUfunction,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
) -> u32 {
    let config = unsafe { &*config };
    let attributes = unsafe { std::slice::from_raw_parts(config.attrs, config.numAttrs as usize) };
    let serial = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    let early = attributes.iter().any(|attribute| {
        attribute.id == serial && unsafe { attribute.value.programmaticStreamSerializationAllowed } == 1
    });
    let status = called("cuLaunchKernelEx");
    if early {
        called(EARLY);
    }
    status
}

writes_out! {
    version "cuDriverGetVersion" 13_000 => c_int;
    device_count "cuDeviceGetCount" 2 => c_int;
    device_memory "cuDeviceTotalMem" 80 << 30 => usize, CUdevice;
    retain_context "cuDevicePrimaryCtxRetain" some_handle() => CUcontext, CUdevice;
    allocate "cuMemAlloc" 0x1000 => CUdeviceptr, usize;
    function "cuModuleGetFunction" some_handle() => CUfunction, CUmodule, *const c_char;
    function_attribute "cuFuncGetAttribute" 0 => c_int, CUfunction_attribute, CUfunction;
    create_stream "cuStreamCreate" some_handle() => CUstream, c_uint;
    instantiate "cuGraphInstantiate" some_handle() => CUgraphExec, CUgraph, u64;
    create_event "cuEventCreate" some_handle() => CUevent, c_uint;
}

unsafe extern "C" fn error_name(_: u32, _: *mut *const c_char) -> u32 {
    // Like a driver that does not define the code.
    let _ = unsafe { error_name_of() };
    INVALID_VALUE
}

unsafe extern "C" fn device(out: *mut CUdevice, ordinal: c_int) -> u32 {
    unsafe { write_out(out, ordinal) };
    if (0..2).contains(&ordinal) { called("cuDeviceGet") } else { 101 }
}

unsafe extern "C" fn device_name(out: *mut c_char, _: c_int, device: CUdevice) -> u32 {
    for (index, byte) in format!("Fake {device}\0").bytes().enumerate() {
        unsafe { write_out(out.add(index), byte.cast_signed() as c_char) };
    }
    called("cuDeviceGetName")
}

unsafe extern "C" fn device_pci_address(out: *mut c_char, _: c_int, _: CUdevice) -> u32 {
    for (index, byte) in b"0000:01:00.0\0".iter().enumerate() {
        unsafe { write_out(out.add(index), byte.cast_signed() as c_char) };
    }
    called("cuDeviceGetPCIBusId")
}

unsafe extern "C" fn device_attribute(out: *mut c_int, attribute: CUdevice_attribute, _: CUdevice) -> u32 {
    use CUdevice_attribute as Attribute;
    let attributes = [
        (Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1_980_000),
        (Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132),
        (Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED, 0),
        (Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 50 << 20),
        (Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9),
        (Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0),
        (Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 << 10),
    ];
    match attributes.into_iter().find(|(supported, _)| *supported == attribute) {
        Some((_, value)) => unsafe { write_out(out, value) },
        None => return INVALID_VALUE,
    }
    called("cuDeviceGetAttribute")
}

unsafe extern "C" fn set_context_flags(_: CUdevice, flags: c_uint) -> u32 {
    called(if flags & 7 == 4 { "cuDevicePrimaryCtxSetFlags blocking" } else { "cuDevicePrimaryCtxSetFlags" })
}

unsafe extern "C" fn memory_info(free: *mut usize, total: *mut usize) -> u32 {
    unsafe { write_out(free, 79 << 30) };
    unsafe { write_out(total, 80 << 30) };
    called("cuMemGetInfo")
}

unsafe extern "C" fn allocate_host(out: *mut *mut c_void, bytes: usize, _: c_uint) -> u32 {
    // Never freed: there are few tests, and untouched pages cost nothing.
    let memory = Vec::<u64>::with_capacity(bytes / 8).leak();
    unsafe { write_out(out, memory.as_mut_ptr().cast()) };
    called("cuMemHostAlloc")
}

unsafe extern "C" fn load_module(out: *mut CUmodule, image: *const c_void) -> u32 {
    unsafe { write_out(out, some_handle()) };
    let first = unsafe { *image.cast::<u8>() };
    called(if first == 0x7f { "cuModuleLoadData machine code" } else { "cuModuleLoadData text" })
}

/// Describes two parameters of eight bytes.
unsafe extern "C" fn parameter(_: CUfunction, index: usize, offset: *mut usize, size: *mut usize) -> u32 {
    unsafe { write_out(offset, 8 * index) };
    unsafe { write_out(size, 8) };
    if index < 2 { called("cuFuncGetParamInfo") } else { INVALID_VALUE }
}

unsafe extern "C" fn end_capture(_: CUstream, out: *mut CUgraph) -> u32 {
    unsafe { write_out(out, some_handle()) };
    called("cuStreamEndCapture")
}

pub(super) static DRIVER: Driver = Driver {
    init,
    version,
    error_name,
    device_count,
    device,
    device_name,
    device_pci_address,
    device_memory,
    device_attribute,
    set_context_flags,
    retain_context,
    release_context,
    set_current,
    memory_info,
    allocate,
    free,
    allocate_host,
    free_host,
    upload,
    download,
    copy,
    fill,
    load_module,
    unload_module,
    function,
    parameter,
    function_attribute,
    set_function_attribute,
    launch,
    create_stream,
    destroy_stream,
    begin_capture,
    end_capture,
    instantiate,
    destroy_graph,
    launch_graph,
    destroy_instance,
    create_event,
    record_event,
    query_event,
    destroy_event,
};
