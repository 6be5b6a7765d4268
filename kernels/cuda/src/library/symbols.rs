//! Functions of a library that is loaded at run time.

#![allow(unsafe_code)]

use super::super::CudaError;
use std::ffi::{CString, c_void};

/// A library that stays loaded until the process ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loaded(*mut c_void);

impl Loaded {
    /// Wraps a handle of `dlopen` that is never closed.
    pub(super) fn new(handle: *mut c_void) -> Self {
        Self(handle)
    }

    /// Returns the address of a function.
    ///
    /// # Errors
    /// [`CudaError::Missing`] if the library does not have it.
    pub(crate) fn symbol(self, library: &'static str, name: &'static str) -> Result<*mut c_void, CudaError> {
        let missing = || CudaError::Missing { library, looked_for: vec![format!("the function {name}")] };
        let c_name = CString::new(name).map_err(|_| missing())?;
        // SAFETY: the handle stays open, and the name ends with a zero.
        let found = unsafe { libc::dlsym(self.0, c_name.as_ptr()) };
        if found.is_null() {
            return Err(missing());
        }
        Ok(found)
    }
}

/// Declares a struct of pointers to functions that `cudarc` declares, and a function that fills it from a
/// [`Loaded`] library.
///
/// A signature that differs from that of `cudarc` does not compile. Only its enum of statuses is replaced:
/// every function returns a `u32`, which has the size of the C enum. A Rust enum would be undefined
/// behaviour for a code that a newer library has and the enum lacks. `Enum as u32` does the same for an
/// argument.
macro_rules! functions {
    (@passed $declared:ty) => { $declared };
    (@passed $declared:ty as $passed:ty) => { $passed };
    (@pointer $($argument:ty $(as $passed:ty)?),*) => {
        unsafe extern "C" fn(
            $($crate::library::functions!(@passed $argument $(as $passed)?)),*
        ) -> u32
    };
    (
        $(#[$doc:meta])*
        $table:ident of $library:literal, declared in $module:ident with $status:ident {
            $($field:ident = $function:ident ( $($argument:ty $(as $passed:ty)?),* );)*
        }
    ) => {
        const _: () = assert!(size_of::<$module::$status>() == size_of::<u32>());
        $(const _: unsafe fn($($argument),*) -> $module::$status = $module::$function;)*

        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct $table {
            $(
                pub(crate) $field:
                    $crate::library::functions!(@pointer $($argument $(as $passed)?),*),
            )*
        }

        impl $table {
            /// Looks up all functions.
            ///
            /// # Errors
            /// [`CudaError::Missing`] with the name of a function that the library lacks.
            pub(crate) fn load(
                library: $crate::library::Loaded,
            ) -> Result<Self, $crate::CudaError> {
                Ok(Self {
                    $($field: {
                        let found = library.symbol($library, stringify!($function))?;
                        // SAFETY: a function of this name has this signature, which `cudarc` declares and
                        // the compiler has compared above. Pointers to functions have the size of pointers
                        // to data.
                        unsafe {
                            std::mem::transmute::<
                                *mut std::ffi::c_void,
                                $crate::library::functions!(@pointer $($argument $(as $passed)?),*),
                            >(found)
                        }
                    },)*
                })
            }
        }
    };
}
pub(crate) use functions;
