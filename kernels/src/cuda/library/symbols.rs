//! Functions of a library that is loaded at run time.

#![allow(unsafe_code)]

use super::super::CudaError;
use std::ffi::{CStr, c_void};

/// A library that stays loaded until the process ends.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Loaded(*mut c_void);

impl Loaded {
    /// Wraps a handle of `dlopen` that is never closed.
    pub(super) fn new(handle: *mut c_void) -> Self {
        Self(handle)
    }

    /// The address of a function.
    ///
    /// # Errors
    /// [`CudaError::Missing`] if the library does not have it.
    pub(in crate::cuda) fn symbol(
        self,
        library: &'static str,
        name: &'static CStr,
    ) -> Result<*mut c_void, CudaError> {
        // SAFETY: the handle stays open, and the name ends with a zero.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if found.is_null() {
            let looked_for = vec![format!("the function {}", name.to_string_lossy())];
            return Err(CudaError::Missing { library, looked_for });
        }
        Ok(found)
    }
}

/// Declares a struct of function pointers and how to fill it from a [`Loaded`] library.
///
/// Every function returns its status as the `u32` that C's `int`-sized enums are. A Rust enum would be undefined
/// behaviour for a code that a newer library has and the enum lacks.
macro_rules! functions {
    (
        $(#[$doc:meta])*
        $table:ident of $library:literal {
            $($field:ident = $symbol:literal ( $($argument:ty),* );)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub(in crate::cuda) struct $table {
            $(pub(in crate::cuda) $field: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl $table {
            /// Looks all functions up.
            ///
            /// # Errors
            /// [`CudaError::Missing`] with the name of a function that the library lacks.
            pub(in crate::cuda) fn load(
                library: $crate::cuda::library::Loaded,
            ) -> Result<Self, $crate::cuda::CudaError> {
                Ok(Self {
                    $($field: {
                        let found = library.symbol($library, $symbol)?;
                        // SAFETY: a function of this name has this signature in the library's documented interface, and
                        // pointers to functions have the size of pointers to data.
                        unsafe {
                            std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($argument),*) -> u32>(
                                found,
                            )
                        }
                    },)*
                })
            }
        }
    };
}
pub(in crate::cuda) use functions;
