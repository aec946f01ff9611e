//! Weight decay: matrices, and norms and embeddings only on request.

use crate::common::*;

#[test]
fn norms_and_embeddings_do_not_decay_unless_that_is_asked_for() {
    let data = text();
    let after_a_step = |settings: &[&str]| {
        let common = ["training.precision=f32", "training.batch_size=2", "optimizer.warmup_steps=0"];
        let config = run_config(data.path(), &[&common, settings].concat());
        named_values(&*advance(steps(&config, &open(&config), |model| model), 1).0.model)
    };
    let none = after_a_step(&["optimizer.weight_decay=0"]);
    let matrices = after_a_step(&["optimizer.weight_decay=0.5"]);
    let all = after_a_step(&["optimizer.weight_decay=0.5", "optimizer.weight_decay_all=true"]);
    for ((none, matrices), all) in none.into_iter().zip(matrices).zip(all) {
        let decays = none.0.contains("_proj.") || none.0.starts_with("lm_head");
        assert_eq!((matrices != none, matrices == all), (decays, decays), "{}", none.0);
        assert!(all != none, "{}", none.0);
    }
}
