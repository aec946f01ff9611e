//! [`Float8Backend`]: what [`Float8`](crate::Float8) asks of the backend that it wraps, and what goes in and out.
mod adamw;
mod attention;
#[cfg(feature = "cubecl")]
mod cube;
#[cfg(feature = "cubecl")]
mod device_errors;
mod fused;
#[cfg(feature = "cubecl")]
mod fused_kernels;
#[cfg(feature = "cubecl")]
mod fused_stream;
#[cfg(feature = "cubecl")]
pub(crate) mod fusion;
mod grouped;
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

pub use adamw::{AdamWFn, AdamWStep, AdamWTensors, RoundingKeys};
pub use attention::{Attention, CachedAttention, CachedHeads};
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, DType, FloatDType, TensorMetadata};
use burn_std::Shape;
pub use float8_kernels::{Cast, GemmConfig, GemmPath, Grouping, InvScale, Orientation};
use float8_kernels::{Format, GemmDevice, Granularity};
pub use fused::{Fused, FusedBackward};
pub(crate) use grouped::check_shapes;
pub use grouped::grouped_matmul;
#[cfg(feature = "cubecl")]
pub use operand::DeviceOperand;
pub use report::SelfCheckReport;
use serde::{Deserialize, Serialize};

use crate::config::SelfCheck;
use crate::error::Float8Error;
use crate::profile::operation;

/// The contraction-major FP8 copies of a tensor seen as `[rows, cols]`, its last axis being `cols`.
#[derive(Clone, Debug)]
pub struct Quantized<B: Float8Backend> {
    /// `[rows, cols]`, if asked for.
    pub rows: Option<B::Operand>,
    /// `[cols, rows]`, if asked for.
    pub cols: Option<B::Operand>,
    /// f32, an array whose maximum is max |x|, NaN if x holds one; the given amax if it was not to be observed.
    pub amax: FloatTensor<B>,
}

/// Where the scale of a cast comes from.
#[derive(Clone, Debug)]
pub enum ScaleFrom<T> {
    /// From the amax of each part of x that shares a scale.
    Dynamic,
    /// From this amax, f32 `[1]`, with one scale per tensor only; what exceeds the format saturates.
    Amax {
        /// The amax.
        amax: T,
        /// Whether [`Quantized::amax`] is to be that of x all the same.
        observe: bool,
    },
}

#[cfg(feature = "cubecl")]
impl<T> ScaleFrom<T> {
    /// What is given.
    fn given(&self) -> Option<&T> {
        match self {
            Self::Dynamic => None,
            Self::Amax { amax, .. } => Some(amax),
        }
    }

    /// The same with another value for what is given.
    fn map<U>(&self, f: impl FnOnce(&T) -> U) -> ScaleFrom<U> {
        match self {
            Self::Dynamic => ScaleFrom::Dynamic,
            Self::Amax { amax, observe } => ScaleFrom::Amax { amax: f(amax), observe: *observe },
        }
    }

    /// Whether the amax of the tensor is found.
    fn is_observed(&self) -> bool {
        !matches!(self, Self::Amax { observe: false, .. })
    }
}

/// The tensor itself where it has the dtype.
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

/// The groups of a grouped GEMM.
#[derive(Clone, Debug)]
pub struct GroupEnds<T> {
    /// i32 `[G]`: where each group ends, and the next begins.
    pub ends: T,
    /// Which axis they divide.
    pub grouping: Grouping,
}

/// A GEMM in FP8.
#[derive(Debug)]
pub struct GemmRequest<'a, B: Float8Backend> {
    /// `[M, K]`.
    pub a: &'a B::Operand,
    /// `[N, K]`.
    pub b: &'a B::Operand,
    /// `[N]`; none with groups.
    pub bias: Option<FloatTensor<B>>,
    /// The groups of a grouped GEMM.
    pub groups: Option<GroupEnds<IntTensor<B>>>,
    /// The shape of y, whose last axis is N.
    pub shape: Shape,
    /// The dtype of y.
    pub dtype: FloatDType,
    /// Accumulation and emulation.
    pub config: GemmConfig,
}

