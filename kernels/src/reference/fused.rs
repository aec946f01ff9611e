//! Operations of [`fused`](crate::fused) in f64.

fn sigmoid(x: f64) -> f64 {
    (1.0 + (-x).exp()).recip()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// `a σ(a) b`, as [`fused::swiglu`](crate::fused::swiglu).
#[must_use]
pub fn swiglu(a: &[f32], b: &[f32]) -> Vec<f64> {
    wide(a).into_iter().zip(wide(b)).map(|(a, b)| a * sigmoid(a) * b).collect()
}

/// Gradients of a and b, as [`fused::swiglu_backward`](crate::fused::swiglu_backward).
#[must_use]
pub fn swiglu_backward(a: &[f32], b: &[f32], dy: &[f32]) -> [Vec<f64>; 2] {
    let terms = wide(a).into_iter().zip(wide(b)).zip(wide(dy));
    let (da, db) = terms
        .map(|((a, b), dy)| {
            let s = sigmoid(a);
            (dy * b * s * (1.0 + a * (1.0 - s)), dy * a * s)
        })
        .unzip();
    [da, db]
}

fn inverse_rms(x: &[f64], epsilon: f64) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + epsilon).sqrt().recip()
}

/// RMSNorm of rows with the length of γ, as [`fused::rms_norm`](crate::fused::rms_norm).
#[must_use]
pub fn rms_norm(x: &[f32], gamma: &[f32], epsilon: f64) -> Vec<f64> {
    let gamma = wide(gamma);
    let rows = wide(x);
    let normed = rows.chunks(gamma.len()).flat_map(|x| {
        let r = inverse_rms(x, epsilon);
        x.iter().zip(&gamma).map(move |(x, gamma)| x * r * gamma)
    });
    normed.collect()
}

/// Gradients of x and γ, as [`fused::rms_norm_backward`](crate::fused::rms_norm_backward).
#[must_use]
pub fn rms_norm_backward(x: &[f32], gamma: &[f32], dy: &[f32], epsilon: f64) -> [Vec<f64>; 2] {
    let (x, gamma, dy, width) = (wide(x), wide(gamma), wide(dy), gamma.len());
    let (mut dx, mut dgamma) = (vec![], vec![0.0; width]);
    for (x, dy) in x.chunks(width).zip(dy.chunks(width)) {
        let r = inverse_rms(x, epsilon);
        let mean = (0..width).map(|i| dy[i] * gamma[i] * x[i] * r).sum::<f64>() / width as f64;
        for i in 0..width {
            dx.push(r * (dy[i] * gamma[i] - x[i] * r * mean));
            dgamma[i] += dy[i] * x[i] * r;
        }
    }
    [dx, dgamma]
}

/// Rotary embedding of x `[B, T, heads, d]`, or with `back` its inverse, as
/// [`fused::rotary`](crate::fused::rotary).
#[must_use]
pub fn rotary(x: &[f32], [cos, sin]: [&[f32]; 2], [batch, len, heads, dim]: [usize; 4], back: bool) -> Vec<f64> {
    let half = dim / 2;
    let mut y = vec![0.0; x.len()];
    for (i, pair) in (0..batch * len * heads).flat_map(|i| (0..half).map(move |pair| (i, pair))) {
        let (b, t, h) = (i / heads / len, i / heads % len, i % heads);
        let (by_position, by_head) = (i * dim + pair, ((b * heads + h) * len + t) * dim + pair);
        let (from, to) = if back { (by_head, by_position) } else { (by_position, by_head) };
        let [c, s] = [cos, sin].map(|table| f64::from(table[t * half + pair]));
        let s = if back { -s } else { s };
        let [x1, x2] = [from, from + half].map(|i| f64::from(x[i]));
        (y[to], y[to + half]) = (x1 * c - x2 * s, x2 * c + x1 * s);
    }
    y
}
