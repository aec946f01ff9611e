//! The linears of a model, by their paths in the module tree.
use std::sync::Arc;

#[cfg(not(feature = "distributed"))]
use burn::module::AutodiffModule;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use crate::config::{Float8Config, LinearInfo};
use crate::layer::{Layer, Tag};
use crate::stack::Float8Stack;
use crate::tensor::source_of;

/// Burn's name of a container without its kind.
fn module_type(container: &str) -> &str {
    container.trim_start_matches("Struct:")
}

/// Whether a parameter is the weight of a linear: of a `Linear`, a `GroupedLinear`, or one of the configuration's own types.
fn is_weight(config: &Float8Config, container: &str, field: &str, rank: usize) -> bool {
    let module = module_type(container);
    let is_own = || config.parsed_module_types().is_ok_and(|types| types.contains(&(module, field)));
    match (module, field, rank) {
        ("Linear", "weight", 2) | ("GroupedLinear", "weight", 3) => true,
        (_, _, 2) => is_own(),
        _ => false,
    }
}

/// The path while walking a model.
#[derive(Default)]
pub struct Path(Vec<(String, String)>);

impl Path {
    /// The walk enters a module.
    pub fn enter(&mut self, name: &str, container: &str) {
        self.0.push((name.into(), container.into()));
    }

    /// The walk leaves it.
    pub fn exit(&mut self) {
        self.0.pop();
    }

    /// The type of the module that the walk is in, and the field that it is at.
    fn parameter(&self) -> (String, String) {
        let (field, container) = self.0.last().cloned().unwrap_or_default();
        (module_type(&container).into(), field)
    }

    /// The name of the parameter that the walk is at.
    pub fn parameter_name(&self) -> String {
        self.0.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(".")
    }

    /// The name of the embedding whose table the walk is at.
    pub fn embedding(&self, rank: usize) -> Option<String> {
        let ((field, container), parents) = self.0.split_last()?;
        let name = || parents.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(".");
        ((module_type(container), field.as_str(), rank) == ("Embedding", "weight", 2)).then(name)
    }

    /// The name of the linear whose weight the walk is at.
    pub fn linear_weight(&self, rank: usize, config: &Float8Config) -> Option<String> {
        let (field, container) = self.0.last()?;
        is_weight(config, container, field, rank).then(|| self.linear_name())
    }

    /// The name that a linear has whose weight the walk is at.
    pub(super) fn linear_name(&self) -> String {
        let Some(((field, _), parents)) = self.0.split_last() else { return String::new() };
        let mut names: Vec<_> = parents.iter().map(|(name, _)| name.as_str()).collect();
        // A type of one's own may have several.
        if field != "weight" {
            names.push(field);
        }
        // A bare `Linear` has no path.
        if names.is_empty() { "linear".into() } else { names.join(".") }
    }
}

/// A linear of a model.
pub struct FoundLinear<B: Float8Stack> {
    /// Its name, K and N.
    pub info: LinearInfo,
    /// The type of its module, and its field in that.
    pub(super) parameter: (String, String),
    /// Where its weight is.
    pub device: B::Device,
    /// The tag of its weight, once a configuration was applied.
    pub(crate) tag: Option<Tag>,
    /// The weight, unless it is a quantized tensor, which no FP8 linear reads.
    pub weight: Option<FloatTensor<B>>,
}

impl<B: Float8Stack> FoundLinear<B> {
    /// Format and granularity of its weight, if that is FP8 codes alone.
    pub(super) fn codes(&self) -> Option<String> {
        let weight = B::float8_tensor(self.weight.as_ref()?);
        weight.codes().map(|codes| format!("{} {}", codes.format(), codes.granularity()))
    }

    /// The layer of its weight, once a configuration was applied.
    pub fn layer(&self) -> Option<&Arc<Layer>> {
        self.tag.as_ref().map(|tag| &tag.layer)
    }
}

