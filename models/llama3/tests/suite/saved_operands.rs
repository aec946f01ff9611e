//! `training.save_fp8_operands`: the same bits with less kept for backward, on every backend that a model may move to.

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn_float8::{Recipe, report};
use llama3::Llama;

use crate::common::{
    Train, ids, model, open, parameters, run, run_config as config, steps, text, tiny, tokens, values,
};

#[test]
fn losses_and_parameters_are_the_same_bits() {
    let folder = text();
    for recipe in Recipe::ALL {
        let trace = |saving: bool| {
            let settings = [format!("float8.recipe={recipe}"), format!("training.save_fp8_operands={saving}")];
            let config = config(folder.path(), &settings.each_ref().map(String::as_str));
            let data = open(&config);
            let mut run = steps(&config, &data, |model| model);
            let mut losses = vec![];
            for _ in 0..5 {
                let step;
                (run, step) = run.step(&Default::default()).unwrap();
                losses.push(values(step.loss)[0].to_bits());
            }
            (losses, parameters(&run.model))
        };
        let ((losses, parameters), (saved_losses, saved_parameters)) = (trace(false), trace(true));
        assert_eq!(losses, saved_losses, "{recipe}");
        assert!(parameters == saved_parameters, "{recipe}: parameters differ");
    }
}

#[test]
fn whole_runs_come_to_the_same() {
    let folder = text();
    let trace = |settings: [&str; 2]| {
        let steps = ["training.steps=5", "training.log_every=1"];
        let (outcome, _) = run(&config(folder.path(), &[settings, steps].concat())).unwrap();
        let losses: Vec<_> = outcome.steps.iter().map(|line| (line.loss, line.grad_norm)).collect();
        (losses, outcome.held_out_loss, outcome.sample, outcome.gemms)
    };
    for precision in ["training.precision=fp8", "training.precision=f32"] {
        let [saving, plain] = ["training.save_fp8_operands=true", "training.save_fp8_operands=false"];
        assert_eq!(trace([precision, saving]), trace([precision, plain]), "{precision}");
    }
}

/// FP8 copies that live between forward and backward.
fn copies_in_between(model: &Llama<Train>) -> u64 {
    let (inputs, targets) = (tokens([2, 6], 288, 1), tokens([2, 6], 288, 2));
    let _loss = model.loss(ids(&inputs, [2, 6]), ids(&targets, [2, 6]));
    report::<Train, _>(model).layers.iter().map(|layer| layer.live_copies).sum()
}

#[test]
fn backward_keeps_fp8_operands_instead() {
    let folder = text();
    let between = |setting: &str| {
        let config = config(folder.path(), &[setting]);
        let data = open(&config);
        copies_in_between(&steps(&config, &data, |model| model).model)
    };
    let plain = between("training.save_fp8_operands=false");
    let saved = between("training.save_fp8_operands=true");
    // Of each of two layers one x for q, k and v, one for o, one for gate and up, one for down.
    assert!(saved >= plain + 2 * 4 - 2, "{saved} {plain}");
}

#[test]
fn other_backends_run_the_plain_linear() {
    let saving = model::<Train>(tiny(), 1).with_saved_fp8_operands();
    let plain = model::<Train>(tiny(), 1);
    let tokens = tokens([1, 6], 288, 3);
    let logits = |model: &Llama<Train>| values(model.valid().forward(ids(&tokens, [1, 6])));
    assert_eq!(logits(&saving), logits(&plain));
    // The way back finds the function again, and a model that never had a Float8 is none the wiser.
    let back = Llama::<Train>::from_inner(saving.valid());
    assert_eq!(values(back.forward(ids(&tokens, [1, 6]))), values(plain.forward(ids(&tokens, [1, 6]))));
    let other = model::<Autodiff<Flex>>(tiny(), 1);
    assert_eq!(other.forward(ids(&tokens, [1, 6])).dims(), [1, 6, 288]);
}
