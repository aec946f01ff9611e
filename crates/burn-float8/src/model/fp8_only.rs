//! FP8-only weights: one byte per parameter plus scales, cast from a model's weights or loaded from
//! a file.
use std::ops::Range;

use burn::module::Module;
use burn::tensor::DType;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, FloatDType, TensorData, TensorMetadata};
use burn_std::Shape;
use float8_kernels::{Granularity, reference};
use serde::Serialize;

use super::walk::{Change, linears, map_params, visit_params};
use crate::backend::{Float8Backend, HostCodes};
use crate::config::{Float8Config, LinearInfo};
use crate::error::{ApplyError, Float8Error};
use crate::layer::Layer;
use crate::ops::functions;
use crate::stack::Float8Stack;
use crate::tensor::{CastRequest, Codes, Float8Tensor, fp8_copy};
use crate::terms::Operand;

/// FP8-only weights of a model. Its `Display` is a one-line summary.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Fp8Only {
    /// Names of linears with FP8-only weights.
    pub layers: Vec<String>,
    /// Names of linears that keep high-precision values, with reasons.
    pub kept: Vec<(String, String)>,
    /// Elements of the FP8-only weights.
    pub elements: u64,
    /// Bytes of their codes and scales.
    pub bytes: u64,
}

impl core::fmt::Display for Fp8Only {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (layers, linears) = (self.layers.len(), self.layers.len() + self.kept.len());
        write!(
            f,
            "FP8-only weights: {layers} of {linears} linears, {} bytes for {} elements",
            self.bytes, self.elements
        )?;
        for (i, (name, reason)) in self.kept.iter().enumerate() {
            write!(f, "{}{name} ({reason})", if i == 0 { "; kept: " } else { ", " })?;
        }
        Ok(())
    }
}

impl Fp8Only {
    fn count<B: Float8Backend>(&mut self, name: String, [k, n]: [usize; 2], codes: &Codes<B>) {
        self.layers.push(name);
        self.elements += (k * n) as u64;
        self.bytes += codes.bytes();
    }
}

/// Drops the high-precision values of the weights of all linears that run in FP8. Each weight keeps
/// the codes and scales that its fprop reads, so the outputs of the model are bit-identical.
/// Returns the names of these linears.
///
/// Requires an applied configuration ([`Float8Config::apply`]). Linears in high precision and
/// grouped linears do not change. Weights are cast one at a time, and weights loaded later become
/// FP8-only too.
///
/// Other operations that read such a weight get decoded values;
/// [`Layer::decodes`](crate::report::Layer::decodes) counts them. Such a weight cannot be trained:
/// [`check_frozen`] returns an error, and its linear panics with the name of the layer. Freeze the
/// weights (`Module::no_grad`) and train [adapters](crate::lora).
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::Flex;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Tensor;
/// use burn_float8::{Float8, Float8Config, Recipe, weights};
///
/// type B = Float8<Flex>;
/// let device = Default::default();
/// let model: Linear<B> = LinearConfig::new(64, 32).with_bias(false).init(&device);
/// let (model, _) = Float8Config::new(Recipe::Rowwise).apply(model).unwrap();
/// let x = Tensor::<B, 2>::ones([4, 64], &device);
/// let y = model.forward(x.clone());
/// let (model, fp8_only) = weights::fp8_only(model).unwrap();
/// assert_eq!((fp8_only.elements, fp8_only.bytes), (64 * 32, 64 * 32 + 4 * 32)); // a scale for each of 32 rows
/// assert_eq!(model.forward(x).to_data(), y.to_data());
/// # }
/// ```
///
/// # Errors
///
/// [`Float8Error::NotApplied`], or [`Float8Error::Sharded`] if the weights are sharded. The error
/// holds the model.
pub fn fp8_only<B: Float8Stack, M: Module<B>>(model: M) -> Result<(M, Fp8Only), ApplyError<M>> {
    let refuse = |error, model| Err(ApplyError { error, model: Box::new(model) });
    let found = linears::<B, M>(&model, None);
    if found.iter().all(|linear| linear.tag.is_none()) {
        return refuse(Float8Error::NotApplied, model);
    }
    if found.iter().any(|linear| linear.layer().is_some_and(|layer| layer.is_divided())) {
        return refuse(Float8Error::Sharded, model);
    }
    drop(found);
    let model = map_params::<B, M>(model, |param| {
        let is_weight = param.shape.num_dims() == 2 && param.float().is_some_and(|weight| weight.tag().is_some());
        if is_weight { Change::map(|t| B::map_float8(t, into_codes)) } else { Change::None }
    });
    let mut fp8_only = Fp8Only::default();
    for linear in linears::<B, M>(&model, None) {
        let LinearInfo { name, k, n } = linear.info;
        let weight = linear.weight.as_ref().map(B::float8_tensor);
        match (weight.as_ref().and_then(Float8Tensor::codes), &linear.tag) {
            (Some(codes), _) => fp8_only.count(name, [k, n], codes),
            (None, None) => fp8_only.kept.push((name, "no configuration applies to it".into())),
            (None, Some(tag)) => {
                let reason = tag.layer.plan(None).err().map(|reason| reason.to_string());
                let is_grouped = weight.is_some_and(|weight| weight.whole_shape().num_dims() == 3);
                let otherwise = match is_grouped {
                    true => "weights of grouped linears keep their values",
                    false => "fprop reads no FP8 copy of it",
                };
                fp8_only.kept.push((name, reason.unwrap_or_else(|| otherwise.into())));
            }
        }
    }
    log::info!("{fp8_only}");
    Ok((model, fp8_only))
}

