//! Visitors of a model's float parameters and linears, by path in the module tree.
use std::sync::Arc;

#[cfg(not(feature = "distributed"))]
use burn::module::AutodiffModule;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::Backend;
use burn_backend::tensor::{Device, FloatTensor};
use burn_std::Shape;

use crate::config::{Float8Config, LinearInfo};
use crate::layer::{Layer, Tag};
use crate::stack::Float8Stack;
use crate::tensor::source_of;

/// Burn's container name without its kind.
fn module_type(container: &str) -> &str {
    container.trim_start_matches("Struct:")
}

/// Whether a parameter is the weight of a `Linear`, of a `GroupedLinear`, or of a custom type of
/// the configuration.
fn is_weight(config: &Float8Config, container: &str, field: &str, rank: usize) -> bool {
    let module = module_type(container);
    let is_own = || config.parsed_module_types().is_ok_and(|types| types.contains(&(module, field)));
    match (module, field, rank) {
        ("Linear", "weight", 2) | ("GroupedLinear", "weight", 3) => true,
        (_, _, 2) => is_own(),
        _ => false,
    }
}

/// Path of the current module in a walk.
#[derive(Default)]
pub struct Path(Vec<(String, String)>);

impl Path {
    /// Enters a module.
    pub fn enter(&mut self, name: &str, container: &str) {
        self.0.push((name.into(), container.into()));
    }

    /// Leaves the module.
    pub fn exit(&mut self) {
        self.0.pop();
    }

    /// Type of the current module, and the current field.
    fn parameter(&self) -> (String, String) {
        let (field, container) = self.0.last().cloned().unwrap_or_default();
        (module_type(&container).into(), field)
    }

    /// Name of the current parameter.
    pub fn parameter_name(&self) -> String {
        self.0.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(".")
    }

    /// Name of the embedding, if the current parameter is its table.
    pub fn embedding(&self, rank: usize) -> Option<String> {
        let ((field, container), parents) = self.0.split_last()?;
        let name = || parents.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(".");
        ((module_type(container), field.as_str(), rank) == ("Embedding", "weight", 2)).then(name)
    }

    /// Name of the linear, if the current parameter is its weight.
    pub fn linear_weight(&self, rank: usize, config: &Float8Config) -> Option<String> {
        let (field, container) = self.0.last()?;
        is_weight(config, container, field, rank).then(|| self.linear_name())
    }

    /// Name of the linear that has the current parameter as its weight.
    pub fn linear_name(&self) -> String {
        let Some(((field, _), parents)) = self.0.split_last() else { return String::new() };
        let mut names: Vec<_> = parents.iter().map(|(name, _)| name.as_str()).collect();
        // A custom type may have several weights.
        if field != "weight" {
            names.push(field);
        }
        // A bare `Linear` has no path.
        if names.is_empty() { "linear".into() } else { names.join(".") }
    }
}

/// A float parameter visited by a walk.
pub struct NamedParam<'a, B: Backend> {
    /// Names and containers of its parents.
    pub path: &'a Path,
    /// Its id.
    pub id: ParamId,
    /// Its shape, also of a lazy parameter.
    pub shape: Shape,
    /// Its device, also of a lazy parameter.
    pub device: Device<B>,
    value: &'a dyn Fn() -> TensorPrimitive<B>,
}

impl<'a, B: Backend> NamedParam<'a, B> {
    fn new<const D: usize>(
        path: &'a Path,
        param: &Param<Tensor<B, D>>,
        value: &'a dyn Fn() -> TensorPrimitive<B>,
    ) -> Self {
        Self { path, id: param.id, shape: param.lazy_shape(), device: param.lazy_device(), value }
    }

    /// Its name, such as `layers.0.mlp.up_proj.weight`.
    pub fn name(&self) -> String {
        self.path.parameter_name()
    }

    /// Its value. None if it is quantized. Draws a lazy parameter.
    pub fn float(&self) -> Option<FloatTensor<B>> {
        match (self.value)() {
            TensorPrimitive::Float(value) => Some(value),
            TensorPrimitive::QFloat(_) => None,
        }
    }

    /// Type of its module, such as `Linear` or `Embedding`.
    pub fn module_type(&self) -> &str {
        self.path.0.last().map_or("", |(_, container)| module_type(container))
    }

