//! Freezes parameters by name.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_float8::shard_hooks::visit_params;
use globset::{Glob, GlobMatcher};

use crate::ModulePath;
use crate::config::{ConfigError, TrainingSection};

/// Pattern of parameter names: the exact name of a parameter or of a module; with `*`, `?` or `[`,
/// a glob over the whole name.
struct Pattern {
    key: &'static str,
    text: String,
    glob: Option<GlobMatcher>,
    has_matched: bool,
}

impl Pattern {
    fn new(key: &'static str, text: &str) -> Result<Self, ConfigError> {
        let glob = match text.contains(['*', '?', '[']) {
            true => {
                Some(Glob::new(text).map_err(|error| value(key, text, &format!("no valid glob: {}", error.kind())))?)
            }
            false => None,
        };
        Ok(Self { key, text: text.into(), glob: glob.map(|glob| glob.compile_matcher()), has_matched: false })
    }

    fn matches(&mut self, path: &str) -> bool {
        let is_below = || path.strip_prefix(&self.text).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let matches = self.glob.as_ref().map_or_else(is_below, |glob| glob.is_match(path));
        self.has_matched |= matches;
        matches
    }
}

fn value(key: &'static str, text: &str, reason: &str) -> ConfigError {
    ConfigError::Value { key, value: format!("{text:?}"), reason: reason.into() }
}

/// Selection of trained parameters by `training.train_only` and `training.freeze`.
pub(crate) struct Trained {
    freeze: Vec<Pattern>,
    train_only: Vec<Pattern>,
    count: usize,
}

impl Trained {
    /// Parses the patterns.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for an invalid glob.
    pub(crate) fn new(training: &TrainingSection) -> Result<Self, ConfigError> {
        let parse =
            |key, names: &[String]| names.iter().map(|name| Pattern::new(key, name)).collect::<Result<Vec<_>, _>>();
        Ok(Self {
            freeze: parse("training.freeze", &training.freeze)?,
            train_only: parse("training.train_only", &training.train_only)?,
            count: 0,
        })
    }

    /// Whether the parameter of this name is trained.
    pub(crate) fn has(&mut self, path: &str) -> bool {
        // Tries every pattern, so that unused ones are detected.
        let any =
            |patterns: &mut [Pattern]| patterns.iter_mut().map(|pattern| pattern.matches(path)).max().unwrap_or(false);
        let is_frozen = any(&mut self.freeze);
        let is_chosen = self.train_only.is_empty() || any(&mut self.train_only);
        let is_trained = is_chosen && !is_frozen;
        self.count += usize::from(is_trained);
        is_trained
    }

    /// Checks the patterns after [`has`](Self::has) was called for each parameter of the model.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for a name that matches no parameter, and if no parameter is trained.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let mut patterns = self.freeze.iter().chain(&self.train_only);
        if let Some(pattern) = patterns.find(|pattern| !pattern.has_matched) {
            return Err(value(pattern.key, &pattern.text, "the model has no parameter of this name, or below it"));
        }
        let names: Vec<_> = self.freeze.iter().map(|pattern| &*pattern.text).collect();
        match self.count {
            0 => Err(value("training.freeze", &names.join(", "), "nothing is left to train")),
            _ => Ok(()),
        }
    }
}

/// Disables gradients of parameters that `training.train_only` and `training.freeze` exclude.
///
/// # Errors
/// [`ConfigError::Value`] for a name that matches no parameter, and if no parameter is trained.
pub(crate) fn freeze<B: Backend, M: Module<B>>(module: M, training: &TrainingSection) -> Result<M, ConfigError> {
    if !training.freezes() {
        return Ok(module);
    }
    let mut freeze = Freeze { trained: Trained::new(training)?, path: ModulePath::default() };
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
    trained: Trained,
    path: ModulePath,
}

impl<B: Backend> ModuleMapper<B> for Freeze {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if self.trained.has(&self.path.dotted()) { param } else { param.set_require_grad(false) }
    }
}
