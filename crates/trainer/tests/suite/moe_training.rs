//! Training of mixtures of experts: FP8 as configured, close to f32.

use crate::common::*;

const MOE: &str = "model.preset=llama3-debug-moe";

/// Short run of the preset on the text in `data`.
fn debug_moe(data: &Path, settings: &[&str]) -> RunConfig {
    let preset =
        ["model.preset=llama3-debug-moe", "training.batch_size=2", "training.seq_len=48", "training.log_every=1"];
    let settings: Vec<_> = preset.iter().chain(settings).map(|s| s.to_string()).collect();
    let mut config = RunConfig::load(None, &settings).unwrap();
    config.data.paths = vec![data.into()];
    config
}

#[test]
fn a_mixture_trains_in_fp8_as_in_f32() {
    let folder = text();
    let held_out_loss = |setting: &str| {
        let settings = [MOE, "training.steps=60", "optimizer.lr=1e-2", "generate.max_new_tokens=0", setting];
        let (outcome, _) = run(&run_config(folder.path(), &settings)).unwrap();
        let held_out_loss = outcome.held_out_loss.unwrap();
        assert!(outcome.steps[0].loss > 5.0 && held_out_loss < 2.0, "{setting}: {held_out_loss}");
        held_out_loss
    };
    let f32 = held_out_loss("training.precision=f32");
    for recipe in ["tensorwise", "mxfp8"] {
        let fp8 = held_out_loss(&format!("float8.recipe={recipe}"));
        assert!((fp8 / f32 - 1.0).abs() < 0.08 && fp8 != f32, "{recipe}: {fp8} {f32}");
    }
}

#[test]
fn experts_run_in_fp8_and_routers_where_the_filter_leaves_them() {
    const STEPS: u64 = 4;
    let folder = text();
    let short = ["training.steps=4", "training.eval_batches=2", "generate.max_new_tokens=3", "float8.strict=true"];
    let unfiltered = [(Recipe::Mxfp8, Some("float8.filter_fqns=[]"))];
    for (recipe, filter) in Recipe::ALL.map(|recipe| (recipe, None)).into_iter().chain(unfiltered) {
        let recipe_setting = format!("float8.recipe={recipe}");
        let settings = short.into_iter().chain([recipe_setting.as_str()]).chain(filter);
        let (outcome, log) = run(&debug_moe(folder.path(), &settings.collect::<Vec<_>>())).unwrap();
        // Four linears of attention, the router and three of the experts in each layer; the output
        // layer.
        let converted = if filter.is_some() { 33 } else { 28 };
        assert!(log.contains(&format!("recipe={recipe}, {converted} of 33 linears")), "{log}");
        assert!(log.contains("model: llama3-debug-moe  parameters: "), "{log}");
        let mut experts = 0;
        for layer in &outcome.report.layers {
            let is_float8 = filter.is_some() || !(layer.name == "lm_head" || layer.name.ends_with(".moe.router"));
            assert_eq!(layer.is_float8, is_float8, "{}", layer.name);
            let wgrad_disabled = recipe.casts()[Operand::INPUT_T].is_disabled();
            for (gemm, calls) in layer.gemms() {
                let in_fp8 = is_float8 && !(gemm == Gemm::Wgrad && wgrad_disabled);
                let expected = if in_fp8 { (STEPS, 0) } else { (0, STEPS) };
                assert_eq!(
                    (calls.emulated + calls.native, calls.high_precision),
                    expected,
                    "{recipe} {} {gemm}",
                    layer.name
                );
            }
            experts += u32::from(layer.name.contains(".moe.experts."));
        }
        assert_eq!(experts, 4 * 3);
    }
}
