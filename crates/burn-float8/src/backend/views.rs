//! Kernels' views of Burn's tensors.
use burn_backend::TensorMetadata;
use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use float8_kernels::{MAX_INDEX, MatrixView, VectorView};

/// `[.., cols]` as a strided `[rows, cols]`. Copies the tensor only if its leading axes have no
/// common stride, or its strides exceed the kernels' index range.
pub(super) fn matrix_view<R: CubeRuntime>(x: CubeTensor<R>) -> MatrixView {
    let reach: u64 = x.meta.shape().iter().zip(x.meta.strides().iter()).map(|(d, s)| (d - 1) as u64 * *s as u64).sum();
    let x = if leading_stride(&x).is_some() && reach <= MAX_INDEX { x } else { into_contiguous(x) };
    let row_stride = leading_stride(&x).expect("a contiguous tensor has one leading stride");
    let (shape, strides) = (x.meta.shape(), x.meta.strides());
    let last = shape.num_dims() - 1;
    let cols = shape[last];
    MatrixView {
        shape: [shape.num_elements() / cols, cols],
        strides: [row_stride, strides[last]],
        dtype: x.dtype.into(),
        handle: x.handle,
    }
}

/// A tensor of rank 1.
pub(super) fn vector_view<R: CubeRuntime>(x: &CubeTensor<R>) -> VectorView {
    let (len, stride) = (x.shape()[0], x.meta.strides()[0]);
    VectorView { len, stride, dtype: x.dtype.into(), handle: x.handle.clone() }
}

/// Row stride if all leading axes form one axis: stride[i] = stride[i + 1] · shape[i + 1].
fn leading_stride<R: CubeRuntime>(x: &CubeTensor<R>) -> Option<usize> {
    let (shape, strides) = (x.meta.shape(), x.meta.strides());
    let mut leading = (0..shape.num_dims() - 1).rev().filter(|i| shape[*i] != 1);
    // One row: its stride is never used.
    let Some(inner) = leading.next() else { return Some(shape[shape.num_dims() - 1]) };
    let mut expected = strides[inner] * shape[inner];
    for axis in leading {
        if strides[axis] != expected {
            return None;
        }
        expected *= shape[axis];
    }
    Some(strides[inner])
}