/// Replaces a weight `[K, N]` with the codes that fprop reads. Returns the weight unchanged if
/// fprop reads none.
fn into_codes<B: Float8Backend>(weight: Float8Tensor<B>) -> Float8Tensor<B> {
    let Some(tag) = weight.tag().cloned() else { return weight };
    let plan = tag.layer.plan(None).ok().filter(|plan| plan.cast(Operand::WEIGHT_T).is_some());
    let (Some(plan), false) = (plan, weight.is_fp8_only()) else { return weight };
    let request = CastRequest::new(&weight, Operand::WEIGHT_T, &tag.layer, &plan);
    let codes = Codes::of(&fp8_copy(CastRequest { evaluates: true, ..request }));
    let like = placeholder::<B>(weight.shape(), weight.dtype(), &weight.device());
    Float8Tensor::of_codes(like, codes).tagged(tag)
}

/// NaN with this shape, without memory for each element.
fn placeholder<B: Backend>(shape: Shape, dtype: DType, device: &Device<B>) -> FloatTensor<B> {
    let nan = B::float_from_data(TensorData::new(vec![f32::NAN], [1, 1]), device);
    B::float_expand(B::float_cast(nan, FloatDType::from(dtype)), shape)
}

/// Linears of a model with a weight of rank 2, in the order of the module tree. `config` adds
/// custom types. Lazy parameters stay uninitialized.
pub fn linear_infos<B: Backend, M: Module<B>>(model: &M, config: &Float8Config) -> Vec<LinearInfo> {
    let mut infos = vec![];
    visit_params::<B, M>(model, |param| {
        if let (Some(name), [k, n]) = (param.linear_weight(config), &param.shape[..]) {
            infos.push(LinearInfo { name, k: *k, n: *n });
        }
    });
    infos
}

type BoxedError = Box<dyn core::error::Error + Send + Sync>;

