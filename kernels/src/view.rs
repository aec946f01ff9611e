//! Strided views of device memory. The host checks that they are inside their memory.

use cubecl::features::TypeUsage;
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::KernelError;
use crate::element_type::ElementType;
use crate::load::GeometryLaunch;

/// Strided rank-2 view of device memory. Element `(r, c)` is at `r * strides[0] + c * strides[1]`,
/// in elements.
#[derive(Clone, Debug)]
pub struct MatrixView {
    /// Memory. Its offset is element `(0, 0)`.
    pub handle: Handle,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Elements between rows and between columns. Zero repeats.
    pub strides: [usize; 2],
    /// f32, f16 or bf16.
    pub dtype: StorageType,
}

impl MatrixView {
    /// View of the transposed matrix in the same memory.
    #[must_use]
    pub fn transposed(self) -> Self {
        let ([rows, cols], [row, col]) = (self.shape, self.strides);
        Self { shape: [cols, rows], strides: [col, row], ..self }
    }
}

/// Strided rank-1 view of device memory. Element `i` is at `i * stride`, in elements.
#[derive(Clone, Debug)]
pub struct VectorView {
    /// Memory. Its offset is element 0.
    pub handle: Handle,
    /// Number of elements.
    pub len: usize,
    /// Distance between elements. Zero repeats.
    pub stride: usize,
    /// f32, f16 or bf16.
    pub dtype: StorageType,
}

/// Whether kernels can write `dtype` on this device: f32 always, f16 and bf16 if the client reports
/// that it stores and converts them.
///
/// This limits the outputs of [`scaled_gemm`](crate::scaled_gemm) and the operations in
/// [`fused`](crate::fused). [`amax`](crate::amax()), [`quantize`](crate::quantize()),
/// [`health`](crate::health()) and the bias read f16 and bf16 on every device.
pub fn supports<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> bool {
    match ElementType::of(dtype) {
        Ok(ElementType::F32) => true,
        Ok(_) => {
            let usage = client.properties().features.type_usage(dtype);
            usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion)
        }
        Err(_) => false,
    }
}

/// Largest index that a kernel computes. The rest of u32 leaves room for the last step of a
/// grid-stride loop.
pub const MAX_INDEX: u64 = u32::MAX as u64 - (1 << 20);

/// Checks that memory is aligned to `size` bytes. Returns its offset in the allocation.
pub(crate) fn check_aligned(memory: &Handle, size: usize) -> Result<u64, KernelError> {
    let offset = memory.offset_start.unwrap_or(0);
    if offset.is_multiple_of(size as u64) { Ok(offset) } else { Err(KernelError::Misaligned { offset, size }) }
}

/// Checks that memory has at least `needed` bytes.
pub(crate) fn check_bytes(memory: &Handle, needed: u64, what: impl FnOnce() -> String) -> Result<(), KernelError> {
    let available = memory.size_in_used();
    if needed <= available { Ok(()) } else { Err(KernelError::OutOfBounds { what: what(), needed, available }) }
}

/// Memory at an address that every device accepts as a binding.
#[derive(Clone, Debug)]
pub(crate) struct Bound {
    pub(crate) handle: Handle,
    /// Elements from the start of `handle` to the first of the view.
    pub(crate) base: usize,
}

impl Bound {
    /// Binding of a view with `last` elements of `size` bytes between its first and its last one.
    /// `shape` and `strides` are for errors.
    ///
    /// # Errors
    /// [`KernelError::Misaligned`], [`TooLarge`](KernelError::TooLarge),
    /// [`OutOfBounds`](KernelError::OutOfBounds).
    pub(crate) fn new<R: Runtime>(
        client: &ComputeClient<R>,
        memory: &Handle,
        size: usize,
        last: u64,
        [rows, cols]: [usize; 2],
        strides: [usize; 2],
    ) -> Result<Self, KernelError> {
        let start = check_aligned(memory, size)?;
        let aligned = start - start % client.properties().memory.alignment.max(16);
        let base = (start - aligned) / size as u64;
        if last.saturating_add(base) > MAX_INDEX {
            return Err(KernelError::TooLarge { rows, cols, strides, limit: MAX_INDEX });
        }
        check_bytes(memory, (last + 1) * size as u64, || format!("elements of a view [{rows}, {cols}]"))?;
        let mut handle = memory.clone();
        handle.offset_start = (aligned != 0).then_some(aligned);
        Ok(Self { handle, base: base as usize })
    }
}

/// Checked view, ready to launch: at least one element, all inside the memory and reachable by u32
/// indices.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    handle: Handle,
    pub(crate) element_type: ElementType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    strides: [usize; 2],
    /// Elements from the start of `handle` to element (0, 0).
    base: usize,
}

impl Checked {
    pub(crate) fn new<R: Runtime>(client: &ComputeClient<R>, x: &MatrixView) -> Result<Self, KernelError> {
        let element_type = ElementType::of(x.dtype)?;
        let ([rows, cols], strides) = (x.shape, x.strides);
        if rows == 0 || cols == 0 {
            return Err(KernelError::EmptyMatrix { rows, cols });
        }
        let last = ((rows - 1) as u64)
            .checked_mul(strides[0] as u64)
            .zip(((cols - 1) as u64).checked_mul(strides[1] as u64))
            .and_then(|(r, c)| r.checked_add(c));
        let elements = (rows as u64).checked_mul(cols as u64).filter(|&elements| elements <= MAX_INDEX);
        let last = elements.and(last).unwrap_or(u64::MAX);
        let Bound { handle, base } = Bound::new(client, &x.handle, element_type.size(), last, x.shape, strides)?;
        Ok(Self { handle, element_type, rows, cols, strides, base })
    }

