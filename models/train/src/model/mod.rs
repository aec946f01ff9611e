//! What training asks of a model: [`LanguageModel`] for steps, [`CausalLm`] and [`ModelConfig`] for everything that [`Job`](crate::Job)
//! does, and [`TrainableModel`], which ties a model's module and configuration together for every backend.

mod activations;
mod ext;
mod generate;
mod init;

use std::fmt::Debug;
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::module::{AutodiffModule, Module, ModuleDisplay};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Int, Tensor};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub use activations::{BatchShape, LayerBytes};
pub use ext::CausalLmExt;
pub(crate) use generate::generate;
pub use generate::{Batching, CacheDtype, CacheOptions, Filters, GenerateOptions, KeyValueCache, Sampling};

use crate::JobError;
use crate::batches::BatchTensors;
use crate::hf::HfReader;

/// The logarithm of the elements that a tensor has at most: 4 TiB in f32.
pub const MAX_TENSOR_BITS: u32 = 40;

/// The product of sizes that a user has given, each above 0; none if it is above 2^`bits`.
pub fn elements(sizes: impl IntoIterator<Item = usize>, bits: u32) -> Option<u64> {
    let product = sizes.into_iter().try_fold(1_u64, |product, size| product.checked_mul(size as u64))?;
    Some(product).filter(|product| *product <= 1 << bits)
}

/// A forward pass from a batch to its loss as a chain of segments, each of which reads what the one before it has made.
///
/// ```text
/// batch_loss = Σ loss(segment_n(.. segment_1(first)), rows)     over ranges of rows that make up all
/// ```
pub trait Segments<B: Backend> {
    /// What the first segment reads: `[M, H]`, M the tokens of the batch.
    fn first(&self) -> Tensor<B, 2>;

    /// How many segments there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What a segment, counted from 0, makes of the output of the one before: `[M, H]` → `[M, H]`.
    fn segment(&self, index: usize, hidden: Tensor<B, 2>) -> Tensor<B, 2>;

    /// M.
    fn rows(&self) -> usize;

    /// What these rows, whose hidden states are `hidden`, add to the loss: `[1]`, f32.
    fn loss(&self, hidden: Tensor<B, 2>, rows: Range<usize>) -> Tensor<B, 1>;
}

/// A model that predicts the next token.
pub trait LanguageModel<B: Backend>: Module<B> + ModuleDisplay {
    /// Mean cross entropy in nats of the targets that count, under the predictions of the inputs: `[1]`, f32; 0 if none counts.
    fn batch_loss(&self, batch: BatchTensors<B>) -> Tensor<B, 1>;

    /// [`batch_loss`](Self::batch_loss) as a chain of segments, so that not all of its activations need be in memory at once; none if the model is not one.
    fn segments<'a>(&'a self, _batch: BatchTensors<B>) -> Option<Box<dyn Segments<B> + 'a>> {
        None
    }

    /// Tokens in the vocabulary, of all of which it makes logits; none if it does not say.
    fn vocab_size(&self) -> Option<usize> {
        None
    }

    /// Floating-point operations of one training token, forward and backward, in sequences of `seq_len`.
    fn flops_per_token(&self, seq_len: usize) -> f64;

    /// The model for forwards of training in which what is dropped out follows from a seed, or for those in which nothing is.
    #[must_use]
    fn with_dropout_seed(self, _seed: Option<u64>) -> Self {
        self
    }
}

/// A language model that is built from its configuration, and generates. [`CausalLmExt`] has what every one of them can do.
pub trait CausalLm<B: Backend>: LanguageModel<B> {
    /// Its configuration.
    type Config: ModelConfig;
    /// Keys and values of the positions seen so far.
    type Cache: KeyValueCache;

    /// A model whose parameters are drawn when they are first used, from the backend's generator.
    ///
    /// # Errors
    /// [`JobError::ModelConfig`].
    fn new(config: Self::Config, device: &B::Device) -> Result<Self, JobError>;

    /// Its configuration.
    fn config(&self) -> &Self::Config;

    /// Sets the dtype of hidden states and GEMM results; parameters stay in f32.
    fn with_compute_dtype(self, dtype: DType) -> Self;

    /// A cache without positions.
    fn new_cache(&self, options: &CacheOptions) -> Self::Cache;

    /// Logits in f32 of the last position, `[B, V]`, for `tokens` `[B, T]` that follow the positions in `cache`, which then holds them
    /// too. Where the cache has [joined](KeyValueCache::join) rows, those of each follow its own.
    fn forward_cached(&self, tokens: Tensor<B, 2, Int>, cache: &mut Self::Cache) -> Tensor<B, 2>;
}

