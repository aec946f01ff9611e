//! Every Burn operation, listed once, forwarded to the inner backend; `tests/forwarded.rs` compares
//! this list with the traits of burn-backend.
use std::future::Future;
use std::ops::Range;

use burn_backend::ops::*;
use burn_backend::quantization::*;
use burn_backend::tensor::quantization::QuantizationParametersPrimitive;
use burn_backend::tensor::{
    BoolTensor as L, Device as D, FloatTensor as F, IndexingUpdateOp, IntTensor as I, QuantizedTensor as Q,
};
use burn_backend::*;
use burn_std::{Shape, Slice};

use super::convert::{Arg, PassArg, PassRet, Ret};
use super::functions::register;
use super::{Float8, attention, embedding, linear, matmul};
use crate::error::wrong_order;
use crate::layer::Mark;
use crate::tensor::{Float8Tensor, Wrapped};

// `fn`: unwraps the arguments and wraps the result.
// `#[keep] fn`: the result also keeps the layer of the first tagged operand, since optimizers
// rebuild parameters by such operations.
// `#[keep_lhs] fn`: the result keeps the layer only of the left operand. The gradient of a penalty
// is a product with a weight on the right, and is not a weight.
// `#[same] fn`: the value is unchanged, so the FP8 copies stay too.
// `#[new] fn`: creates a tensor without an input tensor.
// `#[raw] fn`: the result holds no float tensor (futures, unit).
macro_rules! forward {
    ($($(#[$mark:ident])? fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        $(fn $name($($arg: $ty),*) $(-> $ret)? { body!($($mark)? $name($($arg),*) $($ret)?) })*
    };
}
macro_rules! body {
    (new $name:ident($($arg:ident),*) $ret:ty) => {{
        register::<B>();
        Ret::<$ret>::wrap(B::$name($(Arg($arg).unwrap(stringify!($name))),*))
    }};
    (raw $name:ident($($arg:ident),*) $($ret:ty)?) => { B::$name($(Arg($arg).unwrap(stringify!($name))),*) };
    (keep $name:ident($($arg:ident),*) $ret:ty) => {{
        let floats = 0$(+ usize::from(Arg(&$arg).is_float()))*;
        let mut mark = None;
        $(mark = Mark::either(mark, Arg(&$arg).mark());)*
        let mark = mark.map(|mark| mark.after(floats - 1));
        Ret::<$ret>::wrap(B::$name($(Arg($arg).unwrap(stringify!($name))),*)).with_mark(mark)
    }};
    (keep_lhs $name:ident($lhs:ident, $rhs:ident) $ret:ty) => {{
        let mark = $lhs.mark().map(|mark| mark.clone().after(1));
        let [lhs, rhs] = [$lhs, $rhs].map(|t| t.into_values(stringify!($name)));
        Ret::<$ret>::wrap(B::$name(lhs, rhs)).with_mark(mark)
    }};
    (same $name:ident($t:ident $(, $arg:ident)*) $ret:ty) => { $t.map(|t| B::$name(t $(, $arg)*)) };
    ($name:ident($($arg:ident),*) $ret:ty) => { Ret::<$ret>::wrap(B::$name($(Arg($arg).unwrap(stringify!($name))),*)) };
}

impl<B: Wrapped> BackendTypes for Float8<B> {
    type Device = B::Device;
    type FloatTensorPrimitive = Float8Tensor<B>;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = B::IntTensorPrimitive;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

impl<B: Wrapped> Backend for Float8<B> {
    fn name(device: &Self::Device) -> String {
        format!("float8<{}>", B::name(device))
    }
    fn memory_persistent_allocations<O: Send, A: Send, T: Fn(A) -> O + Send>(
        device: &Self::Device,
        input: A,
        func: T,
    ) -> O {
        B::memory_persistent_allocations(device, input, func)
    }
    fn staging<'a, T: Iterator<Item = &'a mut TensorData>>(data: T, device: &Self::Device) {
        B::staging(data, device)
    }
    forward! {
        #[raw] fn ad_enabled(device: &Self::Device) -> bool;
        #[raw] fn memory_cleanup(device: &Self::Device);
        #[raw] fn seed(device: &Self::Device, seed: u64);
        #[raw] fn sync(device: &Self::Device) -> Result<(), ExecutionError>;
        #[raw] fn supports_dtype(device: &Self::Device, dtype: DType) -> bool;
        #[raw] fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet;
        #[raw] fn device_count(type_id: u16) -> usize;
    }
}

impl<B: Wrapped> FloatTensorOps<Self> for Float8<B> {
    /// An FP8-only weight stays FP8-only.
    fn float_to_device(tensor: F<Self>, device: &D<Self>) -> F<Self> {
        let mark = tensor.mark().cloned();
        let adapters = tensor.adapters().map(|adapters| adapters.map(|t| B::float_to_device(t, device)).into());
        let full = B::float_to_device(tensor.full().clone(), device);
        let moved = match tensor.codes() {
            Some(codes) => Float8Tensor::of_codes(full, codes.to_device(device)),
            None => Float8Tensor::new(full),
        };
        moved.with_mark(mark).with_adapters(adapters)
    }
    fn float_device(tensor: &F<Self>) -> D<Self> {
        tensor.device()
    }
    forward! {
        #[new] fn float_from_data(data: TensorData, device: &D<Self>) -> F<Self>;
        #[new] fn float_random(shape: Shape, distribution: Distribution, device: &D<Self>, dtype: FloatDType) -> F<Self>;
        #[new] fn float_zeros(shape: Shape, device: &D<Self>, dtype: FloatDType) -> F<Self>;
        #[new] fn float_ones(shape: Shape, device: &D<Self>, dtype: FloatDType) -> F<Self>;
        #[new] fn float_full(shape: Shape, fill_value: Scalar, device: &D<Self>, dtype: FloatDType) -> F<Self>;
        #[raw] fn float_into_data(tensor: F<Self>) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send;
        fn float_into_int(tensor: F<Self>, out_dtype: IntDType) -> I<Self>;
        #[new] fn float_empty(shape: Shape, device: &D<Self>, dtype: FloatDType) -> F<Self>;
        fn float_repeat_dim(tensor: F<Self>, dim: usize, times: usize) -> F<Self>;
        #[keep] fn float_add(lhs: F<Self>, rhs: F<Self>) -> F<Self>;
        #[keep] fn float_add_scalar(lhs: F<Self>, rhs: Scalar) -> F<Self>;
        #[keep] fn float_clamp_min(tensor: F<Self>, min: Scalar) -> F<Self>;
        #[keep] fn float_clamp_max(tensor: F<Self>, max: Scalar) -> F<Self>;
        #[keep] fn float_clamp(tensor: F<Self>, min: Scalar, max: Scalar) -> F<Self>;
        #[keep] fn float_sub(lhs: F<Self>, rhs: F<Self>) -> F<Self>;
        #[keep] fn float_sub_scalar(lhs: F<Self>, rhs: Scalar) -> F<Self>;
        #[keep_lhs] fn float_mul(lhs: F<Self>, rhs: F<Self>) -> F<Self>;
        #[keep] fn float_mul_scalar(lhs: F<Self>, rhs: Scalar) -> F<Self>;
        #[keep_lhs] fn float_div(lhs: F<Self>, rhs: F<Self>) -> F<Self>;
        #[keep] fn float_div_scalar(lhs: F<Self>, rhs: Scalar) -> F<Self>;
        fn float_remainder(lhs: F<Self>, rhs: F<Self>) -> F<Self>;
        fn float_remainder_scalar(lhs: F<Self>, rhs: Scalar) -> F<Self>;
        fn float_cross(lhs: F<Self>, rhs: F<Self>, dim: usize) -> F<Self>;
        #[keep] fn float_neg(tensor: F<Self>) -> F<Self>;
        fn float_recip(tensor: F<Self>) -> F<Self>;
        #[keep] fn float_transpose(tensor: F<Self>) -> F<Self>;
        #[keep] fn float_swap_dims(tensor: F<Self>, dim1: usize, dim2: usize) -> F<Self>;
        #[keep] fn float_permute(tensor: F<Self>, axes: &[usize]) -> F<Self>;
        fn float_flip(tensor: F<Self>, axes: &[usize]) -> F<Self>;
        fn float_gather(dim: usize, tensor: F<Self>, indices: I<Self>) -> F<Self>;
        fn float_scatter_add(dim: usize, tensor: F<Self>, indices: I<Self>, value: F<Self>) -> F<Self>;
        fn float_scatter_nd(data: F<Self>, indices: I<Self>, values: F<Self>, reduction: IndexingUpdateOp) -> F<Self>;
        fn float_gather_nd(data: F<Self>, indices: I<Self>) -> F<Self>;
        fn float_select(tensor: F<Self>, dim: usize, indices: I<Self>) -> F<Self>;
        fn float_select_add(tensor: F<Self>, dim: usize, indices: I<Self>, value: F<Self>) -> F<Self>;
        fn float_slice_assign(tensor: F<Self>, slices: &[Slice], value: F<Self>) -> F<Self>;
        #[keep] fn float_mask_where(tensor: F<Self>, mask: L<Self>, value: F<Self>) -> F<Self>;
        #[keep] fn float_mask_fill(tensor: F<Self>, mask: L<Self>, value: Scalar) -> F<Self>;
        fn float_equal(lhs: F<Self>, rhs: F<Self>, out_dtype: BoolDType) -> L<Self>;
        fn float_not_equal(lhs: F<Self>, rhs: F<Self>, out_dtype: BoolDType) -> L<Self>;
        fn float_equal_elem(lhs: F<Self>, rhs: Scalar, out_dtype: BoolDType) -> L<Self>;
        fn float_not_equal_elem(lhs: F<Self>, rhs: Scalar, out_dtype: BoolDType) -> L<Self>;
        fn float_greater(lhs: F<Self>, rhs: F<Self>, out_dtype: BoolDType) -> L<Self>;
        fn float_greater_elem(lhs: F<Self>, rhs: Scalar, out_dtype: BoolDType) -> L<Self>;
        fn float_greater_equal(lhs: F<Self>, rhs: F<Self>, out_dtype: BoolDType) -> L<Self>;
        fn float_greater_equal_elem(lhs: F<Self>, rhs: Scalar, out_dtype: BoolDType) -> L<Self>;
        fn float_lower(lhs: F<Self>, rhs: F<Self>, out_dtype: BoolDType) -> L<Self>;
        fn float_lower_elem(lhs: F<Self>, rhs: Scalar, out_dtype: BoolDType) -> L<Self>;
        fn float_lower_equal(lhs: F<Self>, rhs: F<Self>, out_dtype: BoolDType) -> L<Self>;
        fn float_lower_equal_elem(lhs: F<Self>, rhs: Scalar, out_dtype: BoolDType) -> L<Self>;
        #[same] fn float_detach(tensor: F<Self>) -> F<Self>;
        #[same] fn float_set_require_grad(tensor: F<Self>, require_grad: bool) -> F<Self>;
        #[raw] fn float_is_require_grad(tensor: &F<Self>) -> bool;
        fn float_sum(tensor: F<Self>) -> F<Self>;
        fn float_sum_dim(tensor: F<Self>, dim: usize) -> F<Self>;
        fn float_prod(tensor: F<Self>) -> F<Self>;
        fn float_prod_dim(tensor: F<Self>, dim: usize) -> F<Self>;
        fn float_mean(tensor: F<Self>) -> F<Self>;
        fn float_mean_dim(tensor: F<Self>, dim: usize) -> F<Self>;
        fn float_cumsum(tensor: F<Self>, dim: usize) -> F<Self>;
        fn float_cumprod(tensor: F<Self>, dim: usize) -> F<Self>;
        fn float_cummin(tensor: F<Self>, dim: usize) -> F<Self>;
        fn float_cummax(tensor: F<Self>, dim: usize) -> F<Self>;
        #[keep] fn float_cast(tensor: F<Self>, dtype: FloatDType) -> F<Self>;
        fn float_exp(tensor: F<Self>) -> F<Self>;
        fn float_log(tensor: F<Self>) -> F<Self>;
        fn float_log1p(tensor: F<Self>) -> F<Self>;
        fn float_powf(lhs: F<Self>, rhs: F<Self>) -> F<Self>;
        fn float_powi(lhs: F<Self>, rhs: I<Self>) -> F<Self>;
        fn float_powi_scalar(lhs: F<Self>, rhs: Scalar) -> F<Self>;
        fn float_powi_scalar_impl(lhs: F<Self>, rhs: Scalar) -> F<Self>;
        fn float_powf_scalar(tensor: F<Self>, value: Scalar) -> F<Self>;
        fn float_powf_scalar_impl(tensor: F<Self>, value: Scalar) -> F<Self>;
        fn float_sqrt(tensor: F<Self>) -> F<Self>;
        fn float_abs(tensor: F<Self>) -> F<Self>;
        fn float_cos(tensor: F<Self>) -> F<Self>;
        fn float_sin(tensor: F<Self>) -> F<Self>;
        fn float_tan(tensor: F<Self>) -> F<Self>;
        fn float_cosh(tensor: F<Self>) -> F<Self>;
        fn float_sinh(tensor: F<Self>) -> F<Self>;
        fn float_tanh(tensor: F<Self>) -> F<Self>;
        fn float_acos(tensor: F<Self>) -> F<Self>;
        fn float_acosh(tensor: F<Self>) -> F<Self>;
        fn float_asin(tensor: F<Self>) -> F<Self>;
        fn float_asinh(tensor: F<Self>) -> F<Self>;
        fn float_atan(tensor: F<Self>) -> F<Self>;
        fn float_atanh(tensor: F<Self>) -> F<Self>;
        fn float_atan2(lhs: F<Self>, rhs: F<Self>) -> F<Self>;
        #[keep] fn float_round(tensor: F<Self>) -> F<Self>;
        fn float_floor(tensor: F<Self>) -> F<Self>;
        fn float_ceil(tensor: F<Self>) -> F<Self>;
        fn float_trunc(tensor: F<Self>) -> F<Self>;
        fn float_erf(tensor: F<Self>) -> F<Self>;
        fn float_argmax(tensor: F<Self>, dim: usize, out_dtype: IntDType) -> I<Self>;
        fn float_argtopk(tensor: F<Self>, dim: usize, k: usize, out_dtype: IntDType) -> I<Self>;
        fn float_topk(tensor: F<Self>, dim: usize, k: usize) -> F<Self>;
        fn float_argmin(tensor: F<Self>, dim: usize, out_dtype: IntDType) -> I<Self>;
        fn float_max(tensor: F<Self>) -> F<Self>;
        fn float_max_dim(tensor: F<Self>, dim: usize) -> F<Self>;
        fn float_max_dim_with_indices(tensor: F<Self>, dim: usize, indices_dtype: IntDType) -> (F<Self>, I<Self>);
        fn float_min(tensor: F<Self>) -> F<Self>;
        fn float_min_dim(tensor: F<Self>, dim: usize) -> F<Self>;
        fn float_min_dim_with_indices(tensor: F<Self>, dim: usize, indices_dtype: IntDType) -> (F<Self>, I<Self>);
        fn float_max_abs(tensor: F<Self>) -> F<Self>;
        fn float_max_abs_dim(tensor: F<Self>, dim: usize) -> F<Self>;
        fn float_any(tensor: F<Self>, out_dtype: BoolDType) -> L<Self>;
        fn float_any_dim(tensor: F<Self>, dim: usize, out_dtype: BoolDType) -> L<Self>;
        fn float_all(tensor: F<Self>, out_dtype: BoolDType) -> L<Self>;
        fn float_all_dim(tensor: F<Self>, dim: usize, out_dtype: BoolDType) -> L<Self>;
        #[keep] fn float_sign(tensor: F<Self>) -> F<Self>;
        #[keep] fn float_expand(tensor: F<Self>, shape: Shape) -> F<Self>;
        fn float_sort(tensor: F<Self>, dim: usize, descending: bool) -> F<Self>;
        fn float_sort_with_indices(tensor: F<Self>, dim: usize, descending: bool, indices_dtype: IntDType) -> (F<Self>, I<Self>);
        fn float_argsort(tensor: F<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> I<Self>;
        fn float_grid_sample_2d(tensor: F<Self>, grid: F<Self>, options: GridSampleOptions) -> F<Self>;
        fn float_unfold(tensor: F<Self>, dim: usize, size: usize, step: usize) -> F<Self>;
        fn float_is_nan(tensor: F<Self>, out_dtype: BoolDType) -> L<Self>;
        fn float_is_inf(tensor: F<Self>, out_dtype: BoolDType) -> L<Self>;
    }
    /// A reshape that keeps the last axis keeps the matrix `[rows, k]`, so the FP8 copies stay
    /// valid.
    fn float_reshape(tensor: F<Self>, shape: Shape) -> F<Self> {
        let last = |s: &Shape| s.iter().last().copied();
        let old = tensor.shape();
        let is_same_matrix = last(&old).is_some() && last(&old) == last(&shape);
        let reshaped = |tensor: F<B>| B::float_reshape(tensor, shape.clone());
        if is_same_matrix && !tensor.is_fp8_only() && tensor.adapters().is_none() {
            tensor.map(reshaped)
        } else {
            let mark = tensor.mark().cloned();
            Float8Tensor::new(reshaped(tensor.into_values("float_reshape"))).with_mark(mark)
        }
    }
    fn float_matmul(lhs: F<Self>, rhs: F<Self>) -> F<Self> {
        matmul::matmul(lhs, rhs)
    }
    /// A concatenation of flattened parameters keeps their tags for the slices that optimizers
    /// take.
    fn float_cat(tensors: Vec<F<Self>>, dim: usize) -> F<Self> {
        let is_flat = tensors.iter().all(|t| t.rank() == 1) && tensors.iter().any(|t| t.mark().is_some());
        let mark =
            if is_flat { Mark::concatenate(tensors.iter().map(|t| (t.shape()[0], t.mark().cloned()))) } else { None };
        let tensors = tensors.into_iter().map(|tensor| tensor.into_values("float_cat")).collect();
        Float8Tensor::new(B::float_cat(tensors, dim)).with_mark(mark)
    }
    fn float_slice(tensor: F<Self>, slices: &[Slice]) -> F<Self> {
        let mark = match (tensor.mark(), slices) {
            (Some(mark), [slice]) if tensor.rank() == 1 && slice.step == 1 => {
                mark.slice(&slice.to_range(tensor.shape()[0]))
            }
            _ => None,
        };
        Float8Tensor::new(B::float_slice(tensor.into_values("float_slice"), slices)).with_mark(mark)
    }
}
impl<B: Wrapped> IntTensorOps<Self> for Float8<B> {
    forward! {
        fn int_empty(shape: Shape, device: &D<Self>, dtype: IntDType) -> I<Self>;
        #[raw] fn int_into_data(tensor: I<Self>) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send;
        fn int_from_data(data: TensorData, device: &D<Self>) -> I<Self>;
        #[raw] fn int_device(tensor: &I<Self>) -> D<Self>;
        fn int_to_device(tensor: I<Self>, device: &D<Self>) -> I<Self>;
        fn int_reshape(tensor: I<Self>, shape: Shape) -> I<Self>;
        fn int_slice(tensor: I<Self>, slices: &[Slice]) -> I<Self>;
        fn int_slice_assign(tensor: I<Self>, slices: &[Slice], value: I<Self>) -> I<Self>;
        fn int_into_float(tensor: I<Self>, out_dtype: FloatDType) -> F<Self>;
        fn int_mask_where(tensor: I<Self>, mask: L<Self>, value: I<Self>) -> I<Self>;
        fn int_mask_fill(tensor: I<Self>, mask: L<Self>, value: Scalar) -> I<Self>;
        fn int_gather(dim: usize, tensor: I<Self>, indices: I<Self>) -> I<Self>;
        fn int_scatter_add(dim: usize, tensor: I<Self>, indices: I<Self>, value: I<Self>) -> I<Self>;
        fn int_scatter_nd(data: I<Self>, indices: I<Self>, values: I<Self>, reduction: IndexingUpdateOp) -> I<Self>;
        fn int_gather_nd(data: I<Self>, indices: I<Self>) -> I<Self>;
        fn int_select(tensor: I<Self>, dim: usize, indices: I<Self>) -> I<Self>;
        fn int_select_add(tensor: I<Self>, dim: usize, indices: I<Self>, value: I<Self>) -> I<Self>;
        fn int_repeat_dim(tensor: I<Self>, dim: usize, times: usize) -> I<Self>;
        fn int_cat(tensors: Vec<I<Self>>, dim: usize) -> I<Self>;
        fn int_equal(lhs: I<Self>, rhs: I<Self>, out_dtype: BoolDType) -> L<Self>;
        fn int_not_equal(lhs: I<Self>, rhs: I<Self>, out_dtype: BoolDType) -> L<Self>;
        fn int_equal_elem(lhs: I<Self>, rhs: Scalar, out_dtype: BoolDType) -> L<Self>;
        fn int_not_equal_elem(lhs: I<Self>, rhs: Scalar, out_dtype: BoolDType) -> L<Self>;
        fn int_greater(lhs: I<Self>, rhs: I<Self>, out_dtype: BoolDType) -> L<Self>;
        fn int_greater_elem(lhs: I<Self>, rhs: Scalar, out_dtype: BoolDType) -> L<Self>;
        fn int_greater_equal(lhs: I<Self>, rhs: I<Self>, out_dtype: BoolDType) -> L<Self>;
        fn int_greater_equal_elem(lhs: I<Self>, rhs: Scalar, out_dtype: BoolDType) -> L<Self>;
        fn int_lower(lhs: I<Self>, rhs: I<Self>, out_dtype: BoolDType) -> L<Self>;
        fn int_lower_elem(lhs: I<Self>, rhs: Scalar, out_dtype: BoolDType) -> L<Self>;
        fn int_lower_equal(lhs: I<Self>, rhs: I<Self>, out_dtype: BoolDType) -> L<Self>;
        fn int_lower_equal_elem(lhs: I<Self>, rhs: Scalar, out_dtype: BoolDType) -> L<Self>;
        fn int_add(lhs: I<Self>, rhs: I<Self>) -> I<Self>;
        fn int_add_scalar(lhs: I<Self>, rhs: Scalar) -> I<Self>;
        fn int_powi(lhs: I<Self>, rhs: I<Self>) -> I<Self>;
        fn int_powi_scalar(lhs: I<Self>, rhs: Scalar) -> I<Self>;
        fn int_powi_scalar_impl(lhs: I<Self>, rhs: Scalar) -> I<Self>;
        fn int_clamp_min(tensor: I<Self>, min: Scalar) -> I<Self>;
        fn int_clamp_max(tensor: I<Self>, max: Scalar) -> I<Self>;
        fn int_clamp(tensor: I<Self>, min: Scalar, max: Scalar) -> I<Self>;
        fn int_sub(lhs: I<Self>, rhs: I<Self>) -> I<Self>;
        fn int_sub_scalar(lhs: I<Self>, rhs: Scalar) -> I<Self>;
        fn int_mul(lhs: I<Self>, rhs: I<Self>) -> I<Self>;
        fn int_mul_scalar(lhs: I<Self>, rhs: Scalar) -> I<Self>;
        fn int_div(lhs: I<Self>, rhs: I<Self>) -> I<Self>;
        fn int_div_scalar(lhs: I<Self>, rhs: Scalar) -> I<Self>;
        fn int_remainder(lhs: I<Self>, rhs: I<Self>) -> I<Self>;
        fn int_remainder_scalar(lhs: I<Self>, rhs: Scalar) -> I<Self>;
        fn int_matmul(lhs: I<Self>, rhs: I<Self>) -> I<Self>;
        fn int_neg(tensor: I<Self>) -> I<Self>;
        fn int_zeros(shape: Shape, device: &D<Self>, dtype: IntDType) -> I<Self>;
        fn int_ones(shape: Shape, device: &D<Self>, dtype: IntDType) -> I<Self>;
        fn int_full(shape: Shape, fill_value: Scalar, device: &D<Self>, dtype: IntDType) -> I<Self>;
        fn int_sum(tensor: I<Self>) -> I<Self>;
        fn int_sum_dim(tensor: I<Self>, dim: usize) -> I<Self>;
        fn int_prod(tensor: I<Self>) -> I<Self>;
        fn int_prod_dim(tensor: I<Self>, dim: usize) -> I<Self>;
        fn int_mean(tensor: I<Self>) -> I<Self>;
        fn int_mean_dim(tensor: I<Self>, dim: usize) -> I<Self>;
        fn int_cumsum(tensor: I<Self>, dim: usize) -> I<Self>;
        fn int_cumprod(tensor: I<Self>, dim: usize) -> I<Self>;
        fn int_cummin(tensor: I<Self>, dim: usize) -> I<Self>;
        fn int_cummax(tensor: I<Self>, dim: usize) -> I<Self>;
        fn int_argmax(tensor: I<Self>, dim: usize) -> I<Self>;
        fn int_argtopk(tensor: I<Self>, dim: usize, k: usize) -> I<Self>;
        fn int_topk(tensor: I<Self>, dim: usize, k: usize) -> I<Self>;
        fn int_argmin(tensor: I<Self>, dim: usize) -> I<Self>;
        fn int_max(tensor: I<Self>) -> I<Self>;
        fn int_max_dim(tensor: I<Self>, dim: usize) -> I<Self>;
        fn int_max_dim_with_indices(tensor: I<Self>, dim: usize) -> (I<Self>, I<Self>);
        fn int_max_abs(tensor: I<Self>) -> I<Self>;
        fn int_max_abs_dim(tensor: I<Self>, dim: usize) -> I<Self>;
        fn int_min(tensor: I<Self>) -> I<Self>;
        fn int_min_dim(tensor: I<Self>, dim: usize) -> I<Self>;
        fn int_min_dim_with_indices(tensor: I<Self>, dim: usize) -> (I<Self>, I<Self>);
        fn int_abs(tensor: I<Self>) -> I<Self>;
        fn int_transpose(tensor: I<Self>) -> I<Self>;
        fn int_swap_dims(tensor: I<Self>, dim1: usize, dim2: usize) -> I<Self>;
        fn int_permute(tensor: I<Self>, axes: &[usize]) -> I<Self>;
        fn int_flip(tensor: I<Self>, axes: &[usize]) -> I<Self>;
        fn int_random(shape: Shape, distribution: Distribution, device: &D<Self>, dtype: IntDType) -> I<Self>;
        fn int_arange_step(range: Range<i64>, step: usize, device: &D<Self>, dtype: IntDType) -> I<Self>;
        fn int_arange(range: Range<i64>, device: &D<Self>, dtype: IntDType) -> I<Self>;
        fn int_any(tensor: I<Self>, out_dtype: BoolDType) -> L<Self>;
        fn int_any_dim(tensor: I<Self>, dim: usize, out_dtype: BoolDType) -> L<Self>;
        fn int_all(tensor: I<Self>, out_dtype: BoolDType) -> L<Self>;
        fn int_all_dim(tensor: I<Self>, dim: usize, out_dtype: BoolDType) -> L<Self>;
        fn int_sign(tensor: I<Self>) -> I<Self>;
        fn int_expand(tensor: I<Self>, shape: Shape) -> I<Self>;
        fn int_sort(tensor: I<Self>, dim: usize, descending: bool) -> I<Self>;
        fn int_sort_with_indices(tensor: I<Self>, dim: usize, descending: bool) -> (I<Self>, I<Self>);
        fn int_argsort(tensor: I<Self>, dim: usize, descending: bool) -> I<Self>;
        fn bitwise_and(lhs: I<Self>, rhs: I<Self>) -> I<Self>;
        fn bitwise_and_scalar(lhs: I<Self>, rhs: Scalar) -> I<Self>;
        fn bitwise_or(lhs: I<Self>, rhs: I<Self>) -> I<Self>;
        fn bitwise_or_scalar(lhs: I<Self>, rhs: Scalar) -> I<Self>;
        fn bitwise_xor(lhs: I<Self>, rhs: I<Self>) -> I<Self>;
        fn bitwise_xor_scalar(lhs: I<Self>, rhs: Scalar) -> I<Self>;
        fn bitwise_not(tensor: I<Self>) -> I<Self>;
        fn bitwise_left_shift(lhs: I<Self>, rhs: I<Self>) -> I<Self>;
        fn bitwise_left_shift_scalar(lhs: I<Self>, rhs: Scalar) -> I<Self>;
        fn bitwise_right_shift(lhs: I<Self>, rhs: I<Self>) -> I<Self>;
        fn bitwise_right_shift_scalar(lhs: I<Self>, rhs: Scalar) -> I<Self>;
        fn int_cast(tensor: I<Self>, dtype: IntDType) -> I<Self>;
        fn int_unfold(tensor: I<Self>, dim: usize, size: usize, step: usize) -> I<Self>;
    }
}
impl<B: Wrapped> BoolTensorOps<Self> for Float8<B> {
    forward! {
        fn bool_empty(shape: Shape, device: &D<Self>, dtype: BoolDType) -> L<Self>;
        fn bool_zeros(shape: Shape, device: &D<Self>, dtype: BoolDType) -> L<Self>;
        fn bool_ones(shape: Shape, device: &D<Self>, dtype: BoolDType) -> L<Self>;
        #[raw] fn bool_into_data(tensor: L<Self>) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send;
        fn bool_from_data(data: TensorData, device: &D<Self>) -> L<Self>;
        fn bool_into_int(tensor: L<Self>, out_dtype: IntDType) -> I<Self>;
        fn bool_into_float(tensor: L<Self>, out_dtype: FloatDType) -> F<Self>;
        #[raw] fn bool_device(tensor: &L<Self>) -> D<Self>;
        fn bool_to_device(tensor: L<Self>, device: &D<Self>) -> L<Self>;
        fn bool_reshape(tensor: L<Self>, shape: Shape) -> L<Self>;
        fn bool_slice(tensor: L<Self>, slices: &[Slice]) -> L<Self>;
        fn bool_slice_assign(tensor: L<Self>, slices: &[Slice], value: L<Self>) -> L<Self>;
        fn bool_mask_where(tensor: L<Self>, mask: L<Self>, value: L<Self>) -> L<Self>;
        fn bool_mask_fill(tensor: L<Self>, mask: L<Self>, value: Scalar) -> L<Self>;
        fn bool_gather(dim: usize, tensor: L<Self>, indices: I<Self>) -> L<Self>;
        fn bool_scatter_or(dim: usize, tensor: L<Self>, indices: I<Self>, value: L<Self>) -> L<Self>;
        fn bool_select(tensor: L<Self>, dim: usize, indices: I<Self>) -> L<Self>;
        fn bool_select_or(tensor: L<Self>, dim: usize, indices: I<Self>, value: L<Self>) -> L<Self>;
        fn bool_repeat_dim(tensor: L<Self>, dim: usize, times: usize) -> L<Self>;
        fn bool_cat(tensors: Vec<L<Self>>, dim: usize) -> L<Self>;
        fn bool_equal(lhs: L<Self>, rhs: L<Self>) -> L<Self>;
        fn bool_not_equal(lhs: L<Self>, rhs: L<Self>) -> L<Self>;
        fn bool_equal_elem(lhs: L<Self>, rhs: Scalar) -> L<Self>;
        fn bool_not_equal_elem(lhs: L<Self>, rhs: Scalar) -> L<Self>;
        fn bool_not(tensor: L<Self>) -> L<Self>;
        fn bool_and(lhs: L<Self>, rhs: L<Self>) -> L<Self>;
        fn bool_or(lhs: L<Self>, rhs: L<Self>) -> L<Self>;
        fn bool_xor(lhs: L<Self>, rhs: L<Self>) -> L<Self>;
        fn bool_transpose(tensor: L<Self>) -> L<Self>;
        fn bool_swap_dims(tensor: L<Self>, dim1: usize, dim2: usize) -> L<Self>;
        fn bool_permute(tensor: L<Self>, axes: &[usize]) -> L<Self>;
        fn bool_flip(tensor: L<Self>, axes: &[usize]) -> L<Self>;
        fn bool_any(tensor: L<Self>) -> L<Self>;
        fn bool_any_dim(tensor: L<Self>, dim: usize) -> L<Self>;
        fn bool_all(tensor: L<Self>) -> L<Self>;
        fn bool_all_dim(tensor: L<Self>, dim: usize) -> L<Self>;
        #[raw] fn bool_argwhere(tensor: L<Self>, out_dtype: IntDType) -> impl Future<Output = I<Self>> + 'static + Send;
        fn bool_expand(tensor: L<Self>, shape: Shape) -> L<Self>;
        fn bool_unfold(tensor: L<Self>, dim: usize, size: usize, step: usize) -> L<Self>;
    }
}
impl<B: Wrapped> ModuleOps<Self> for Float8<B> {
    forward! {
        fn embedding_backward(weights: F<Self>, output_grad: F<Self>, indices: I<Self>) -> F<Self>;
        fn conv1d(x: F<Self>, weight: F<Self>, bias: Option<F<Self>>, options: ConvOptions<1>) -> F<Self>;
        fn conv1d_x_backward(x: F<Self>, weight: F<Self>, output_grad: F<Self>, options: ConvOptions<1>) -> F<Self>;
        fn conv1d_weight_backward(x: F<Self>, weight: F<Self>, output_grad: F<Self>, options: ConvOptions<1>) -> F<Self>;
        fn conv1d_bias_backward(x: F<Self>, bias: F<Self>, output_grad: F<Self>) -> F<Self>;
        fn conv2d(x: F<Self>, weight: F<Self>, bias: Option<F<Self>>, options: ConvOptions<2>) -> F<Self>;
        fn conv2d_x_backward(x: F<Self>, weight: F<Self>, output_grad: F<Self>, options: ConvOptions<2>) -> F<Self>;
        fn conv2d_weight_backward(x: F<Self>, weight: F<Self>, output_grad: F<Self>, options: ConvOptions<2>) -> F<Self>;
        fn conv2d_bias_backward(x: F<Self>, bias: F<Self>, output_grad: F<Self>) -> F<Self>;
        fn deform_conv2d(x: F<Self>, offset: F<Self>, weight: F<Self>, mask: Option<F<Self>>, bias: Option<F<Self>>, options: DeformConvOptions<2>) -> F<Self>;
        fn deform_conv2d_backward(x: F<Self>, offset: F<Self>, weight: F<Self>, mask: Option<F<Self>>, bias: Option<F<Self>>, output_grad: F<Self>, options: DeformConvOptions<2>) -> DeformConv2dBackward<Self>;
        fn conv3d(x: F<Self>, weight: F<Self>, bias: Option<F<Self>>, options: ConvOptions<3>) -> F<Self>;
        fn conv3d_x_backward(x: F<Self>, weight: F<Self>, output_grad: F<Self>, options: ConvOptions<3>) -> F<Self>;
        fn conv3d_weight_backward(x: F<Self>, weight: F<Self>, output_grad: F<Self>, options: ConvOptions<3>) -> F<Self>;
        fn conv3d_bias_backward(x: F<Self>, bias: F<Self>, output_grad: F<Self>) -> F<Self>;
        fn conv_transpose1d(x: F<Self>, weight: F<Self>, bias: Option<F<Self>>, options: ConvTransposeOptions<1>) -> F<Self>;
        fn conv_transpose1d_x_backward(weight: F<Self>, output_grad: F<Self>, options: ConvTransposeOptions<1>) -> F<Self>;
        fn conv_transpose1d_weight_backward(x: F<Self>, weight: F<Self>, output_grad: F<Self>, options: ConvTransposeOptions<1>) -> F<Self>;
        fn conv_transpose1d_bias_backward(x: F<Self>, bias: F<Self>, output_grad: F<Self>) -> F<Self>;
        fn conv_transpose2d(x: F<Self>, weight: F<Self>, bias: Option<F<Self>>, options: ConvTransposeOptions<2>) -> F<Self>;
        fn conv_transpose2d_x_backward(weight: F<Self>, output_grad: F<Self>, options: ConvTransposeOptions<2>) -> F<Self>;
        fn conv_transpose2d_weight_backward(x: F<Self>, weight: F<Self>, output_grad: F<Self>, options: ConvTransposeOptions<2>) -> F<Self>;
        fn conv_transpose2d_bias_backward(x: F<Self>, bias: F<Self>, output_grad: F<Self>) -> F<Self>;
        fn conv_transpose3d(x: F<Self>, weight: F<Self>, bias: Option<F<Self>>, options: ConvTransposeOptions<3>) -> F<Self>;
        fn conv_transpose3d_x_backward(weight: F<Self>, output_grad: F<Self>, options: ConvTransposeOptions<3>) -> F<Self>;
        fn conv_transpose3d_weight_backward(x: F<Self>, weight: F<Self>, output_grad: F<Self>, options: ConvTransposeOptions<3>) -> F<Self>;
        fn conv_transpose3d_bias_backward(x: F<Self>, bias: F<Self>, output_grad: F<Self>) -> F<Self>;
        fn unfold4d(x: F<Self>, kernel_size: [usize; 2], options: UnfoldOptions) -> F<Self>;
        fn avg_pool1d(x: F<Self>, kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> F<Self>;
        fn avg_pool1d_backward(x: F<Self>, grad: F<Self>, kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> F<Self>;
        fn avg_pool2d(x: F<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> F<Self>;
        fn avg_pool2d_backward(x: F<Self>, grad: F<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> F<Self>;
        fn adaptive_avg_pool2d(x: F<Self>, output_size: [usize; 2]) -> F<Self>;
        fn adaptive_avg_pool2d_backward(x: F<Self>, grad: F<Self>) -> F<Self>;
        fn adaptive_avg_pool1d(x: F<Self>, output_size: usize) -> F<Self>;
        fn adaptive_avg_pool1d_backward(x: F<Self>, grad: F<Self>) -> F<Self>;
        fn max_pool1d(x: F<Self>, kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool) -> F<Self>;
        fn max_pool1d_with_indices(x: F<Self>, kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool) -> MaxPool1dWithIndices<Self>;
        fn max_pool1d_with_indices_backward(x: F<Self>, kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool, output_grad: F<Self>, indices: I<Self>) -> MaxPool1dBackward<Self>;
        fn max_pool2d(x: F<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool) -> F<Self>;
        fn max_pool2d_with_indices(x: F<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool) -> MaxPool2dWithIndices<Self>;
        fn max_pool2d_with_indices_backward(x: F<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool, output_grad: F<Self>, indices: I<Self>) -> MaxPool2dBackward<Self>;
        fn interpolate(x: F<Self>, output_size: [usize; 2], options: InterpolateOptions) -> F<Self>;
        fn interpolate_backward(x: F<Self>, grad: F<Self>, output_size: [usize; 2], options: InterpolateOptions) -> F<Self>;
        fn layer_norm(tensor: F<Self>, gamma: F<Self>, beta: Option<F<Self>>, epsilon: f64) -> F<Self>;
        fn ctc_loss(log_probs: F<Self>, targets: I<Self>, input_lengths: I<Self>, target_lengths: I<Self>, blank: usize) -> F<Self>;
        #[raw] fn has_ctc_loss_backward() -> bool;
        fn ctc_loss_backward(log_probs: F<Self>, targets: I<Self>, input_lengths: I<Self>, target_lengths: I<Self>, grad_loss: F<Self>, blank: usize) -> F<Self>;
        fn irfft(spectrum_re: F<Self>, spectrum_im: F<Self>, dim: usize, n: Option<usize>) -> F<Self>;
    }
    fn attention(
        query: F<Self>,
        key: F<Self>,
        value: F<Self>,
        mask: Option<L<Self>>,
        attn_bias: Option<F<Self>>,
        options: AttentionModuleOptions,
    ) -> F<Self> {
        let inputs = [query, key, value].map(Float8Tensor::into_full);
        Float8Tensor::new(attention::attention::<B>(inputs, mask, attn_bias.map(Float8Tensor::into_full), options))
    }
    fn embedding(weights: F<Self>, indices: I<Self>) -> F<Self> {
        let is_divided = weights.layer().is_some_and(|layer| layer.is_divided());
        if is_divided || embedding::is_narrow(weights.dtype()) && B::is_tracked(weights.full()) {
            return Float8Tensor::new(B::fp8_embedding(weights, indices));
        }
        Float8Tensor::new(B::embedding(weights.into_values("embedding"), indices))
    }
    fn linear(x: F<Self>, weight: F<Self>, bias: Option<F<Self>>) -> F<Self> {
        let bias = bias.map(Float8Tensor::into_full);
        Float8Tensor::new(match weight.adapters().cloned() {
            // Burn's linear reports invalid shapes.
            _ if !linear::fits(&x, &weight, bias.as_ref()) => {
                B::linear(x.into_full(), weight.into_values("linear"), bias)
            }
            None => B::fp8_linear(x, weight, bias),
            Some(adapters) => {
                // Only this linear reads a weight and its adapters separately.
                let layer = weight.layer().cloned();
                let y = B::fp8_linear(x.clone(), weight.with_adapters(None), bias);
                let part = layer.as_deref().and_then(B::linear_part);
                adapters.add_to(y, x.into_full(), part, |inner, direction| {
                    B::parallel_tokens(inner, layer.as_ref().expect("a part is one of a layer"), direction)
                })
            }
        })
    }
    // Only an `Autodiff` around a `Float8` backend calls these.
    fn linear_x_backward(_: F<Self>, _: F<Self>) -> F<Self> {
        wrong_order()
    }
    fn linear_weight_backward(_: F<Self>, _: F<Self>) -> F<Self> {
        wrong_order()
    }
    fn linear_bias_backward(_: F<Self>) -> F<Self> {
        wrong_order()
    }
    fn rfft(signal: F<Self>, dim: usize, n: Option<usize>) -> (F<Self>, F<Self>) {
        let (re, im) = B::rfft(signal.into_full(), dim, n);
        (Float8Tensor::new(re), Float8Tensor::new(im))
    }
}
impl<B: Wrapped> ActivationOps<Self> for Float8<B> {
    forward! {
        fn leaky_relu(tensor: F<Self>, negative_slope: Scalar) -> F<Self>;
        fn relu(tensor: F<Self>) -> F<Self>;
        fn relu_backward(output: F<Self>, grad: F<Self>) -> F<Self>;
        fn gelu(tensor: F<Self>) -> F<Self>;
        fn prelu(tensor: F<Self>, alpha: F<Self>) -> F<Self>;
        fn gelu_backward(x: F<Self>, grad: F<Self>) -> F<Self>;
        fn sigmoid(tensor: F<Self>) -> F<Self>;
        fn sigmoid_backward(output: F<Self>, grad: F<Self>) -> F<Self>;
        fn hard_sigmoid(tensor: F<Self>, alpha: Scalar, beta: Scalar) -> F<Self>;
        fn log_sigmoid(tensor: F<Self>) -> F<Self>;
        fn softmax(tensor: F<Self>, dim: usize) -> F<Self>;
        fn log_softmax(tensor: F<Self>, dim: usize) -> F<Self>;
        fn softmin(tensor: F<Self>, dim: usize) -> F<Self>;
        fn log_sigmoid_backward(x: F<Self>, grad: F<Self>) -> F<Self>;
    }
}
impl<B: Wrapped> QTensorOps<Self> for Float8<B> {
    forward! {
        fn q_from_data(data: TensorData, device: &D<Self>) -> Q<Self>;
        fn quantize(tensor: F<Self>, scheme: &QuantScheme, qparams: QuantizationParametersPrimitive<Self>) -> Q<Self>;
        fn quantize_dynamic(tensor: F<Self>, scheme: &QuantScheme) -> Q<Self>;
        fn dequantize(tensor: Q<Self>, dtype: FloatDType) -> F<Self>;
        #[raw] fn q_device(tensor: &Q<Self>) -> D<Self>;
        fn q_to_device(tensor: Q<Self>, device: &D<Self>) -> Q<Self>;
        fn q_reshape(tensor: Q<Self>, shape: Shape) -> Q<Self>;
        #[raw] fn q_into_data(tensor: Q<Self>) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send;
        fn q_detach(tensor: Q<Self>) -> Q<Self>;
        fn q_set_require_grad(tensor: Q<Self>, require_grad: bool) -> Q<Self>;
        #[raw] fn q_is_require_grad(tensor: &Q<Self>) -> bool;
        fn q_expand(tensor: Q<Self>, shape: Shape) -> Q<Self>;
        fn q_transpose(tensor: Q<Self>) -> Q<Self>;
        fn q_swap_dims(tensor: Q<Self>, dim1: usize, dim2: usize) -> Q<Self>;
        fn q_permute(tensor: Q<Self>, axes: &[usize]) -> Q<Self>;
        fn q_flip(tensor: Q<Self>, axes: &[usize]) -> Q<Self>;
        fn q_select(tensor: Q<Self>, dim: usize, indices: I<Self>) -> Q<Self>;
        fn q_slice(tensor: Q<Self>, slices: &[Slice]) -> Q<Self>;
        fn q_gather(dim: usize, tensor: Q<Self>, indices: I<Self>) -> Q<Self>;
        fn q_repeat_dim(tensor: Q<Self>, dim: usize, times: usize) -> Q<Self>;
        fn q_add(lhs: Q<Self>, rhs: Q<Self>) -> TensorPrimitive<Self>;
        fn q_add_scalar(lhs: Q<Self>, rhs: Scalar) -> TensorPrimitive<Self>;
        fn q_clamp_min(tensor: Q<Self>, min: Scalar) -> TensorPrimitive<Self>;
        fn q_clamp_max(tensor: Q<Self>, max: Scalar) -> TensorPrimitive<Self>;
        fn q_clamp(tensor: Q<Self>, min: Scalar, max: Scalar) -> TensorPrimitive<Self>;
        fn q_sub(lhs: Q<Self>, rhs: Q<Self>) -> TensorPrimitive<Self>;
        fn q_sub_scalar(lhs: Q<Self>, rhs: Scalar) -> TensorPrimitive<Self>;
        fn q_mul(lhs: Q<Self>, rhs: Q<Self>) -> TensorPrimitive<Self>;
        fn q_mul_scalar(lhs: Q<Self>, rhs: Scalar) -> TensorPrimitive<Self>;
        fn q_div(lhs: Q<Self>, rhs: Q<Self>) -> TensorPrimitive<Self>;
        fn q_div_scalar(lhs: Q<Self>, rhs: Scalar) -> TensorPrimitive<Self>;
        fn q_matmul(lhs: TensorPrimitive<Self>, rhs: TensorPrimitive<Self>) -> TensorPrimitive<Self>;
        fn q_neg(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_recip(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_sum(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_sum_dim(tensor: Q<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_prod(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_prod_dim(tensor: Q<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_mean(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_mean_dim(tensor: Q<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_cumsum(tensor: Q<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_cumprod(tensor: Q<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_cummin(tensor: Q<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_cummax(tensor: Q<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_exp(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_log(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_log1p(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_powf(lhs: Q<Self>, rhs: Q<Self>) -> TensorPrimitive<Self>;
        fn q_powi(lhs: Q<Self>, rhs: I<Self>) -> TensorPrimitive<Self>;
        fn q_powi_scalar(lhs: Q<Self>, rhs: Scalar) -> TensorPrimitive<Self>;
        fn q_powf_scalar(tensor: Q<Self>, value: Scalar) -> TensorPrimitive<Self>;
        fn q_sqrt(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_abs(tensor: Q<Self>) -> Q<Self>;
        fn q_cos(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_sin(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_tan(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_cosh(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_sinh(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_tanh(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_erf(tensor: Q<Self>) -> TensorPrimitive<Self>;
        fn q_cat(tensors: Vec<Q<Self>>, dim: usize) -> Q<Self>;
        fn q_argmax(tensor: Q<Self>, dim: usize, out_dtype: IntDType) -> I<Self>;
        fn q_argtopk(tensor: Q<Self>, dim: usize, k: usize, out_dtype: IntDType) -> I<Self>;
        fn q_topk(tensor: Q<Self>, dim: usize, k: usize) -> Q<Self>;
        fn q_argmin(tensor: Q<Self>, dim: usize, out_dtype: IntDType) -> I<Self>;
        fn q_max(tensor: Q<Self>) -> Q<Self>;
        fn q_max_dim(tensor: Q<Self>, dim: usize) -> Q<Self>;
        fn q_max_dim_with_indices(tensor: Q<Self>, dim: usize, out_dtype: IntDType) -> (Q<Self>, I<Self>);
        fn q_min(tensor: Q<Self>) -> Q<Self>;
        fn q_min_dim(tensor: Q<Self>, dim: usize) -> Q<Self>;
        fn q_min_dim_with_indices(tensor: Q<Self>, dim: usize, out_dtype: IntDType) -> (Q<Self>, I<Self>);
        fn q_max_abs(tensor: Q<Self>) -> Q<Self>;
        fn q_max_abs_dim(tensor: Q<Self>, dim: usize) -> Q<Self>;
        fn q_any(tensor: Q<Self>, out_dtype: BoolDType) -> L<Self>;
        fn q_any_dim(tensor: Q<Self>, dim: usize, out_dtype: BoolDType) -> L<Self>;
        fn q_all(tensor: Q<Self>, out_dtype: BoolDType) -> L<Self>;
        fn q_all_dim(tensor: Q<Self>, dim: usize, out_dtype: BoolDType) -> L<Self>;
        fn q_sort(tensor: Q<Self>, dim: usize, descending: bool) -> Q<Self>;
        fn q_sort_with_indices(tensor: Q<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> (Q<Self>, I<Self>);
        fn q_argsort(tensor: Q<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> I<Self>;
    }
}
impl<B: Wrapped> TransactionOps<Self> for Float8<B> {
    forward! {
        #[raw] fn tr_execute(transaction: TransactionPrimitive<Self>) -> impl Future<Output = Result<TransactionPrimitiveData, ExecutionError>> + Send;
    }
}
