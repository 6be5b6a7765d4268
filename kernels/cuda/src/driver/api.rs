//! Functions of NVIDIA's driver that are called, and the meanings of their statuses.

#![allow(unsafe_code)]

use super::super::CudaError;
use super::super::library::{self, functions};
use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute,
    CUgraph, CUgraphExec, CUlaunchConfig, CUmodule, CUresult, CUstream, CUstreamCaptureMode,
};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

functions! {
    Driver of "CUDA driver", declared in sys with CUresult {
        init = cuInit(c_uint);
        version = cuDriverGetVersion(*mut c_int);
        error_name = cuGetErrorName(CUresult as u32, *mut *const c_char);
        device_count = cuDeviceGetCount(*mut c_int);
        device = cuDeviceGet(*mut CUdevice, c_int);
        device_name = cuDeviceGetName(*mut c_char, c_int, CUdevice);
        device_pci_address = cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
        device_memory = cuDeviceTotalMem_v2(*mut usize, CUdevice);
        device_attribute = cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        set_context_flags = cuDevicePrimaryCtxSetFlags_v2(CUdevice, c_uint);
        retain_context = cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        release_context = cuDevicePrimaryCtxRelease_v2(CUdevice);
        set_current = cuCtxSetCurrent(CUcontext);
        memory_info = cuMemGetInfo_v2(*mut usize, *mut usize);
        allocate = cuMemAlloc_v2(*mut CUdeviceptr, usize);
        free = cuMemFree_v2(CUdeviceptr);
        allocate_host = cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        free_host = cuMemFreeHost(*mut c_void);
        upload = cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        download = cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        copy = cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
        fill = cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream);
        load_module = cuModuleLoadData(*mut CUmodule, *const c_void);
        unload_module = cuModuleUnload(CUmodule);
        function = cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        parameter = cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize);
        function_attribute = cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
        set_function_attribute = cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
        launch = cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
        create_stream = cuStreamCreate(*mut CUstream, c_uint);
        destroy_stream = cuStreamDestroy_v2(CUstream);
        begin_capture = cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
        end_capture = cuStreamEndCapture(CUstream, *mut CUgraph);
        instantiate = cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, u64);
        destroy_graph = cuGraphDestroy(CUgraph);
        launch_graph = cuGraphLaunch(CUgraphExec, CUstream);
        destroy_instance = cuGraphExecDestroy(CUgraphExec);
        create_event = cuEventCreate(*mut CUevent, c_uint);
        record_event = cuEventRecord(CUevent, CUstream);
        query_event = cuEventQuery(CUevent);
        destroy_event = cuEventDestroy_v2(CUevent);
    }
}

pub(super) const SUCCESS: u32 = CUresult::CUDA_SUCCESS as u32;
pub(super) const INVALID_VALUE: u32 = CUresult::CUDA_ERROR_INVALID_VALUE as u32;
pub(super) const OUT_OF_MEMORY: u32 = CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;
pub(super) const INVALID_IMAGE: u32 = CUresult::CUDA_ERROR_INVALID_IMAGE as u32;
pub(super) const NO_BINARY_FOR_GPU: u32 = CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as u32;
pub(super) const NOT_FOUND: u32 = CUresult::CUDA_ERROR_NOT_FOUND as u32;
pub(super) const NOT_READY: u32 = CUresult::CUDA_ERROR_NOT_READY as u32;
pub(super) const LAUNCH_OUT_OF_RESOURCES: u32 = CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES as u32;
pub(super) const PRIMARY_CONTEXT_ACTIVE: u32 = CUresult::CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE as u32;

/// Codes of refused calls, after which the context stays usable. Every other code, unknown ones included,
/// may come from work that ran before the call; then no later call of this process succeeds.
const REFUSALS: &[u32] = &[
    INVALID_VALUE,
    OUT_OF_MEMORY,
    CUresult::CUDA_ERROR_STUB_LIBRARY as u32,
    CUresult::CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER as u32,
    INVALID_IMAGE,
    NO_BINARY_FOR_GPU,
    CUresult::CUDA_ERROR_INVALID_PTX as u32,
    CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND as u32,
    CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as u32,
    CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED as u32,
    CUresult::CUDA_ERROR_INVALID_SOURCE as u32,
    CUresult::CUDA_ERROR_FILE_NOT_FOUND as u32,
    CUresult::CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND as u32,
    CUresult::CUDA_ERROR_SHARED_OBJECT_INIT_FAILED as u32,
    CUresult::CUDA_ERROR_INVALID_HANDLE as u32,
    CUresult::CUDA_ERROR_ILLEGAL_STATE as u32,
    NOT_FOUND,
    LAUNCH_OUT_OF_RESOURCES,
    CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE as u32,
    CUresult::CUDA_ERROR_NOT_PERMITTED as u32,
    CUresult::CUDA_ERROR_NOT_SUPPORTED as u32,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as u32,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED as u32,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE as u32,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED as u32,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED as u32,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION as u32,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as u32,
    CUresult::CUDA_ERROR_CAPTURED_EVENT as u32,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD as u32,
    CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE as u32,
];

impl Driver {
    /// Returns the driver of this machine. It is looked for once.
    ///
    /// # Errors
    /// [`CudaError::Missing`] for a missing library or function.
    pub(super) fn here() -> Result<&'static Self, CudaError> {
        static FOUND: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        let found = FOUND.get_or_init(|| Self::load(library::load_driver()?));
        found.as_ref().map_err(Clone::clone)
    }

    /// Returns the driver's name of a status, or its number.
    fn name(&self, status: u32) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the pointer is to a local variable; the driver sets it to a static text of its own.
        let found = unsafe { (self.error_name)(status, &raw mut name) };
        if found != SUCCESS || name.is_null() {
            return format!("CUDA error {status}");
        }
        // SAFETY: the driver has just set it to a text that ends with a zero.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// Checks the status of a call before there is a context, so that no context can be lost.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub(super) fn check_before_context(&self, call: &'static str, status: u32) -> Result<(), CudaError> {
        match status {
            SUCCESS => Ok(()),
            other => Err(CudaError::Call { call, status: self.name(other) }),
        }
    }

    /// Checks the status of a call in a context.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] and [`CudaError::Call`] for a refused call; [`CudaError::Lost`] for
    /// everything else.
    pub(super) fn check(&self, call: &'static str, status: u32) -> Result<(), CudaError> {
        match status {
            SUCCESS => Ok(()),
            INVALID_VALUE | LAUNCH_OUT_OF_RESOURCES => {
                Err(CudaError::Invalid { what: format!("{call}: {}", self.name(status)) })
            }
            refused if REFUSALS.contains(&refused) => {
                Err(CudaError::Call { call, status: self.name(refused) })
            }
            other => Err(CudaError::Lost { call, status: self.name(other) }),
        }
    }
}