/// Replaces the weights of linears with FP8 codes, without a high-precision copy of any. Returns
/// the names of these linears.
///
/// `codes` returns the codes of a linear as fprop reads them, [`HostCodes`] of `[N, K]`, or None to
/// keep the weight. Parameters that are not initialized yet are not drawn.
///
/// `config` determines the parameters that are weights of linears. Apply it afterwards: GEMMs read
/// the codes directly if its cast of a weight has their format and granularity. Decoded values have
/// the dtype `values`. Weights loaded on a backend without autodiff are frozen: `train()` gives
/// them no gradient.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::Flex;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::DType;
/// use burn_float8::{Float8, Float8Config, Recipe, weights};
///
/// type B = Float8<Flex>;
/// let linear = || -> Linear<B> { LinearConfig::new(64, 32).init(&Default::default()) };
/// let config = Float8Config::new(Recipe::Rowwise);
/// let (saved, _) = weights::fp8_only(config.apply(linear()).unwrap().0).unwrap();
/// let mut codes: std::collections::HashMap<_, _> = weights::read_codes(&saved).collect();
/// let (loaded, summary) = weights::load_codes(linear(), &config, DType::F32, |linear| {
///     Ok(codes.remove(&linear.name))
/// })
/// .unwrap();
/// assert_eq!(summary.layers, ["linear"]);
/// # }
/// ```
///
/// # Errors
///
/// Errors of `codes`, which `downcast` recovers. [`Float8Error::Codes`] if codes do not fit the
/// linear:
///
/// - wrong dimensions, or a wrong number of codes or scales
/// - a code that is NaN or infinite, or a value beyond f32
/// - a scale that is negative or not finite, a zero scale of a nonzero code, or an E8M0 scale that
///   is not a power of two
pub fn load_codes<B: Float8Stack, M: Module<B>>(
    model: M,
    config: &Float8Config,
    values: DType,
    mut codes: impl FnMut(&LinearInfo) -> Result<Option<HostCodes>, BoxedError>,
) -> Result<(M, Fp8Only), BoxedError> {
    let (mut loaded, mut error) = (Fp8Only::default(), None);
    functions::register::<B::Wrapped>();
    let model = map_params::<B, M>(model, |param| {
        let (None, Some(name), [k, n]) = (&error, param.linear_weight(config), &param.shape[..]) else {
            return Change::None;
        };
        let info = LinearInfo { name, k: *k, n: *n };
        let checked = codes(&info).and_then(|codes| {
            let weight = codes.map(|codes| weight_of_codes::<B>(&info, codes, values, &param.device)).transpose();
            weight.map_err(BoxedError::from)
        });
        match checked {
            Ok(None) => loaded.kept.push((info.name, "no codes were given".into())),
            Err(wrong) => error = Some(wrong),
            Ok(Some(weight)) => {
                let tensor = B::float8_tensor(&weight);
                loaded.count(info.name, [*k, *n], tensor.codes().expect("it was made of codes"));
                return Change::Loaded(weight);
            }
        }
        Change::None
    });
    error.map_or(Ok((model, loaded)), Err)
}

/// FP8-only weight `[K, N]` of a linear, which decodes to the dtype `values`.
///
/// # Errors
///
/// [`Float8Error::Codes`], as [`load_codes`].
pub fn weight_of_codes<B: Float8Stack>(
    info: &LinearInfo,
    codes: HostCodes,
    values: DType,
    device: &B::Device,
) -> Result<FloatTensor<B>, Float8Error> {
    let amax = B::Inner::float_from_data(TensorData::new(vec![check(info, &codes)?], [1]), device);
    let like = placeholder::<B>(Shape::from(vec![info.k, info.n]), values, device);
    Ok(B::map_float8(like, |like| Float8Tensor::of_codes(like.full().clone(), Codes::<B::Inner>::new(codes, amax))))
}

