//! [`Float8Backend`]: operations that [`Float8`](crate::Float8) needs from a wrapped backend, with
//! their inputs and outputs.
mod adamw;
#[cfg(feature = "cubecl")]
mod adamw_kernels;
mod attention;
#[cfg(feature = "cubecl")]
mod attention_kernels;
#[cfg(feature = "cubecl")]
mod cube;
#[cfg(feature = "cubecl")]
mod device_errors;
mod fused;
#[cfg(feature = "cubecl")]
mod fused_kernels;
#[cfg(feature = "cubecl")]
pub(crate) mod fusion;
#[cfg(feature = "cubecl")]
mod fusion_fused_ops;
mod grouped;
mod high_precision;
#[cfg(feature = "cubecl")]
mod high_precision_kernels;
pub mod host;
#[cfg(feature = "cubecl")]
pub(crate) mod operand;
#[cfg(feature = "cubecl")]
mod preflight;
mod report;
#[cfg(feature = "cubecl")]
mod self_check;
#[cfg(feature = "cubecl")]
mod stream;
#[cfg(feature = "cubecl")]
mod views;

pub use adamw::{AdamWDtypes, AdamWFn, AdamWRequest, AdamWResult, AdamWStep, AdamWTensors, RoundingKeys};
pub use attention::{Attention, CachedAttention, CachedHeads};
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, DType, FloatDType, TensorMetadata};
use burn_std::Shape;
#[cfg(feature = "cubecl")]
#[doc(hidden)]
pub use device_errors::device_error;
pub use float8_kernels::{Cast, GemmConfig, GemmPath, Grouping, InvScale, Orientation};
use float8_kernels::{Format, GemmDevice, Granularity};
pub use fused::{Fused, FusedBackward};
pub(crate) use grouped::check_shapes;
pub use grouped::grouped_matmul;
pub use high_precision::HighPrecisionGemm;
#[cfg(feature = "cubecl")]
pub use operand::{DeviceOperand, OperandLayout};
pub use report::SelfCheckReport;
use serde::{Deserialize, Serialize};

use crate::config::SelfCheck;
use crate::error::Float8Error;
use crate::profile::operation;

/// Contraction-major FP8 copies of a tensor as `[rows, cols]`, where `cols` is its last axis.
#[derive(Clone, Debug)]
pub struct Quantized<B: Float8Backend> {
    /// `[rows, cols]`, if requested.
    pub rows: Option<B::Operand>,
    /// `[cols, rows]`, if requested.
    pub cols: Option<B::Operand>,
    /// f32 array whose maximum is max |x|, NaN if x contains a NaN. The given amax if x was not
    /// observed.
    pub amax: FloatTensor<B>,
}

impl<B: Float8Backend> Quantized<B> {
    /// The copy of a cast in one orientation.
    pub(crate) fn only(self) -> B::Operand {
        self.rows.or(self.cols).expect("a cast makes the requested orientation")
    }
}

/// A given amax that sets the scale of a cast, in place of the amax of each part of x that shares a
/// scale. Only with one scale per tensor; values beyond the format saturate.
#[derive(Clone, Debug)]
pub struct GivenAmax<T> {
    /// f32 `[1]`.
    pub amax: T,
    /// Whether [`Quantized::amax`] is still computed from x.
    pub observe: bool,
}

/// Casts a tensor unless it has the dtype already.
#[doc(hidden)]
pub fn in_dtype<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if x.dtype() == dtype {
        return x;
    }
    let _timer = operation("float_cast");
    #[cfg(feature = "flex")]
    if let Some(y) = host::cast::<B>(&x, dtype) {
        return y;
    }
    B::float_cast(x, FloatDType::from(dtype))
}

/// Groups of a grouped GEMM.
#[derive(Clone, Debug)]
pub struct GroupEnds<T> {
    /// i32 `[G]`: end of each group, which is the start of the next.
    pub ends: T,
    /// The axis that the groups divide.
    pub grouping: Grouping,
}

