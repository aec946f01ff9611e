//! Interface of a model: [`LanguageModel`] for training steps, [`CausalLm`] and [`ModelConfig`] for
//! a [`Job`](crate::Job), and [`TrainableModel`], which combines a model's module and configuration
//! for every backend.

mod activation_memory;
mod ext;
mod generate;
mod init;

use std::fmt::Debug;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::Result;
use burn::module::{AutodiffModule, Module, ModuleDisplay};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Int, Tensor};
use float8_shard::ParallelPlan;
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

pub use activation_memory::{BatchShape, LayerBytes};
pub use ext::CausalLmExt;
pub(crate) use generate::generate;
pub use generate::{Batching, CacheDtype, CacheOptions, Filters, GenerateOptions, KeyValueCache, Sampling};
pub(crate) use init::initial_values;

use crate::batches::BatchTensors;
use crate::config::require;
use crate::hf::HfReader;

/// Logarithm (base 2) of the maximum number of elements of a tensor: 4 TiB in f32.
pub const MAX_TENSOR_BITS: u32 = 40;

/// Product of positive sizes given by a user; `None` if it exceeds 2^`bits`.
pub fn elements(sizes: impl IntoIterator<Item = usize>, bits: u32) -> Option<u64> {
    let product = sizes.into_iter().try_fold(1_u64, |product, size| product.checked_mul(size as u64))?;
    Some(product).filter(|product| *product <= 1 << bits)
}

/// Forward pass from a batch to its loss as a chain of segments. Each segment reads the output of
/// the previous one.
///
/// ```text
/// batch_loss = Σ loss(segment_n(.. segment_1(first)), rows)     over ranges of rows that make up all
/// ```
pub trait Segments<B: Backend> {
    /// Input of the first segment: `[M, H]`, M the tokens of the batch.
    fn first(&self) -> Tensor<B, 2>;

    /// Number of segments.
    fn len(&self) -> usize;

    /// Whether there are no segments.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Output of segment `index`, counted from 0: `[M, H]` → `[M, H]`.
    fn segment(&self, index: usize, hidden: Tensor<B, 2>) -> Tensor<B, 2>;

    /// Number of rows, M.
    fn rows(&self) -> usize;

    /// Contribution of these rows, whose hidden states are `hidden`, to the loss: `[1]`, f32.
    fn loss(&self, hidden: Tensor<B, 2>, rows: Range<usize>) -> Tensor<B, 1>;
}

/// A model that predicts the next token.
pub trait LanguageModel<B: Backend>: Module<B> + ModuleDisplay {
    /// Mean cross entropy in nats over the counted targets: `[1]`, f32; 0 if none counts.
    fn batch_loss(&self, batch: BatchTensors<B>) -> Tensor<B, 1>;

    /// [`batch_loss`](Self::batch_loss) as a chain of segments, so that not all activations are in
    /// memory at once; `None` if the model does not support it.
    fn segments<'a>(&'a self, _batch: BatchTensors<B>) -> Option<Box<dyn Segments<B> + 'a>> {
        None
    }

    /// Vocabulary size, which is also the number of logits; `None` if unknown.
    fn vocab_size(&self) -> Option<usize> {
        None
    }

    /// Floating-point operations per training token, forward and backward, in sequences of
    /// `seq_len`.
    fn flops_per_token(&self, seq_len: usize) -> f64;

    /// Sets the seed of dropout for training forwards; `None` disables dropout.
    #[must_use]
    fn with_dropout_seed(self, _seed: Option<u64>) -> Self {
        self
    }
}

/// Language model that is built from its configuration and generates text. [`CausalLmExt`] has the
/// methods shared by all.
pub trait CausalLm<B: Backend>: LanguageModel<B> {
    /// Configuration.
    type Config: ModelConfig;
    /// Keys and values of the positions seen so far.
    type Cache: KeyValueCache;

    /// Creates a model whose parameters are initialized on first use by the backend's generator.
    ///
    /// # Errors
    /// An invalid dimension.
    fn new(config: Self::Config, device: &B::Device) -> Result<Self>;

    /// Configuration.
    fn config(&self) -> &Self::Config;

    /// Sets the dtype of hidden states and GEMM results; parameters stay in f32.
    fn with_compute_dtype(self, dtype: DType) -> Self;

    /// Empty cache.
    fn new_cache(&self, options: &CacheOptions) -> Self::Cache;

    /// Logits in f32 of the last position, `[B, V]`, for `tokens` `[B, T]` after the positions in
    /// `cache`, which are appended to it. In a [joined](KeyValueCache::join) cache, each row
    /// continues its own positions.
    fn forward_cached(&self, tokens: Tensor<B, 2, Int>, cache: &mut Self::Cache) -> Tensor<B, 2>;
}

