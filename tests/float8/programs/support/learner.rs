//! A regression for burn-train's learner, and a renderer that collects losses.
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
use burn_train::metric::{LossMetric, MetricDefinition};
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

/// Loss of each training batch and of each validation batch.
pub type History = [Vec<f64>; 2];

/// Renderer that only collects losses.
#[derive(Clone, Default)]
struct Collect(Arc<Mutex<History>>);

impl Collect {
    fn add(&self, kind: usize, state: MetricState) {
        if let MetricState::Numeric(_, loss) = state {
            self.0.lock().unwrap()[kind].push(loss.current());
        }
    }
}

impl MetricsRendererTraining for Collect {
    fn update_train(&mut self, state: MetricState) {
        self.add(0, state);
    }
    fn update_valid(&mut self, state: MetricState) {
        self.add(1, state);
    }
    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for Collect {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Collect {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

/// Components of a run in burn-train.
pub type Components<M> = LearningComponentsMarker<B, f64, M, OptimizerAdaptor<AdamW, M, B>>;

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
    let losses = Collect::default();
    let training = SupervisedTraining::<Components<M>>::new(folder, loader(0..12, 3), loader(12..16, 2))
        .renderer(losses.clone())
        // The default would install a logger for the whole process.
        .with_application_logger(None)
        .with_file_checkpointer(NamedMpkFileRecorder::<FullPrecisionSettings>::new())
        .metric_train_numeric(LossMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .num_epochs(epochs);
    let result = setup(training).launch(Learner::new(model, AdamWConfig::new().init(), rate));
    let history = losses.0.lock().unwrap().clone();
    (history, result.model)
}
