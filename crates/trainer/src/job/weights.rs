//! [`Weights`]: source of a model's parameters, checked against its dimensions before anything is
//! allocated.

use std::io::Write;

use anyhow::{Result, bail};
use burn::module::AutodiffModule;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive};
use burn_float8::backend::{Cast, HostCodes};
use burn_float8::config::LinearInfo;
use burn_float8::report::LayerState;
use burn_float8::shard_hooks::{Change, NamedParam, configured, map_params, part_alignment, weight_of_codes};
use burn_float8::{Float8Config, Float8Stack, Float8State};
use float8_shard::{Place, Sharded};

use super::config::RunConfig;
use crate::checkpoint::{ASSETS, SavedRun, SavedTensors};
use crate::config::TrainingSection;
use crate::freeze::freeze;
use crate::hf::{Checkpoint, base, names, quantize};
use crate::lora_model::{is_adapter, name_in_base};
use crate::model::{CausalLm, CausalLmExt, ModelConfig, ModelSection, initial_values};
use crate::{Progress, ProgressLine};

/// Files or seed of a model's parameters.
pub struct Weights<'a, C> {
    dims: C,
    source: WeightSource<'a>,
    training: &'a TrainingSection,
    /// Checkpoint of a run with frozen parameters; it contains only the trained ones.
    trained: Option<&'a SavedRun>,
    /// Casts of FP8-only linears; `None` if all weights have values.
    codes: Option<Codes>,
    /// Amax histories of a checkpoint.
    pub(super) histories: Option<&'a Float8State>,
}

/// Casts of FP8-only weights.
struct Codes {
    float8: Float8Config,
    /// Dtype of dequantized values.
    values: DType,
}

enum WeightSource<'a> {
    Saved(&'a SavedRun),
    HuggingFace(Checkpoint),
    Seed(u64),
}

impl<'a, C: ModelConfig> Weights<'a, C> {
    /// Opens the parameters of a checkpoint, or the initial ones of `config`. A resumed run with
    /// frozen parameters needs both. Files of a Hugging Face folder are opened, stay open, and are
    /// checked against `dims`.
    ///
    /// # Errors
    /// The errors of [`CausalLmExt::load_hf_weights`], except for tensors that cannot be read;
    /// Frozen weights that differ from the ones that the run started with, or whose folder is gone.
    pub fn open<S: ModelSection<Config = C>>(
        config: &'a RunConfig<S>,
        saved: Option<&'a SavedRun>,
        dims: C,
    ) -> Result<Self> {
        let training = &config.training;
        if let (Some(run), Some(folder)) = (saved.and_then(|saved| saved.path().parent()), config.frozen_folder()) {
            if !folder.is_dir() {
                bail!(
                    "there is no folder {}, which has the weights that the run keeps frozen: its checkpoints hold only what it trains. \
                     It must be where it was (model.hf_path)",
                    folder.display()
                );
            }
            base::check(folder, &run.join(ASSETS))?;
        }
        // A checkpoint contains only trained parameters; with adapters, none of the model.
        let [trained, saved] = match (&config.lora, !training.freeze.is_empty()) {
            (Some(_), _) => [None, None],
            (None, true) => [saved, None],
            (None, false) => [None, saved],
        };
        let source = match (saved, config.model.hf_path()) {
            (Some(saved), _) => WeightSource::Saved(saved),
            (None, Some(path)) => WeightSource::HuggingFace(Checkpoint::open(path, &dims, config.repeated_head())?),
            (None, None) => WeightSource::Seed(config.training.seed),
        };
        Ok(Self { dims, source, training, trained, codes: None, histories: None })
    }

    /// Makes linears that `float8` casts FP8 only, if they come from a Hugging Face folder. Values
    /// dequantized later have the dtype `values`.
    #[must_use]
    pub(super) fn with_codes(self, float8: &Float8Config, values: DType) -> Self {
        let codes = Codes { float8: float8.clone(), values };
        // Weights scaled by a history are loaded as values, and cast when the histories are
        // restored.
        let has_history =
            |layer: &LayerState| layer.weight.as_ref().is_some_and(|weight| weight.scaling_amax.is_some());
        let are_scaled = self.histories.is_some_and(|histories| histories.layers.values().any(has_history));
        Self { codes: Some(codes).filter(|_| self.trained.is_none() && !are_scaled), ..self }
    }

