//! [`Float8Config::apply`]: names the linears of a model and tags their weights.
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorPrimitive};
use serde::Serialize;

use crate::backend::Float8Ops;
use crate::config::{Float8Config, LinearInfo};
use crate::error::Float8Error;
use crate::group::Group;
use crate::layer::{Layer, Policy};
use crate::tensor::Tag;

/// What [`Float8Config::convert`] did; its `Display` is the one-line summary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// The recipe.
    pub recipe: String,
    /// Names of the linears that run in FP8.
    pub converted: Vec<String>,
    /// Names of those among them that run by another recipe, and which.
    pub overridden: Vec<(String, String)>,
    /// Names of the linears kept in high precision, and why.
    pub skipped: Vec<(String, String)>,
}

impl core::fmt::Display for Summary {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (converted, skipped) = (self.converted.len(), self.skipped.len());
        write!(f, "Applied Float8: recipe={}, {converted} of {} linears", self.recipe, converted + skipped)?;
        for (what, names) in [("overridden", &self.overridden), ("skipped", &self.skipped)] {
            for (i, (name, detail)) in names.iter().enumerate() {
                if i == 0 {
                    write!(f, "; {what}: ")?;
                }
                write!(f, "{}{name} ({detail})", if i == 0 { "" } else { ", " })?;
            }
        }
        Ok(())
    }
}

impl Float8Config {
    /// Tags every linear of `model` and prints the one-line [`Summary`]; see [`convert`](Self::convert).
    ///
    /// # Errors
    ///
    /// As [`convert`](Self::convert).
    pub fn apply<B: Float8Ops, M: Module<B>>(&self, model: M) -> Result<M, Float8Error> {
        let (model, summary) = self.convert(model)?;
        println!("{summary}");
        Ok(model)
    }

    /// Tags every linear of `model`: the rank-2 parameter `weight` of each `Linear`, under its path in the module tree.
    ///
    /// What the layers of a model share, such as the optimizer step and amax histories, is shared by its clones, too: to train
    /// two models apart that began as one, load a record of one into a model that was converted by itself. The report's
    /// count of untagged linears on the device begins anew.
    ///
    /// The tag outlives optimizer steps, `clone`, `valid`, `fork` and `load_record`. Applying again, after parameters
    /// were rebuilt or with another configuration, is fine: a weight that still has its tag keeps its counters, and with an
    /// equal configuration its amax history and fallback too. Parameters not initialised yet are initialised.
    ///
    /// # Errors
    ///
    /// A pattern that is no valid glob or matches no linear; a model without linears; too few layers for those to be kept in
    /// high precision; nothing left to convert; statistics or limits that make no sense. `model` is dropped then: apply to a
    /// clone to keep it.
    pub fn convert<B: Float8Ops, M: Module<B>>(&self, model: M) -> Result<(M, Summary), Float8Error> {
        let linears = linears::<B, M>(&model);
        let device = linears.first().map(|linear| linear.device.clone());
        let known = linears.iter().find_map(|linear| linear.tag.as_ref()).map(|tag| tag.layer.group());
        let found: Vec<_> = linears.into_iter().map(|linear| linear.info).collect();
        let policies = self.policies(&found)?;
        let recipe = self.linear.to_string();
        let mut summary = Summary { recipe, converted: vec![], overridden: vec![], skipped: vec![] };
        for (LinearInfo { name, .. }, policy) in found.iter().zip(&policies) {
            match policy {
                Policy::Float8(config) => {
                    summary.converted.push(name.clone());
                    if *config != self.linear {
                        summary.overridden.push((name.clone(), config.to_string()));
                    }
                }
                Policy::HighPrecision(reason) => summary.skipped.push((name.clone(), reason.to_string())),
            }
        }
        let group = known.filter(|group| group.config() == self).unwrap_or_else(|| Arc::new(Group::new(self.clone())));
        if let Some(device) = device {
            let untagged = B::untagged_layer(&device);
            untagged.group().set_strict(self.strict);
            untagged.reset_calls();
        }
        let mut tagger = Tagger { path: Path::default(), policies: policies.into_iter(), group };
        Ok((model.map(&mut tagger), summary))
    }
}

/// The module path while walking a model.
#[derive(Default)]
struct Path(Vec<(String, String)>);

impl Path {
    fn enter(&mut self, name: &str, container: &str) {
        self.0.push((name.into(), container.into()));
    }

    fn exit(&mut self) {
        self.0.pop();
    }

    /// The name of the linear whose weight the walk is at.
    fn linear_weight(&self, rank: usize) -> Option<String> {
        let ((field, container), parents) = self.0.split_last()?;
        let is_linear = matches!((rank, container.as_str()), (2, "Struct:Linear") | (3, "Struct:GroupedLinear"));
        let is_weight = is_linear && field == "weight";
        let names: Vec<_> = parents.iter().map(|(name, _)| name.as_str()).collect();
        // A bare `Linear` has no path.
        is_weight.then(|| if names.is_empty() { "linear".into() } else { names.join(".") })
    }
}

/// A linear of a model.
pub(crate) struct FoundLinear<B: Float8Ops> {
    pub(crate) info: LinearInfo,
    pub(crate) device: B::Device,
    /// Of its weight, once a configuration was applied.
    pub(crate) tag: Option<Tag>,
}

/// The linears of a model, in the order of the walk.
pub(crate) fn linears<B: Float8Ops, M: Module<B>>(model: &M) -> Vec<FoundLinear<B>> {
    struct Walk<B: Float8Ops>(Path, Vec<FoundLinear<B>>);
    impl<B: Float8Ops> ModuleVisitor<B> for Walk<B> {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.0.enter(name, container);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let Some(name) = self.0.linear_weight(D) else { return };
            let weight = param.val();
            let (dims, device) = (weight.dims(), weight.device());
            let info = LinearInfo { name, k: dims[D - 2], n: dims[D - 1] };
            self.1.push(FoundLinear { info, device, tag: B::tag(&weight.into_primitive().tensor()) });
        }
    }
    let mut walk = Walk(Path::default(), vec![]);
    Module::<B>::visit(model, &mut walk);
    walk.1
}

struct Tagger {
    path: Path,
    /// One for each linear, in the order of the walk.
    policies: std::vec::IntoIter<Policy>,
    group: Arc<Group>,
}

impl<B: Float8Ops> ModuleMapper<B> for Tagger {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(name) = self.path.linear_weight(D) else { return param };
        let policy = self.policies.next().expect("visit and map walk the same linears");
        if let Some(layer) = B::layer(&param.val().into_primitive().tensor())
            && layer.name() == name
        {
            let moved = layer.health.fallback().is_some() && Arc::ptr_eq(&layer.group(), &self.group);
            if !moved {
                layer.configure(policy);
                layer.set_group(self.group.clone());
            }
            return param;
        }
        let layer = Arc::new(Layer::new(name, policy, self.group.clone()));
        let tag = move |t: Tensor<B, D>| {
            let t = B::with_layer(t.into_primitive().tensor(), layer.clone());
            Tensor::from_primitive(TensorPrimitive::Float(t))
        };
        // A record loaded later has no tag; the parameter may have a mapper of its own (`LinearLayout::Col`).
        let (id, tensor, mapper) = param.consume();
        let (own, on_load) = (mapper.clone(), tag.clone());
        Param::from_mapped_value(id, tag(tensor), mapper).load_mapper(move |t| on_load(own.on_load(t)))
    }
}
