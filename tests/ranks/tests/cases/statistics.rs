//! Statistics of casts over ranks. Each rank has the shares and the noise of its part, with the scales of the
//! whole.
use burn::prelude::*;
use burn_float8::report::Monitor;
use burn_float8::{Float8Config, Recipe, StatisticsConfig};
use float8_shard::{ShardConfig, Sharded, TensorParallel, TensorStyle};
use ranks::B;

use super::parallel::{One, SIZE, one, part, random, read};
use super::world;

/// Statistics by the names of operands.
fn health(model: &One<B>) -> Vec<(&'static str, [f64; 3])> {
    let sampled = Monitor::new(model).health().into_iter();
    let of = |cast: burn_float8::report::CastHealth| [cast.sqnr_db.unwrap(), cast.saturated, cast.flushed];
    sampled.map(|sampled| (sampled.operand, of(sampled.health.cast))).collect()
}

/// Sums over ranks equal one rank's statistics. Where ranks divide a row with one scale there are none,
/// since a rank cannot cast its part again alone.
pub fn are_those_of_one_rank() {
    let (comm, device) = (world(), Default::default());
    let ranks = comm.world_size();
    // With the scale of the first rank's largest value, other ranks flush small ones.
    let large = Tensor::<B, 2>::full([1, 1], 1e4, &device);
    let [x, w, dy] = [1, 2, 3].map(|seed| random(seed).slice_assign([0..1, 0..1], large.clone()));
    for recipe in Recipe::ALL {
        let one = || one(Float8Config::new(recipe).with_statistics(StatisticsConfig::every(1)), w.clone());
        let whole = one();
        read(&whole.linear, x.clone(), dy.clone());
        let expected = health(&whole);
        // Ranks of shards read the same batch.
        for (style, axes, divided) in [
            (None, [0, 0], &["weight_t"][..]),
            (Some(TensorStyle::Colwise), [0, 1], &["input_t", "weight", "grad_output"]),
            (Some(TensorStyle::Rowwise), [1, 0], &["input", "weight_t", "grad_output_t"]),
        ] {
            let (model, tensor) = match style {
                Some(style) => (TensorParallel::apply(one(), &comm, &vec![("linear".into(), style)]).unwrap().0, ranks),
                None => (Sharded::apply(one(), &comm, ShardConfig::default()).unwrap().0, 1),
            };
            let (own_x, own_dy) = (part(&x, axes[0], tensor), part(&dy, axes[1], tensor));
            read(&model.linear, own_x.clone(), own_dy.clone());
            let place = Sharded::parameters::<B, _>(&model).remove(0);
            let [rows, cols] = [place.rows, place.cols].map(|of| of.unwrap_or([0, SIZE]));
            let own_w = w.clone().slice([rows[0]..rows[1], cols[0]..cols[1]]);
            let found = health(&model);
            for (operand, expected) in &expected {
                let what = format!("{recipe} {style:?} {operand}");
                let Some((_, [sqnr, saturated, flushed])) = found.iter().find(|(name, _)| name == operand) else {
                    let is_by_row = matches!(recipe, Recipe::Rowwise | Recipe::RowwiseWithGwHp);
                    assert!(is_by_row && divided.contains(operand), "{what}: no statistics");
                    continue;
                };
                let values = match operand.split('_').next() {
                    Some("input") => &own_x,
                    Some("weight") => &own_w,
                    _ => &own_dy,
                };
                let values: Vec<f32> = values.to_data().to_vec().unwrap();
                let (count, signal) = (values.len() as f64, values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>());
                let noise = signal / 10_f64.powf(sqnr / 10.0);
                let own = [signal, noise, saturated * count, flushed * count, count].map(|x| x as f32).to_vec();
                let all = comm.all_reduce_sum("statistics", own).unwrap().wait().unwrap();
                let all: Vec<f64> = all.into_iter().map(f64::from).collect();
                let all = [10.0 * (all[0] / all[1]).log10(), all[2] / all[4], all[3] / all[4]];
                let is_near = all.iter().zip(expected).all(|(all, expected)| (all - expected).abs() <= 1e-3);
                assert!(is_near, "{what}: {all:?}, not {expected:?}");
            }
        }
    }
}
