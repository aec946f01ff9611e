//! [`Float8Folder`]: the recipe by which a Hugging Face checkpoint in FP8 is written.

use std::path::Path;

use burn_float8::Recipe;

use super::check::{Checkpoint, RepeatedHead};
use super::{json, names};
use crate::JobError;
use crate::model::ModelConfig;

/// How a Hugging Face checkpoint in FP8 is to be written again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Float8Folder {
    /// The recipe.
    pub(crate) recipe: Recipe,
    /// Paths of the linears that are not in FP8.
    pub(crate) high_precision: Vec<String>,
}

impl Float8Folder {
    /// Reads the folder's headers; none if no weight is in FP8, and if some lie there in other ways than others.
    ///
    /// # Errors
    /// The errors of [`read_config`](super::read_config) and of [`Checkpoint::open`].
    pub(crate) fn read<C: ModelConfig>(folder: &Path) -> Result<Option<Self>, JobError> {
        if json::quantization(folder)?.is_none() {
            return Ok(None);
        }
        let config = super::read_config::<C>(folder)?;
        let checkpoint = Checkpoint::open(folder, &config, RepeatedHead::IsLeftOut)?;
        let Some(recipe) = checkpoint.recipe() else { return Ok(None) };
        let tensors = config.hf_tensors(folder)?;
        let linears = tensors.iter().filter_map(|(path, _)| names::linear(path));
        let others = linears.filter(|linear| !checkpoint.float8.contains(&names::weight_name(linear)));
        Ok(Some(Self { recipe, high_precision: others.map(String::from).collect() }))
    }
}