/// Size of a model, known without building it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSize {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of layers; for a model in [segments](Segments), their number.
    pub num_layers: usize,
    /// Maximum number of positions.
    pub max_seq_len: usize,
    /// Whether the output layer is the transposed embedding.
    pub tie_word_embeddings: bool,
    /// Number of parameters; a tied embedding counts once.
    pub num_params: usize,
    /// Number of parameters used per token: fewer than all in a mixture of experts.
    pub num_active_params: usize,
    /// Whether the model is a mixture of experts.
    pub has_experts: bool,
}

/// Dimensions of a model, and their form in Hugging Face's `config.json`.
pub trait ModelConfig: Clone + Debug + PartialEq + Send + Sync + 'static {
    /// Checks every field.
    ///
    /// # Errors
    /// An error that names the first invalid field.
    fn validate(&self) -> Result<()>;

    /// Size of the model.
    fn size(&self) -> ModelSize;

    /// Bytes that each layer keeps of a micro-batch from forward to backward.
    fn layer_bytes(&self, shape: &BatchShape) -> LayerBytes;

    /// Sets the number of positions, for which a model precomputes tables.
    fn with_max_seq_len(self, max_seq_len: usize) -> Self;

    /// Replaces keys of `config.json`, by their names there.
    ///
    /// # Errors
    /// An unknown key, or a value that the model does not support.
    fn with_overrides(&self, overrides: &Map<String, Value>) -> Result<Self>;

    /// Names of linears that stay in high precision by default.
    fn high_precision_linears(&self) -> Vec<&'static str>;

    /// Groups of linears that read the same input and that inference programs fuse, such as
    /// `q_proj`, `k_proj` and `v_proj`. In FP8 files with per-tensor scales, a group shares one
    /// scale. Empty by default.
    fn fused_linears(&self) -> Vec<&'static [&'static str]> {
        vec![]
    }

    /// Plan of tensor parallelism over a number of ranks.
    ///
    /// # Errors
    /// A model without one; a size that the number does not divide.
    fn tensor_plan(&self, ranks: usize) -> Result<ParallelPlan> {
        require("parallelism.tensor", ranks, false, "the model has no plan of tensor parallelism")?;
        Ok(vec![])
    }

    /// Standard deviation of a parameter's initial values, by its path in the module tree and input
    /// size; `None` for norms, which start at 1.
    fn initial_deviation(&self, path: &str, d_input: usize) -> Option<f64> {
        init::deviation(&self.size(), path, d_input)
    }

    /// Parses a `config.json`, without validation.
    ///
    /// # Errors
    /// A key that is missing; an unsupported feature.
    fn from_hf(json: &HfReader<'_>) -> Result<Self>;

    /// Keys of `config.json` that describe the model.
    ///
    /// # Errors
    /// A model that Hugging Face has no name for.
    fn to_hf(&self) -> Result<Vec<(&'static str, Value)>>;

    /// Parameters that a checkpoint in the folder `path` must have, by path in the module tree,
    /// with the shapes of Hugging Face's files: a linear is `[out, in]`.
    ///
    /// # Errors
    /// A model that Hugging Face has no names for.
    fn hf_tensors(&self, path: &Path) -> Result<Vec<(String, Vec<usize>)>>;
}

/// Section `[model]` of a configuration.
pub trait ModelSection:
    Clone + Debug + Default + JsonSchema + PartialEq + Serialize + DeserializeOwned + 'static
{
    /// The configuration that the section describes.
    type Config: ModelConfig;

    /// Section of a Hugging Face checkpoint with these changes.
    fn of_folder(hf_path: PathBuf, overrides: Map<String, Value>) -> Self;

    /// Name of the preset, or of the default one.
    fn preset(&self) -> String;

    /// Folder of a Hugging Face checkpoint to start from.
    fn hf_path(&self) -> Option<&Path>;

    /// Keys of `config.json` to change.
    fn overrides(&self) -> &Map<String, Value>;

    /// Dimensions of the preset, without the changes.
    ///
    /// # Errors
    /// An unknown preset.
    fn preset_config(&self) -> Result<Self::Config>;
}

/// Kind of model for a [`Job`](crate::Job), on any backend.
pub trait TrainableModel: Sized + 'static {
    /// Section `[model]` of the configuration.
    type Section: ModelSection<Config = Self::Config>;
    /// Dimensions.
    type Config: ModelConfig;
    /// Module.
    type Module<B: Backend>: CausalLm<B, Config = Self::Config>;
    /// Module on an autodiff backend.
    type Trained<B: AutodiffBackend>: CausalLm<B, Config = Self::Config>
        + AutodiffModule<B, InnerModule = Self::Module<B::InnerBackend>>;
}
