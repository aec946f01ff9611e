//! [`Float8Config::apply`]: tags the weights of a model's linears with their names.
use std::sync::Arc;

use burn::module::Module;
use burn_backend::tensor::FloatTensor;
use float8_kernels::{GemmPath, Granularity};
use serde::Serialize;

use super::walk::{Change, FoundLinear, draw, linears, map_params};
use crate::backend::Float8Backend;
use crate::config::{Float8Config, LinearInfo, Policy};
use crate::error::{ApplyError, Float8Error};
use crate::layer::{Applied, Layer, LinearPlan, Tag, settle_at_apply};
use crate::ops::functions;
use crate::stack::Float8Stack;
use crate::terms::Gemm;

/// Result of [`Float8Config::apply`]. Its `Display` is a one-line summary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// The recipe.
    pub recipe: String,
    /// Names of the linears that run in FP8.
    pub converted: Vec<String>,
    /// Names and recipes of converted linears with another recipe.
    pub overridden: Vec<(String, String)>,
    /// Names of linears kept in high precision, with reasons.
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
    /// Tags every linear of `model`: the rank-2 parameter `weight` of each `Linear`, named by its
    /// path in the module tree. Returns a summary and logs it in one line.
    ///
    /// Clones of a model share the optimizer step and the amax histories of its layers. To train
    /// two clones separately, load a record of one into a separately converted model. The report's
    /// count of untagged linears on the device restarts.
    ///
    /// Tags survive optimizer steps, `clone`, `valid`, `fork` and `load_record`. Applying an equal
    /// configuration again, after parameters were rebuilt, keeps counters, amax histories and
    /// fallbacks of weights that still have tags. Applying another configuration, or applying one
    /// to a part of the model, creates new layers. Clones of the model keep the old ones. Quantized
    /// parameters do not change.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::backend::{Autodiff, Flex};
    /// use burn::module::Module;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::backend::Backend;
    /// use burn_float8::{Float8, Float8Config, Recipe};
    ///
    /// #[derive(Module, Debug)]
    /// struct Model<B: Backend> {
    ///     body: Linear<B>,
    ///     head: Linear<B>,
    /// }
    /// let device = Default::default();
    /// let linear = |n| LinearConfig::new(64, n).init(&device);
    /// let model = Model::<Float8<Autodiff<Flex>>> { body: linear(64), head: linear(8) };
    /// let config = Float8Config::new(Recipe::Rowwise).with_filter_fqns(["head"]);
    /// let (model, summary) = config.apply(model).unwrap();
    /// assert_eq!(summary.converted, ["body"]);
    /// assert_eq!(summary.skipped[0].0, "head");
    /// # drop(model);
    /// # }
    /// ```
    ///
    /// Lazy parameters are initialized first, in the module's order. `require_grad` does not
    /// change, even without autodiff, where `train()` reads it. With the feature `distributed` it
    /// becomes true in a model without autodiff.
    ///
    /// # Errors
    ///
    /// The error holds the model. It is returned if
    ///
    /// - a pattern is an invalid glob or matches no linear, or a custom layer type is not in the
    ///   model
    /// - the model has no linears, too few layers to keep in high precision, or no linear left in
    ///   FP8
    /// - `strict` is set and a pair of granularities has no kernel for the device's FP8 tensor
    ///   cores
    /// - [`validate`](Self::validate) fails
    /// - the device cannot run FP8 ([`Float8Error::Setup`], [`Float8Error::Preflight`])
    /// - the model is sharded and had another configuration ([`Float8Error::Sharded`])
    pub fn apply<B: Float8Stack, M: Module<B>>(&self, model: M) -> Result<(M, Summary), ApplyError<M>> {
        self.apply_with(model, |_| true)
    }

    /// [`apply`](Self::apply) with torchao's `module_filter_fn`: linears for which `filter` returns
    /// false stay in high precision. It is called only for linears that pass the configuration's
    /// filters.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::backend::Flex;
    /// use burn::nn::LinearConfig;
    /// use burn_float8::{Float8, Float8Config, Float8Error};
    ///
    /// let model = LinearConfig::new(8, 8).init::<Float8<Flex>>(&Default::default());
    /// let refused = Float8Config::tensorwise().apply_with(model, |linear| linear.n % 16 == 0).unwrap_err();
    /// assert!(matches!(refused.error, Float8Error::NothingConverted { .. }));
    /// let model = refused.model; // as it was
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`apply`](Self::apply).
    pub fn apply_with<B: Float8Stack, M: Module<B>>(
        &self,
        model: M,
        mut filter: impl FnMut(&LinearInfo) -> bool,
    ) -> Result<(M, Summary), ApplyError<M>> {
        draw::<B, M>(&model);
        let (quantized, linears): (Vec<_>, Vec<_>) =
            linears::<B, M>(&model, Some(self)).into_iter().partition(|linear| linear.weight.is_none());
        let infos: Vec<_> = linears.iter().map(|linear| linear.info.clone()).collect();
        let policies = self.check_module_types(&linears, &quantized).and_then(|()| self.policies(&infos, &mut filter));
        let policies = match policies {
            Ok(policies) => policies,
            Err(Float8Error::NothingConverted { linears: 0, .. }) if !quantized.is_empty() => {
                let error = Float8Error::NothingConverted { linears: quantized.len(), reasons: "quantized".into() };
                return Err(ApplyError { error, model: Box::new(model) });
            }
            Err(error) => return Err(ApplyError { error, model: Box::new(model) }),
        };
        let quantized: Vec<_> = quantized.into_iter().map(|linear| linear.info.name).collect();
        let summary = Summary::new(self, &infos, &policies, quantized.clone());
        let known = self.known_conversion(&linears, &policies);
        let is_sharded = |linear: &FoundLinear<B>| linear.layer().is_some_and(|layer| layer.is_divided());
        if known.is_none() && linears.iter().any(is_sharded) {
            return Err(ApplyError { error: Float8Error::Sharded, model: Box::new(model) });
        }
        let mut devices: Vec<&B::Device> = vec![];
        for FoundLinear { device, .. } in &linears {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        let prepare = |device: &&B::Device| B::Inner::fp8_prepare(device, Some(self.self_check));
        let prepared = devices.iter().try_for_each(prepare).and_then(|()| self.check_paths(&linears, &policies));
        if let Err(error) = prepared {
            return Err(ApplyError { error, model: Box::new(model) });
        }
        let keeps_tags = known.is_some();
        let applied = known.unwrap_or_else(|| Arc::new(Applied::new(self.clone(), quantized)));
        functions::register::<B::Wrapped>();
        for device in devices {
            B::untagged_layer(device).reset_calls();
            let applied = linears.iter().filter(|linear| linear.device == *device).map(|linear| linear.info.clone());
            let settled = settle_at_apply::<B::Inner>(device, self.untagged, applied).choice;
            if let Some(asked_for) = self.untagged.filter(|asked_for| *asked_for != settled) {
                log::warn!(
                    "Float8: untagged = {asked_for:?} is ignored on {device:?}: untagged linears there are settled as {settled:?}, by an \
                     earlier configuration, an untagged linear that ran, or set_default_config, which alone changes it"
                );
            }
        }
        // One policy per linear that is not quantized, in the order of the walk.
        let mut policies = policies.into_iter();
        let model = map_params::<B, M>(model, |param| {
            let Some(name) = param.linear_weight(self) else { return Change::None };
            let Some(weight) = param.float() else { return Change::None };
            let policy = policies.next().expect("visit and map walk the same linears");
            let known = weight.tag().cloned().filter(|_| keeps_tags);
            if known.as_ref().is_some_and(|tag| tag.enabled) {
                return Change::None;
            }
            // Re-enables layers that `without_float8` switched off.
            let new = || Arc::new(Layer::new(name, policy, applied.clone()));
            let layer = known.map_or_else(new, |tag| tag.layer);
            // Tags tensors loaded later too, since records hold no tags.
            Change::map(move |t: FloatTensor<B>| t.tagged(Tag::new(layer.clone())))
        });
        log::info!("{summary}");
        Ok((model, summary))
    }

    /// Conversion of all tagged linears, if this configuration was applied to this model before, so
    /// that the tags agree with it.
    fn known_conversion<B: Float8Stack>(
        &self,
        linears: &[FoundLinear<B>],
        policies: &[Policy],
    ) -> Option<Arc<Applied>> {
        let tagged = || linears.iter().zip(policies).filter_map(|(linear, p)| Some((linear, linear.tag.as_ref()?, p)));
        let applied = tagged().next()?.1.layer.applied().clone();
        let is_same = tagged().all(|(FoundLinear { info, .. }, Tag { layer, .. }, policy)| {
            layer.name() == info.name && Arc::ptr_eq(layer.applied(), &applied) && layer.configured().as_ref() == policy
        });
        (is_same && applied.config == *self).then_some(applied)
    }

    /// Warns about GEMMs that do not gain from FP8 on a device where others do. Logs one warning
    /// per cause with the names of the linears.
    ///
    /// # Errors
    ///
    /// [`Float8Error::Config`] with `strict`, if a pair of granularities has no kernel for FP8
    /// tensor cores.
    fn check_paths<B: Float8Stack>(&self, linears: &[FoundLinear<B>], policies: &[Policy]) -> Result<(), Float8Error> {
        let mut slow: Vec<(GemmPath, [Granularity; 2], Vec<&str>)> = vec![];
        for (linear, policy) in linears.iter().zip(policies) {
            let Policy::Float8(config) = policy else { continue };
            let (plan, device) = (LinearPlan::new(config), B::Inner::fp8_facts(&linear.device));
            for gemm in Gemm::ALL.into_iter().filter_map(|gemm| plan.gemm(gemm).ok()) {
                let path = |pair| device.gemm_path(None, pair, gemm.config);
                let found = path(gemm.granularities);
                if found.is_native() || !path([Granularity::Tensor; 2]).is_native() {
                    continue;
                }
                let is_it = |(path, pair, _): &&mut (GemmPath, [Granularity; 2], Vec<&str>)| {
                    (*path, *pair) == (found, gemm.granularities)
                };
                match slow.iter_mut().find(is_it) {
                    Some((.., names)) if names.last() == Some(&linear.info.name.as_str()) => {}
                    Some((.., names)) => names.push(&linear.info.name),
                    None => slow.push((found, gemm.granularities, vec![&linear.info.name])),
                }
            }
        }
        for (path, pair @ [a, b], names) in slow {
            let names = names.join(", ");
            let reason = format!("{names}: runs as {path}: {}", path.cost().unwrap_or("no FP8 kernel takes this pair"));
            if self.strict && !Granularity::on_tensor_cores(pair) {
                return Err(Float8Error::config("cast_config_*", format!("{a} with {b}"), reason));
            }
            log::warn!("Float8: GEMMs of {a} with {b} do not gain on this device. {reason}");
        }
        Ok(())
    }

    /// Checks that the model has all custom layer types.
    ///
    /// # Errors
    ///
    /// [`Float8Error::Config`] if a type is not in the model.
    fn check_module_types<B: Float8Stack>(
        &self,
        linears: &[FoundLinear<B>],
        quantized: &[FoundLinear<B>],
    ) -> Result<(), Float8Error> {
        for (name, (module, field)) in self.module_types.iter().zip(self.parsed_module_types()?) {
            let is_it = |linear: &FoundLinear<B>| linear.parameter.0 == module && linear.parameter.1 == field;
            if !linears.iter().chain(quantized).any(is_it) {
                let reason = "the model has no parameter of rank 2 that it names";
                return Err(Float8Error::config("module_types", format!("{name:?}"), reason));
            }
        }
        Ok(())
    }
}