    /// Hugging Face folder of the parameters, if any.
    pub(super) fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.source {
            WeightSource::HuggingFace(checkpoint) => Some(checkpoint),
            _ => None,
        }
    }

    /// Input scales in a Hugging Face folder, by path of the linear.
    pub(super) fn input_scales(&self) -> Result<Vec<(String, f32)>> {
        match self.checkpoint() {
            Some(checkpoint) => Ok(checkpoint.input_scales()?),
            None => Ok(vec![]),
        }
    }

    /// The model's dimensions.
    pub fn dims(&self) -> &C {
        &self.dims
    }

    /// Loads the model with these parameters.
    ///
    /// # Errors
    /// An invalid dimension, a device that fails, weights that cannot be read, a log that cannot be
    /// written.
    pub fn load<B: AutodiffBackend + Float8Stack, M: CausalLm<B, Config = C> + AutodiffModule<B>>(
        self,
        device: &B::Device,
        progress: &ProgressLine,
        out: &mut dyn Write,
    ) -> Result<M> {
        let model = M::new(self.dims, device)?;
        let model = match self.source {
            WeightSource::Saved(saved) => {
                progress.track("loaded", out, |progress| saved.load_parameters(model, progress))??
            }
            WeightSource::HuggingFace(checkpoint) => {
                progress.track("loaded", out, |progress| match &self.codes {
                    Some(Codes { float8, values }) => checkpoint.load_codes(model, float8, *values, progress),
                    None => checkpoint.load(model, progress),
                })??
            }
            WeightSource::Seed(seed) => {
                progress.track("initialized", out, |progress| model.init_weights_with(seed, progress))?
            }
        };
        let model = freeze(model, self.training)?;
        Ok(match self.trained {
            Some(saved) => saved.load_parameters(model, &mut |_| ())?,
            None => model,
        })
    }

    /// Digests of the tensor files of a Hugging Face folder, as text; empty without one.
    pub(super) fn digests<S: ModelSection<Config = C>>(&self, config: &RunConfig<S>) -> Result<String> {
        match (self.checkpoint(), config.model.hf_path()) {
            (Some(_), Some(folder)) => Ok(format!("{:#?}", base::of_folder(folder)?)),
            _ => Ok(String::new()),
        }
    }

    /// The model without its parameters: each is one zero, expanded to its shape. Matrices have the
    /// dtype `matrices`.
    ///
    /// # Errors
    /// An invalid dimension; names to freeze that match no parameter.
    pub(super) fn outline<B: AutodiffBackend, M: CausalLm<B, Config = C> + AutodiffModule<B>>(
        &self,
        device: &B::Device,
        matrices: DType,
    ) -> Result<M> {
        let model = map_params::<B, M>(M::new(self.dims.clone(), device)?, |param| {
            let rank = param.shape.num_dims();
            let dtype = if rank >= 2 { matrices } else { DType::F32 };
            let zero = B::float_zeros(Shape::from(vec![1; rank]), &param.device, dtype.into());
            Change::Loaded(B::float_expand(zero, param.shape.clone()))
        });
        Ok(freeze(model, self.training)?)
    }

    /// Loads this rank's rows into `model`, an [outline](Self::outline) that is sharded. Besides the
    /// rows, one parameter at a time is in memory. Adapters stay. If `holds_codes`, linears that run in
    /// FP8 become FP8-only.
    ///
    /// # Errors
    /// The errors of [`load`](Self::load).
    pub(super) fn load_shards<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
        self,
        model: M,
        matrices: DType,
        holds_codes: bool,
        progress: &ProgressLine,
        out: &mut dyn Write,
    ) -> Result<M> {
        let mut source = match &self.source {
            WeightSource::Saved(saved) => Values::Saved(saved.parameters()?),
            WeightSource::HuggingFace(checkpoint) => Values::HuggingFace(checkpoint),
            WeightSource::Seed(seed) => Values::Seed(&self.dims, *seed),
        };
        let mut trained = self.trained.map(SavedRun::parameters).transpose()?.map(Values::Saved);
        let mut parameters = Sharded::parameters::<B, _>(&model).into_iter();
        let mut done = Progress { bytes: 0, total_bytes: 4 * self.dims.size().num_params as u64 };
        // A walk cannot stop early. After the first failure it changes nothing.
        let (mut failure, mut fp8_only) = (Ok(()), 0);
        let model = progress.track("loaded", out, |progress| {
            map_params::<B, _>(model, |param| {
                let place = parameters.next().expect("both walks are of the same model");
                let Some(old) = param.float().filter(|_| failure.is_ok() && !is_adapter(&place.name)) else {
                    return Change::None;
                };
                let place = Place { name: name_in_base(&place.name).into(), ..place };
                let source = match &mut trained {
                    Some(trained) if B::float_is_require_grad(&old) => trained,
                    _ => &mut source,
                };
                let layer = B::layer(&old).filter(|_| holds_codes && place.shape.len() == 2);
                let cast = layer.and_then(|layer| configured(&layer).weight_cast());
                match source.load::<B>(&place, param, matrices, cast) {
                    Ok(value) => {
                        done.bytes += 4 * place.shape.iter().product::<usize>() as u64;
                        progress(done);
                        fp8_only += usize::from(B::float8_tensor(&value).is_fp8_only());
                        Change::Loaded(value)
                    }
                    Err(error) => {
                        failure = Err(error);
                        Change::None
                    }
                }
            })
        })?;
        failure?;
        if fp8_only > 0 {
            writeln!(out, "FP8-only weights: {fp8_only} linears, divided over ranks")?;
        }
        [Some(source), trained].into_iter().flatten().try_for_each(|values| match values {
            Values::Saved(saved) => saved.all_read(),
            _ => Ok(()),
        })?;
        Ok(model)
    }
}

