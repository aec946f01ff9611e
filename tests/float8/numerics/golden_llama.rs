//! The Hugging Face checkpoint in hf_llama: logits, loss and gradients in f32 on plain `Flex`.
use burn::backend::Autodiff;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use models::{CausalLmExt, Decoder};
use test_data::Golden;
use trainer::hf::names;

use crate::support::operand::values;
use crate::support::runtime::Flex;
use crate::support::{max_error, relative_error};

fn load<B: Backend>() -> Decoder<B> {
    Decoder::load_hf(Golden::folder().join("hf_llama"), &Default::default()).unwrap_or_else(|e| panic!("{e}"))
}

/// Token ids, `[batch, tokens]`.
fn tokens<B: Backend>(golden: &Golden, name: &str) -> Tensor<B, 2, Int> {
    Tensor::from_data(TensorData::new(golden.ints(name), golden.matrix(name)), &Default::default())
}

/// Inputs and labels. Labels are the inputs, shifted by one.
fn shifted<B: Backend>(ids: Tensor<B, 2, Int>) -> [Tensor<B, 2, Int>; 2] {
    let [batch, len] = ids.dims();
    [ids.clone().slice([0..batch, 0..len - 1]), ids.slice([0..batch, 1..len])]
}

#[test]
fn golden_logits_and_loss() {
    let golden = Golden::open("hf_llama/reference.safetensors");
    let model = load::<Flex>();
    let ids = tokens(&golden, "input_ids");
    let error = max_error(&values(model.forward(ids.clone())), &golden.floats("logits"));
    println!("logits: at most {error:.2e} from transformers'");
    assert!(error < 1e-4, "{error:e}");
    let [inputs, targets] = shifted(ids);
    let loss = values(model.loss(inputs, targets))[0];
    let want = golden.floats("loss")[0];
    assert!((loss - want).abs() < 1e-4 * want, "{loss} {want}");
}

/// Collects the gradients of all parameters by Hugging Face name, linears as `[out, in]`.
struct Gradients<'a, B: AutodiffBackend> {
    path: Vec<String>,
    grads: &'a B::Gradients,
    found: Vec<(String, Vec<f32>)>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Gradients<'_, B> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let path = self.path.join(".");
        if let Some(grad) = param.val().grad(self.grads) {
            let grad = if names::is_linear(&path) { grad.transpose() } else { grad };
            self.found.push((names::hf_name(&path), values(grad)));
        }
    }
}

#[test]
fn golden_gradients() {
    type B = Autodiff<Flex>;
    let golden = Golden::open("hf_llama/reference.safetensors");
    let model = load::<B>();
    let [inputs, targets] = shifted(tokens(&golden, "input_ids"));
    let grads = model.loss(inputs, targets).backward();
    let mut visitor = Gradients::<B> { path: vec![], grads: &grads, found: vec![] };
    model.visit(&mut visitor);
    let mut compared = 0;
    for name in golden.names() {
        let Some(parameter) = name.strip_prefix("grad.") else { continue };
        let found = visitor.found.iter().find(|(n, _)| n == parameter);
        let (_, ours) = found.unwrap_or_else(|| panic!("no gradient of {parameter}"));
        let error = relative_error(ours, &golden.floats(&name));
        println!("{parameter}: {error:.2e}");
        assert!(error < 1e-3, "{parameter}: {error:e}");
        compared += 1;
    }
    assert!(compared > 0, "the file holds no gradients");
}
