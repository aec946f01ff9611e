//! Number types that MPI sends and reduces.

use ::mpi::ffi;

/// Number type of MPI.
pub(crate) trait Element: Copy + Default + Send + 'static {
    /// MPI's datatype handle.
    fn datatype() -> ffi::MPI_Datatype;
}

macro_rules! element {
    ($($number:ty: $datatype:ident),*) => {
        $(impl Element for $number {
            fn datatype() -> ffi::MPI_Datatype {
                // SAFETY: a constant of the library.
                unsafe { ffi::$datatype }
            }
        })*
    };
}

element!(u8: RSMPI_UINT8_T, u32: RSMPI_UINT32_T, u64: RSMPI_UINT64_T, f32: RSMPI_FLOAT, f64: RSMPI_DOUBLE);
