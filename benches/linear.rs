//! Forward and backward of one linear, the casts of x, w and dy included.
use std::time::Instant;

use benches::linear::{float8_step, inputs, plain_step};
use benches::table::Table;
use burn::backend::Flex;
use burn::tensor::DType;
use serde_json::json;

use crate::medians;

/// Table by shape.
pub fn table(repeat: u32) -> Table {
    let mut table = Table::new("linear on the CPU, forward + backward, tensorwise");
    for shape in [[1024, 256, 256], [1024, 256, 1024], [512, 1024, 1024]] {
        let inputs = inputs::<Flex>(shape, DType::F32);
        let milliseconds = |step: fn(_)| {
            let start = Instant::now();
            step(inputs.clone());
            start.elapsed().as_secs_f64() * 1e3
        };
        let [plain, float8] =
            medians(repeat, || milliseconds(plain_step::<Flex>), || milliseconds(float8_step::<Flex>));
        table.rows.push(json!({ "M x K x N": shape, "plain ms": plain, "float8 ms": float8, "ratio": float8 / plain }));
    }
    table
}
