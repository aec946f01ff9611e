//! Training of mixtures of experts in FP8: close to f32, routers in high precision.

use crate::common::*;

const MOE: &str = "model.preset=llama3-debug-moe";

#[test]
fn a_mixture_trains_in_fp8_as_in_f32() {
    let folder = text();
    let validation_loss = |setting: &str| {
        let settings = [MOE, "training.steps=60", "optimizer.lr=1e-2", "generate.max_new_tokens=0", setting];
        let (outcome, _) = run(&run_config(folder.path(), &settings)).unwrap();
        for layer in &outcome.report.layers {
            assert_eq!(
                layer.is_float8,
                !(layer.name == "lm_head" || layer.name.ends_with(".moe.router")),
                "{}",
                layer.name
            );
        }
        let validation_loss = outcome.validation_loss.unwrap();
        assert!(outcome.steps[0].loss > 5.0 && validation_loss < 2.0, "{setting}: {validation_loss}");
        validation_loss
    };
    let f32 = validation_loss("training.precision=f32");
    for recipe in ["tensorwise", "mxfp8"] {
        let fp8 = validation_loss(&format!("float8.recipe={recipe}"));
        assert!((fp8 / f32 - 1.0).abs() < 0.08 && fp8 != f32, "{recipe}: {fp8} {f32}");
    }
}
