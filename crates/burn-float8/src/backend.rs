//! [`Float8<B>`], what it asks of the backend it wraps ([`Float8Backend`]), and what it adds to the stack above it
//! ([`Float8Ops`]).
use core::marker::PhantomData;
use std::any::TypeId;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, DType, DeviceId, DeviceOps, FloatDType};
use burn_std::Shape;
use float8_kernels::{Cast, Format, GemmConfig, Granularity, Grouping, InvScale, Orientation};
use serde::Serialize;

use crate::config::{Float8Config, ScalingType};
use crate::error::Float8Error;
use crate::layer::{Along, Layer, Policy, Reason, Role};
use crate::tensor::{Float8Tensor, Tag};

/// A backend whose linear layers run in FP8.
///
/// `Float8<B>` forwards every operation to `B` and overrides three: `linear`, `linear_x_backward` and
/// `linear_weight_backward`. Differentiation goes outside:
///
/// ```
/// # #[cfg(feature = "flex")]
/// type B = burn::backend::Autodiff<burn_float8::Float8<burn::backend::Flex>>;
/// ```
///
/// The other order does not compile, since the FP8 casts must not be differentiated through:
///
/// ```compile_fail
/// type B = burn_float8::Float8<burn::backend::Autodiff<burn::backend::Flex>>;
/// fn backend<B: burn::tensor::backend::Backend>() {}
/// backend::<B>();
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Float8<B>(PhantomData<B>);

/// How an FP8 GEMM was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GemmPath {
    /// The codes are decoded on the host and multiplied by the backend's own f32 matmul.
    Host,
    /// A kernel decodes the codes in its tiles and multiplies in f32.
    Emulated,
    /// A kernel decodes the codes to f16 in its tiles, or with E8M0 scales to bf16, for matrix units that sum in f32.
    F16Mma,
    /// A kernel multiplies codes and E8M0 scales into bf16, which is exact down to its normal values, for bf16 tensor cores (`wgmma`) that sum in f32: sm_90.
    Bf16Wgmma,
    /// FP8 tensor cores, warp by warp (`mma.sync`): sm_89 and sm_120.
    Mma,
    /// FP8 tensor cores, warpgroup by warpgroup (`wgmma`), fed by TMA: sm_90.
    Wgmma,
    /// FP8 tensor cores with memory of their own (`tcgen05`), fed by TMA: sm_100.
    Tcgen05,
}

impl GemmPath {
    /// Whether FP8 tensor cores did the work.
    pub fn is_native(self) -> bool {
        match self {
            Self::Host | Self::Emulated | Self::F16Mma | Self::Bf16Wgmma => false,
            Self::Mma | Self::Wgmma | Self::Tcgen05 => true,
        }
    }
}

impl core::fmt::Display for GemmPath {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Emulated => "emulated",
            Self::F16Mma => "f16 mma",
            Self::Mma => "mma",
            Self::Bf16Wgmma => "bf16 wgmma",
            Self::Wgmma => "wgmma",
            Self::Tcgen05 => "tcgen05",
        })
    }
}

/// The contraction-major FP8 copies of a tensor seen as `[rows, cols]`, its last axis being `cols`.
#[derive(Clone, Debug)]
pub struct Copies<B: Float8Backend> {
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
    Own,
    /// From this amax, f32 `[1]`, with one scale per tensor only; what exceeds the format saturates.
    Amax {
        /// The amax.
        amax: T,
        /// Whether [`Copies::amax`] is to be that of x all the same.
        observe: bool,
    },
}

/// The size of an operand, and what padding adds to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Extent {
    /// Rows.
    pub rows: usize,
    /// The axis that a GEMM contracts.
    pub k: usize,
    /// Codes in a stored row: `k`, and zeros up to what the kernels ask for.
    pub padded_k: usize,
    /// Bytes of codes and scales.
    pub bytes: u64,
}

/// What a backend must offer so that [`Float8`] can wrap it.
///
/// Implemented for `CubeBackend`, `Fusion<CubeBackend>` and `Flex`. For a CPU backend of your own,
/// [`host_backend!`](crate::host_backend) implements it in one line.
pub trait Float8Backend: Backend {
    /// FP8 codes of a matrix, contraction-major, with their inverse scale.
    type Operand: Clone + Send + Sync + core::fmt::Debug + 'static;