    /// Name of the linear, if it is the weight of one.
    pub fn linear_weight(&self, config: &Float8Config) -> Option<String> {
        self.path.linear_weight(self.shape.num_dims(), config)
    }
}

/// Change of a parameter. The parameter keeps its id.
pub enum Change<B: Backend> {
    /// No change.
    None,
    /// Applies a function to its tensor and to each tensor loaded later. Quantized tensors do not
    /// change.
    Map(Box<MapTensor<B>>),
    /// Sets a value for one step. Tensors loaded later are unchanged.
    Value(FloatTensor<B>),
    /// Sets a detached value with the `require_grad` of the old one.
    Replaced(FloatTensor<B>),
    /// Sets a value as if it were loaded. A lazy parameter is not drawn.
    Loaded(FloatTensor<B>),
}

type MapTensor<B> = dyn Fn(FloatTensor<B>) -> FloatTensor<B> + Send + Sync;

impl<B: Backend> Change<B> {
    /// [`Change::Map`] of a function.
    pub fn map(f: impl Fn(FloatTensor<B>) -> FloatTensor<B> + Send + Sync + 'static) -> Self {
        Self::Map(Box::new(f))
    }
}

struct Walk<F>(Path, F);

impl<B: Backend, F: FnMut(&NamedParam<'_, B>)> ModuleVisitor<B> for Walk<F> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.0.enter(name, container);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.0.exit();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        (self.1)(&NamedParam::new(&self.0, param, &|| param.val().into_primitive()));
    }
}

impl<B: Backend, F: FnMut(&NamedParam<'_, B>) -> Change<B>> ModuleMapper<B> for Walk<F> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.0.enter(name, container);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.0.exit();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let tensor = |value| Tensor::from_primitive(TensorPrimitive::Float(value));
        match (self.1)(&NamedParam::new(&self.0, &param, &|| param.val().into_primitive())) {
            Change::None => param,
            Change::Map(f) => map_param(param, f),
            Change::Value(value) => set_value(param, tensor(value)),
            Change::Replaced(value) => map_value(param, |_| tensor(value).detach(), |t| t),
            Change::Loaded(value) => {
                let id = param.id;
                param.transform_for_load(tensor(value), id)
            }
        }
    }
}

