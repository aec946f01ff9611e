//! [`Float8Config::apply`]: names the linears of a model and tags their weights.
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorPrimitive};
use serde::Serialize;

use super::walk::{Path, linears, map_param};
use crate::config::{Float8Config, LinearInfo, Policy};
use crate::error::{ApplyError, Float8Error};
use crate::layer::{Conversion, Layer, Tag, note_apply};
use crate::nn::register;
use crate::stack::Float8Stack;

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

impl Summary {
    fn new(config: &Float8Config, linears: &[LinearInfo], policies: &[Policy], quantized: Vec<String>) -> Self {
        let recipe = config.linear.to_string();
        let mut summary = Self { recipe, converted: vec![], overridden: vec![], skipped: vec![] };
        for (LinearInfo { name, .. }, policy) in linears.iter().zip(policies) {
            match policy {
                Policy::Float8(own) => {
                    summary.converted.push(name.clone());
                    if *own != config.linear {
                        summary.overridden.push((name.clone(), own.to_string()));
                    }
                }
                Policy::HighPrecision(reason) => summary.skipped.push((name.clone(), reason.to_string())),
            }
        }
        summary.skipped.extend(quantized.into_iter().map(|name| (name, "quantized".into())));
        summary
    }
}

impl Float8Config {
    /// Tags every linear of `model` and logs the one-line [`Summary`]; see [`convert`](Self::convert).
    ///
    /// # Errors
    ///
    /// As [`convert`](Self::convert).
    pub fn apply<B: Float8Stack, M: Module<B>>(&self, model: M) -> Result<M, ApplyError<M>> {
        self.apply_filtered(model, |_| true)
    }

    /// [`apply`](Self::apply) with torchao's `module_filter_fn`: linears for which `filter` is false stay in high precision. It is
    /// asked about those that the configuration's own filters leave.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::backend::Flex;
    /// use burn::nn::LinearConfig;
    /// use burn_float8::{Float8, Float8Config, Float8Error};
    ///
    /// let model = LinearConfig::new(8, 8).init::<Float8<Flex>>(&Default::default());
    /// let refused = Float8Config::tensorwise().apply_filtered(model, |linear| linear.n % 16 == 0).unwrap_err();
    /// assert!(matches!(refused.error, Float8Error::NothingConverted { .. }));
    /// let model = refused.model; // as it was
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`convert`](Self::convert).
    pub fn apply_filtered<B: Float8Stack, M: Module<B>>(
        &self,
        model: M,
        filter: impl FnMut(&LinearInfo) -> bool,
    ) -> Result<M, ApplyError<M>> {
        let (model, summary) = self.convert_filtered(model, filter)?;
        log::info!("{summary}");
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
    /// equal configuration its amax history and fallback too. Parameters not initialised yet are initialised; quantized ones
    /// are left as they are.
    ///
    /// # Errors
    ///
    /// A pattern that is no valid glob or matches no linear; a model without linears; too few layers for those to be kept in
    /// high precision; nothing left to convert; settings that [`validate`](Self::validate) refuses. The error holds the model.
    pub fn convert<B: Float8Stack, M: Module<B>>(&self, model: M) -> Result<(M, Summary), ApplyError<M>> {
        self.convert_filtered(model, |_| true)
    }

    /// [`convert`](Self::convert) with the filter of [`apply_filtered`](Self::apply_filtered).
    ///
    /// # Errors
    ///
    /// As [`convert`](Self::convert).
    pub fn convert_filtered<B: Float8Stack, M: Module<B>>(
        &self,
        model: M,
        mut filter: impl FnMut(&LinearInfo) -> bool,
    ) -> Result<(M, Summary), ApplyError<M>> {
        let (quantized, linears): (Vec<_>, Vec<_>) =
            linears::<B, M>(&model, Some(self)).into_iter().partition(|linear| linear.weight.is_none());
        let known = linears.iter().find_map(|linear| Some(linear.tag.as_ref()?.layer.conversion()));
        let devices: Vec<_> = linears.iter().map(|linear| linear.device.clone()).collect();
        let infos: Vec<_> = linears.into_iter().map(|linear| linear.info).collect();
        let policies = match self.policies(&infos, &mut filter) {
            Ok(policies) => policies,
            Err(Float8Error::NoLinears) if !quantized.is_empty() => {
                let error = Float8Error::NothingConverted { linears: quantized.len(), reasons: "quantized".into() };
                return Err(ApplyError { error, model: Box::new(model) });
            }
            Err(error) => return Err(ApplyError { error, model: Box::new(model) }),
        };
        let quantized = quantized.into_iter().map(|linear| linear.info.name).collect();
        let summary = Summary::new(self, &infos, &policies, quantized);
        let conversion = known
            .filter(|conversion| conversion.config() == self)
            .unwrap_or_else(|| Arc::new(Conversion::new(self.clone())));
        register::<B>();
        note_apply(&conversion);
        devices.iter().for_each(|device| B::untagged_layer(device).reset_calls());
        let mut tagger = Tagger { path: Path::default(), policies: policies.into_iter(), conversion };
        Ok((model.map(&mut tagger), summary))
    }
}

struct Tagger {
    path: Path,
    /// One for each linear that is not quantized, in the order of the walk.
    policies: std::vec::IntoIter<Policy>,
    conversion: Arc<Conversion>,
}

impl<B: Float8Stack> ModuleMapper<B> for Tagger {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(name) = self.path.linear_weight(D, self.conversion.config()) else { return param };
        let TensorPrimitive::Float(weight) = param.val().into_primitive() else { return param };
        let policy = self.policies.next().expect("visit and map walk the same linears");
        if let Some(Tag { layer, .. }) = B::tag(&weight)
            && layer.name() == name
        {
            let has_moved = layer.fallback().is_some() && Arc::ptr_eq(&layer.conversion(), &self.conversion);
            if !has_moved {
                layer.configure(policy);
                layer.set_conversion(self.conversion.clone());
            }
            return param;
        }
        let layer = Arc::new(Layer::new(name, policy, self.conversion.clone()));
        // A record that is loaded later has no tag.
        map_param(param, move |t| B::with_tag(t, Tag::new(layer.clone())))
    }
}