/// The linears of a model in the order of the walk, by the custom types of this configuration, or else by those of the
/// configuration that was applied to each.
pub fn linears<B: Float8Stack, M: Module<B>>(model: &M, config: Option<&Float8Config>) -> Vec<FoundLinear<B>> {
    struct Walk<'a, B: Float8Stack>(Path, Option<&'a Float8Config>, Vec<FoundLinear<B>>);
    impl<B: Float8Stack> ModuleVisitor<B> for Walk<'_, B> {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.0.enter(name, container);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if D < 2 {
                return;
            }
            let weight = param.val();
            let (dims, device) = (weight.dims(), weight.device());
            let weight = match weight.into_primitive() {
                TensorPrimitive::Float(weight) => Some(weight),
                TensorPrimitive::QFloat(_) => None,
            };
            let tag = weight.as_ref().and_then(B::tag);
            let applied = tag.as_ref().map(|tag| tag.layer.conversion());
            let fallback = Float8Config::default();
            let config = self.1.or(applied.as_ref().map(|applied| applied.config())).unwrap_or(&fallback);
            let Some(name) = self.0.linear_weight(D, config) else { return };
            let source = tag.as_ref().and_then(|tag| source_of::<B::Inner>(&tag.layer));
            let [k, n] = source.map_or([dims[D - 2], dims[D - 1]], |source| source.shape());
            let info = LinearInfo { name, k, n };
            self.2.push(FoundLinear { info, parameter: self.0.parameter(), device, tag, weight });
        }
    }
    let mut walk = Walk(Path::default(), config, vec![]);
    Module::<B>::visit(model, &mut walk);
    walk.2
}

/// The parameter with `f` of its tensor, and of what is loaded into it later. Quantized tensors stay as they are.
pub fn map_param<B: Float8Stack, const D: usize>(
    param: Param<Tensor<B, D>>,
    f: impl Fn(FloatTensor<B>) -> FloatTensor<B> + Clone + Send + Sync + 'static,
) -> Param<Tensor<B, D>> {
    let f = move |t: Tensor<B, D>| {
        Tensor::from_primitive(match t.into_primitive() {
            TensorPrimitive::Float(t) => TensorPrimitive::Float(f(t)),
            quantized => quantized,
        })
    };
    map_value(param, f.clone(), f)
}

/// The parameter with `f` applied to its tensor, and `on_load` to tensors that are loaded into it later.
///
/// It keeps its id, its mappers and its `require_grad`, which `Param::map` loses on a backend without autodiff.
pub(super) fn map_value<B: Backend, const D: usize>(
    param: Param<Tensor<B, D>>,
    f: impl FnOnce(Tensor<B, D>) -> Tensor<B, D>,
    on_load: impl Fn(Tensor<B, D>) -> Tensor<B, D> + Send + Sync + 'static,
) -> Param<Tensor<B, D>> {
    let tensor = param.val();
    // The parameter may have mappers of its own (`LinearLayout::Col`).
    let (id, _, mapper) = param.clone().consume();
    let own = mapper.clone();
    parameter(id, f(tensor), is_trained(param))
        .load_mapper(move |t| on_load(mapper.on_load(t)))
        .save_mapper(move |t| own.on_save(t))
}

/// The parameter with `f` applied to its tensor. Tensors that are loaded into it later are unchanged.
pub(super) fn set_value<B: Backend, const D: usize>(
    param: Param<Tensor<B, D>>,
    f: impl FnOnce(Tensor<B, D>) -> Tensor<B, D>,
) -> Param<Tensor<B, D>> {
    if !B::ad_enabled(&param.device()) {
        return map_value(param, f, |t| t);
    }
    // The same mapper, where mapping each step would nest them without end.
    let (id, tensor, mapper) = param.consume();
    Param::from_mapped_value(id, f(tensor), mapper)
}

/// A parameter with this value and this `require_grad`, which `train()` reads if the backend has no autodiff.
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

/// The parameter's `require_grad`. Without autodiff `train()` alone reads it.
fn is_trained<B: Backend, const D: usize>(param: Param<Tensor<B, D>>) -> bool {
    if B::ad_enabled(&param.device()) {
        return param.is_require_grad();
    }
    #[cfg(not(feature = "distributed"))]
    return Param::<Tensor<burn_autodiff::Autodiff<B>, D>>::from_inner(param).is_require_grad();
    // Autodiff is not for every backend then, so the flag cannot be read.
    #[cfg(feature = "distributed")]
    true
}

/// Draws the parameters of a model that are not initialized yet, in the order of the walk.
pub(super) fn draw<B: Backend, M: Module<B>>(model: &M) {
    struct Draw;
    impl<B: Backend> ModuleVisitor<B> for Draw {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            param.val();
        }
    }
    Module::<B>::visit(model, &mut Draw);
}
