//! Every recipe trains the debug preset, in FP8 as configured.

use burn_float8::{Recipe, report::GemmTotals};
use models::RunConfig;

use crate::common::{run, text};

#[test]
fn every_recipe_trains_the_debug_preset() {
    const STEPS: u64 = 8;
    let data = text();
    for recipe in Recipe::ALL {
        let settings = [
            &format!("float8.recipe={recipe}"),
            "float8.strict=true",
            "training.steps=8",
            "training.batch_size=2",
            "training.seq_len=48",
            "training.log_every=1",
            "training.eval_batches=2",
            "optimizer.warmup_steps=2",
            "generate.max_new_tokens=0",
        ];
        let mut config = RunConfig::load(None, &settings.map(str::to_string)).unwrap();
        config.data.paths = vec![data.path().into()];
        let (outcome, log) = run(&config).unwrap();
        let applied =
            format!("Applied Float8: recipe={recipe}, 28 of 29 linears; skipped: lm_head (filter \"lm_head\")");
        assert!(log.contains(&applied), "{log}");
        let losses: Vec<_> = outcome.steps.iter().map(|line| line.loss).collect();
        assert!(losses.iter().all(|loss| loss.is_finite()), "{recipe}: {losses:?}");
        assert!(
            losses[7] < losses[0] - 0.5 && outcome.held_out_loss.unwrap() < losses[0] - 0.5,
            "{recipe}: {losses:?}"
        );

        let wgrad_in_fp8 = !matches!(recipe, Recipe::RowwiseWithGwHp | Recipe::Mxfp8WgradWithHp);
        let mut totals = GemmTotals::default();
        for layer in &outcome.report.layers {
            let is_float8 = layer.name != "lm_head";
            let reason = match (is_float8, wgrad_in_fp8) {
                (false, _) => Some("filter \"lm_head\""),
                (true, false) => Some("disabled by the recipe"),
                (true, true) => None,
            };
            assert_eq!((layer.is_float8, layer.wgrad.reason.as_deref()), (is_float8, reason), "{}", layer.name);
            let ran = layer.gemms().map(|(_, gemm)| (gemm.emulated, gemm.high_precision));
            let expected = [is_float8, is_float8, is_float8 && wgrad_in_fp8]
                .map(|is_float8| if is_float8 { (STEPS, 0) } else { (0, STEPS) });
            assert_eq!(ran, expected, "{recipe} {}", layer.name);
            totals.emulated += expected.iter().map(|(float8, _)| float8).sum::<u64>();
            totals.high_precision += expected.iter().map(|(_, high)| high).sum::<u64>();
        }
        assert_eq!(outcome.gemms, totals);
    }
}
