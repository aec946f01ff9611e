//! [`Float8Config::apply`]: names the linears of a model and tags their weights.
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorPrimitive};
use serde::Serialize;

use crate::backend::Float8Ops;
use crate::config::{Float8Config, Recipe};
use crate::error::Float8Error;
use crate::layer::{Layer, Policy};

/// What [`Float8Config::convert`] did; its `Display` is the one-line summary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// The recipe.
    pub recipe: Recipe,
    /// Names of the linears that run in FP8.
    pub converted: Vec<String>,
    /// Names of the linears kept in high precision, and why.
    pub skipped: Vec<(String, String)>,
}

impl core::fmt::Display for Summary {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (converted, skipped) = (self.converted.len(), self.skipped.len());
        write!(f, "Applied Float8: recipe={}, {converted} of {} linears", self.recipe, converted + skipped)?;
        for (i, (name, reason)) in self.skipped.iter().enumerate() {
            write!(f, "{}{name} ({reason})", if i == 0 { "; skipped: " } else { ", " })?;
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
    /// The tag outlives optimizer steps, `clone`, `valid`, `fork` and `load_record`. Applying again, after parameters
    /// were rebuilt or with another configuration, is fine: a weight that still has its tag keeps its counters.
    /// Parameters not initialised yet are initialised.
    ///
    /// # Errors
    ///
    /// A filter that is no valid glob or matches no linear; a model without linears; nothing left to convert. `model`
    /// is dropped then: apply to a clone to keep it.
    pub fn convert<B: Float8Ops, M: Module<B>>(&self, model: M) -> Result<(M, Summary), Float8Error> {
        let names = linear_names::<B, M>(&model);
        let policies = self.policies(&names)?;
        let mut summary = Summary { recipe: self.recipe, converted: vec![], skipped: vec![] };
        for (name, policy) in names.iter().zip(&policies) {
            match policy {
                Policy::Float8(_) => summary.converted.push(name.clone()),
                Policy::HighPrecision(reason) => summary.skipped.push((name.clone(), reason.to_string())),
            }
        }
        let mut tagger = Tagger { path: Path::default(), policies: policies.into_iter() };
        Ok((model.map(&mut tagger), summary))
    }
}

/// The module path while walking a model.
#[derive(Default)]
pub(crate) struct Path(Vec<(String, String)>);

impl Path {
    pub(crate) fn enter(&mut self, name: &str, container: &str) {
        self.0.push((name.into(), container.into()));
    }

    pub(crate) fn exit(&mut self) {
        self.0.pop();
    }

    /// The name of the linear whose weight the walk is at.
    pub(crate) fn linear_weight(&self, rank: usize) -> Option<String> {
        let ((field, container), parents) = self.0.split_last()?;
        let is_weight = rank == 2 && field == "weight" && container == "Struct:Linear";
        let names: Vec<_> = parents.iter().map(|(name, _)| name.as_str()).collect();
        // A bare `Linear` has no path.
        is_weight.then(|| if names.is_empty() { "linear".into() } else { names.join(".") })
    }
}

fn linear_names<B: Float8Ops, M: Module<B>>(model: &M) -> Vec<String> {
    #[derive(Default)]
    struct Names(Path, Vec<String>);
    impl<B: Float8Ops> ModuleVisitor<B> for Names {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.0.enter(name, container);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.exit();
        }
        fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<B, D>>) {
            self.1.extend(self.0.linear_weight(D));
        }
    }
    let mut names = Names::default();
    Module::<B>::visit(model, &mut names);
    names.1
}

struct Tagger {
    path: Path,
    /// One for each linear, in the order of the walk.
    policies: std::vec::IntoIter<Policy>,
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
            layer.set_policy(policy);
            return param;
        }
        let layer = Arc::new(Layer::new(name, policy));
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