/// An FP8 GEMM.
#[derive(Debug)]
pub struct GemmRequest<'a, B: Float8Backend> {
    /// `[M, K]`.
    pub a: &'a B::Operand,
    /// `[N, K]`.
    pub b: &'a B::Operand,
    /// `[N]`; none with groups.
    pub bias: Option<FloatTensor<B>>,
    /// Groups of a grouped GEMM.
    pub groups: Option<GroupEnds<IntTensor<B>>>,
    /// Shape of y. Its last axis is N.
    pub shape: Shape,
    /// Dtype of y.
    pub dtype: FloatDType,
    /// Accumulation and emulation.
    pub config: GemmConfig,
}

/// Size of an operand, with padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperandSize {
    /// Rows.
    pub rows: usize,
    /// Length of the contracted axis.
    pub k: usize,
    /// Codes per stored row: `k` plus the zero padding of the kernels.
    pub padded_k: usize,
    /// Bytes of codes and scales.
    pub bytes: u64,
}

/// Fixed properties of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Dtypes that can be quantized and returned by a GEMM.
    pub dtypes: [Option<DType>; 3],
    /// Maximum number of elements of an operand or output.
    pub max_elements: u64,
    /// Maximum number of rows for which a GEMM without groups is batch-invariant: each row of `a`
    /// has the same bits as if computed separately. Requires per-row scales. 1 if not guaranteed.
    pub independent_rows: usize,
    /// Fastest algorithm of [`Fused::Attention`]: `wgmma` or `mma`, kernels on tensor cores for f16
    /// and bf16; `tiles` of queries and keys in a kernel; or `blocks` of queries by Burn's matmuls.
    /// The next one takes what a kernel does not. On a GPU, the variable `FLOAT8_ATTENTION` requests
    /// one.
    pub attention: &'static str,
    /// GEMM device of the kernels. None on the host.
    pub gemm: Option<GemmDevice>,
}

impl DeviceFacts {
    /// A device without limits and without an attention kernel. `supports` is called for f32, f16
    /// and bf16.
    pub fn new(supports: impl Fn(DType) -> bool) -> Self {
        let dtypes = [DType::F32, DType::F16, DType::BF16].map(|dtype| supports(dtype).then_some(dtype));
        Self { dtypes, max_elements: u64::MAX, independent_rows: 1, attention: "blocks", gemm: None }
    }

    /// Whether a tensor of this dtype can be quantized, and a GEMM can return it.
    pub fn supports(&self, dtype: DType) -> bool {
        self.dtypes.contains(&Some(dtype))
    }

    /// Whether kernels compute attention of heads with this dtype and these sizes.
    #[cfg(feature = "cubecl")]
    pub(crate) fn has_attention_kernel(&self, dtype: DType, widths: [usize; 2]) -> bool {
        let fits = |width| width <= float8_kernels::attention::MAX_WIDTH;
        self.gemm.is_some() && self.attention != "blocks" && self.supports(dtype) && widths.into_iter().all(fits)
    }

    /// Algorithm of attention in this dtype.
    pub fn attention_of(&self, dtype: DType) -> &'static str {
        if dtype == DType::F32 && self.attention != "blocks" { "tiles" } else { self.attention }
    }

    /// Current path of a GEMM. `rows` are the output's, or `None` with groups. The path changes
    /// when a kernel is disabled.
    pub fn gemm_path(&self, rows: Option<usize>, granularities: [Granularity; 2], config: GemmConfig) -> GemmPath {
        self.gemm.map_or(GemmPath::Host, |device| device.path(rows, granularities, config))
    }
}

/// Device memory held by a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes of live tensors.
    pub in_use: u64,
    /// Bytes taken from the device: live tensors plus memory kept for reuse. It does not shrink
    /// automatically, so it is close to the peak.
    pub reserved: u64,
}

