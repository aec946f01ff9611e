//! Several linears, models or graphs read the same x: each keeps its recipe, histories and
//! gradients.
use burn::module::{AutodiffModule, Module};
use burn::tensor::Tensor;
use burn_float8::{Float8Config, Float8State, Recipe, StatisticsConfig, without_float8};

use crate::support::models::{D, Mlp};
use crate::support::{B, applied, bits, layer_of, tensor, train, unrelated_backward, with_parameters};

fn x(seed: u64) -> Tensor<B, 2> {
    tensor([6, D], seed)
}

fn loss(y: Tensor<B, 2>) -> Tensor<B, 1> {
    y.powf_scalar(2.0).mean()
}

fn dw(model: &Mlp<B>, grads: &<B as burn::tensor::backend::AutodiffBackend>::Gradients) -> Vec<u32> {
    bits(model.first.weight.grad(grads).expect("tracked"))
}

/// Gradient of a model without other readers of its batch.
fn alone(model: &Mlp<B>) -> Vec<u32> {
    dw(model, &loss(model.forward(x(1))).backward())
}

/// A baseline and the FP8 model on one batch with separate losses; either backward may come first.
#[test]
fn two_models_on_one_batch() {
    let float8: Mlp<B> = applied(&Float8Config::tensorwise(), Mlp::new());
    let others: [Mlp<B>; 2] = [
        applied(&Float8Config::new(Recipe::RowwiseWithGwHp), Mlp::new()),
        without_float8(applied(&Float8Config::tensorwise(), Mlp::new())),
    ];
    for other in others {
        let want = [alone(&float8), alone(&other)];
        assert_ne!(want[0], want[1], "by other recipes");
        for float8_comes_first in [true, false] {
            let x = x(1);
            let (a, b) = (loss(float8.forward(x.clone())), loss(other.forward(x)));
            let got = if float8_comes_first {
                let a = dw(&float8, &a.backward());
                [a, dw(&other, &b.backward())]
            } else {
                let b = dw(&other, &b.backward());
                [dw(&float8, &a.backward()), b]
            };
            assert_eq!(got, want, "{float8_comes_first}");
        }
        // One loss of both.
        let x = x(1);
        let grads = (loss(float8.forward(x.clone())) + loss(other.forward(x))).backward();
        assert_eq!([dw(&float8, &grads), dw(&other, &grads)], want);
    }
}

/// The program keeps a clone of x, made just before the teacher reads it.
#[test]
fn a_teacher_beside_a_residual() {
    let student: Mlp<B> = applied(&Float8Config::tensorwise(), Mlp::new());
    let want = alone(&student);
    let teachers: [Mlp<B>; 2] = [
        applied(&Float8Config::new(Recipe::Rowwise), Mlp::new()).no_grad(),
        without_float8(applied(&Float8Config::tensorwise(), Mlp::new())).no_grad(),
    ];
    for teacher in teachers {
        for student_reads_first in [true, false] {
            let x = x(1);
            let mut y = student_reads_first.then(|| student.forward(x.clone()));
            let kept = x.clone();
            let target = teacher.forward(x.clone()) + kept.slice([0..6, 0..4]);
            let y = y.take().unwrap_or_else(|| student.forward(x));
            assert_eq!(dw(&student, &(loss(y) + target.sum().detach() * 0.0).backward()), want);
        }
    }
}

/// An average of the model, or the model without backward, evaluates the same batch between forward
/// and backward. Another graph's backward, on this thread or another, drops the tensors that the
/// evaluation saved.
#[test]
fn evaluations_on_the_batch_leave_no_trace() {
    const STEPS: u64 = 4;
    type Evaluate = fn(&Mlp<B>, Tensor<B, 2>);
    const ELSEWHERE: [fn(); 3] = [|| (), unrelated_backward, || std::thread::spawn(unrelated_backward).join().unwrap()];
    let evaluations: [Evaluate; 4] = [
        |_, _| (),
        |model, x| drop(with_parameters(model.clone().no_grad(), 9).forward(x)),
        |model, x| drop(with_parameters(model.clone(), 9).forward(x)),
        |model, x| drop(with_parameters(model.valid(), 9).forward(x.inner())),
    ];
    for recipe in [Recipe::Delayed, Recipe::Tensorwise] {
        let runs = evaluations.iter().flat_map(|evaluate| ELSEWHERE.map(|elsewhere| (evaluate, elsewhere)));
        let runs = runs.map(|(evaluate, elsewhere)| {
            let config = Float8Config::new(recipe).with_statistics(StatisticsConfig::every(1));
            let (model, losses) = train(applied(&config, Mlp::<B>::new()), 0..STEPS, |model, step| {
                let x = x(step) * (1.0 + step as f32);
                let y = model.forward(x.clone());
                evaluate(model, x);
                elsewhere();
                loss(y)
            });
            let health = ["first", "second"].map(|name| {
                let layer = layer_of(&model, name);
                [layer.fprop, layer.dgrad, layer.wgrad].map(|gemm| gemm.operands.map(|o| format!("{:?}", o.health)))
            });
            (losses, Float8State::export(&model), health)
        });
        let runs: Vec<_> = runs.collect();
        for (i, run) in runs.iter().enumerate() {
            assert!(*run == runs[0], "{recipe}, run {i}: losses {:?} instead of {:?}", run.0, runs[0].0);
        }
    }
}

/// Two models with delayed scaling use separate histories, also for an x that the other has already
/// cast.
#[test]
fn models_applied_apart_have_histories_apart() {
    const STEPS: u64 = 4;
    let delayed = Float8Config::new(Recipe::Delayed);
    let run = |beside: bool| {
        let teacher = applied(&delayed, Mlp::<B>::new()).no_grad();
        let student = delayed.apply(with_parameters::<B, _>(Mlp::new(), 7)).unwrap().0;
        let (student, losses) = train(student, 0..STEPS, |student, step| {
            let x = x(step) * (1.0 + step as f32);
            if beside {
                teacher.forward(x.clone());
            }
            loss(student.forward(x))
        });
        (losses, Float8State::export(&student))
    };
    let (losses, state) = run(true);
    assert!(state.layers["first"].input.is_some());
    assert_eq!((losses, state), run(false));
}

/// A layer frozen during training adapts its scale to later inputs, with and without a dgrad.
#[test]
fn layers_that_are_frozen_later() {
    let delayed = Float8Config::new(Recipe::Delayed);
    let (mut model, _) = train(applied(&delayed, Mlp::<B>::new()), 0..4, |m, step| loss(m.forward(x(step))));
    model.first = model.first.no_grad();
    let scaled = |step: u64| x(step) * 1000.0;
    for tracked in [true, false] {
        let (after, _) = train(model.clone(), 4..10, |m, step| {
            let x = scaled(step);
            loss(m.forward(if tracked { x.require_grad() } else { x }))
        });
        let input = layer_of(&after, "first").fprop.operands[0].clone();
        let (amax, scale) = (input.amax.unwrap(), input.scale.unwrap());
        assert!(amax > 1000.0 && amax * scale < 2.0 * 448.0, "{tracked}: amax {amax}, scale {scale}");
    }
}
