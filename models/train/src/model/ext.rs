//! [`CausalLmExt`]: what every [`CausalLm`] can do: be initialized, generate, and be read from and written to Hugging Face folders.

use std::path::Path;

use burn::tensor::backend::Backend;

use super::CausalLm;
use super::generate::{GenerateOptions, Sampling, generate};
use super::init::init_weights;
use crate::hf::{self, Checkpoint, ExportOptions, Float8Export, RepeatedHead};
use crate::{JobError, Progress};

/// What every [`CausalLm`] can do.
pub trait CausalLmExt<B: Backend>: CausalLm<B> {
    /// Replaces every parameter by its initial value under `seed`: drawn on the host, one stream per parameter name, so that a seed
    /// means the same model on every device. [`ModelConfig::initial_deviation`](super::ModelConfig::initial_deviation) says how wide.
    fn init_weights(self, seed: u64) -> Self {
        self.init_weights_with(seed, &mut |_| ())
    }

    /// [`init_weights`](Self::init_weights), which says how far it is.
    fn init_weights_with(self, seed: u64, progress: &mut dyn FnMut(Progress)) -> Self {
        init_weights(self, seed, progress)
    }

    /// Continues `prompt` by `max_new_tokens` tokens out of the first `num_choices` of the vocabulary (the rest may
    /// be padding), or until one of `stop`, and returns the new ones without that.
    ///
    /// # Errors
    /// The errors of [`generate_batch`](Self::generate_batch).
    fn generate(
        &self,
        prompt: &[u32],
        max_new_tokens: usize,
        num_choices: usize,
        stop: &[u32],
        sampling: Sampling,
    ) -> Result<Vec<u32>, JobError> {
        let options =
            GenerateOptions { stop: stop.to_vec(), sampling, ..GenerateOptions::new(max_new_tokens, num_choices) };
        Ok(self.generate_batch(&[prompt.to_vec()], &options)?.remove(0))
    }

    /// Continues each of `prompts`, and returns the new tokens of each, without those that end it.
    ///
    /// # Errors
    /// [`ConfigError::Value`](crate::config::ConfigError::Value) for an empty prompt, no choices and options that cannot be,
    /// [`JobError::Vocabulary`] for a prompt token or a choice that the model does not have, [`JobError::Positions`] for a text longer
    /// than the model is made for, [`JobError::Logits`] for logits that are NaN, [`TrainError::Execution`](crate::TrainError::Execution)
    /// if the device fails.
    fn generate_batch(&self, prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<Vec<Vec<u32>>, JobError> {
        let mut texts = vec![vec![]; prompts.len()];
        self.generate_each(prompts, options, |prompt, token| {
            texts[prompt].push(token);
            Ok(true)
        })?;
        Ok(texts)
    }

    /// As [`generate_batch`](Self::generate_batch), but gives each token to `take` when it is there, with the number of its prompt. A text
    /// of which `take` says false ends with that token.
    ///
    /// # Errors
    /// The errors of [`generate_batch`](Self::generate_batch), and `take`'s.
    fn generate_each(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        mut take: impl FnMut(usize, u32) -> Result<bool, JobError>,
    ) -> Result<(), JobError> {
        generate(self, prompts, options, &mut |number, token| token.map_or(Ok(false), |token| take(number, token)))
    }

    /// Loads the model in folder `dir`: `config.json` with `model.safetensors`, or with
    /// `model.safetensors.index.json` and its shards. F32, F16 and BF16 tensors become f32 parameters, and so do linears in FP8 as
    /// compressed-tensors, vLLM, transformers and DeepSeek write them.
    ///
    /// # Errors
    /// The errors of [`hf::read_config`] and [`load_hf_weights`](Self::load_hf_weights).
    fn load_hf(dir: impl AsRef<Path>, device: &B::Device) -> Result<Self, JobError> {
        let config = hf::read_config::<Self::Config>(dir.as_ref())?;
        let checkpoint = Checkpoint::open(dir.as_ref(), &config, RepeatedHead::default())?;
        checkpoint.load(Self::new(config, device)?, &mut |_| ())
    }

    /// Replaces every parameter by the checkpoint's in folder `dir`, of whose `config.json` only `quantization_config` is read, if there are
    /// weights in FP8.
    ///
    /// # Errors
    /// [`JobError::MoeCheckpoint`], [`JobError::TensorFiles`], [`JobError::TiedHead`], [`JobError::Float8Files`],
    /// [`TrainError::Execution`](crate::TrainError::Execution).
    fn load_hf_weights(self, dir: impl AsRef<Path>) -> Result<Self, JobError> {
        Checkpoint::open(dir.as_ref(), self.config(), RepeatedHead::default())?.load(self, &mut |_| ())
    }

    /// Writes the model to `folder` in Hugging Face's format: `config.json`, `model.safetensors` or shards with an index, and
    /// the files of [`ExportOptions::source`]. A tied output layer is left out. The same model gives the same bytes.
    ///
    /// `folder` must not exist, or be empty; it is there whole or, after an error, as before.
    ///
    /// # Errors
    /// [`JobError::MoeExport`]; [`JobError::Folder`] for a folder that is not empty or cannot be made; [`JobError::Io`],
    /// [`JobError::Json`], [`JobError::HfUnsupported`] and [`JobError::HfMissingKey`] for the source; [`JobError::TensorFiles`] and
    /// [`JobError::Write`] for files that cannot be written; [`TrainError::Execution`](crate::TrainError::Execution) if the device
    /// fails.
    fn save_hf(&self, folder: impl AsRef<Path>, options: &ExportOptions) -> Result<(), JobError> {
        hf::save(self, self.config(), folder.as_ref(), options, None)
    }

    /// As [`save_hf`](Self::save_hf), with the weights of linears in FP8, as compressed-tensors, vLLM and, in blocks, transformers read them.
    /// Codes and scales are those of the weight's cast for fprop; linears that readers run as one
    /// ([`ModelConfig::fused_linears`](super::ModelConfig::fused_linears)) share the scale that a tensor has.
    ///
    /// # Errors
    /// The errors of [`save_hf`](Self::save_hf); [`JobError::Float8`] for a configuration that does not fit the model;
    /// [`JobError::Float8Files`] for what a format does not have or its readers do not take, and for weights that are not finite.
    fn save_hf_float8(
        &self,
        folder: impl AsRef<Path>,
        options: &ExportOptions,
        float8: &Float8Export<'_>,
    ) -> Result<(), JobError> {
        hf::save(self, self.config(), folder.as_ref(), options, Some(float8))
    }
}

impl<B: Backend, M: CausalLm<B>> CausalLmExt<B> for M {}