/// What is known of a model's size without building it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSize {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Layers: of a model in [segments](Segments), these.
    pub num_layers: usize,
    /// Positions for which it is made.
    pub max_seq_len: usize,
    /// The output layer is the transposed embedding.
    pub tie_word_embeddings: bool,
    /// Parameters; a tied embedding counts once.
    pub num_params: usize,
    /// Parameters that serve a token: fewer than all in a mixture of experts.
    pub num_active_params: usize,
}

/// The dimensions of a model, and their form in Hugging Face's `config.json`.
pub trait ModelConfig: Clone + Debug + PartialEq + Send + Sync + 'static {
    /// Checks every field.
    ///
    /// # Errors
    /// [`JobError::ModelConfig`] naming the first field that cannot be.
    fn validate(&self) -> Result<(), JobError>;

    /// How large the model is.
    fn size(&self) -> ModelSize;

    /// What each layer keeps of a micro-batch from forward to backward; none if the model does not say.
    fn layer_bytes(&self, shape: &BatchShape) -> Option<LayerBytes> {
        let _ = shape;
        None
    }

    /// The same configuration with this many positions, for which a model builds its tables ahead.
    fn with_max_seq_len(self, max_seq_len: usize) -> Self;

    /// The same configuration with the output layer tied to the embedding, or not.
    fn with_tie_word_embeddings(self, tie: bool) -> Self;

    /// Names of the linears that stay in high precision unless the configuration says which do.
    fn high_precision_linears(&self) -> Vec<&'static str>;

    /// Names of linears beside each other that read the same input and that programs which run the model join into one, as `q_proj`,
    /// `k_proj` and `v_proj`: in FP8 files those with one scale per tensor share one. None unless the model says so.
    fn fused_linears(&self) -> Vec<&'static [&'static str]> {
        vec![]
    }

    /// Standard deviation of a parameter's initial values, by its path in the module tree and the size of its input; none for norms,
    /// which begin at 1.
    fn initial_deviation(&self, path: &str, d_input: usize) -> Option<f64> {
        init::deviation(&self.size(), path, d_input)
    }

    /// The configuration that a `config.json` says, not yet validated.
    ///
    /// # Errors
    /// [`JobError::HfMissingKey`], [`JobError::HfUnsupported`] for a feature that the model does not have.
    fn from_hf(json: &HfReader<'_>) -> Result<Self, JobError>;

    /// The keys of `config.json` that say what the model is.
    ///
    /// # Errors
    /// [`JobError::MoeExport`] for a model that Hugging Face has no name for.
    fn to_hf(&self) -> Result<Vec<(&'static str, Value)>, JobError>;

    /// The parameters that a checkpoint in the folder `path` must have, by path in the module tree, in the shapes of Hugging Face's
    /// files, where a linear is `[out, in]`.
    ///
    /// # Errors
    /// [`JobError::MoeCheckpoint`] for a model that Hugging Face has no names for.
    fn hf_tensors(&self, path: &Path) -> Result<Vec<(String, Vec<usize>)>, JobError>;
}

/// The section `[model]` of a configuration.
pub trait ModelSection:
    Clone + Debug + Default + JsonSchema + PartialEq + Serialize + DeserializeOwned + 'static
{
    /// The configuration that the section describes.
    type Config: ModelConfig;

    /// A section with only these two keys.
    fn of_folder(hf_path: Option<PathBuf>, tie_word_embeddings: Option<bool>) -> Self;

    /// The name of a size; the default one where the section gives none.
    fn preset(&self) -> &str;

    /// Folder of a Hugging Face checkpoint to start from.
    fn hf_path(&self) -> Option<&Path>;

    /// Whether the output is tied to the embedding, whatever a checkpoint's `config.json` says.
    fn tie_word_embeddings(&self) -> Option<bool>;

    /// The preset with the section's changes, not yet validated; `hf_path` is not looked at.
    ///
    /// # Errors
    /// [`JobError::UnknownPreset`].
    fn to_config(&self) -> Result<Self::Config, JobError>;
}

/// A kind of model that [`Job`](crate::Job) trains, resumes, evaluates, runs and exports, on any backend.
pub trait TrainableModel: Sized + 'static {
    /// Its name, and that of its program.
    const NAME: &'static str;
    /// The first line of its program's help.
    const TITLE: &'static str;
    /// The section `[model]` of its configuration.
    type Section: ModelSection<Config = Self::Config>;
    /// Its dimensions.
    type Config: ModelConfig;
    /// Its module.
    type Module<B: Backend>: CausalLm<B, Config = Self::Config>;
    /// Its module on a backend that trains.
    type Trained<B: AutodiffBackend>: CausalLm<B, Config = Self::Config>
        + AutodiffModule<B, InnerModule = Self::Module<B::InnerBackend>>;
}