    /// Whether a tensor of this dtype can be quantized, and a GEMM can return it, on this device.
    fn fp8_supports(device: &Device<Self>, dtype: DType) -> bool;

    /// The largest number of elements of an operand or output that [`fp8_quantize`](Self::fp8_quantize) and
    /// [`fp8_matmul`](Self::fp8_matmul) take.
    fn fp8_max_elements() -> u64 {
        u64::MAX
    }

    /// How this device computes [`fp8_matmul`](Self::fp8_matmul) of operands of these granularities.
    fn fp8_gemm_path(device: &Device<Self>, granularities: [Granularity; 2], config: GemmConfig) -> GemmPath;

    /// Casts `x` `[.., cols]`, seen as `[rows, cols]`, in one pass over it.
    ///
    /// The caller has checked that the dtype is supported, that no dimension is zero, the size, and that an amax is given
    /// only with one scale per tensor.
    fn fp8_quantize(
        x: FloatTensor<Self>,
        cast: Cast,
        orientation: Orientation,
        scale: ScaleFrom<FloatTensor<Self>>,
    ) -> Copies<Self>;

    /// y `[M, N]` = a `[M, K]` · b `[N, K]`ᵀ + bias `[N]`, given the shape of y, whose last axis is N.
    ///
    /// Products are exact, accumulation is in f32; scales and bias are applied to the accumulator before the one
    /// rounding to `dtype`.
    fn fp8_matmul(
        a: &Self::Operand,
        b: &Self::Operand,
        bias: Option<FloatTensor<Self>>,
        shape: Shape,
        dtype: FloatDType,
        config: GemmConfig,
    ) -> FloatTensor<Self>;

    /// How this device computes [`fp8_grouped_matmul`](Self::fp8_grouped_matmul) of operands of these granularities.
    fn fp8_grouped_gemm_path(device: &Device<Self>, granularities: [Granularity; 2], config: GemmConfig) -> GemmPath;

    /// The products of each group, as [`grouped_scaled_gemm`](float8_kernels::grouped_scaled_gemm) defines them, given the shape of
    /// the output; `ends` is i32 `[G]`.
    fn fp8_grouped_matmul(
        a: &Self::Operand,
        b: &Self::Operand,
        ends: IntTensor<Self>,
        grouping: Grouping,
        shape: Shape,
        dtype: FloatDType,
        config: GemmConfig,
    ) -> FloatTensor<Self>;

    /// How well `operand`, cast from `x` or from its transpose, represents it: f32 `[n, 5]`, which
    /// [`Health::from_partials`](float8_kernels::Health::from_partials) sums up.
    fn fp8_health(x: FloatTensor<Self>, operand: &Self::Operand, transposed: bool) -> FloatTensor<Self>;

    /// The size of an operand.
    fn fp8_extent(operand: &Self::Operand) -> Extent;

    /// Reads an operand back; this waits for the device.
    fn fp8_read(operand: &Self::Operand) -> HostCodes;
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
}

mod sealed {
    pub trait Sealed {}
}
impl<B: Float8Backend> sealed::Sealed for Float8<B> {}
impl<B: Float8Backend, C: CheckpointStrategy> sealed::Sealed for Autodiff<Float8<B>, C> {}

/// A stack of backends with a [`Float8`] in it: `Float8<B>` itself, or `Autodiff<Float8<B>>`.
pub trait Float8Ops: Backend + sealed::Sealed {
    /// The backend that [`Float8`] wraps.
    type Inner: Float8Backend;

    /// The same device.
    #[doc(hidden)]
    fn inner_device(device: &Device<Self>) -> Device<Self::Inner>;
    /// The same tensor as the weight of `layer`.
    #[doc(hidden)]
    fn with_layer(tensor: FloatTensor<Self>, layer: Arc<Layer>) -> FloatTensor<Self>;
    /// The layer whose weight this is, and when it was built.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn tag(tensor: &FloatTensor<Self>) -> Option<Tag>;
    /// The layer whose weight this is.
    fn layer(tensor: &FloatTensor<Self>) -> Option<Arc<Layer>> {
        Self::tag(tensor).map(|tag| tag.layer)
    }
    /// See [`linear`](crate::linear()).
    #[doc(hidden)]
    fn linear_saved(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self>;
    /// See [`grouped_linear`](crate::grouped_linear).
    #[doc(hidden)]
    fn grouped_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        ends: IntTensor<Self::Inner>,
    ) -> FloatTensor<Self>;
    /// The same integers.
    #[doc(hidden)]
    fn inner_int(tensor: IntTensor<Self>) -> IntTensor<Self::Inner>;
    /// The layer that stands for all untagged weights of a device.
    fn untagged_layer(device: &Device<Self>) -> Arc<Layer> {
        untagged::<Self::Inner>(&Self::inner_device(device))
    }
}

