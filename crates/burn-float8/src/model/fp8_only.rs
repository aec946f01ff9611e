//! Weights that are FP8 codes alone: a byte a parameter and its scales, made of a model's weights or given as they are in a file.
use burn::module::Module;
use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, FloatDType, TensorData, TensorMetadata};
use float8_kernels::{Granularity, reference};
use serde::Serialize;

use super::walk::{Change, linears, map_params, visit_params};
use crate::backend::{Float8Backend, HostCodes};
use crate::config::{Float8Config, LinearInfo};
use crate::error::{ApplyError, Float8Error};
use crate::stack::Float8Stack;
use crate::tensor::{CastRequest, Codes, Float8Tensor, Layout, fp8_copy};
use crate::terms::Operand;

/// Which weights are FP8 codes alone; its `Display` is the one-line summary.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Fp8Only {
    /// Names of the linears whose weights are codes alone.
    pub layers: Vec<String>,
    /// Names of those that keep high-precision values, and why.
    pub kept: Vec<(String, String)>,
    /// Elements of the weights that are codes alone.
    pub elements: u64,
    /// Bytes of their codes and scales.
    pub bytes: u64,
}

impl core::fmt::Display for Fp8Only {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (layers, linears) = (self.layers.len(), self.layers.len() + self.kept.len());
        write!(
            f,
            "FP8 codes alone: {layers} of {linears} linears, {} bytes for {} elements",
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

/// Drops the high-precision values of the weights of all linears that run in FP8: what is left of each are the codes and scales that its
/// fprop reads, so that the model gives the same outputs to the bit. Says which.
///
/// A configuration was applied before ([`Float8Config::apply`]). Linears that it keeps in high precision, and grouped ones, stay as they
/// are. One weight after the other is cast, and what is loaded into the model later becomes codes alone, too. Whatever else reads
/// such a weight gets the decoded values, which [`Layer::decodes`](crate::report::Layer::decodes) counts; a gradient of it is a panic of the linear
/// that names the layer, and an error of [`check_frozen`]: freeze the weights (`Module::no_grad`) and train [adapters](crate::lora).
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
/// [`Float8Error::NotApplied`]; [`Float8Error::Sharded`] where a process has some rows of the weights. The error holds the model.
pub fn fp8_only<B: Float8Stack, M: Module<B>>(model: M) -> Result<(M, Fp8Only), ApplyError<M>> {
    let refuse = |error, model| Err(ApplyError { error, model: Box::new(model) });
    let found = linears::<B, M>(&model, None);
    if found.iter().all(|linear| linear.tag.is_none()) {
        return refuse(Float8Error::NotApplied, model);
    }
    if found.iter().any(|linear| linear.layer().is_some_and(|layer| layer.has_source())) {
        return refuse(Float8Error::Sharded, model);
    }
    drop(found);
    let model = map_params::<B, M>(model, |param| {
        let is_weight = param.shape.num_dims() == 2 && param.float().is_some_and(|weight| B::tag(&weight).is_some());
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

/// The codes that fprop reads of a weight `[K, N]`, and nothing else of it; the weight itself where fprop reads none.
fn into_codes<B: Float8Backend>(weight: Float8Tensor<B>) -> Float8Tensor<B> {
    let Some(tag) = weight.tag().cloned() else { return weight };
    let plan = tag.layer.plan(None).ok().filter(|plan| plan.cast(Operand::WEIGHT_T).is_some());
    let (Some(plan), false) = (plan, weight.is_fp8_only()) else { return weight };
    let request = CastRequest {
        tensor: &weight,
        layout: Layout::Matrix,
        operand: Operand::WEIGHT_T,
        layer: &tag.layer,
        plan: &plan,
        both: false,
        evaluates: true,
    };
    let codes = Codes::of(&fp8_copy(request));
    let like = placeholder::<B>(weight.full());
    Float8Tensor::of_codes(like, codes).tagged(tag)
}

/// A NaN in the shape of another tensor, with its dtype and device.
fn placeholder<B: Float8Backend>(like: &FloatTensor<B>) -> FloatTensor<B> {
    let (dtype, shape) = (FloatDType::from(like.dtype()), like.shape());
    let nan = B::float_from_data(TensorData::new(vec![f32::NAN], [1, 1]), &B::float_device(like));
    B::float_expand(B::float_cast(nan, dtype), shape)
}

/// The linears of a model that have a weight of rank 2, in the order of the module tree, by the types that `config` names. Parameters that
/// are not initialized yet stay so.
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

/// Puts FP8 codes in the place of the weights of linears, without a high-precision copy of any: `codes` gives those of a linear
/// as fprop reads them, [`HostCodes`] of `[N, K]`, or none where the weight is to stay as it is. Parameters that are not initialized yet are not
/// drawn for it. Says which were put there.
///
/// `config` says which parameters are weights of linears; it is applied afterwards, and where its cast of a weight is of the same format and
/// granularity, GEMMs read the codes as they are. Where values are asked for, they have the dtype `values`. Weights that are loaded on a
/// backend without autodiff are frozen: `train()` gives them no gradient.
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
/// Errors of `codes`, which `downcast` gives back; [`Float8Error::Codes`] where codes do not fit the linear: other dimensions, too few codes or scales, a NaN, a scale that
/// is zero, negative or not finite, or no power of two where E8M0 is asked for, a value beyond f32.
pub fn load_codes<B: Float8Stack, M: Module<B>>(
    model: M,
    config: &Float8Config,
    values: DType,
    mut codes: impl FnMut(&LinearInfo) -> Result<Option<HostCodes>, BoxedError>,
) -> Result<(M, Fp8Only), BoxedError> {
    let (mut loaded, mut error) = (Fp8Only::default(), None);
    B::register();
    let model = map_params::<B, M>(model, |param| {
        let (None, Some(name), [k, n]) = (&error, param.linear_weight(config), &param.shape[..]) else {
            return Change::None;
        };
        let info = LinearInfo { name, k: *k, n: *n };
        let checked = codes(&info).and_then(|codes| {
            let checked = codes.map(|codes| check(&info, &codes).map(|amax| (codes, amax))).transpose();
            checked.map_err(BoxedError::from)
        });
        match checked {
            Ok(None) => loaded.kept.push((info.name, "no codes were given".into())),
            Err(wrong) => error = Some(wrong),
            Ok(Some((codes, amax))) => {
                let like = Tensor::<B, 2>::full([1, 1], f32::NAN, (&param.device, values)).expand([*k, *n]);
                let amax = B::Inner::float_from_data(TensorData::new(vec![amax], [1]), &param.device);
                let codes = Codes::<B::Inner>::new(codes, amax);
                loaded.count(info.name, [*k, *n], &codes);
                let TensorPrimitive::Float(like) = like.into_primitive() else { unreachable!("it is float") };
                let weight = B::map_float8(like, |like| Float8Tensor::of_codes(like.full().clone(), codes.clone()));
                return Change::Loaded(weight);
            }
        }
        Change::None
    });
    error.map_or(Ok((model, loaded)), Err)
}

/// Whether codes are the weight of a linear; the largest magnitude that their scales allow.
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
    // With scales whose largest codes are beyond f32, but for which there are none.
    Ok(inv_scales.iter().map(|scale| scale.get() * format.max()).fold(0.0, f32::max).min(f32::MAX))
}

/// Whether all weights that are codes alone are frozen: what a training loop asks before its first step. Without it, the first forward of a
/// linear that is not panics with the same words, since Burn's operations return no errors.
///
/// # Errors
///
/// [`Float8Error::Fp8OnlyTrained`] naming the first linear whose weight is codes alone and wants a gradient.
pub fn check_frozen<B: Float8Stack, M: Module<B>>(model: &M) -> Result<(), Float8Error> {
    let is_trained =
        |weight: &FloatTensor<B>| B::float_is_require_grad(weight) && B::float8_tensor(weight).is_fp8_only();
    let trained =
        linears::<B, M>(model, None).into_iter().find(|linear| linear.weight.as_ref().is_some_and(is_trained));
    trained.map_or(Ok(()), |linear| Err(Float8Error::Fp8OnlyTrained { layer: linear.info.name }))
}

/// Codes and scales `[N, K]` of each linear whose weight is codes alone, by name; this waits for the device.
pub fn read_codes<B: Float8Stack, M: Module<B>>(model: &M) -> impl Iterator<Item = (String, HostCodes)> {
    linears::<B, M>(model, None).into_iter().filter_map(|linear| {
        let weight = B::float8_tensor(&linear.weight?);
        Some((linear.info.name, weight.codes()?.read()))
    })
}