/// Rows and columns of the FP8-only weight `[K, N]` of a layer, with zeros below up to `len` rows. None for
/// any other weight.
///
/// # Panics
/// If the part begins or ends inside of a block of scales.
pub fn part_of_codes<B: Float8Backend>(
    layer: &Layer,
    weight: &Float8Tensor<B>,
    rows: Range<usize>,
    cols: Range<usize>,
    len: usize,
) -> Option<Float8Tensor<B>> {
    let (codes, shape) = (weight.codes()?, Shape::from(vec![len, cols.len()]));
    let whole = weight.shape();
    if [&rows, &cols] == [&(0..whole[0]), &(0..whole[1])] && len == whole[0] {
        return Some(weight.clone());
    }
    let like = placeholder::<B>(shape, weight.dtype(), &weight.device());
    Some(Float8Tensor::of_codes(like, codes.part(layer.name(), rows, cols, len)))
}

/// Checks that codes fit the weight of a linear. Returns the largest magnitude that their scales
/// allow.
fn check(LinearInfo { name, k, n }: &LinearInfo, all: &HostCodes) -> Result<f32, Float8Error> {
    let wrong = |what: String| Err(Float8Error::Codes { layer: name.clone(), what });
    let HostCodes { codes, dims, format, granularity, inv_scales, .. } = all;
    if dims != &[*n, *k] {
        return wrong(format!("of {dims:?}, where the weight is [N, K] = [{n}, {k}]"));
    }
    if codes.len() != n * k {
        return wrong(format!("are {}, not {n} · {k}", codes.len()));
    }
    let [height, width] = granularity.scale_dims(*n, *k);
    if inv_scales.len() != height * width {
        return wrong(format!("with {} scales, where {granularity} has {height} · {width}", inv_scales.len()));
    }
    if let Some(i) = codes.iter().position(|code| !reference::decode(*code, *format).is_finite()) {
        return wrong(format!("are not finite: {:#04x} at row {}, column {}", codes[i], i / k, i % k));
    }
    let bad = |inv: f32| !(inv.is_finite() && inv >= 0.0);
    if let Some(i) = inv_scales.iter().position(|scale| bad(scale.get())).or_else(|| all.zero_scale()) {
        return wrong(format!("with the scale {} at row {}, column {}", inv_scales[i].get(), i / width, i % width));
    }
    if let Some(scale) = inv_scales.iter().find(|scale| scale.to_e8m0().is_none())
        && *granularity == Granularity::Block1x32
    {
        return wrong(format!("with the scale {}, which is no power of two, as E8M0 is", scale.get()));
    }
    if let Some((i, scale)) = all.overflow() {
        return wrong(format!("beyond f32: {:#04x} · {} at row {}, column {}", codes[i], scale.get(), i / k, i % k));
    }
    // The bound may exceed f32 if the largest codes do not occur. It is clamped.
    Ok(inv_scales.iter().map(|scale| scale.get() * format.max()).fold(0.0, f32::max).min(f32::MAX))
}

/// Checks that all FP8-only weights are frozen. Call it before the first training step. Otherwise
/// the first forward of a trained FP8-only linear panics with the same message, since Burn's
/// operations return no errors.
///
/// # Errors
///
/// [`Float8Error::Fp8OnlyTrained`] naming the first linear whose weight is FP8-only and requires a
/// gradient.
pub fn check_frozen<B: Float8Stack, M: Module<B>>(model: &M) -> Result<(), Float8Error> {
    let is_trained =
        |weight: &FloatTensor<B>| B::float_is_require_grad(weight) && B::float8_tensor(weight).is_fp8_only();
    let trained =
        linears::<B, M>(model, None).into_iter().find(|linear| linear.weight.as_ref().is_some_and(is_trained));
    trained.map_or(Ok(()), |linear| Err(Float8Error::Fp8OnlyTrained { layer: linear.info.name }))
}

/// Codes and scales `[N, K]` of each linear with an FP8-only weight, by name. Waits for the device.
pub fn read_codes<B: Float8Stack, M: Module<B>>(model: &M) -> impl Iterator<Item = (String, HostCodes)> {
    linears::<B, M>(model, None).into_iter().filter_map(|linear| {
        let weight = B::float8_tensor(&linear.weight?);
        Some((linear.info.name, weight.codes()?.read()))
    })
}
