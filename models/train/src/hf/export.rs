//! Export: a model into a folder that transformers loads, read from the device tensor by tensor.

use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use clap::ValueEnum;
use safetensors::Dtype;

use super::{files, json, names};
use crate::model::ModelConfig;
use crate::tensor_files::{NewTensor, bf16_bytes, f32_bytes, write_shards};
use crate::{JobError, ModulePath, TrainError, create_folder};

/// What is exported, and with what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Dtype of every tensor in the files.
    pub dtype: ExportDtype,
    /// Bytes of tensors in one file; more are split over several.
    pub max_shard_bytes: u64,
    /// A folder whose tokenizer files and `generation_config.json` are copied, and whose `config.json` keeps the keys that
    /// say nothing of the model's dimensions or dtype: the checkpoint that training began with, or what
    /// [`copy_assets`](super::copy_assets) kept of it.
    pub source: Option<PathBuf>,
    /// The tokens at which generation ends, for `eos_token_id` of `generation_config.json`; if there are none, that is as in the source.
    pub stop: Vec<u32>,
}

impl Default for ExportOptions {
    /// f32, as parameters are; 5 GB, as in transformers; no source.
    fn default() -> Self {
        Self { dtype: ExportDtype::F32, max_shard_bytes: 5_000_000_000, source: None, stop: vec![] }
    }
}

/// Dtype of exported weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportDtype {
    /// What parameters have, exactly, also where they are kept in bf16.
    F32,
    /// Parameters rounded to nearest, ties to even.
    Bf16,
}

impl ExportDtype {
    /// As PyTorch calls it.
    fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }

    fn stored(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
        }
    }

    fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => f32_bytes(values),
            Self::Bf16 => bf16_bytes(values),
        }
    }
}

/// Writes a model of this configuration, as [`CausalLmExt::save_hf`](crate::CausalLmExt::save_hf) says.
///
/// # Errors
/// The errors of [`CausalLmExt::save_hf`](crate::CausalLmExt::save_hf).
pub(crate) fn save<B: Backend, M: Module<B>, C: ModelConfig>(
    model: &M,
    config: &C,
    folder: &Path,
    options: &ExportOptions,
) -> Result<(), JobError> {
    let ExportOptions { dtype, max_shard_bytes, ref source, ref stop } = *options;
    let config = json::to_json(config, dtype.torch_name(), source.as_deref())?;
    create_folder(folder, |folder| {
        let path = folder.join(files::CONFIG);
        fs::write(&path, config).map_err(|source| JobError::Write { path, source })?;
        if let Some(source) = source {
            files::copy_others(source, folder)?;
        }
        if !stop.is_empty() {
            let path = folder.join(files::GENERATION);
            let json = json::generation_json(&path, stop)?;
            fs::write(&path, json).map_err(|source| JobError::Write { path, source })?;
        }
        let mut collect = Collect { dtype, path: ModulePath::default(), tensors: Vec::new() };
        model.visit(&mut collect);
        write_shards(folder, &collect.tensors, max_shard_bytes)
    })
}

/// The parameters in the order of the module tree, to be read one by one.
struct Collect {
    dtype: ExportDtype,
    path: ModulePath,
    tensors: Vec<NewTensor<'static, JobError>>,
}

impl<B: Backend> ModuleVisitor<B> for Collect {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let path = self.path.dotted();
        let tensor = param.val();
        let tensor = if names::is_linear(&path) { tensor.transpose() } else { tensor };
        let dtype = self.dtype;
        self.tensors.push(NewTensor {
            name: names::hf_name(&path),
            dtype: dtype.stored(),
            shape: tensor.dims().to_vec(),
            bytes: Box::new(move || {
                let failed = |reason| JobError::from(TrainError::Execution { doing: "reading the weights", reason });
                let data = tensor.clone().try_into_data().map_err(|error| failed(error.to_string()))?.convert::<f32>();
                data.as_slice().map(|values| dtype.encode(values)).map_err(|error| failed(format!("{error:?}")))
            }),
        });
    }
}
