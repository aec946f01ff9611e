//! TFLOP/s of the tiles, clusters and stages that the estimate of `plan.rs` chooses among, beside its choice.

use std::cell::LazyCell;

use float8_kernels::{FixedPlan, Format, GemmConfig, GemmPath, Granularity, fix_gemm_plan, gemm_path};
use serde::{Deserialize, Serialize};

use super::data::Table;
use super::{Bench, gemm};
use crate::target::Target;

const TILES: [[usize; 2]; 2] = [[128, 256], [128, 128]];
const CLUSTERS: [usize; 2] = [1, 2];
const STAGES: [usize; 3] = [3, 4, 6];

/// One shape with one plan.
#[derive(Serialize, Deserialize)]
pub struct Row {
    pub shape: [usize; 3],
    /// Tile, cluster and most stages; nothing for the estimate's choice.
    pub plan: Option<[usize; 4]>,
    /// TFLOP/s with f32 accumulation every 128 of the contraction.
    pub precise: f64,
    /// TFLOP/s with the tensor core's own accumulation.
    pub fast: f64,
}

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    let path = gemm_path(&T::client(), [Granularity::Tensor; 2], GemmConfig::default());
    if !matches!(path, GemmPath::Wgmma | GemmPath::Tcgen05) {
        return;
    }
    let table = LazyCell::new(|| Table::new(Format::E4m3));
    let plans = TILES.iter().flat_map(|&[rows, cols]| {
        CLUSTERS.iter().flat_map(move |&cluster| STAGES.map(|stages| FixedPlan { rows, cols, cluster, stages }))
    });
    let plans: Vec<_> = [None].into_iter().chain(plans.map(Some)).collect();
    for shape @ [m, n, k] in bench.size.of(&[[256, 256, 512]], 2, &[[4096; 3], [8192; 3]]) {
        for &plan in &plans {
            bench.case(&format!("sweep {m}x{n}x{k} {}", name(plan.map(numbers))), |clock| {
                fix_gemm_plan(plan);
                let measured = gemm::fp8::<T>(clock, &table, shape, [Granularity::Tensor; 2]);
                fix_gemm_plan(None);
                T::client().memory_cleanup();
                let [precise, fast] = measured?;
                Ok(super::Row::Sweep(Row { shape, plan: plan.map(numbers), precise, fast }))
            });
        }
    }
}

const fn numbers(plan: FixedPlan) -> [usize; 4] {
    [plan.rows, plan.cols, plan.cluster, plan.stages]
}

fn name(plan: Option<[usize; 4]>) -> String {
    plan.map_or_else(
        || "plan.rs".into(),
        |[rows, cols, cluster, stages]| format!("{rows}x{cols} cluster {cluster} stages {stages}"),
    )
}

pub fn print(rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    println!("\nGEMM in TFLOP/s by tile, cluster and most stages; plan.rs is what the library takes");
    println!("{:>18}  {:<32}  {:>8} {:>8}", "shape", "plan", "precise", "fast");
    for Row { shape: [m, n, k], plan, precise, fast } in rows {
        println!("{:>18}  {:<32}  {precise:>8.1} {fast:>8.1}", format!("{m}x{n}x{k}"), name(*plan));
    }
}