impl<B: Float8Backend> Float8Ops for Float8<B> {
    type Inner = B;

    fn inner_device(device: &Device<Self>) -> Device<B> {
        device.clone()
    }

    fn with_layer(tensor: FloatTensor<Self>, layer: Arc<Layer>) -> FloatTensor<Self> {
        tensor.tagged(layer)
    }

    #[allow(private_interfaces)]
    fn tag(tensor: &FloatTensor<Self>) -> Option<Tag> {
        Float8Tensor::tag(tensor).cloned()
    }

    fn linear_saved(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        crate::linear::forward(x, weight, bias)
    }

    fn grouped_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, ends: IntTensor<B>) -> FloatTensor<Self> {
        crate::grouped::forward(x, weight, ends)
    }

    fn inner_int(tensor: IntTensor<Self>) -> IntTensor<B> {
        tensor
    }
}

impl<B: Float8Backend, C: CheckpointStrategy> Float8Ops for Autodiff<Float8<B>, C> {
    type Inner = B;

    fn inner_device(device: &Device<Self>) -> Device<B> {
        device.clone()
    }

    fn with_layer(mut tensor: FloatTensor<Self>, layer: Arc<Layer>) -> FloatTensor<Self> {
        tensor.primitive = Float8::<B>::with_layer(tensor.primitive, layer);
        tensor
    }

    #[allow(private_interfaces)]
    fn tag(tensor: &FloatTensor<Self>) -> Option<Tag> {
        Float8::<B>::tag(&tensor.primitive)
    }

    fn linear_saved(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        crate::saved::linear_autodiff::<B, C>(x, weight, bias)
    }

    fn grouped_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, ends: IntTensor<B>) -> FloatTensor<Self> {
        crate::grouped::forward_autodiff::<B, C>(x, weight, ends)
    }

    fn inner_int(tensor: IntTensor<Self>) -> IntTensor<B> {
        tensor
    }
}

type UntaggedLayers = Mutex<HashMap<(TypeId, DeviceId), Arc<Layer>>>;
static UNTAGGED: LazyLock<UntaggedLayers> = LazyLock::new(Mutex::default);

/// The name under which reports list the linears whose weights carry no layer.
pub const UNTAGGED_NAME: &str = "(untagged)";

/// The device's layer for untagged weights: FP8 by the default recipe until [`set_default_config`] says otherwise, so
/// that wrapping the backend is enough.
pub(crate) fn untagged<B: Float8Backend>(device: &Device<B>) -> Arc<Layer> {
    let key = (TypeId::of::<B>(), device.id());
    let new = || Arc::new(Layer::new(UNTAGGED_NAME, Policy::Float8(Default::default()), Arc::default()));
    UNTAGGED.lock().unwrap().entry(key).or_insert_with(new).clone()
}

/// Sets how linears run on this device whose weights were not tagged by [`Float8Config::apply`]; `None` turns FP8 off
/// for them. Filters, overrides and statistics do not apply, since an untagged linear has no name.
///
/// # Errors
///
/// [`Float8Error::DelayedWithoutLayers`]: an amax history belongs to a layer.
pub fn set_default_config<B: Float8Ops>(device: &Device<B>, config: Option<&Float8Config>) -> Result<(), Float8Error> {
    let policy = match config {
        Some(Float8Config { linear, .. }) => {
            let casts = Role::ALL.into_iter().flat_map(|r| [Along::Rows, Along::Cols].map(|a| linear.casts().of(r, a)));
            if casts.into_iter().any(|cast| cast.scaling_type == ScalingType::Delayed) {
                return Err(Float8Error::DelayedWithoutLayers);
            }
            Policy::Float8(linear.clone())
        }
        None => Policy::HighPrecision(Reason::Off),
    };
    B::untagged_layer(device).configure(policy);
    Ok(())
}
