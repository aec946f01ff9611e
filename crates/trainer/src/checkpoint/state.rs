//! State that a run needs to continue with bitwise the same losses in another process.
//!
//! ```text
//! model.safetensors      parameters, in their storage dtype, by path in the module tree
//! optimizer.safetensors  AdamW's moments, likewise
//! state.json             steps, place in the data, FP8 state
//! config.toml            the run's configuration
//! ```
//! With several ranks, each writes two tensor files, and `index.json` locates the rows of a tensor
//! in them.
//!
//! Learning rate, precision schedule and batches depend only on the configuration, its seed and
//! this state; there is no other random state.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::{Float8Stack, Float8State};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::sharded_tensors::{Parts, SavedTensors};
use super::tensors::{self, Pending};
use super::{CONFIG, CheckpointKind, Which, cannot, find_checkpoint};
use crate::Ranks;
use crate::config::OptimizerSection;
use crate::data::Position;
use crate::lora_model::name_in_base;
use crate::optimizer::AdamWStates;
use crate::progress::Progress;
use crate::{atomic, files};

const FORMAT: u32 = 3;
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";
pub(super) const STATE: &str = "state.json";

/// State other than tensors and configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RunState {
    format: u32,
    /// Completed optimizer steps.
    pub(super) step: usize,
    /// The next sequence.
    pub(super) data: Position,
    /// Steps of each parameter, by its path.
    parameter_steps: BTreeMap<String, usize>,
    /// Amax histories, fallbacks, sampled steps.
    float8: Float8State,
}

/// State between two steps. Tensors stay on their device until they are written.
pub(crate) struct Snapshot {
    parameters: Vec<Pending>,
    moments: Vec<Pending>,
    state: RunState,
    /// Rank and number of ranks, if there are several.
    rank: Option<[usize; 2]>,
}

impl Snapshot {
    /// Takes a snapshot of this rank's part of the run. Every rank must call it.
    pub(crate) fn of<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
        model: &M,
        optimizer: &AdamWStates<B::InnerBackend>,
        step: usize,
        data: Position,
        ranks: Option<&Ranks>,
    ) -> Self {
        let (parameters, moments, parameter_steps) = tensors::collect::<B, M>(model, optimizer, ranks);
        let float8 = Float8State::export::<B, M>(model);
        let state = RunState { format: FORMAT, step, data, parameter_steps, float8 };
        Self { parameters, moments, state, rank: ranks.map(|ranks| [ranks.rank(), ranks.count()]) }
    }

    pub(super) fn step(&self) -> usize {
        self.state.step
    }

    fn is_first(&self) -> bool {
        self.rank.is_none_or(|[rank, _]| rank == 0)
    }

    /// Kinds of tensor files of this rank, with their tensors. A rank without tensors writes none.
    fn tensors(&self) -> impl Iterator<Item = (&'static str, &[Pending])> {
        let all = [(MODEL, &self.parameters[..]), (OPTIMIZER, &self.moments)];
        all.into_iter().filter(|(_, tensors)| self.is_first() || !tensors.is_empty())
    }

    /// Names of the files that [`write`](Self::write) writes.
    pub(super) fn files(&self) -> Vec<String> {
        let mut files: Vec<_> = self.tensors().map(|(kind, _)| file_name(kind, self.rank)).collect();
        files.extend([STATE, CONFIG].into_iter().filter(|_| self.is_first()).map(String::from));
        files
    }

    /// Writes this rank's files, and on the first rank the configuration as TOML. Returns the parts
    /// of tensors in them.
    ///
    /// A value that is not finite is an error, unless the run has diverged.
    pub(super) fn write(&self, folder: &Path, kind: CheckpointKind, config: &str) -> Result<Parts> {
        let finite_at = (kind != CheckpointKind::Diverged).then_some(self.step());
        let mut parts = Parts::new();
        for (kind, tensors) in self.tensors() {
            parts.extend(tensors::write(folder, &file_name(kind, self.rank), tensors, finite_at)?);
        }
        if self.is_first() {
            for (name, text) in [(STATE, &*serde_json::to_string(&self.state)?), (CONFIG, config)] {
                let path = folder.join(name);
                atomic::replace(&path, text.as_bytes()).with_context(cannot("write", &path))?;
            }
        }
        Ok(parts)
    }
}

/// Name of a tensor file, with the rank if there are several.
fn file_name(kind: &str, rank: Option<[usize; 2]>) -> String {
    match rank {
        None => format!("{kind}.safetensors"),
        Some([rank, ranks]) => format!("{kind}-rank-{rank:05}-of-{ranks:05}.safetensors"),
    }
}

/// A verified checkpoint.
#[derive(Debug)]
pub struct SavedRun {
    path: PathBuf,
    state: RunState,
    config: String,
}

impl SavedRun {
    /// Opens a checkpoint of the run in `folder`.
    ///
    /// # Errors
    /// The errors of [`find_checkpoint`]; a checkpoint of another format version.
    pub fn open(folder: &Path, which: Which) -> Result<Self> {
        let path = find_checkpoint(folder, which)?;
        let file = path.join(STATE);
        let state: Value = files::read_json(&file)?;
        let format = &state["format"];
        ensure!(*format == FORMAT, "{} has format {format}, this program reads {FORMAT}", file.display());
        let is_invalid = || format!("{} is not valid", file.display());
        let state = serde_json::from_value(state).with_context(is_invalid)?;
        let config = path.join(CONFIG);
        let config = files::read_to_string(&config).with_context(cannot("read", &config))?;
        Ok(Self { path, state, config })
    }

    /// Path of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Completed optimizer steps.
    pub fn step(&self) -> usize {
        self.state.step
    }

    /// The configuration, as TOML.
    pub fn config(&self) -> &str {
        &self.config
    }

    /// The next sequence.
    pub fn position(&self) -> &Position {
        &self.state.data
    }

    /// Amax histories and fallbacks of the linears.
    pub fn float8(&self) -> &Float8State {
        &self.state.float8
    }

    /// [`float8`](Self::float8) with the names of the model without its adapters.
    pub(crate) fn float8_of_model(&self, has_adapters: bool) -> Float8State {
        let mut float8 = self.state.float8.clone();
        if has_adapters {
            let layers = float8.layers.into_iter();
            float8.layers = layers.map(|(name, state)| (name_in_base(&name).to_owned(), state)).collect();
        }
        float8
    }

    /// Replaces every parameter of `model`, before FP8 is applied.
    ///
    /// # Errors
    /// The tensors do not fit the model or cannot be read.
    pub fn load_parameters<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        model: M,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<M> {
        tensors::load_parameters(model, self.parameters()?, progress)
    }

    /// Opens the saved parameters.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub(crate) fn parameters(&self) -> Result<SavedTensors> {
        SavedTensors::open(&self.path, &file_name(MODEL, None))
    }

    /// Restores the FP8 state of a model after FP8 was applied.
    ///
    /// # Errors
    /// The state is of another model.
    pub fn restore_float8<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(&self, model: &M) -> Result<()> {
        Ok(self.state.float8.restore::<B, M>(model)?)
    }

    /// Loads the optimizer state for `section`.
    ///
    /// # Errors
    /// The tensors do not fit the model or cannot be read.
    pub fn load_moments<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
        &self,
        model: &M,
        section: &OptimizerSection,
        ranks: Option<&Ranks>,
    ) -> Result<AdamWStates<B::InnerBackend>> {
        let saved = SavedTensors::open(&self.path, &file_name(OPTIMIZER, None))?;
        tensors::load_moments::<B, M>(model, section, saved, &self.state.parameter_steps, ranks)
    }
}