/// The size of an operand, and what padding adds to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperandSize {
    /// Rows.
    pub rows: usize,
    /// The axis that a GEMM contracts.
    pub k: usize,
    /// Codes in a stored row: `k`, and zeros up to what the kernels ask for.
    pub padded_k: usize,
    /// Bytes of codes and scales.
    pub bytes: u64,
}

/// Fixed properties of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Dtypes that tensors can be quantized from, and that a GEMM can return.
    pub dtypes: [Option<DType>; 3],
    /// Largest number of elements of an operand or output.
    pub max_elements: u64,
    /// Number of rows up to which a GEMM without groups gives each row of `a` the bits that it has
    /// alone, where rows have scales of their own. 1 without that promise.
    pub independent_rows: usize,
    /// Algorithm of [`Fused::Attention`]: `tiles` of queries and keys in a kernel, or `blocks` of
    /// queries by Burn's matmuls.
    pub attention: &'static str,
    /// The device of GEMMs. None for the host.
    pub gemm: Option<GemmDevice>,
}

impl DeviceFacts {
    /// A device without limits or a kernel for attention. `supports` is asked about f32, f16 and bf16.
    pub fn new(supports: impl Fn(DType) -> bool) -> Self {
        let dtypes = [DType::F32, DType::F16, DType::BF16].map(|dtype| supports(dtype).then_some(dtype));
        Self { dtypes, max_elements: u64::MAX, independent_rows: 1, attention: "blocks", gemm: None }
    }

    /// Whether a tensor of this dtype can be quantized, and a GEMM can return it.
    pub fn supports(&self, dtype: DType) -> bool {
        self.dtypes.contains(&Some(dtype))
    }

    /// Path of a GEMM now. `rows` are the output's, or `None` with groups. The answer changes when a kernel is found to be wrong.
    pub fn gemm_path(&self, rows: Option<usize>, granularities: [Granularity; 2], config: GemmConfig) -> GemmPath {
        self.gemm.map_or(GemmPath::Host, |device| device.path(rows, granularities, config))
    }
}

/// What a backend holds of its device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes of live tensors.
    pub in_use: u64,
    /// Bytes taken from the device: those of live tensors, and what is kept for the next ones. It does not shrink by itself, so it
    /// is close to the peak.
    pub reserved: u64,
}

/// What a backend must offer so that [`Float8`](crate::Float8) can wrap it.
///
/// Implemented for `CubeBackend` and `Fusion<CubeBackend>` (`Cuda`, `Wgpu`, `Vulkan`, `Metal`,
/// `Rocm`), `Flex` and `NdArray`. For a CPU backend of your own,
/// [`host_backend!`](crate::host_backend) implements it in one line, through
/// [`HostBackend`](host::HostBackend). Burn's `Router`, `RemoteBackend` and `Dispatch` cannot be
/// wrapped: they choose the backend at run time and cannot send an operation for FP8.
pub trait Float8Backend: Backend {
    /// FP8 codes of a matrix, contraction-major, with their inverse scale.
    type Operand: Clone + Send + Sync + core::fmt::Debug + 'static;

    /// The properties of a device.
    fn fp8_facts(device: &Device<Self>) -> DeviceFacts;

    /// What the backend holds of the device's memory, if it counts that.
    fn fp8_device_memory(device: &Device<Self>) -> Option<DeviceMemory> {
        let _ = device;
        None
    }

    /// Tries the device out, once. It is called before anything runs in FP8 there, and whenever a configuration is applied, which says
    /// whether kernels are to be checked.
    ///
    /// # Errors
    ///
    /// Why the device cannot run FP8.
    fn fp8_prepare(device: &Device<Self>, self_check: Option<SelfCheck>) -> Result<(), Float8Error> {
        let _ = (device, self_check);
        Ok(())
    }

    /// The self-checks of a device, and the results that it has lost. `wait` waits for its queue.
    /// Without it the report is the default, at no cost, while nothing is wrong: each GEMM asks.
    fn fp8_self_check(device: &Device<Self>, wait: bool) -> SelfCheckReport {
        let _ = (device, wait);
        SelfCheckReport::default()
    }

