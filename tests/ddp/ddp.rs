//! burn-train's data-parallel strategy on a Float8 backend. Of Burn's backends only CUDA reduces
//! gradients between devices, so this needs a GPU to run, and the feature `ddp` to compile.
use std::sync::Arc;

use burn::backend::{Autodiff, Cuda};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig};
use burn::tensor::backend::distributed::{DistributedConfig, ReduceOperation};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Tensor};
use burn_float8::{Float8, Float8Config, report};
use burn_train::{
    ExecutionStrategy, InferenceStep, Learner, LearningComponentsMarker, RegressionOutput, SupervisedTraining,
    TrainOutput, TrainStep,
};

type B = Float8<Autodiff<Cuda>>;
type Components = LearningComponentsMarker<B, f64, Net<B>, OptimizerAdaptor<AdamW, Net<B>, B>>;
const D: usize = 64;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    linear: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn regress(&self, x: Tensor<B, 2>) -> RegressionOutput<B> {
        let (y, target) = (self.linear.forward(x.clone()), x.tanh());
        RegressionOutput::new((y.clone() - target.clone()).powf_scalar(2.0).mean(), y, target)
    }
}

impl<B: AutodiffBackend> TrainStep for Net<B> {
    type Input = Tensor<B, 2>;
    type Output = RegressionOutput<B>;

    fn step(&self, x: Tensor<B, 2>) -> TrainOutput<RegressionOutput<B>> {
        let output = self.regress(x);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Net<B> {
    type Input = Tensor<B, 2>;
    type Output = RegressionOutput<B>;

    fn step(&self, x: Tensor<B, 2>) -> RegressionOutput<B> {
        self.regress(x)
    }
}

#[derive(Clone)]
struct Noise;

impl<B: Backend> Batcher<B, u64, Tensor<B, 2>> for Noise {
    fn batch(&self, rows: Vec<u64>, device: &B::Device) -> Tensor<B, 2> {
        Tensor::random([rows.len(), D], Distribution::Default, device)
    }
}

fn loader<B: Backend>() -> Arc<dyn DataLoader<B, Tensor<B, 2>>> {
    DataLoaderBuilder::new(Noise).batch_size(16).build(InMemDataset::new((0..64).collect()))
}

#[test]
fn the_learner_trains_data_parallel() {
    if let Err(error) = device_select::cuda_setup() {
        println!("skipped: {error}");
        return;
    }
    let devices = vec![<B as burn::tensor::backend::BackendTypes>::Device::default()];
    let folder = tempfile::tempdir().unwrap();
    let net = Net { linear: LinearConfig::new(D, D).init(&devices[0]) };
    let net = Float8Config::tensorwise().with_strict(true).apply(net).unwrap().0;
    let strategy = ExecutionStrategy::ddp(devices, DistributedConfig { all_reduce_op: ReduceOperation::Mean });
    let result = SupervisedTraining::<Components>::new(folder.path(), loader(), loader())
        .with_training_strategy(strategy.into())
        .num_epochs(2)
        .launch(Learner::new(net, AdamWConfig::new().init(), 1e-2));
    report(&result.model).verify().unwrap();
}
