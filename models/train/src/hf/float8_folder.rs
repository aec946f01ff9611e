//! [`Float8Folder`]: the recipes that write a Hugging Face checkpoint in FP8.

use std::cmp::Reverse;
use std::path::Path;

use burn_float8::Recipe;

use super::check::{Checkpoint, RepeatedHead};
use super::float8::Scheme;
use super::{json, names};
use crate::JobError;
use crate::model::ModelConfig;

/// Recipes for writing a Hugging Face checkpoint in FP8 again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Float8Folder {
    /// Recipe of most linears.
    pub(crate) recipe: Recipe,
    /// Other recipes, with the paths of their linears.
    pub(crate) others: Vec<(Recipe, Vec<String>)>,
    /// Paths of the linears that are not in FP8.
    pub(crate) high_precision: Vec<String>,
}

impl Float8Folder {
    /// Reads the folder's headers. `None` if no weight is in FP8.
    ///
    /// # Errors
    /// The errors of [`read_config`](super::read_config) and of [`Checkpoint::open`].
    pub(crate) fn read<C: ModelConfig>(folder: &Path) -> Result<Option<Self>, JobError> {
        if json::quantization(folder)?.is_none() {
            return Ok(None);
        }
        let config = super::read_config::<C>(folder)?;
        let checkpoint = Checkpoint::open(folder, &config, RepeatedHead::IsLeftOut)?;
        let (mut recipes, mut high_precision): (Vec<(Recipe, Vec<_>)>, _) = (vec![], vec![]);
        let tensors = config.hf_tensors(folder)?;
        for linear in tensors.iter().filter_map(|(path, _)| names::linear(path)) {
            let recipe = checkpoint.float8.scheme(&names::weight_name(linear)).map(Scheme::recipe);
            let of_recipe = recipes.iter_mut().find(|(known, _)| Some(*known) == recipe);
            match (recipe, of_recipe) {
                (_, Some((_, linears))) => linears.push(linear.to_string()),
                (Some(recipe), None) => recipes.push((recipe, vec![linear.to_string()])),
                (None, None) => high_precision.push(linear.to_string()),
            }
        }
        if recipes.is_empty() {
            return Ok(None);
        }
        recipes.sort_by_key(|(_, linears)| Reverse(linears.len()));
        let (recipe, _) = recipes.remove(0);
        Ok(Some(Self { recipe, others: recipes, high_precision }))
    }
}
