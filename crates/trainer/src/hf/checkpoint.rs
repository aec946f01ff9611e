//! [`Checkpoint`]: folder of weights that was checked against a model's dimensions before the model
//! is allocated.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use anyhow::{Result, bail};
use burn_float8::backend::HostCodes;
use burn_float8::config::LinearInfo;
use burn_float8::{Float8Config, Recipe};
use safetensors::Dtype;

use super::float8::{Scheme, StoredWeight};
use super::{json, names};
use crate::TensorFiles;
use crate::model::{ModelConfig, ModelSize};
use crate::tensor_files::{other_dtype, unexpected};

/// Rows of two matrices compared at once.
const ROWS: usize = 4096;

/// Treatment of an output layer in the files of a model that ties its output to the embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RepeatedHead {
    /// The output layer must equal the embedding.
    #[default]
    MustBeEqual,
    /// The output layer is ignored.
    IsLeftOut,
}

/// Weights with the names, shapes and dtypes of a model.
pub(crate) struct Checkpoint {
    pub(super) files: TensorFiles,
    /// Linears of the model.
    linears: Vec<LinearInfo>,
    /// FP8 weights of linears, by name.
    float8: BTreeMap<String, StoredWeight>,
    /// FP8 scales and keys that are not used.
    unused: Vec<String>,
}

/// Linears among tensors, by paths of the module tree and shapes of the files.
pub(super) fn linears(tensors: &[(String, Vec<usize>)]) -> Vec<LinearInfo> {
    let linear = |(path, shape): &(String, Vec<usize>)| match shape[..] {
        [n, k] => Some(LinearInfo { name: names::linear(path)?.into(), k, n }),
        _ => None,
    };
    tensors.iter().filter_map(linear).collect()
}

impl Checkpoint {
    /// Opens the folder `dir`. Reads headers, both matrices of a tied model if its files have both,
    /// and the quantization config of FP8 weights.
    ///
    /// # Errors
    /// A mixture of experts; files that cannot be read; tensors that are missing, unexpected, or of
    /// another shape or dtype; an output layer that should equal the embedding; FP8 weights without
    /// matching scales.
    pub(crate) fn open<C: ModelConfig>(dir: &Path, config: &C, head: RepeatedHead) -> Result<Self> {
        let tensors = config.hf_tensors(dir)?;
        let files = TensorFiles::open_folder(dir)?;
        let is_float8 = |name: &str| files.get(name).is_some_and(|stored| stored.dtype() == Dtype::F8_E4M3);
        let linears = linears(&tensors);
        // The quantization config of other weights does not matter, since the files hold their values.
        let quantization = match linears.iter().any(|linear| is_float8(&names::weight_name(&linear.name))) {
            true => json::quantization(dir)?,
            false => None,
        };
        let mut float8 = BTreeMap::new();
        for (path, shape) in &tensors {
            let stored = files.expect(&names::hf_name(path), shape)?;
            match (stored.dtype(), &shape[..]) {
                (Dtype::F32 | Dtype::F16 | Dtype::BF16, _) => {}
                (Dtype::F8_E4M3, &[out, d_in]) if names::is_linear(path) => {
                    let weight = StoredWeight::new(&files, stored, [out, d_in], quantization.as_ref())?;
                    float8.insert(stored.name().to_string(), weight);
                }
                _ => return Err(other_dtype(stored)),
            }
        }
        let scales = files.names().filter(|name| names::is_unused_scale(name)).map(String::from);
        let unused: Vec<_> = quantization.and_then(|config| config.unused).into_iter().chain(scales).collect();
        let mut known: HashSet<String> = tensors.iter().map(|(path, _)| names::hf_name(path)).collect();
        known.extend(unused.iter().cloned().chain(float8.values().flat_map(StoredWeight::scales).map(String::from)));
        let (size, head_name) = (config.size(), names::hf_name("lm_head.weight"));
        let is_repeated = size.tie_word_embeddings && files.get(&head_name).is_some();
        let is_known = |name: &str| known.contains(name) || is_repeated && name == head_name || names::is_ignored(name);
        let others: Vec<_> = files.names().filter(|name| !is_known(name)).collect();
        if !others.is_empty() {
            let holders: HashSet<_> = others.iter().filter_map(|name| files.get(name)).map(|it| it.path()).collect();
            let one = holders.iter().next().filter(|_| holders.len() == 1);
            return Err(unexpected(one.copied().unwrap_or(files.path()), &others));
        }
        if is_repeated && head == RepeatedHead::MustBeEqual && !is_embedding(&files, &head_name, &size)? {
            bail!(
                "{}: config.json says tie_word_embeddings = true, but lm_head.weight differs from model.embed_tokens.weight: set \
                 model.overrides.tie_word_embeddings to false to take lm_head.weight, or to true to leave it out",
                dir.display()
            );
        }
        Ok(Self { files, linears, float8, unused })
    }

    /// Warning about FP8 scales and keys of the folder that are not used, if there are any.
    pub(crate) fn unused(&self) -> Option<String> {
        let (first, count) = (self.unused.first()?, self.unused.len());
        let more = if count > 1 { format!(" and {} more of its kind are", count - 1) } else { " is".into() };
        Some(format!(
            "{}: {first}{more} not used: keys, values and inputs are cast by scales of their own",
            self.files.path().display()
        ))
    }

    /// FP8 weight of a linear, if it is in FP8.
    pub(super) fn stored(&self, linear: &str) -> Option<&StoredWeight> {
        self.float8.get(&names::weight_name(linear))
    }

