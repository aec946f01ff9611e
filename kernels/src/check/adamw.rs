//! Checks AdamW against the scalar reference, element by element.

use core::fmt;

use cubecl::prelude::*;

use super::{Flaw, floats, read, split_mix, upload};
use crate::adamw::{AdamWArgs, AdamWStep, AdamWVariant, RoundingKeys, adamw};
use crate::element_type::ElementType;
use crate::reference::adamw as reference;

/// Shapes: with vector loads and more than one round of a unit, and without.
const SHAPES: [[usize; 2]; 2] = [[37, 100], [5, 13]];

/// Least share of elements, in parts of 64, with the stochastic rounding of the reference. f32 and
/// f64 round some differently.
const SAME_ROUNDING: usize = 60;

impl AdamWVariant {
    pub(super) fn judge<R: Runtime>(&self, client: &ComputeClient<R>, seed: u64) -> Result<(), Flaw> {
        for (shape, time) in SHAPES.into_iter().zip([3, 1]) {
            self.judge_step(client, seed, shape, time)?;
        }
        Ok(())
    }

    fn judge_step<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        seed: u64,
        [rows, cols]: [usize; 2],
        time: usize,
    ) -> Result<(), Flaw> {
        let random = |number: u64, i: usize| split_mix(seed.wrapping_add(number << 32), i as u64);
        let values = |number: u64, change: &dyn Fn(f32) -> f32| -> Vec<f32> {
            let unit = |i| (random(number, i) >> 40) as f32 / (1 << 23) as f32 - 1.0;
            (0..rows * cols).map(|i| change(unit(i))).collect()
        };
        let (param, w) = upload(client, &values(0, &|x| 2.0 * x), cols, self.param, 0)?;
        // The first step must not read its moments.
        let unread = if time == 1 { f32::NAN } else { 1.0 };
        let (first, m) = upload(client, &values(1, &|x| x * unread), cols, self.moments, 0)?;
        let (second, v) = upload(client, &values(2, &|x| x * x * unread), cols, self.moments, 0)?;
        let (grad, g) = upload(client, &values(3, &|x| x), cols, self.grad, 0)?;
        let keys = |number: u64, is_rounded: bool| {
            let keys = |axis: u64, len| (0..len).map(|i| random(2 * number + axis + 4, i) as u16).collect();
            is_rounded.then(|| RoundingKeys(vec![keys(0, rows), keys(1, cols)]))
        };
        let [of_param, of_moments] = self.rounded;
        let rounding = [keys(0, of_param), keys(1, of_moments), keys(2, of_moments)];
        let step = AdamWStep { lr: 0.1, betas: [0.9, 0.95], epsilon: 1e-8, decay: Some(0.99), time, rounding };
        let args = AdamWArgs { param, moments: [first, second], grad };
        let amax = adamw(client, &step, &args, &[rows, cols], true)?.expect("it is observed");
        let AdamWArgs { param, moments: [first, second], .. } = &args;
        let made = read(client, &[&param.handle, &first.handle, &second.handle, &amax])?;

        let expected: Vec<_> = (0..rows * cols).map(|i| reference::adamw(&step, [w[i], m[i], v[i]], g[i])).collect();
        for (which, dtype) in [self.param, self.moments, self.moments].into_iter().enumerate() {
            let got = floats(&made[which], dtype)?;
            let element_type = ElementType::of(dtype)?;
            let keys = step.rounding[which].as_ref().map(|keys| keys.by_row(&[rows, cols]));
            let mut same = 0;
            for (i, got) in got.iter().enumerate() {
                let want = expected[i][which];
                // The sums and quotients in f32, then the rounding to the dtype, with f16's smallest step.
                let size = sizes(&step, [w[i], m[i]], g[i], expected[i][2])[which];
                let mut bound = size * 16.0 * ElementType::F32.rounding() + want.abs() * element_type.rounding();
                if element_type == ElementType::F16 {
                    bound += 2f64.powi(-25);
                }
                if let Some((by_row, by_col)) = &keys {
                    bound += want.abs() * 2.0 * ElementType::Bf16.rounding();
                    let rounded = reference::round_stochastic(want as f32, by_row[i / cols] ^ by_col[i % cols]);
                    same += usize::from(f32::from_bits(u32::from(rounded) << 16) == *got);
                }
                if (f64::from(*got) - want).abs() > bound || got.is_nan() {
                    let name = ["w", "m", "v"][which];
                    return Err(Flaw::Wrong(format!("{name} of element {i} is {got:e}, not {want:e}")));
                }
            }
            if keys.is_some() && 64 * same < SAME_ROUNDING * got.len() {
                return Err(Flaw::Wrong(format!("only {same} of {} elements are rounded by their keys", got.len())));
            }
        }
        let largest = floats(&made[0], self.param)?.into_iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let amax = floats(&made[3][..4], ElementType::F32.storage())?[0];
        if amax != largest {
            return Err(Flaw::Wrong(format!("max |w| is {amax:e}, not {largest:e}")));
        }
        Ok(())
    }
}

/// Sums of the magnitudes of the terms of w, m and v, for the parameter and m before the step and v
/// after it.
fn sizes(step: &AdamWStep, [w, m]: [f32; 2], g: f32, v: f64) -> [f64; 3] {
    let [beta, correction_1] = [step.betas[0], step.corrections()[0]].map(f64::from);
    let m = if step.time > 1 { f64::from(m.abs()) * beta } else { 0.0 } + f64::from(g.abs()) * (1.0 - beta);
    let root = (v / f64::from(step.corrections()[1])).sqrt() + f64::from(step.epsilon);
    [f64::from(w.abs()) + m / correction_1 / root * f64::from(step.lr), m, v]
}

impl fmt::Display for AdamWVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { param, moments, grad, rounded } = self;
        write!(f, "AdamW of {param} with moments {moments} and gradients {grad}")?;
        if rounded.contains(&true) { f.write_str(", rounded stochastically") } else { Ok(()) }
    }
}