/// Operations a backend must implement so that [`Float8`](crate::Float8) can wrap it.
///
/// Implemented for `CubeBackend` and `Fusion<CubeBackend>` (`Cuda`, `Wgpu`, `Vulkan`, `Metal`,
/// `Rocm`), `Flex` and `NdArray`. For your CPU backend, [`host_backend!`](crate::host_backend)
/// implements it in one line, through [`HostBackend`](host::HostBackend). Burn's `Router`,
/// `RemoteBackend` and `Dispatch` cannot be wrapped. They choose the backend at run time and cannot
/// send FP8 operations.
pub trait Float8Backend: Backend {
    /// FP8 codes of a matrix, contraction-major, with their inverse scales.
    type Operand: Clone + Send + Sync + core::fmt::Debug + 'static;

    /// Properties of a device.
    fn fp8_facts(device: &Device<Self>) -> DeviceFacts;

    /// Device memory held by the backend, if it counts that.
    fn fp8_device_memory(device: &Device<Self>) -> Option<DeviceMemory> {
        let _ = device;
        None
    }

    /// Checks the device once. Called before the first FP8 operation there, and whenever a
    /// configuration is applied. `self_check` is the setting of that configuration.
    ///
    /// # Errors
    ///
    /// If the device cannot run FP8.
    fn fp8_prepare(device: &Device<Self>, self_check: Option<SelfCheck>) -> Result<(), Float8Error> {
        let _ = (device, self_check);
        Ok(())
    }

    /// Self-check results and lost results of a device. `wait` waits for its queue. Without it the
    /// call is free and returns the default while nothing is wrong; each GEMM calls it so.
    fn fp8_self_check(device: &Device<Self>, wait: bool) -> SelfCheckReport {
        let _ = (device, wait);
        SelfCheckReport::default()
    }

    /// Casts `x` `[.., cols]`, as `[rows, cols]`, in one pass.
    ///
    /// The caller has checked dtype and size. No dimension is zero, and an amax is given only with
    /// one scale per tensor.
    fn fp8_quantize(
        x: FloatTensor<Self>,
        cast: Cast,
        orientation: Orientation,
        given: Option<GivenAmax<FloatTensor<Self>>>,
    ) -> Quantized<Self>;