    /// Contiguous views of one shape, in dtypes that `takes` accepts and the device writes.
    ///
    /// # Errors
    /// [`KernelError::UnsupportedDtype`], [`ShapeMismatch`](KernelError::ShapeMismatch),
    /// [`NotContiguous`](KernelError::NotContiguous), and as [`new`](Self::new).
    pub(crate) fn dense<R: Runtime, const N: usize>(
        client: &ComputeClient<R>,
        views: [&MatrixView; N],
        takes: impl Fn(StorageType) -> bool,
    ) -> Result<[Self; N], KernelError> {
        for view in views {
            if !takes(view.dtype) || !supports(client, view.dtype) {
                return Err(KernelError::UnsupportedDtype { dtype: view.dtype });
            }
            if view.shape != views[0].shape {
                return Err(KernelError::ShapeMismatch { x: views[0].shape, operand: view.shape });
            }
        }
        let mut checked = Vec::with_capacity(N);
        for view in views {
            let one = Self::new(client, view)?;
            if !one.is_dense() {
                return Err(KernelError::NotContiguous { shape: view.shape, strides: view.strides });
            }
            checked.push(one);
        }
        let Ok(checked) = checked.try_into() else { unreachable!("as many as were given") };
        Ok(checked)
    }

    pub(crate) fn vector<R: Runtime>(client: &ComputeClient<R>, x: &VectorView) -> Result<Self, KernelError> {
        let view = MatrixView { handle: x.handle.clone(), shape: [1, x.len], strides: [0, x.stride], dtype: x.dtype };
        Self::new(client, &view)
    }

    /// Transpose, in the same memory.
    pub(crate) fn transpose(self) -> Self {
        let [row, col] = self.strides;
        Self { rows: self.cols, cols: self.rows, strides: [col, row], ..self }
    }

    /// Whether adjacent elements in memory are in a column rather than in a row. The transpose then
    /// reads faster.
    pub(crate) fn is_column_major(&self) -> bool {
        let [row, col] = self.strides;
        self.rows > 1 && (self.cols == 1 || (col != 1 && (row == 1 || row < col)))
    }

    /// Views rows without gaps as one long row, for kernels that do not need the shape.
    pub(crate) fn flatten(self) -> Self {
        let [row, col] = self.strides;
        if self.rows > 1 && self.cols.checked_mul(col) == Some(row) {
            Self { rows: 1, cols: self.rows * self.cols, strides: [0, col], ..self }
        } else {
            self
        }
    }

    /// Whether elements are contiguous, row by row.
    pub(crate) fn is_dense(&self) -> bool {
        let [row, col] = self.strides;
        (col == 1 || self.cols == 1) && (row == self.cols || self.rows == 1)
    }

    /// Elements per vector load of a dense view: 16 bytes, or one element if vectors would span
    /// rows or be misaligned.
    pub(crate) fn dense_width(&self) -> usize {
        let len = self.element_type.vector_len() as usize;
        if self.cols.is_multiple_of(len) && self.starts_at_vector() { len } else { 1 }
    }

    /// Whether the first element is at a multiple of 16 bytes.
    pub(crate) fn starts_at_vector(&self) -> bool {
        self.base.is_multiple_of(self.element_type.vector_len() as usize)
    }

    /// A dense view as a kernel array of vectors of `width` elements, at most
    /// [`dense_width`](Self::dense_width). It starts where [`memory`](Self::memory) does.
    pub(crate) fn dense_array<R: Runtime>(&self, width: usize) -> ArrayArg<R> {
        // SAFETY: `new` has checked that all elements are inside the handle.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), (self.base + self.rows * self.cols) / width) }
    }

    /// Whether every 16 bytes of columns are one aligned vector load. Ragged and gapped rows need
    /// scalar loads: a vector load at the end of the last row would leave the memory.
    pub(crate) fn has_vector_loads(&self) -> bool {
        let [row, col] = self.strides;
        let aligned = |elements: usize| elements.is_multiple_of(self.element_type.vector_len() as usize);
        col == 1 && aligned(self.cols) && (self.rows == 1 || aligned(row)) && aligned(self.base)
    }

    /// Words per array element in a kernel that calls [`load_vector`](crate::load::load_vector).
    pub(crate) fn vector_words(&self) -> usize {
        if self.has_vector_loads() { 4 } else { 1 }
    }

    /// Input array of the kernel.
    pub(crate) fn array<R: Runtime>(&self) -> ArrayArg<R> {
        let [row, col] = self.strides;
        let elements = self.base + (self.rows - 1) * row + (self.cols - 1) * col + 1;
        let words = (elements * self.element_type.size()).div_ceil(4);
        // SAFETY: `new` has checked that all elements are inside the handle. The last word may
        // contain one 16-bit element past the end. It is inside the allocation, as runtimes round
        // allocations and bindings up to 4 bytes or more.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), words) }
    }

    /// Memory, and the index of the view's first element in it.
    pub(crate) fn memory(&self) -> (Handle, usize) {
        (self.handle.clone(), self.base)
    }

    /// Geometry for the kernel.
    pub(crate) fn geometry<R: Runtime>(&self) -> GeometryLaunch<R> {
        let [row, col] = self.strides;
        let [rows, cols, row, col, base] = [self.rows, self.cols, row, col, self.base].map(|number| number as u32);
        GeometryLaunch::new(rows, cols, row, col, base)
    }
}