    /// Casts `x` `[.., cols]`, seen as `[rows, cols]`, in one pass over it.
    ///
    /// The caller has checked dtype and size. No dimension is zero, and an amax is given only with
    /// one scale per tensor.
    fn fp8_quantize(
        x: FloatTensor<Self>,
        cast: Cast,
        orientation: Orientation,
        scale: ScaleFrom<FloatTensor<Self>>,
    ) -> Quantized<Self>;

    /// y `[M, N]` = a `[M, K]` · b `[N, K]`ᵀ + bias `[N]`. With groups, the products of each as
    /// [`grouped_scaled_gemm`](float8_kernels::grouped_scaled_gemm) defines them, without a bias.
    ///
    /// Products are exact, accumulation is in f32; scales and bias are applied to the accumulator before the one
    /// rounding to the dtype.
    fn fp8_matmul(gemm: GemmRequest<'_, Self>) -> FloatTensor<Self>;

    /// How well `operand`, cast from `x` or from its transpose, represents it: f32 `[n, 5]`, which
    /// [`Health::from_partials`](float8_kernels::Health::from_partials) sums up.
    fn fp8_health(x: FloatTensor<Self>, operand: &Self::Operand, transposed: bool) -> FloatTensor<Self>;

    /// Computes a fused operation: y, then other tensors that its backward reads. With `backward`, the
    /// gradient of each input. The caller has checked shapes and dtypes, and nothing is empty. The
    /// default uses Burn's operations.
    fn fused(
        op: &Fused<Self>,
        inputs: &[FloatTensor<Self>],
        backward: Option<&FusedBackward<'_, Self>>,
    ) -> Vec<FloatTensor<Self>> {
        fused::compute(op, inputs, backward)
    }

    /// Attention of keys and values in a cache, decoded tile by tile: bit for bit the result of
    /// [`Fused::Attention`] on the decoded ones in the dtype of q. The default is none: the caller
    /// decodes them.
    fn cached_attention(attention: &CachedAttention<Self>) -> Option<FloatTensor<Self>> {
        let _ = attention;
        None
    }

    /// How a step of AdamW is made in one pass; none if the backend has only its operations.
    fn adamw() -> Option<AdamWFn<Self>> {
        None
    }

    /// The size of an operand.
    fn fp8_size(operand: &Self::Operand) -> OperandSize;

    /// The values of an operand `[rows, k]`, in f32: `decode(code) · inv_scale`, rounded once.
    fn fp8_dequantize(operand: &Self::Operand) -> FloatTensor<Self>;

    /// The operand `[k, rows]` of the same codes. The caller has checked that its scales serve both orientations: those of the tensor, of
    /// blocks of 128 by 128, or of 1 by 32 that are equal in squares of 32 by 32.
    fn fp8_transpose(operand: &Self::Operand) -> Self::Operand;

    /// Reads an operand back; this waits for the device.
    fn fp8_read(operand: &Self::Operand) -> HostCodes;

    /// The operand with these codes and scales: the inverse of [`fp8_read`](Self::fp8_read).
    fn fp8_write(codes: HostCodes, device: &Device<Self>) -> Self::Operand;
}

/// An operand read back to the host.
#[derive(Clone, Debug, PartialEq)]
pub struct HostCodes {
    /// Row-major `dims`, without padding; the contraction runs over the last axis.
    pub codes: Vec<u8>,
    /// `[rows, k]`
    pub dims: [usize; 2],
    /// The codes' format.
    pub format: Format,
    /// What shares one scale.
    pub granularity: Granularity,
    /// value = decode(code) · inv_scale: row-major, `granularity.scale_dims(rows, k)`.
    pub inv_scales: Vec<InvScale>,
    /// Whether the operand has its codes transposed, as the host path leaves a cast of the transpose: sums over them are in
    /// another order than over the same codes in rows. Backends whose operands lie in one way only ignore it.
    pub transposed: bool,
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_backend::TensorData;
    use burn_backend::ops::FloatTensorOps;
    use burn_flex::Flex;
    use burn_std::bf16;

    use super::*;

    /// Between f32 and bf16 on a CPU, wherever the values lie: the nearest, of two the even one.
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
