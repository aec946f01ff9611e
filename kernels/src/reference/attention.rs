//! [`attention`](mod@crate::attention) by its definition in f64, with a bound of each element's error.
//!
//! ```text
//! u    half a step of the dtype: 2⁻⁸ (bf16), 2⁻¹¹ (f16), 2⁻²⁴ (f32); for f16, u|x| is at least 2⁻²⁵
//! ε    2⁻²⁰ (scale Σ|qk| + |S|) + 2⁻¹⁷: the error of a score, and of a sum of exponentials
//! y    (u + 2ε) Σ P|v| + u|y|             lse    ε + 2⁻²⁰|lse|
//! dS   |dS| (u + 2ε) + P ((u + 2ε) Σ|y dy| + 2⁻²⁰ Σ|dy v|)
//! dv   Σ (u + 2ε) P|dy| + u|dv|           dq     scale Σ E(dS)|k| + u|dq|, and dk alike
//! ```
//! Kernels may round P and dS to the dtype, and round y, dq, dk and dv. Scores and sums are f32.

/// Inputs of attention on the host.
#[derive(Clone, Copy, Debug)]
pub struct HostAttention<'a> {
    /// `[B, H, T, d]`
    pub query: &'a [f32],
    /// `[B, KV, S, d]`
    pub key: &'a [f32],
    /// `[B, KV, S, e]`
    pub value: &'a [f32],
    /// `[B, H, T, e]`, the gradient of y.
    pub dy: &'a [f32],
    /// B, H and KV.
    pub heads: [usize; 3],
    /// T and S.
    pub positions: [usize; 2],
    /// d and e.
    pub widths: [usize; 2],
    /// `[B, H, T, S]`: true hides a key.
    pub hidden: &'a [bool],
    /// `[B, H, T, S]`, added to scores; empty for none.
    pub bias: &'a [f32],
    /// Factor of q · k.
    pub scale: f64,
    /// As in [`AttentionInputs`](crate::attention::AttentionInputs).
    pub softcap: Option<f64>,
    /// Half a step of the dtype, relative.
    pub rounding: f64,
}

/// A result and how far an element may be from it.
#[derive(Clone, Debug, Default)]
pub struct Bounded {
    /// Values in f64.
    pub values: Vec<f64>,
    /// Largest error of each.
    pub bounds: Vec<f64>,
}

impl Bounded {
    fn zeros(len: usize) -> Self {
        Self { values: vec![0.0; len], bounds: vec![0.0; len] }
    }

    /// Adds `factor · row`, and `error · |row|` to the bounds, at row `index`.
    fn add(&mut self, index: usize, row: &[f32], factor: f64, error: f64) {
        let at = index * row.len()..(index + 1) * row.len();
        for ((value, bound), x) in self.values[at.clone()].iter_mut().zip(&mut self.bounds[at]).zip(row) {
            *value += factor * f64::from(*x);
            *bound += error * f64::from(x.abs());
        }
    }

    /// Adds the rounding of the result.
    fn rounded(mut self, u: f64, least: f64) -> Self {
        self.bounds.iter_mut().zip(&self.values).for_each(|(bound, value)| *bound += (u * value.abs()).max(least));
        self
    }

    /// Largest error of `got` as a share of the allowed one, and its index. NaN counts as infinite.
    #[must_use]
    pub fn worst(&self, got: &[f32]) -> (usize, f64) {
        let shares = got.iter().zip(&self.values).zip(&self.bounds).map(|((got, want), bound)| {
            let share = (f64::from(*got) - want).abs() / (bound + f64::from(f32::MIN_POSITIVE));
            if share.is_nan() { f64::INFINITY } else { share }
        });
        shares.enumerate().fold((0, 0.0), |worst, one| if one.1 > worst.1 { one } else { worst })
    }
}

