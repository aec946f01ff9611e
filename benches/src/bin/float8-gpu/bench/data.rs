//! Normally distributed inputs, filled from a table so that gigabytes take little time.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::check::in_dtype;
use float8_kernels::{Format, Granularity, MatrixView, Operand, mx, reference, row_words};
use test_data::normal;

/// Values in the table: a prime, so that rows of common lengths start at different positions.
const TABLE: usize = 1_048_573;

/// Bytes of rotating inputs: twice the largest L2 cache.
const ROTATION: usize = 128 << 20;

/// Maximum number of input sets.
const MOST_SETS: usize = 16;

/// Number of rotating input sets of `bytes` each.
pub fn sets(bytes: usize) -> usize {
    ROTATION.div_ceil(bytes.max(1)).clamp(1, MOST_SETS)
}

/// Granularity of scales, and whether all scales are powers of two.
#[derive(Clone, Copy)]
pub struct Scales {
    pub granularity: Granularity,
    pub power_of_two: bool,
}

impl From<Granularity> for Scales {
    /// Uses powers of two if the granularity requires them.
    fn from(granularity: Granularity) -> Self {
        Self { granularity, power_of_two: granularity == Granularity::Block1x32 }
    }
}

/// Approximately standard normal values, and their FP8 codes under one scale.
pub struct Values {
    pub values: Vec<f32>,
    codes: Vec<u8>,
    format: Format,
}

impl Values {
    pub fn new(format: Format) -> Self {
        let values = normal(TABLE, 1);
        let scale = reference::amax_to_scale(reference::amax(&values), format, Default::default());
        let mut codes = vec![0; values.len()];
        reference::cast(&values, scale, format, &mut codes);
        Self { values, codes, format }
    }

    /// Dense matrix of normal values. `seed` selects the table position of the first.
    pub fn matrix<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        shape @ [rows, cols]: [usize; 2],
        dtype: StorageType,
        seed: usize,
    ) -> MatrixView {
        let (values, _) = in_dtype(&self.values, dtype).expect("a float");
        let mut bytes = vec![0; rows * cols * dtype.size()];
        fill(&values, &mut bytes, seed * 7919 * 13 * dtype.size());
        MatrixView { handle: client.create_from_slice(&bytes), shape, strides: [cols, 1], dtype }
    }

    /// Operand of normal values with scales near 0.01. `seed` selects the table position of each
    /// row.
    pub fn operand<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        [rows, k]: [usize; 2],
        scales: impl Into<Scales>,
        seed: usize,
    ) -> Operand {
        let Scales { granularity, power_of_two } = scales.into();
        let pitch = row_words(k) * 4;
        let mut bytes = vec![0; rows * pitch];
        for (i, row) in bytes.chunks_exact_mut(pitch).enumerate() {
            fill(&self.codes, &mut row[..k], (i + seed * rows) * 7919 * 13);
        }
        let [height, width] = granularity.scale_dims(rows, k);
        let scale = |i: usize| {
            let scale = 0.01 * (1.0 + self.values[i % TABLE].abs() / 4.0);
            if power_of_two { f32::from_bits(scale.to_bits() & 0x7f80_0000) } else { scale }
        };
        let scales: Vec<u8> = match granularity {
            // 2^-8 to 2^-5.
            Granularity::Block1x32 => {
                let scales: Vec<u8> = (0..height * width).map(|i| 119 + self.codes[i % TABLE] % 4).collect();
                mx::to_blocked(&scales, height, width)
            }
            _ => (0..height * width).flat_map(|i| scale(i).to_le_bytes()).collect(),
        };
        Operand {
            codes: client.create_from_slice(&bytes),
            inv_scale: client.create_from_slice(&scales),
            rows,
            k,
            format: self.format,
            granularity,
            power_of_two,
        }
    }
}

/// Fills `out` from the table, cyclically from `start`.
pub fn fill<V: Copy>(table: &[V], out: &mut [V], start: usize) {
    let mut start = start % table.len();
    let mut rest = out;
    while !rest.is_empty() {
        let len = rest.len().min(table.len() - start);
        let (now, later) = rest.split_at_mut(len);
        now.copy_from_slice(&table[start..start + len]);
        rest = later;
        start = 0;
    }
}
