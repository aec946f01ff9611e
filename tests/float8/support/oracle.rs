//! Casts and GEMMs by their definition, in f64 and one element at a time. Only the encoding of a
//! single value is shared with the code under test.
use burn_float8::{
    Float8LinearConfig,
    config::{CastConfig, Format, Granularity, Operand, ScaleCalculationMode, ScaleMode},
};
use float8_kernels::reference;

/// Values that a GEMM reads for x `[rows, cols]`: decode(code) / scale, in the layout of x.
///
/// With `transposed`, the GEMM contracts over the rows of x. `scaling_amax` replaces the amax of x,
/// for casts with one scale.
pub fn dequantized(
    x: &[f32],
    [rows, cols]: [usize; 2],
    cast: CastConfig,
    config: &Float8LinearConfig,
    transposed: bool,
    scaling_amax: Option<f32>,
) -> Vec<f64> {
    if cast.is_disabled() {
        return x.iter().map(|x| f64::from(*x)).collect();
    }
    // Coordinates of an element in the operand, and the group that shares its scale.
    let group = |i: usize| {
        let (r, c) = if transposed { (i % cols, i / cols) } else { (i / cols, i % cols) };
        match cast.scaling_granularity {
            Granularity::Tensor => (0, 0),
            Granularity::Row => (r, 0),
            Granularity::Block1x128 => (r, c / 128),
            Granularity::Block128x128 => (r / 128, c / 128),
            Granularity::Block1x32 => (r, c / 32),
        }
    };
    let mut amaxes = std::collections::HashMap::new();
    for (i, x) in x.iter().enumerate().take(rows * cols) {
        let amax = amaxes.entry(group(i)).or_insert(0f32);
        *amax = amax.max(x.abs());
    }
    let format = cast.target_dtype;
    let one = |(i, x): (usize, &f32)| {
        let amax = f64::from(scaling_amax.unwrap_or(amaxes[&group(i)]));
        let scale = scale(amax, format, config.scale_mode(cast.scaling_granularity));
        f64::from(reference::decode(reference::encode(x * scale, format), format)) / f64::from(scale)
    };
    x.iter().enumerate().map(one).collect()
}

/// Scale for a finite amax.
pub fn scale(amax: f64, format: Format, mode: ScaleMode) -> f32 {
    let scale = (f64::from(format.max()) / amax.max(1e-12)) as f32;
    match mode {
        ScaleMode::F32 => scale,
        ScaleMode::PowerOfTwo => f32::from_bits(scale.to_bits() & 0xff80_0000),
        ScaleMode::E8m0(mode) | ScaleMode::E8m0Square(mode) => {
            // log2 of the format's largest power of two, and bits of its mantissa.
            let (largest, mantissa) = if format == Format::E4m3 { (8.0, 3) } else { (15.0, 2) };
            let exponent = match mode {
                ScaleCalculationMode::Floor => amax.log2().floor() - largest,
                ScaleCalculationMode::Ceil => amax.log2().ceil() - largest,
                // Half a step of the mantissa may carry into the exponent.
                ScaleCalculationMode::Even => {
                    let half = 2f64.powi(amax.log2().floor() as i32 - mantissa - 1);
                    (amax + half).log2().floor() - largest
                }
                ScaleCalculationMode::Rceil => f64::from(amax as f32 * (1.0 / format.max())).log2().ceil(),
            };
            2f64.powi(-exponent.clamp(-127.0, 127.0) as i32) as f32
        }
    }
}

/// a `[m, k]` · b `[k, n]`, with strides.
pub fn matmul(a: &[f64], sa: [usize; 2], b: &[f64], sb: [usize; 2], [m, k, n]: [usize; 3]) -> Vec<f32> {
    let at = |i: usize, j: usize| (0..k).map(|c| a[i * sa[0] + c * sa[1]] * b[c * sb[0] + j * sb[1]]).sum::<f64>();
    (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| at(i, j) as f32).collect()
}

/// y `[M, N]`, dx `[M, K]` and dw `[K, N]` of a linear, without bias.
pub fn linear(
    inputs: [&[f32]; 3],
    dims: [usize; 3],
    config: &Float8LinearConfig,
    scaling_amax: [Option<f32>; 3],
) -> [Vec<f32>; 3] {
    products(inputs, dims, config, scaling_amax, |x| x)
}

/// Sums of the magnitudes of the same products. Rounding errors are proportional to them.
pub fn linear_magnitudes(inputs: [&[f32]; 3], dims: [usize; 3], config: &Float8LinearConfig) -> [Vec<f32>; 3] {
    products(inputs, dims, config, [None; 3], f64::abs)
}

fn products(
    [x, w, dy]: [&[f32]; 3],
    [m, k, n]: [usize; 3],
    config: &Float8LinearConfig,
    [ax, aw, ady]: [Option<f32>; 3],
    map: fn(f64) -> f64,
) -> [Vec<f32>; 3] {
    let casts = config.casts();
    let quantized = |values: &[f32], shape, cast, transposed, amax| -> Vec<f64> {
        dequantized(values, shape, cast, config, transposed, amax).into_iter().map(map).collect()
    };
    let xq = |cast, transposed| quantized(x, [m, k], cast, transposed, ax);
    let wq = |cast, transposed| quantized(w, [k, n], cast, transposed, aw);
    let dyq = |cast, transposed| quantized(dy, [m, n], cast, transposed, ady);
    // w is read transposed in fprop, x and dy in wgrad.
    let y = matmul(&xq(casts[Operand::INPUT], false), [k, 1], &wq(casts[Operand::WEIGHT_T], true), [n, 1], [m, k, n]);
    let (dy_rows, w_rows) = (dyq(casts[Operand::GRAD_OUTPUT], false), wq(casts[Operand::WEIGHT], false));
    let dx = matmul(&dy_rows, [n, 1], &w_rows, [1, n], [m, n, k]);
    let (x_cols, dy_cols) = (xq(casts[Operand::INPUT_T], true), dyq(casts[Operand::GRAD_OUTPUT_T], true));
    let dw = matmul(&x_cols, [1, k], &dy_cols, [n, 1], [k, m, n]);
    [y, dx, dw]
}
