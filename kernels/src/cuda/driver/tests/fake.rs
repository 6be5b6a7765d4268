//! A driver that does nothing, notes what it is asked for, and fails where a test says so. Each test's thread has its own.

#![allow(
    unsafe_code,
    clippy::undocumented_unsafe_blocks,
    reason = "every pointer is one that the code under test hands over"
)]

use super::super::api::{Attribute, Driver, Handle, INVALID_VALUE, SUCCESS};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};

thread_local! {
    static FAILURES: RefCell<HashMap<&'static str, u32>> = RefCell::default();
    static CALLS: RefCell<Vec<&'static str>> = RefCell::default();
}

/// From now on a call returns this.
pub(super) fn fail(call: &'static str, status: u32) {
    FAILURES.with_borrow_mut(|failures| failures.insert(call, status));
}

pub(super) fn forget_failures() {
    FAILURES.take();
    CALLS.take();
}

/// What was asked for since.
pub(super) fn calls() -> Vec<&'static str> {
    CALLS.with_borrow(Clone::clone)
}

fn called(call: &'static str) -> u32 {
    CALLS.with_borrow_mut(|calls| calls.push(call));
    FAILURES.with_borrow(|failures| failures.get(call).copied().unwrap_or(SUCCESS))
}

fn some_handle() -> Handle {
    std::ptr::dangling_mut::<u64>().cast()
}

unsafe fn give<T>(to: *mut T, value: T) {
    unsafe { to.write(value) };
}

macro_rules! does_nothing {
    ($($name:ident $call:literal ($($argument:ty),*);)*) => {
        $(unsafe extern "C" fn $name($(_: $argument),*) -> u32 {
            called($call)
        })*
    };
}

macro_rules! gives {
    ($($name:ident $call:literal $value:expr => $out:ty $(, $argument:ty)*;)*) => {
        $(unsafe extern "C" fn $name(out: *mut $out $(, _: $argument)*) -> u32 {
            unsafe { give(out, $value) };
            called($call)
        })*
    };
}

does_nothing! {
    init "cuInit" (c_uint);
    error_name_of "cuGetErrorName" ();
    release_context "cuDevicePrimaryCtxRelease" (c_int);
    set_current "cuCtxSetCurrent" (Handle);
    free "cuMemFree" (u64);
    free_host "cuMemFreeHost" (Handle);
    upload "cuMemcpyHtoDAsync" (u64, *const c_void, usize, Handle);
    download "cuMemcpyDtoHAsync" (*mut c_void, u64, usize, Handle);
    copy "cuMemcpyDtoDAsync" (u64, u64, usize, Handle);
    fill "cuMemsetD8Async" (u64, u8, usize, Handle);
    unload_module "cuModuleUnload" (Handle);
    set_function_attribute "cuFuncSetAttribute" (Handle, c_uint, c_int);
    launch "cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    destroy_stream "cuStreamDestroy" (Handle);
    begin_capture "cuStreamBeginCapture" (Handle, c_uint);
    destroy_graph "cuGraphDestroy" (Handle);
    launch_graph "cuGraphLaunch" (Handle, Handle);
    destroy_instance "cuGraphExecDestroy" (Handle);
    record_event "cuEventRecord" (Handle, Handle);
    query_event "cuEventQuery" (Handle);
    destroy_event "cuEventDestroy" (Handle);
}

gives! {
    version "cuDriverGetVersion" 13_000 => c_int;
    device_count "cuDeviceGetCount" 2 => c_int;
    device_memory "cuDeviceTotalMem" 80 << 30 => usize, c_int;
    retain_context "cuDevicePrimaryCtxRetain" some_handle() => Handle, c_int;
    allocate "cuMemAlloc" 0x1000 => u64, usize;
    function "cuModuleGetFunction" some_handle() => Handle, Handle, *const c_char;
    function_attribute "cuFuncGetAttribute" 0 => c_int, c_uint, Handle;
    create_stream "cuStreamCreate" some_handle() => Handle, c_uint;
    instantiate "cuGraphInstantiate" some_handle() => Handle, Handle, u64;
    create_event "cuEventCreate" some_handle() => Handle, c_uint;
}

unsafe extern "C" fn error_name(_: u32, _: *mut *const c_char) -> u32 {
    // As a driver that does not know the code.
    let _ = unsafe { error_name_of() };
    INVALID_VALUE
}

unsafe extern "C" fn device(out: *mut c_int, ordinal: c_int) -> u32 {
    unsafe { give(out, ordinal) };
    if (0..2).contains(&ordinal) { called("cuDeviceGet") } else { 101 }
}

unsafe extern "C" fn device_name(out: *mut c_char, _: c_int, device: c_int) -> u32 {
    for (place, byte) in format!("Fake {device}\0").bytes().enumerate() {
        unsafe { give(out.add(place), byte.cast_signed() as c_char) };
    }
    called("cuDeviceGetName")
}

unsafe extern "C" fn device_attribute(out: *mut c_int, attribute: c_uint, _: c_int) -> u32 {
    let known = [
        (Attribute::ClockKilohertz, 1_980_000),
        (Attribute::Multiprocessors, 132),
        (Attribute::Integrated, 0),
        (Attribute::L2Bytes, 50 << 20),
        (Attribute::ComputeMajor, 9),
        (Attribute::ComputeMinor, 0),
        (Attribute::SharedBytesOptIn, 227 << 10),
    ];
    match known.into_iter().find(|(known, _)| *known as u32 == attribute) {
        Some((_, value)) => unsafe { give(out, value) },
        None => return INVALID_VALUE,
    }
    called("cuDeviceGetAttribute")
}

unsafe extern "C" fn set_context_flags(_: c_int, flags: c_uint) -> u32 {
    called(if flags & 7 == 4 { "cuDevicePrimaryCtxSetFlags blocking" } else { "cuDevicePrimaryCtxSetFlags" })
}

unsafe extern "C" fn memory_info(free: *mut usize, total: *mut usize) -> u32 {
    unsafe { give(free, 79 << 30) };
    unsafe { give(total, 80 << 30) };
    called("cuMemGetInfo")
}

unsafe extern "C" fn allocate_host(out: *mut Handle, bytes: usize, _: c_uint) -> u32 {
    // Never given back: few tests, and untouched pages cost nothing.
    let memory = Vec::<u64>::with_capacity(bytes / 8).leak();
    unsafe { give(out, memory.as_mut_ptr().cast()) };
    called("cuMemHostAlloc")
}

unsafe extern "C" fn load_module(out: *mut Handle, image: *const c_void) -> u32 {
    unsafe { give(out, some_handle()) };
    let first = unsafe { *image.cast::<u8>() };
    called(if first == 0x7f { "cuModuleLoadData machine code" } else { "cuModuleLoadData text" })
}

/// Two parameters of eight bytes.
unsafe extern "C" fn parameter(_: Handle, index: usize, offset: *mut usize, size: *mut usize) -> u32 {
    unsafe { give(offset, 8 * index) };
    unsafe { give(size, 8) };
    if index < 2 { called("cuFuncGetParamInfo") } else { INVALID_VALUE }
}

unsafe extern "C" fn end_capture(_: Handle, out: *mut Handle) -> u32 {
    unsafe { give(out, some_handle()) };
    called("cuStreamEndCapture")
}

pub(super) static DRIVER: Driver = Driver {
    init,
    version,
    error_name,
    device_count,
    device,
    device_name,
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
