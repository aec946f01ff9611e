//! [`ModelSection`]: section `[model]` of a Qwen3's configuration, and [`Qwen3Model`], its
//! [`TrainableModel`].

use burn::tensor::backend::{AutodiffBackend, Backend};
use train::TrainableModel;

use crate::config::Qwen3Config;
use crate::model::Qwen3;

decoder::model_section! {
    Qwen3Config,
    /// Name of a size: `debug`, which trains on a CPU; `0.6b`, `1.7b`, `4b`, `8b`, `14b` and `32b`.
    /// If absent, `debug`.
    preset,
}

/// Qwen3 as a [`TrainableModel`].
#[derive(Clone, Copy, Debug)]
pub enum Qwen3Model {}

impl TrainableModel for Qwen3Model {
    const NAME: &'static str = "qwen3";
    const TITLE: &'static str = "Qwen3 in FP8.";
    type Section = ModelSection;
    type Config = Qwen3Config;
    type Module<B: Backend> = Qwen3<B>;
    type Trained<B: AutodiffBackend> = Qwen3<B>;
}
