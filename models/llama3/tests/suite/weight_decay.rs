//! Weight decay: matrices, and norms and embeddings only on request.

use std::path::Path;

use crate::common::{advance, open, parameters, run_config, steps, text};

/// Bits of all parameters after one step.
fn after_a_step(data: &Path, settings: &[&str]) -> Vec<u32> {
    let common = ["training.precision=f32", "training.batch_size=2", "optimizer.warmup_steps=0"];
    let config = run_config(data, &[&common, settings].concat());
    parameters(&advance(steps(&config, &open(&config), |model| model), 1).0.model)
}

#[test]
fn norms_and_embeddings_do_not_decay_unless_that_is_asked_for() {
    let data = text();
    let [none, matrices, all] = [
        &["optimizer.weight_decay=0"][..],
        &["optimizer.weight_decay=0.5"],
        &["optimizer.weight_decay=0.5", "optimizer.weight_decay_all=true"],
    ]
    .map(|settings| after_a_step(data.path(), settings));
    // In the order of the module tree: the embedding, two layers (attention's four linears, the
    // MLP's three, two norms), the last norm, the output layer.
    let (h, q, kv, intermediate) = (48, 72, 24, 80);
    let layer = [(h, false), (h * (2 * q + 2 * kv), true), (h, false), (3 * h * intermediate, true)];
    let tree = [&[(288 * h, false)][..], &layer, &layer, &[(h, false), (288 * h, true)]].concat();
    assert_eq!(tree.iter().map(|(elements, _)| elements).sum::<usize>(), none.len());
    let mut at = 0;
    for (elements, decays) in tree {
        let part = |parameters: &[u32]| parameters[at..at + elements].to_vec();
        assert_eq!(part(&matrices) != part(&none), decays, "{elements} parameters from {at} on");
        assert_eq!(part(&matrices) == part(&all), decays, "{elements} parameters from {at} on");
        at += elements;
    }
}
