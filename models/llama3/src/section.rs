//! [`ModelSection`]: section `[model]` of a Llama's configuration, and [`Llama3`], its
//! [`TrainableModel`].

use burn::tensor::backend::{AutodiffBackend, Backend};
use decoder::MoeConfig;
use train::TrainableModel;

use crate::config::{LlamaConfig, RopeScaling};
use crate::model::Llama;

decoder::model_section! {
    LlamaConfig,
    /// Name of a size: `debug` and `debug_moe` (a mixture of experts), which train on a CPU; `1b`
    /// and `3b` of Llama 3.2; `8b`, `70b` and `405b` of Llama 3.1. If absent, `debug`.
    preset,
    /// Frequency scaling of Llama 3.1 and later. If absent, the preset's, which cannot be removed.
    rope_scaling: RopeScaling => rope_scaling,
    /// Mixture of experts that replaces each SwiGLU, with experts `intermediate_size` wide. If
    /// absent, the preset's, which cannot be removed.
    moe: MoeConfig => dims.moe,
}

/// Llama 3, 3.1 and 3.2 as a [`TrainableModel`].
#[derive(Clone, Copy, Debug)]
pub enum Llama3 {}

impl TrainableModel for Llama3 {
    const NAME: &'static str = "llama3";
    const TITLE: &'static str = "Llama 3 in FP8.";
    type Section = ModelSection;
    type Config = LlamaConfig;
    type Module<B: Backend> = Llama<B>;
    type Trained<B: AutodiffBackend> = Llama<B>;
}