/// Visits the float parameters of a model in the order of the module tree.
pub fn visit_params<B: Backend, M: Module<B>>(model: &M, visit: impl FnMut(&NamedParam<'_, B>)) {
    Module::<B>::visit(model, &mut Walk(Path::default(), visit));
}

/// Changes the float parameters of a model in the order of the module tree.
pub fn map_params<B: Backend, M: Module<B>>(model: M, change: impl FnMut(&NamedParam<'_, B>) -> Change<B>) -> M {
    Module::<B>::map(model, &mut Walk(Path::default(), change))
}

/// A linear of a model.
pub struct FoundLinear<B: Float8Stack> {
    /// Name, K and N.
    pub info: LinearInfo,
    /// Type of its module, and the field of the weight.
    pub(super) parameter: (String, String),
    /// Device of its weight.
    pub device: B::Device,
    /// Tag of its weight, if a configuration was applied.
    pub(crate) tag: Option<Tag>,
    /// Its weight. None if it is quantized, which FP8 linears cannot read.
    pub weight: Option<FloatTensor<B>>,
}

impl<B: Float8Stack> FoundLinear<B> {
    /// Format and granularity of an FP8-only weight.
    pub(super) fn codes(&self) -> Option<String> {
        let weight = B::float8_tensor(self.weight.as_ref()?);
        weight.codes().map(|codes| format!("{} {}", codes.format, codes.granularity))
    }

    /// Layer of its weight, if a configuration was applied.
    pub fn layer(&self) -> Option<&Arc<Layer>> {
        self.tag.as_ref().map(|tag| &tag.layer)
    }
}

/// Linears of a model in the order of the walk. Custom types come from `config`, or else from the
/// configuration applied to each linear.
pub fn linears<B: Float8Stack, M: Module<B>>(model: &M, config: Option<&Float8Config>) -> Vec<FoundLinear<B>> {
    let mut found = vec![];
    visit_params::<B, M>(model, |param| {
        let [.., rows, cols] = param.shape[..] else { return };
        let weight = param.float();
        let tag = weight.as_ref().and_then(|weight| weight.tag().cloned());
        let applied = tag.as_ref().map(|tag| tag.layer.applied());
        let fallback = Float8Config::default();
        let config = config.or(applied.as_ref().map(|applied| &applied.config)).unwrap_or(&fallback);
        let Some(name) = param.linear_weight(config) else { return };
        let source = tag.as_ref().and_then(|tag| source_of::<B::Inner>(&tag.layer));
        let [k, n] = source.map_or([rows, cols], |source| source.layout().shape);
        let (info, parameter) = (LinearInfo { name, k, n }, param.path.parameter());
        found.push(FoundLinear { info, parameter, device: param.device.clone(), tag, weight });
    });
    found
}

/// Applies `f` to a parameter's tensor and to tensors loaded into it later. Quantized tensors do
/// not change.
pub fn map_param<B: Backend, const D: usize>(
    param: Param<Tensor<B, D>>,
    f: impl Fn(FloatTensor<B>) -> FloatTensor<B> + Send + Sync + 'static,
) -> Param<Tensor<B, D>> {
    let f = Arc::new(move |t: Tensor<B, D>| {
        Tensor::from_primitive(match t.into_primitive() {
            TensorPrimitive::Float(t) => TensorPrimitive::Float(f(t)),
            quantized => quantized,
        })
    });
    map_value(param, &*f.clone(), move |t| f(t))
}

/// Applies `f` to a parameter's tensor, and `on_load` to tensors loaded into it later.
///
/// Keeps id, mappers and `require_grad`. `Param::map` loses `require_grad` on a backend without
/// autodiff.
fn map_value<B: Backend, const D: usize>(
    param: Param<Tensor<B, D>>,
    f: impl FnOnce(Tensor<B, D>) -> Tensor<B, D>,
    on_load: impl Fn(Tensor<B, D>) -> Tensor<B, D> + Send + Sync + 'static,
) -> Param<Tensor<B, D>> {
    let tensor = param.val();
    // The parameter may have its own mappers (`LinearLayout::Col`).
    let (id, _, mapper) = param.clone().consume();
    let own = mapper.clone();
    parameter(id, f(tensor), is_trained(param))
        .load_mapper(move |t| on_load(mapper.on_load(t)))
        .save_mapper(move |t| own.on_save(t))
}

/// Sets the value of a parameter. Tensors loaded into it later are unchanged.
fn set_value<B: Backend, const D: usize>(param: Param<Tensor<B, D>>, value: Tensor<B, D>) -> Param<Tensor<B, D>> {
    if !B::ad_enabled(&param.device()) {
        return map_value(param, |_| value, |t| t);
    }
    // Keeps the same mapper. Mapping in each step would nest mappers without bound.
    let (id, _, mapper) = param.consume();
    Param::from_mapped_value(id, value, mapper)
}

/// A parameter with this value and `require_grad`, which `train()` reads on a backend without
/// autodiff.
pub(super) fn parameter<B: Backend, const D: usize>(
    id: ParamId,
    value: Tensor<B, D>,
    require_grad: bool,
) -> Param<Tensor<B, D>> {
    let (device, shape) = (value.device(), value.shape());
    let param = Param::uninitialized(id, move |_, _| value.clone(), device, require_grad, shape);
    param.val();
    param
}

/// `require_grad` of a parameter. Without autodiff only `train()` reads it.
fn is_trained<B: Backend, const D: usize>(param: Param<Tensor<B, D>>) -> bool {
    if B::ad_enabled(&param.device()) {
        return param.is_require_grad();
    }
    #[cfg(not(feature = "distributed"))]
    return Param::<Tensor<burn_autodiff::Autodiff<B>, D>>::from_inner(param).is_require_grad();
    // With this feature `Autodiff` does not accept every backend, so the flag cannot be read.
    #[cfg(feature = "distributed")]
    true
}

/// Initializes the lazy parameters of a model in the order of the walk.
pub(super) fn draw<B: Backend, M: Module<B>>(model: &M) {
    visit_params::<B, M>(model, |param| drop(param.float()));
}
