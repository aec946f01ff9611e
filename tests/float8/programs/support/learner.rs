//! A regression for burn-train's learner, and a renderer without output.
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{AutodiffModule, Module};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig};
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData};
use burn_float8::{Float8Config, Float8StateModule};
use burn_train::metric::{Adaptor, Metric, MetricDefinition, MetricMetadata, MetricName, SerializedEntry};
use burn_train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn_train::{
    InferenceStep, Learner, LearningComponentsMarker, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};

use super::models::{D, Mlp};
use super::{B, F8, normal, with_parameters};

/// Rows of x and of the target.
#[derive(Clone, Debug)]
pub struct Batch<B: Backend> {
    x: Tensor<B, 2>,
    target: Tensor<B, 2>,
}

/// Generates rows from their numbers, with magnitudes that differ between batches.
#[derive(Clone)]
struct Rows;

impl<B: Backend> Batcher<B, u64, Batch<B>> for Rows {
    fn batch(&self, rows: Vec<u64>, device: &B::Device) -> Batch<B> {
        let n = rows.len();
        let matrix = |width: usize, seed: u64| {
            let values = rows.iter().flat_map(|row| {
                let scale = 1.0 + (*row % 5) as f32;
                normal(width, seed + row).into_iter().map(move |v| v * scale)
            });
            Tensor::from_data(TensorData::new(values.collect::<Vec<f32>>(), [n, width]), device)
        };
        Batch { x: matrix(D, 1000), target: matrix(4, 2000).tanh() }
    }
}

/// Loader of a range of rows, in batches and in order.
pub fn loader<B: Backend>(rows: std::ops::Range<u64>, batch_size: usize) -> Arc<dyn DataLoader<B, Batch<B>>> {
    DataLoaderBuilder::new(Rows).batch_size(batch_size).build(InMemDataset::new(rows.collect()))
}

/// Implements training for a struct with a field `net: Mlp<B>`.
macro_rules! learnable {
    ($model:ident) => {
        impl<A: AutodiffBackend> TrainStep for $model<A> {
            type Input = Batch<A>;
            type Output = RegressionOutput<A>;

            fn step(&self, batch: Batch<A>) -> TrainOutput<RegressionOutput<A>> {
                let output = regress(&self.net, batch);
                TrainOutput::new(self, output.loss.backward(), output)
            }
        }

        impl<A: Backend> InferenceStep for $model<A> {
            type Input = Batch<A>;
            type Output = RegressionOutput<A>;

            fn step(&self, batch: Batch<A>) -> RegressionOutput<A> {
                regress(&self.net, batch)
            }
        }
    };
}

fn regress<A: Backend>(net: &Mlp<A>, Batch { x, target }: Batch<A>) -> RegressionOutput<A> {
    let y = net.forward(x);
    let loss = (y.clone() - target.clone()).powf_scalar(2.0).mean();
    RegressionOutput::new(loss, y, target)
}

/// Model with its state before it.
#[derive(Module, Debug)]
pub struct Trainable<B: Backend> {
    pub float8: Float8StateModule<B>,
    pub net: Mlp<B>,
}

/// Model with its state after it.
#[derive(Module, Debug)]
pub struct StateLast<B: Backend> {
    pub net: Mlp<B>,
    pub float8: Float8StateModule<B>,
}

learnable!(Trainable);
learnable!(StateLast);

/// Converted model with its state.
pub fn trainable(config: &Float8Config, seed: u64) -> Trainable<B> {
    let net = config.apply(with_parameters(Mlp::new(), seed)).unwrap().0;
    Trainable { float8: Float8StateModule::new(&net).unwrap(), net }
}

/// Records each loss with its epoch.
#[derive(Clone, Default)]
pub struct Losses(pub Arc<Mutex<Vec<(usize, u32)>>>);

/// Bits of a loss.
pub struct LossBits(u32);

impl<A: Backend> Adaptor<LossBits> for RegressionOutput<A> {
    fn adapt(&self) -> LossBits {
        LossBits(super::bits(self.loss.clone())[0])
    }
}

impl Metric for Losses {
    type Input = LossBits;

    fn name(&self) -> MetricName {
        Arc::new("bits".into())
    }

    fn update(&mut self, item: &LossBits, metadata: &MetricMetadata) -> SerializedEntry {
        let epoch = metadata.global_progress.items_processed;
        self.0.lock().unwrap().push((epoch, item.0));
        SerializedEntry::new(item.0.to_string(), item.0.to_string())
    }

    fn clear(&mut self) {}
}

/// Renderer without output.
pub struct Silent;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _: MetricState) {}
    fn update_valid(&mut self, _: MetricState) {}
    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

/// Components of a run in burn-train.
pub type Components<M> = LearningComponentsMarker<B, f64, M, OptimizerAdaptor<AdamW, M, B>>;

/// Losses of each training batch and of each validation batch, with their epochs.
pub type History = [Vec<(usize, u32)>; 2];

/// Trains on 12 rows and validates on 4 with burn-train; `setup` may change the run.
pub fn fit<M>(
    model: M,
    folder: &Path,
    epochs: usize,
    rate: f64,
    setup: impl FnOnce(SupervisedTraining<Components<M>>) -> SupervisedTraining<Components<M>>,
) -> (History, M::InnerModule)
where
    M: TrainStep<Input = Batch<B>, Output = RegressionOutput<B>> + AutodiffModule<B> + core::fmt::Display + 'static,
    M::InnerModule: InferenceStep<Input = Batch<F8>, Output = RegressionOutput<F8>>,
{
    let (train, valid) = (Losses::default(), Losses::default());
    let training = SupervisedTraining::<Components<M>>::new(folder, loader(0..12, 3), loader(12..16, 2))
        .renderer(Silent)
        // The default would install a logger for the whole process.
        .with_application_logger(None)
        .with_file_checkpointer(NamedMpkFileRecorder::<FullPrecisionSettings>::new())
        .metric_train(train.clone())
        .metric_valid(valid.clone())
        .num_epochs(epochs);
    let result = setup(training).launch(Learner::new(model, AdamWConfig::new().init(), rate));
    let history = [train, valid].map(|losses| losses.0.lock().unwrap().clone());
    (history, result.model)
}
