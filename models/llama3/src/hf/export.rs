//! Export: a [`Llama`] into a folder that transformers loads, read from the device tensor by tensor.

use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use clap::ValueEnum;
use safetensors::Dtype;
use train::tensor_files::{NewTensor, bf16_bytes, f32_bytes, write_shards};
use train::{ModulePath, TrainError, create_folder, write_synced};

use super::{config, files};
use crate::Error;
use crate::model::Llama;
use crate::names;

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
    /// The parameters' own.
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

impl<B: Backend> Llama<B> {
    /// Writes the model to `folder` in Hugging Face's format: `config.json`, `model.safetensors` or shards with an index, and
    /// the files of [`ExportOptions::source`]. A tied output layer is left out. The same model gives the same bytes.
    ///
    /// `folder` must not exist, or be empty; it is there whole or, after an error, as before.
    ///
    /// # Errors
    /// [`Error::MoeExport`]; [`Error::Folder`] for a folder that is not empty or cannot be made; [`Error::Io`],
    /// [`Error::Json`], [`Error::HfUnsupported`] and [`Error::HfMissingKey`] for the source; [`Error::TensorFiles`] and
    /// [`Error::Write`] for files that cannot be written; [`TrainError::Execution`] if the device fails.
    pub fn save_hf(&self, folder: impl AsRef<Path>, options: &ExportOptions) -> Result<(), Error> {
        if let Some(moe) = self.config().moe {
            return Err(Error::MoeExport { num_experts: moe.num_experts });
        }
        let ExportOptions { dtype, max_shard_bytes, ref source, ref stop } = *options;
        let config = config::to_json(self.config(), dtype.torch_name(), source.as_deref())?;
        create_folder(folder.as_ref(), |folder| {
            let path = folder.join(files::CONFIG);
            write_synced(&path, config.as_bytes()).map_err(|source| Error::Write { path, source })?;
            if let Some(source) = source {
                files::copy_others(source, folder)?;
            }
            if !stop.is_empty() {
                let path = folder.join(files::GENERATION);
                let json = config::generation_json(&path, stop)?;
                write_synced(&path, json.as_bytes()).map_err(|source| Error::Write { path, source })?;
            }
            let mut collect = Collect { dtype, path: ModulePath::default(), tensors: Vec::new() };
            self.visit(&mut collect);
            write_shards(folder, &collect.tensors, max_shard_bytes)
        })
    }
}

/// The parameters in the order of the module tree, to be read one by one.
struct Collect {
    dtype: ExportDtype,
    path: ModulePath,
    tensors: Vec<NewTensor<'static, Error>>,
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
                let failed = |reason| Error::from(TrainError::Execution { doing: "reading the weights", reason });
                let data = tensor.clone().try_into_data().map_err(|error| failed(error.to_string()))?.convert::<f32>();
                data.as_slice().map(|values| dtype.encode(values)).map_err(|error| failed(format!("{error:?}")))
            }),
        });
    }
}
