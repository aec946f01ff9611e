//! TFLOP/s of the tiles, clusters and stages that `plan.rs` chooses among, compared with its
//! choice.

use std::cell::LazyCell;

use float8_kernels::{
    FixedPlan, Format, GemmConfig, GemmPlan, GemmShape, Granularity, fix_gemm_plan, gemm_path, gemm_plan,
};
use serde_json::{Value, json};

use super::data::{Scales, Values};
use super::{Bench, gemm};
use crate::target::Target;

const TILES: [[usize; 2]; 2] = [[128, 256], [128, 128]];
const CLUSTERS: [usize; 2] = [1, 2];
const STAGES: [usize; 3] = [3, 4, 6];

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    let (client, granularities) = (T::client(), [Granularity::Tensor; 2]);
    let path = gemm_path(&client, granularities, GemmConfig::default());
    let sms = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
    let table = LazyCell::new(|| Values::new(Format::E4m3));
    let plans = TILES.iter().flat_map(|&[rows, cols]| {
        CLUSTERS.iter().flat_map(move |&cluster| STAGES.map(|stages| FixedPlan { rows, cols, cluster, stages }))
    });
    let plans: Vec<_> = [None].into_iter().chain(plans.map(Some)).collect();
    for product @ [m, n, k] in bench.size.of(&[[256, 256, 512]], 2, &[[4096; 3], [8192; 3]]) {
        let shape = GemmShape { product, granularities, power_of_two: false, use_fast_accum: false, groups: None };
        let Some(chosen) = gemm_plan(path, &shape, sms) else {
            let why = format!("sweep: the path {path} has no tiles, clusters and stages to choose from");
            return bench.case("sweep", |_| Ok(Value::String(why)));
        };
        for &plan in &plans {
            let GemmPlan { tile, cluster, splits } = chosen;
            let choice = || format!("plan.rs: {}x{} cluster {cluster} splits {splits}", tile.rows, tile.cols);
            let name = plan.map_or_else(choice, |FixedPlan { rows, cols, cluster, stages }| {
                format!("{rows}x{cols} cluster {cluster} stages {stages}")
            });
            bench.case(&format!("sweep {m}x{n}x{k} {name}"), |clock| {
                fix_gemm_plan(plan);
                let measured = gemm::fp8::<T>(clock, &table, product, granularities.map(Scales::from));
                fix_gemm_plan(None);
                T::client().memory_cleanup();
                let [precise, fast] = measured?;
                Ok(json!({ "shape": product, "plan": name, "precise": precise, "fast": fast }))
            });
        }
    }
}