/// y, lse, dq, dk and dv. lse is `-1e30`, and y and the gradients are 0, for a query that sees no
/// key.
#[must_use]
pub fn attention(inputs: &HostAttention<'_>) -> [Bounded; 5] {
    let &HostAttention { query, key, value, dy, heads: [batch, heads, kv_heads], .. } = inputs;
    let &HostAttention { positions: [queries, keys], widths: [dim, width], scale, rounding: u, .. } = inputs;
    // Subnormal steps of f16.
    let least = if u == 2f64.powi(-11) { 2f64.powi(-25) } else { 0.0 };
    let rows = batch * heads * queries;
    let mut lse = Bounded::zeros(rows);
    let [mut y, mut dq, mut dk, mut dv] = [rows * width, query.len(), key.len(), value.len()].map(Bounded::zeros);
    let dot = |a: &[f32], b: &[f32]| {
        let products = || a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        (products().sum::<f64>(), products().map(f64::abs).sum::<f64>())
    };
    for row in 0..rows {
        let (b, h) = (row / queries / heads, row / queries % heads);
        let first_key = (b * kv_heads + h * kv_heads / heads) * keys;
        let (q, own_dy) = (&query[row * dim..][..dim], &dy[row * width..][..width]);
        let [key, value] = [(key, dim), (value, width)].map(|(x, n)| move |s: usize| &x[(first_key + s) * n..][..n]);
        let seen: Vec<usize> = (0..keys).filter(|s| !inputs.hidden[row * keys + s]).collect();
        let (mut error, mut scores, mut slopes) = (0f64, vec![], vec![]);
        for &s in &seen {
            let (product, magnitude) = dot(q, key(s));
            let (score, slope) = inputs.softcap.map_or((scale * product, 1.0), |cap| {
                let tanh = (scale * product / cap).tanh();
                (cap * tanh, 1.0 - tanh * tanh)
            });
            let score = score + inputs.bias.get(row * keys + s).map_or(0.0, |bias| f64::from(*bias));
            error = error.max(2f64.powi(-20) * (scale.abs() * magnitude + score.abs()) + 2f64.powi(-17));
            scores.push(score);
            slopes.push(slope);
        }
        let Some(max) = scores.iter().copied().reduce(f64::max) else {
            lse.values[row] = -1e30;
            lse.bounds[row] = 1e30;
            continue;
        };
        let sum = scores.iter().map(|score| (score - max).exp()).sum::<f64>();
        (lse.values[row], lse.bounds[row]) = (max + sum.ln(), error + 2f64.powi(-20) * (max + sum.ln()).abs());
        let relative = u + 2.0 * error;
        let products: Vec<_> = seen.iter().map(|&s| dot(own_dy, value(s))).collect();
        let weights: Vec<_> = scores.iter().map(|score| (score - max).exp() / sum).collect();
        let delta = weights.iter().zip(&products).map(|(p, (dp, _))| p * dp).sum::<f64>();
        for (&s, &p) in seen.iter().zip(&weights) {
            let error = relative * p + least;
            y.add(row, value(s), p, error);
            dv.add(first_key + s, own_dy, p, error);
        }
        let magnitude = y.values[row * width..][..width].iter().zip(own_dy).map(|(y, dy)| (y * f64::from(*dy)).abs());
        let magnitude = magnitude.sum::<f64>();
        for (i, &s) in seen.iter().enumerate() {
            let ds = weights[i] * (products[i].0 - delta) * slopes[i];
            let of_delta = (u + 2.0 * error) * magnitude + 2f64.powi(-20) * products[i].1;
            let ds_error = ds.abs() * relative + weights[i] * of_delta + least;
            dq.add(row, key(s), scale * ds, scale.abs() * ds_error);
            dk.add(first_key + s, q, scale * ds, scale.abs() * ds_error);
        }
    }
    let [y, dq, dk, dv] = [y, dq, dk, dv].map(|result| result.rounded(u, least));
    [y, lse, dq, dk, dv]
}