    /// y `[M, N]` = a `[M, K]` · b `[N, K]`ᵀ + bias `[N]`. With groups, the products of each group
    /// without a bias, as defined by [`grouped_scaled_gemm`](float8_kernels::grouped_scaled_gemm).
    ///
    /// Products are exact and accumulated in f32. Scales and bias are applied to the accumulator
    /// before the single rounding to the dtype.
    fn fp8_matmul(gemm: GemmRequest<'_, Self>) -> FloatTensor<Self>;

    /// A GEMM of a linear in high precision. The default uses Burn's operations. On Hopper, CubeCL
    /// backends have a kernel for bf16 and f16, which transposes no operand and rounds its f32 sums
    /// once.
    fn high_precision_matmul(gemm: HighPrecisionGemm<FloatTensor<Self>>) -> FloatTensor<Self> {
        high_precision::compute::<Self>(gemm)
    }

    /// Quantization statistics of `operand`, cast from `x` or its transpose: f32 `[n, 5]` partial
    /// sums for [`Health::from_partials`](float8_kernels::Health::from_partials).
    fn fp8_health(x: FloatTensor<Self>, operand: &Self::Operand, transposed: bool) -> FloatTensor<Self>;

    /// Computes a fused operation: y, then other tensors that its backward reads. With `backward`,
    /// the gradient of each input. The caller has checked shapes and dtypes, and nothing is empty.
    /// The default uses Burn's operations.
    fn fused(
        op: &Fused<Self>,
        inputs: &[FloatTensor<Self>],
        backward: Option<&FusedBackward<'_, Self>>,
    ) -> Vec<FloatTensor<Self>> {
        fused::compute(op, inputs, backward)
    }

    /// Attention over a KV cache, decoded tile by tile. The result is bit-identical to
    /// [`Fused::Attention`] on keys and values decoded to the dtype of q. The default is None: the
    /// caller decodes them.
    fn cached_attention(attention: &CachedAttention<Self>) -> Option<FloatTensor<Self>> {
        let _ = attention;
        None
    }

    /// AdamW in one pass. None if the backend has none for these dtypes on this device.
    fn adamw(device: &Device<Self>, dtypes: AdamWDtypes) -> Option<AdamWFn<Self>> {
        let _ = (device, dtypes);
        None
    }

    /// Size of an operand.
    fn fp8_size(operand: &Self::Operand) -> OperandSize;

    /// Values of an operand `[rows, k]` in f32: `decode(code) · inv_scale`, rounded once.
    fn fp8_dequantize(operand: &Self::Operand) -> FloatTensor<Self>;

    /// The operand `[k, rows]` of the same codes. The caller has checked that its scales serve both
    /// orientations: one per tensor, blocks of 128 by 128, or blocks of 1 by 32 that are equal in
    /// squares of 32 by 32.
    fn fp8_transpose(operand: &Self::Operand) -> Self::Operand;

    /// Reads an operand to the host. Waits for the device.
    fn fp8_read(operand: &Self::Operand) -> HostCodes;

    /// Operand with these codes and scales: the inverse of [`fp8_read`](Self::fp8_read).
    fn fp8_write(codes: HostCodes, device: &Device<Self>) -> Self::Operand;
}

/// An operand on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct HostCodes {
    /// Row-major `dims` without padding. The contraction is the last axis.
    pub codes: Vec<u8>,
    /// `[rows, k]`
    pub dims: [usize; 2],
    /// Format of the codes.
    pub format: Format,
    /// Granularity of the scales.
    pub granularity: Granularity,
    /// Row-major `granularity.scale_dims(rows, k)`: value = decode(code) · inv_scale.
    pub inv_scales: Vec<InvScale>,
    /// Whether the operand stores its codes transposed, as the host path does for a cast of the
    /// transpose. Its sums then have another order than with row-major codes. Backends with a
    /// single layout ignore it.
    pub transposed: bool,
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_backend::TensorData;
    use burn_backend::ops::FloatTensorOps;
    use burn_flex::Flex;
    use burn_std::bf16;

    use super::*;

    /// Casts between f32 and bf16 on a CPU round to nearest, ties to even, for any layout.
    #[test]
    fn casts_round_to_the_nearest() {
        let bits = (0..200_000_u32).map(|i| f32::from_bits(i.wrapping_mul(21_475)));
        let values: Vec<f32> = bits.filter(|x| !x.is_nan()).take(190_000).collect();
        let narrowed: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
        let device = Default::default();
        let x = Flex::float_from_data(TensorData::new(values, [500, 380]), &device);
        let narrow = Flex::float_from_data(TensorData::new(narrowed.clone(), [500, 380]), &device);
        let wide: Vec<f32> = narrowed.iter().map(|x| x.to_f32()).collect();
        let wide = TensorData::new(wide, [500, 380]);
        assert_eq!(data(in_dtype::<Flex>(x, DType::BF16)), data(narrow.clone()));
        assert_eq!(data(in_dtype::<Flex>(narrow.clone(), DType::F32)), wide);
        let transposed = in_dtype::<Flex>(Flex::float_transpose(narrow), DType::F32);
        assert_eq!(data(Flex::float_transpose(transposed)), wide);
        let nan = Flex::float_from_data(TensorData::new(vec![f32::NAN], [1]), &device);
        assert!(data(in_dtype::<Flex>(nan, DType::BF16)).as_slice::<bf16>().unwrap()[0].is_nan());
    }

    fn data(x: FloatTensor<Flex>) -> TensorData {
        burn_std::future::block_on(Flex::float_into_data(x)).unwrap()
    }
}
