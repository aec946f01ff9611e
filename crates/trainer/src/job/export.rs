//! Exports a trained run or a Hugging Face checkpoint to a folder that other programs load.

use std::io::Write;
use std::path::Path;

use anyhow::Result;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::Float8Stack;
use device_select::SelectedDevice;

use super::build_model::adapt;
use super::device_memory::check_parameters;
use super::{Job, Weights, log_header};
use crate::ProgressLine;
use crate::config::require;
use crate::hf::{Checkpoint, ExportDtype, ExportOptions, Float8Export, share_left};
use crate::model::{CausalLmExt, ModelConfig, ModelSection, TrainableModel};

impl<A: TrainableModel> Job<A> {
    /// Writes the model. A run with adapters writes only these, unless they are merged.
    pub(super) fn export<B: AutodiffBackend + Float8Stack>(
        &self,
        to: &Path,
        options: &ExportOptions,
        merge: bool,
        selected: &SelectedDevice,
        device: &B::Device,
        out: &mut dyn Write,
    ) -> Result<()> {
        let (config, dims) = (&self.config, self.config.dimensions()?);
        let (has_adapters, is_float8) = (config.lora.is_some(), options.dtype == ExportDtype::Fp8);
        require("--merge-adapters", merge, !merge || has_adapters, "the run has no adapters")?;
        let reason =
            "adapters are written as they are, in f32: --merge-adapters adds them to the weights, which may be in FP8";
        require("--format", "fp8", !is_float8 || merge || !has_adapters, reason)?;
        check_parameters(4 * dims.size().num_params as u64, selected)?;
        let options = ExportOptions { stop: self.stop_tokens()?, ..options.clone() };
        let (float8, saved, hf_path) = (config.float8(&dims), self.saved(), config.model.hf_path());
        // Untrained weights keep their FP8 codes; merged weights are requantized.
        let checkpoint = match (is_float8 && !merge, saved, hf_path) {
            (true, None, Some(path)) => Some(Checkpoint::open(path, &dims, config.repeated_head())?),
            _ => None,
        };
        let float8 = Float8Export::new(&float8);
        let mut state = saved.map(|saved| saved.float8_of_model(has_adapters));
        if merge {
            // Weight histories belong to the base: merged weights can be larger and would saturate.
            let layers = state.iter_mut().flat_map(|state| state.layers.values_mut());
            layers.for_each(|layer| layer.weight = None);
        }
        let float8 = state.as_ref().map_or(float8, |state| float8.with_state(state));
        let float8 = checkpoint.as_ref().map_or(float8, |checkpoint| float8.with_checkpoint(checkpoint));
        if is_float8 {
            // Reports problems before the weights are read.
            writeln!(out, "{}", float8.summary(&dims)?)?;
        }
        let progress = ProgressLine::new();
        let weights = Weights::open(config, saved, dims.clone())?;
        weights.checkpoint().and_then(Checkpoint::unused).map_or(Ok(()), |note| writeln!(out, "{note}"))?;
        let model = weights.load::<B, A::Trained<B>>(device, &progress, out)?;
        let (model, adapters) = match &config.lora {
            None => (model, None),
            Some(lora) => match adapt::<B, _>(lora, model, config.training.seed, saved)? {
                adapted if merge => (adapted.merged(), Some(adapted.lora)),
                adapted => {
                    adapted.save_peft(hf_path, to)?;
                    return Ok(writeln!(out, "exported: {}", to.display())?);
                }
            },
        };
        match is_float8 {
            true => model.save_hf_float8(to, &options, &float8)?,
            false => model.save_hf(to, &options)?,
        }
        if let Some(lora) = adapters
            && let Some(left) = share_left(&lora, &model, &dims, to)?
        {
            log_header::merged(left, out)?;
        }
        Ok(writeln!(out, "exported: {}", to.display())?)
    }

    /// Tokens at which a chat template ends an assistant's turn, if they differ from the
    /// tokenizer's.
    fn stop_tokens(&self) -> Result<Vec<u32>> {
        if self.config.chat_template()?.is_none() {
            return Ok(vec![]);
        }
        let text = self.config.text()?;
        let stop = text.stop();
        Ok(if stop == text.tokenizer.stop() { vec![] } else { stop })
    }
}