    /// Scheme of a linear's weight, if it is in FP8.
    pub(super) fn scheme(&self, linear: &str) -> Option<Scheme> {
        self.stored(linear).map(|weight| weight.scheme)
    }

    /// Recipe of the FP8 weights. `None` if no weight is in FP8, or if they have different recipes.
    pub(crate) fn recipe(&self) -> Option<Recipe> {
        let mut recipes = self.float8.values().map(|weight| weight.scheme.recipe());
        let first = recipes.next()?;
        recipes.all(|recipe| recipe == first).then_some(first)
    }

    /// First weight whose inputs are not cast as in [`recipe`](Self::recipe), with its scheme.
    pub(crate) fn other_inputs(&self) -> Option<(&str, Scheme)> {
        let is_other = |scheme: Scheme| !scheme.has_static_inputs() && !scheme.has_usual_inputs();
        self.float8.iter().map(|(name, weight)| (name.as_str(), weight.scheme)).find(|(_, scheme)| is_other(*scheme))
    }

    /// Names of the linears with FP8 weights, and of the ones to requantize. `float8` casts the
    /// latter with another granularity or format than the files have, so their codes cannot be kept.
    ///
    /// # Errors
    /// A configuration that does not fit the model.
    pub(crate) fn cast_anew(&self, float8: &Float8Config) -> Result<[Vec<&str>; 2]> {
        let (mut found, mut anew) = (vec![], vec![]);
        for (linear, policy) in self.linears.iter().zip(float8.resolve(&self.linears)?) {
            let Some(scheme) = self.scheme(&linear.name) else { continue };
            if policy.weight_cast().is_some_and(|cast| !scheme.is_cast_by(cast)) {
                anew.push(linear.name.as_str());
            }
            found.push(linear.name.as_str());
        }
        Ok([found, anew])
    }

    /// Input scales of linears in the files, by the linears' paths.
    ///
    /// # Errors
    /// An invalid scale; a file that cannot be read.
    pub(crate) fn input_scales(&self) -> Result<Vec<(String, f32)>> {
        let scale = |LinearInfo { name, .. }: &LinearInfo| {
            let scale = self.stored(name)?.input_scale(&self.files).transpose()?;
            Some(scale.map(|scale| (name.clone(), scale)))
        };
        self.linears.iter().filter_map(scale).collect()
    }

    /// Reads the codes of the weight `name` of a linear; `None` if it is not in FP8.
    ///
    /// # Errors
    /// Invalid codes or scales; a file that cannot be read.
    pub(super) fn codes(&self, name: &str) -> Result<Option<HostCodes>> {
        self.float8.get(name).map(|weight| weight.read(&self.files, name)).transpose()
    }

    /// Reads the weight `name` of a linear, `[out, in]`, in f32.
    ///
    /// # Errors
    /// The errors of [`codes`](Self::codes).
    pub(super) fn linear_f32(&self, name: &str, dims: [usize; 2]) -> Result<Vec<f32>> {
        match self.codes(name)? {
            Some(codes) => Ok(codes.dequantize()),
            None => self.files.expect(name, &dims)?.to_f32(),
        }
    }

    /// Bytes of the tensor `name` and its scales in the files.
    pub(super) fn num_bytes(&self, name: &str) -> u64 {
        let scales = self.float8.get(name).into_iter().flat_map(StoredWeight::scales);
        let all = std::iter::once(name).chain(scales).filter_map(|name| self.files.get(name));
        all.map(|stored| stored.num_bytes()).sum()
    }
}

/// Whether the output layer equals the embedding bit for bit, both widened to f32.
fn is_embedding(files: &TensorFiles, head: &str, size: &ModelSize) -> Result<bool> {
    let shape = [size.vocab_size, size.hidden_size];
    let [head, embedding] = [head, &names::hf_name("embed_tokens.weight")].map(|name| files.expect(name, &shape));
    let (head, embedding) = (head?, embedding?);
    for first in (0..size.vocab_size).step_by(ROWS) {
        let rows = first..size.vocab_size.min(first + ROWS);
        let [a, b] = [&head, &embedding].map(|tensor| tensor.rows_f32(rows.clone()));
        if !a?.iter().map(|value| value.to_bits()).eq(b?.iter().map(|value| value.to_bits())) {
            return Ok(false);
        }
    }
    Ok(true)
}

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
    pub(crate) fn read<C: ModelConfig>(folder: &Path) -> Result<Option<Self>> {
        if json::quantization(folder)?.is_none() {
            return Ok(None);
        }
        let checkpoint = Checkpoint::open(folder, &super::read_config::<C>(folder)?, RepeatedHead::IsLeftOut)?;
        let (mut recipes, mut high_precision): (Vec<(Recipe, Vec<_>)>, _) = (vec![], vec![]);
        for LinearInfo { name, .. } in &checkpoint.linears {
            let recipe = checkpoint.scheme(name).map(Scheme::recipe);
            let of_recipe = recipes.iter_mut().find(|(known, _)| Some(*known) == recipe);
            match (recipe, of_recipe) {
                (_, Some((_, linears))) => linears.push(name.clone()),
                (Some(recipe), None) => recipes.push((recipe, vec![name.clone()])),
                (None, None) => high_precision.push(name.clone()),
            }
        }
        recipes.sort_by_key(|(_, linears)| Reverse(linears.len()));
        let mut recipes = recipes.into_iter();
        Ok(recipes.next().map(|(recipe, _)| Self { recipe, others: recipes.collect(), high_precision }))
    }
}
