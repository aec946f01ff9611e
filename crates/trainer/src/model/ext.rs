//! [`CausalLmExt`]: methods of every [`CausalLm`]: initialization, generation, and reading and
//! writing Hugging Face folders.

use std::path::Path;

use anyhow::Result;
use burn::tensor::backend::Backend;

use super::CausalLm;
use super::generate::{GenerateOptions, Sampling, generate};
use super::init::init_weights;
use crate::Progress;
use crate::hf::{self, Checkpoint, ExportOptions, Float8Export, RepeatedHead};

/// Methods of every [`CausalLm`].
pub trait CausalLmExt<B: Backend>: CausalLm<B> {
    /// Replaces every parameter by its initial value under `seed`. Values are drawn on the host
    /// with one stream per parameter name, so a seed gives the same model on every device.
    /// [`ModelConfig::initial_deviation`](super::ModelConfig::initial_deviation) sets the standard
    /// deviation.
    fn init_weights(self, seed: u64) -> Self {
        self.init_weights_with(seed, &mut |_| ())
    }

    /// [`init_weights`](Self::init_weights) with progress reports.
    fn init_weights_with(self, seed: u64, progress: &mut dyn FnMut(Progress)) -> Self {
        init_weights(self, seed, progress)
    }

    /// Continues `prompt` by up to `max_new_tokens` tokens, or until a token in `stop`. Tokens are
    /// chosen from the first `num_choices` of the vocabulary; the rest may be padding. Returns the
    /// new tokens without the stop token.
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
    ) -> Result<Vec<u32>> {
        let options =
            GenerateOptions { stop: stop.to_vec(), sampling, ..GenerateOptions::new(max_new_tokens, num_choices) };
        Ok(self.generate_batch(&[prompt.to_vec()], &options)?.remove(0))
    }

    /// Continues each of `prompts`. Returns the new tokens of each, without stop tokens.
    ///
    /// # Errors
    /// [`ConfigError::Value`](crate::config::ConfigError::Value) for an empty prompt, no choices or
    /// invalid options; a prompt token or choice outside of the vocabulary, a text longer than the
    /// model supports, NaN logits, and a device that fails.
    fn generate_batch(&self, prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<Vec<Vec<u32>>> {
        let mut texts = vec![vec![]; prompts.len()];
        self.generate_each(prompts, options, |prompt, token| {
            texts[prompt].push(token);
            Ok(true)
        })?;
        Ok(texts)
    }

    /// Like [`generate_batch`](Self::generate_batch), but passes each token to `take` when it is
    /// generated, with the index of its prompt. If `take` returns false, the text ends with that
    /// token.
    ///
    /// # Errors
    /// The errors of [`generate_batch`](Self::generate_batch) and of `take`.
    fn generate_each(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        mut take: impl FnMut(usize, u32) -> Result<bool>,
    ) -> Result<()> {
        generate(self, prompts, options, &mut |number, token| token.map_or(Ok(false), |token| take(number, token)))
    }

    /// Loads the model in folder `dir`: `config.json` with `model.safetensors`, or with
    /// `model.safetensors.index.json` and its shards. F32, F16 and BF16 tensors become f32
    /// parameters. So do FP8 linears in the formats of compressed-tensors, vLLM, transformers and
    /// DeepSeek.
    ///
    /// # Errors
    /// The errors of [`hf::read_config`] and [`load_hf_weights`](Self::load_hf_weights).
    fn load_hf(dir: impl AsRef<Path>, device: &B::Device) -> Result<Self> {
        let config = hf::read_config::<Self::Config>(dir.as_ref())?;
        let checkpoint = Checkpoint::open(dir.as_ref(), &config, RepeatedHead::default())?;
        checkpoint.load(Self::new(config, device)?, &mut |_| ())
    }

    /// Replaces every parameter by the checkpoint's in folder `dir`. Of its `config.json` only
    /// `quantization_config` is read, if there are FP8 weights.
    ///
    /// # Errors
    /// A mixture of experts; tensors that are missing, unexpected or have another shape or dtype; an
    /// output layer that should equal the embedding; invalid FP8 weights; a file that cannot be
    /// read; a device that fails.
    fn load_hf_weights(self, dir: impl AsRef<Path>) -> Result<Self> {
        let checkpoint = Checkpoint::open(dir.as_ref(), self.config(), RepeatedHead::default())?;
        checkpoint.load(self, &mut |_| ())
    }

    /// Writes the model to `folder` in Hugging Face's format: `config.json`, `model.safetensors` or
    /// shards with an index, and the files of [`ExportOptions::source`]. A tied output layer is
    /// omitted. The same model gives the same bytes.
    ///
    /// `folder` must not exist, or be empty. It is written completely or, after an error, left as
    /// before.
    ///
    /// # Errors
    /// A mixture of experts; a folder that is not empty or cannot be
    /// created; a source that cannot be read or is of another model; files that cannot be written;
    /// a device that fails.
    fn save_hf(&self, folder: impl AsRef<Path>, options: &ExportOptions) -> Result<()> {
        hf::save(self, self.config(), folder.as_ref(), options, None)
    }

    /// Like [`save_hf`](Self::save_hf), with FP8 linears in the formats of compressed-tensors, vLLM
    /// and, for blocks, transformers. Codes and scales are the weight's cast for fprop. Linears
    /// that readers fuse ([`ModelConfig::fused_linears`](super::ModelConfig::fused_linears)) share
    /// a per-tensor scale.
    ///
    /// # Errors
    /// The errors of [`save_hf`](Self::save_hf); a configuration that does not
    /// fit the model; features that a format or its readers lack; weights that are not finite.
    fn save_hf_float8(
        &self,
        folder: impl AsRef<Path>,
        options: &ExportOptions,
        float8: &Float8Export<'_>,
    ) -> Result<()> {
        hf::save(self, self.config(), folder.as_ref(), options, Some(float8))
    }
}

impl<B: Backend, M: CausalLm<B>> CausalLmExt<B> for M {}
