//! Freezes parameters by name.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_float8::shard_hooks::{Path, visit_params};
use globset::{Glob, GlobMatcher};

use crate::config::{ConfigError, TrainingSection};

/// Pattern of parameter names: the exact name of a parameter or of a module; with `*`, `?` or `[`,
/// a glob over the whole name. After `!`, its parameters are trained.
struct FreezePattern {
    text: String,
    trains: bool,
    glob: Option<GlobMatcher>,
    has_matched: bool,
}

impl FreezePattern {
    fn new(text: &str) -> Result<Self, ConfigError> {
        let (trains, text) = text.strip_prefix('!').map_or((false, text), |text| (true, text));
        let glob = text.contains(['*', '?', '[']).then(|| Glob::new(text)).transpose();
        let glob = glob.map_err(|error| value(text, &format!("no valid glob: {}", error.kind())))?;
        let glob = glob.map(|glob| glob.compile_matcher());
        Ok(Self { text: text.into(), trains, glob, has_matched: false })
    }

    fn matches(&mut self, path: &str) -> bool {
        let is_below = || path.strip_prefix(&self.text).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let matches = self.glob.as_ref().map_or_else(is_below, |glob| glob.is_match(path));
        self.has_matched |= matches;
        matches
    }
}

fn value(text: &str, reason: &str) -> ConfigError {
    ConfigError::Value { key: "training.freeze", value: format!("{text:?}"), reason: reason.into() }
}

/// Selection of trained parameters by `training.freeze`.
pub(crate) struct TrainedParameters {
    patterns: Vec<FreezePattern>,
    count: usize,
}

impl TrainedParameters {
    /// Parses the patterns.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for an invalid glob.
    pub(crate) fn new(training: &TrainingSection) -> Result<Self, ConfigError> {
        let patterns = training.freeze.iter().map(|name| FreezePattern::new(name)).collect::<Result<_, _>>()?;
        Ok(Self { patterns, count: 0 })
    }

    /// Whether the parameter of this name is trained.
    pub(crate) fn has(&mut self, path: &str) -> bool {
        // Tries every pattern, so that unused ones are detected.
        let matches = self.patterns.iter_mut().filter_map(|pattern| pattern.matches(path).then_some(pattern.trains));
        let is_trained = matches.last().unwrap_or(true);
        self.count += usize::from(is_trained);
        is_trained
    }

    /// Checks the patterns after [`has`](Self::has) was called for each parameter of the model.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for a name that matches no parameter, and if no parameter is trained.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if let Some(pattern) = self.patterns.iter().find(|pattern| !pattern.has_matched) {
            return Err(value(&pattern.text, "the model has no parameter of this name, or below it"));
        }
        let names: Vec<_> = self.patterns.iter().map(|pattern| &*pattern.text).collect();
        match self.count {
            0 => Err(value(&names.join(", "), "nothing is left to train")),
            _ => Ok(()),
        }
    }
}

/// Disables gradients of parameters in `training.freeze`.
///
/// # Errors
/// [`ConfigError::Value`] for a name that matches no parameter, and if no parameter is trained.
pub(crate) fn freeze<B: Backend, M: Module<B>>(module: M, training: &TrainingSection) -> Result<M, ConfigError> {
    if training.freeze.is_empty() {
        return Ok(module);
    }
    let mut freeze = Freeze { trained: TrainedParameters::new(training)?, path: Path::default() };
    let module = module.map(&mut freeze);
    freeze.trained.check()?;
    Ok(module)
}

/// Number of elements of trained parameters, and of all.
pub(crate) fn trainable<B: Backend, M: Module<B>>(module: &M) -> [usize; 2] {
    let mut count = [0; 2];
    visit_params::<B, _>(module, |param| {
        let elements = param.shape.num_elements();
        let is_trained = param.float().is_some_and(|value| B::float_is_require_grad(&value));
        count[0] += if is_trained { elements } else { 0 };
        count[1] += elements;
    });
    count
}

struct Freeze {
    trained: TrainedParameters,
    path: Path,
}

impl<B: Backend> ModuleMapper<B> for Freeze {
    tracks_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if self.trained.has(&self.path.parameter_name()) { param } else { param.set_require_grad(false) }
    }
}