/// Checks that this rank's part of FP8-only codes has whole blocks of their scales.
fn check_blocks(place: &Place, codes: &HostCodes) -> Result<()> {
    let ([n, k], [of_cols, of_rows]) = (codes.dims, part_alignment(codes.granularity, codes.dims));
    for (own, block, len) in [(place.rows, of_rows, k), (place.cols, of_cols, n)] {
        let is_inside = |at: usize| at < len && !at.is_multiple_of(block);
        if let Some([begin, end]) = own.filter(|own| own.iter().any(|at| is_inside(*at))) {
            bail!(
                "{}: its codes have blocks of {block}, and {begin}..{end} of {len} on this rank is not whole blocks: \
                 choose another parallelism.shard or parallelism.tensor",
                place.name
            );
        }
    }
    Ok(())
}

/// Parameters that are read one at a time.
enum Values<'a, C> {
    Saved(SavedTensors),
    HuggingFace(&'a Checkpoint),
    /// Dimensions and seed.
    Seed(&'a C, u64),
}

impl<C: ModelConfig> Values<'_, C> {
    /// A parameter, or the whole FP8-only weight of a linear with this cast. Matrices, and decoded codes,
    /// have the dtype `matrices`.
    fn load<B: Float8Stack>(
        &mut self,
        place: &Place,
        param: &NamedParam<'_, B>,
        matrices: DType,
        cast: Option<Cast>,
    ) -> Result<FloatTensor<B>> {
        let linear = match place.shape[..] {
            [k, n] => cast.zip(names::linear(&place.name).map(|name| LinearInfo { name: name.into(), k, n })),
            _ => None,
        };
        let Some((cast, linear)) = linear else { return self.read::<B>(place, param, matrices) };
        let codes = match self {
            Self::HuggingFace(checkpoint) => checkpoint.linear_codes(&linear, cast)?,
            _ => {
                let value = TensorPrimitive::Float(self.read::<B>(place, param, matrices)?);
                let values: Vec<f32> = Tensor::<B, 2>::from_primitive(value).transpose().into_data().iter().collect();
                quantize(&place.name, &values, [linear.n, linear.k], cast, None)?
            }
        };
        check_blocks(place, &codes)?;
        Ok(weight_of_codes::<B>(&linear, codes, matrices, &param.device)?)
    }

    /// A whole parameter, or this rank's rows of a saved one. Matrices have the dtype `matrices`.
    fn read<B: Backend>(
        &mut self,
        place: &Place,
        param: &NamedParam<'_, B>,
        matrices: DType,
    ) -> Result<FloatTensor<B>> {
        let value = self.read_in_its_dtype::<B>(place, param)?;
        let needs_cast = place.shape.len() >= 2 && value.dtype() != matrices;
        Ok(if needs_cast { B::float_cast(value, matrices.into()) } else { value })
    }

    fn read_in_its_dtype<B: Backend>(&mut self, place: &Place, param: &NamedParam<'_, B>) -> Result<FloatTensor<B>> {
        let (name, shape) = (&place.name, Shape::from(place.shape.clone()));
        let (values, shape) = match self {
            Self::HuggingFace(checkpoint) => return checkpoint.tensor::<B>(name, shape, &param.device),
            Self::Seed(dims, seed) => (initial_values(*dims, *seed, name, &shape), shape),
            Self::Saved(saved) => {
                let mut values = saved.values(place)?;
                // Padding of a shard.
                values.resize(param.shape.num_elements(), 0.0);
                (values, param.shape.clone())
            }
        };
        Ok(B::float_from_data(TensorData::new(values, shape), &param.device))
    }
}
