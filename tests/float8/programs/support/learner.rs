//! A regression for burn-train's learner, and a renderer that collects losses.
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig};
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
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
use super::{B, F8, mean_square, tensor, with_parameters};

/// Rows of x and of the target.
#[derive(Clone, Debug)]
pub struct Batch<B: Backend> {
    x: Tensor<B, 2>,
    target: Tensor<B, 2>,
}

/// Generates rows from their numbers, with magnitudes that differ between batches.
struct Rows;

impl<B: Backend> Batcher<B, u64, Batch<B>> for Rows {
    fn batch(&self, rows: Vec<u64>, _: &B::Device) -> Batch<B> {
        let matrix = |width: usize, seed: u64| {
            let row = |row: &u64| tensor::<B, 2>([1, width], seed + row) * (1.0 + (row % 5) as f32);
            Tensor::cat(rows.iter().map(row).collect(), 0)
        };
        Batch { x: matrix(D, 1000), target: matrix(4, 2000).tanh() }
    }
}

/// Loader of a range of rows, in batches and in order.
fn loader<B: Backend>(rows: std::ops::Range<u64>, batch_size: usize) -> Arc<dyn DataLoader<B, Batch<B>>> {
    DataLoaderBuilder::new(Rows).batch_size(batch_size).build(InMemDataset::new(rows.collect()))
}

/// Model with its FP8 state.
#[derive(Module, Debug)]
pub struct Trainable<B: Backend> {
    pub float8: Float8StateModule<B>,
    pub net: Mlp<B>,
}

impl<A: AutodiffBackend> TrainStep for Trainable<A> {
    type Input = Batch<A>;
    type Output = RegressionOutput<A>;

    fn step(&self, batch: Batch<A>) -> TrainOutput<RegressionOutput<A>> {
        let output = regress(&self.net, batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<A: Backend> InferenceStep for Trainable<A> {
    type Input = Batch<A>;
    type Output = RegressionOutput<A>;

    fn step(&self, batch: Batch<A>) -> RegressionOutput<A> {
        regress(&self.net, batch)
    }
}

fn regress<A: Backend>(net: &Mlp<A>, Batch { x, target }: Batch<A>) -> RegressionOutput<A> {
    let y = net.forward(x);
    RegressionOutput::new(mean_square(y.clone() - target.clone()), y, target)
}

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

/// A run of burn-train's learner.
pub type Training = SupervisedTraining<LearningComponentsMarker<B, f64, Model, OptimizerAdaptor<AdamW, Model, B>>>;

type Model = Trainable<B>;

/// Trains on 12 rows and validates on 4 with burn-train; `setup` may change the run.
pub fn fit(
    model: Model,
    folder: &Path,
    epochs: usize,
    setup: impl FnOnce(Training) -> Training,
) -> (History, Trainable<F8>) {
    let losses = Collect::default();
    let training = Training::new(folder, loader(0..12, 3), loader(12..16, 2))
        .renderer(losses.clone())
        // The default would install a logger for the whole process.
        .with_application_logger(None)
        .with_file_checkpointer(NamedMpkFileRecorder::<FullPrecisionSettings>::new())
        .metric_train_numeric(LossMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .num_epochs(epochs);
    let result = setup(training).launch(Learner::new(model, AdamWConfig::new().init(), 1e-2));
    let history = losses.0.lock().unwrap().clone();
    (history, result.model)
}
