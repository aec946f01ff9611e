//! [`Adapted`]: a frozen model with trained adapters on its linears.

use std::ops::Range;
use std::path::Path;

use anyhow::Result;
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_float8::lora::Lora;
use burn_float8::shard_hooks::visit_params;
use float8_shard::{ParallelPlan, TensorStyle};

use crate::batches::BatchTensors;
use crate::hf::peft;
use crate::model::{LanguageModel, Segments};

/// A frozen model with its adapters, as the model of optimizer steps. Steps change only the
/// adapters, and checkpoints contain only these.
#[derive(Module, Debug)]
pub struct Adapted<B: Backend, M: Module<B>> {
    /// The frozen model.
    base: M,
    /// The adapters.
    pub lora: Lora<B>,
    /// Seed of dropout in a training forward.
    #[module(skip)]
    dropout_seed: Option<u64>,
}

/// Name in the base model of a module of an adapted model.
pub(crate) fn name_in_base(name: &str) -> &str {
    name.strip_prefix("base.").unwrap_or(name)
}

/// Plan of tensor parallelism of an adapted model: its base's, with whole adapters on each rank.
pub(crate) fn tensor_plan<B: Backend, M: Module<B>>(adapted: &M, base: &ParallelPlan) -> ParallelPlan {
    let mut modules = vec![];
    visit_params::<B, M>(adapted, |param| {
        modules.extend(param.name().rsplit_once('.').map(|(name, _)| name.to_string()))
    });
    let of_base = |(name, style): &(String, TensorStyle)| {
        let in_base = format!("base.{name}");
        // A substring matches anywhere, so it needs no prefix.
        let is_whole = name.contains(['*', '?', '[']) || modules.contains(&in_base);
        (if is_whole { in_base } else { name.clone() }, *style)
    };
    base.iter().map(of_base).chain([("lora.*".into(), TensorStyle::Sequence)]).collect()
}

/// Whether a parameter of this name belongs to an adapter.
pub(crate) fn is_adapter(name: &str) -> bool {
    name.starts_with("lora.")
}

impl<B: Backend, M: Module<B>> Adapted<B, M> {
    /// Freezes a model and adds adapters.
    pub fn new(base: M, lora: Lora<B>) -> Self {
        Self { base: base.no_grad(), lora, dropout_seed: None }
    }

    /// Model with the adapters attached to its linears; it runs like any other.
    pub fn attached(&self) -> M {
        self.lora.attach(self.base.clone(), self.dropout_seed)
    }

    /// Writes the adapters to `folder` in PEFT's format for `base`: `adapter_config.json` and
    /// `adapter_model.safetensors`. The folder must not exist, or be empty. It is written
    /// completely or, after an error, left as before.
    ///
    /// # Errors
    /// A folder that is occupied; files that cannot be written; a device that fails.
    pub fn save_peft(&self, base: Option<&Path>, folder: &Path) -> Result<()> {
        peft::save(&self.lora, base, folder)
    }

    /// Model with the adapters merged into its weights.
    pub fn merged(&self) -> M {
        self.lora.merge(self.base.clone())
    }
}

impl<B: Backend, M: LanguageModel<B>> LanguageModel<B> for Adapted<B, M> {
    fn batch_loss(&self, batch: BatchTensors<B>) -> Tensor<B, 1> {
        self.attached().batch_loss(batch)
    }

    fn segments<'a>(&'a self, batch: BatchTensors<B>) -> Option<Box<dyn Segments<B> + 'a>> {
        let model = self.attached();
        model.segments(batch.clone())?;
        Some(Box::new(Owned { model, batch }))
    }

    fn vocab_size(&self) -> Option<usize> {
        self.base.vocab_size()
    }

    /// Excludes the weight gradients of frozen matrices, two operations per element. Includes all
    /// three products of the adapters.
    fn flops_per_token(&self, seq_len: usize) -> f64 {
        let adapters = matrix_elements(&self.lora);
        self.base.flops_per_token(seq_len) - 2.0 * matrix_elements(&self.base) as f64 + 6.0 * adapters as f64
    }

    fn with_dropout_seed(self, seed: Option<u64>) -> Self {
        Self { dropout_seed: seed, ..self }
    }
}

/// Segments that own their model.
struct Owned<B: Backend, M> {
    model: M,
    batch: BatchTensors<B>,
}

impl<B: Backend, M: LanguageModel<B>> Owned<B, M> {
    fn with<T>(&self, f: impl FnOnce(&dyn Segments<B>) -> T) -> T {
        f(&*self.model.segments(self.batch.clone()).expect("it had segments when this was made"))
    }
}

impl<B: Backend, M: LanguageModel<B>> Segments<B> for Owned<B, M> {
    fn first(&self) -> Tensor<B, 2> {
        self.with(|segments| segments.first())
    }

    fn len(&self) -> usize {
        self.with(|segments| segments.len())
    }

    fn segment(&self, index: usize, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        self.with(|segments| segments.segment(index, hidden))
    }

    fn rows(&self) -> usize {
        self.with(|segments| segments.rows())
    }

    fn loss(&self, hidden: Tensor<B, 2>, rows: Range<usize>) -> Tensor<B, 1> {
        self.with(|segments| segments.loss(hidden, rows))
    }
}

/// Elements of the matrices that a module multiplies with. Embeddings do not count.
fn matrix_elements<B: Backend, M: Module<B>>(module: &M) -> usize {
    let mut elements = 0;
    visit_params::<B, _>(module, |param| {
        if param.shape.num_dims() >= 2 && param.module_type() != "Embedding" {
            elements += param.shape.num_elements();
        }
    });
    elements
}
