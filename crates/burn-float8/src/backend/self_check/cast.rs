//! Casts: codes, scales and amax of sampled rows, bit for bit those of the scalar reference.
use std::collections::BTreeMap;

use burn_backend::{DType, DeviceId};
use cubecl::client::ComputeClient;
use cubecl::prelude::Runtime;
use cubecl::server::Handle;
use float8_kernels::reference::{self, HostQuantized};
use float8_kernels::{
    Cast, Granularity, KernelError, MatrixView, Operand, Orientation, Quantized, ScaleMode, cast_instructions,
    quantize as launch, quantize_with_amax, strike_casts,
};

use super::gemm::edges;
use super::read::{Rows, bytes, each_piece, floats, parts_of, whole};
use super::{Call, DeviceChecks, Mismatch, Verdict};
use crate::backend::ScaleFrom;

/// The cast with instructions that are right.
///
/// # Errors
///
/// [`KernelError::StruckOff`] if none are.
pub(in crate::backend) fn quantize<R: Runtime>(
    client: &ComputeClient<R>,
    checks: &DeviceChecks,
    device: DeviceId,
    (x, dtype): (&MatrixView, DType),
    (cast, orientation): (Cast, Orientation),
    scale: &ScaleFrom<Handle>,
) -> Result<Quantized, KernelError> {
    let mut call = Call::new();
    loop {
        let instructions = cast_instructions(client);
        let quantized = call.record(checks, device, || match scale {
            ScaleFrom::Dynamic => launch(client, x, cast, orientation),
            ScaleFrom::Amax { amax, observe } => quantize_with_amax(client, x, amax, *observe, cast, orientation),
        });
        let quantized = quantized?;
        let name = || {
            let ([rows, cols], Cast { format, granularity, scale_mode }) = (x.shape, cast);
            let call =
                format!("cast of [{rows}, {cols}] {dtype:?} to {format} {granularity} ({scale_mode}), {orientation:?}");
            [call, format!("casts by {}", instructions.unwrap_or("none"))]
        };
        let compare = || compare(client, (x, dtype), cast, scale, &quantized);
        match checks.judge((client, device), &mut call, (None, name), compare) {
            Verdict::Right => return Ok(quantized),
            Verdict::Again => {}
            // Unless another thread has done so meanwhile.
            Verdict::Wrong if cast_instructions(client) == instructions => strike_casts(client),
            Verdict::Wrong => {}
        }
    }
}

/// A copy that is looked at.
struct Copy<'a> {
    operand: &'a Operand,
    transposed: bool,
    /// Which of its rows: whole bands of 128, or 32, where they share scales.
    rows: Vec<usize>,
    /// The values of these rows.
    values: BTreeMap<usize, Vec<f32>>,
}

impl<'a> Copy<'a> {
    fn new(operand: &'a Operand, scale_mode: ScaleMode, transposed: bool) -> Self {
        let bands = |height: usize| {
            let bands = edges(operand.rows.div_ceil(height), 2).into_iter();
            bands.flat_map(|band| band * height..((band + 1) * height).min(operand.rows)).collect()
        };
        let rows = match (operand.granularity, scale_mode) {
            (Granularity::Block128x128, _) => bands(128),
            (_, ScaleMode::E8m0Square(_)) => bands(32),
            _ => edges(operand.rows, 16),
        };
        let values = rows.iter().map(|row| (*row, vec![0.0; operand.k])).collect();
        Self { operand, transposed, rows, values }
    }

    /// Takes its values from rows of `x [_, cols]`, the first of which is row `first`.
    fn fill(&mut self, first: usize, values: &[f32], cols: usize) {
        let count = values.len() / cols;
        if self.transposed {
            for (col, to) in &mut self.values {
                (0..count).for_each(|i| to[first + i] = values[i * cols + col]);
            }
        } else {
            for (row, to) in self.values.range_mut(first..first + count) {
                to.copy_from_slice(&values[(row - first) * cols..][..cols]);
            }
        }
    }

    /// What codes and scales of its rows must be, given the amax of all for a scale of the whole tensor.
    fn want(&self, cast: Cast, amax: f32) -> HostQuantized {
        let values: Vec<f32> = self.values.values().flatten().copied().collect();
        match cast.granularity {
            Granularity::Tensor => {
                let scale = reference::amax_to_scale(amax, cast.format, cast.scale_mode);
                let mut codes = vec![0; values.len()];
                reference::cast(&values, scale, cast.format, &mut codes);
                HostQuantized { codes, scales: vec![scale], amax }
            }
            _ => reference::quantize(&values, self.rows.len(), self.operand.k, cast, false),
        }
    }

    /// Whether the rows that were read are right.
    fn compare(&self, got: &Rows, cast: Cast, amax: f32) -> Result<(), String> {
        let (want, k) = (self.want(cast, amax), self.operand.k);
        let what = if self.transposed { "the transpose" } else { "x" };
        for (i, row) in self.rows.iter().enumerate() {
            let (got, want) = (&got.codes[row], &want.codes[i * k..][..k]);
            if let Some(col) = (0..k).find(|col| got[*col] != want[*col]) {
                return Err(format!("code [{row}, {col}] of {what} is {:#04x}, not {:#04x}", got[col], want[col]));
            }
        }
        let granularity = cast.granularity;
        let [height, _] = granularity.group(self.operand.rows, k);
        let ([_, width], [some, _]) =
            (granularity.scale_dims(self.operand.rows, k), granularity.scale_dims(self.rows.len(), k));
        for i in 0..some {
            // Of the first row that has it.
            let row = if granularity == Granularity::Tensor { 0 } else { self.rows[i * height] / height };
            for block in 0..width {
                let (got, want) =
                    (got.inv_scales[row * width + block].get(), want.scales[i * width + block].inverse().get());
                if got.to_bits() != want.to_bits() && !(got.is_nan() && want.is_nan()) {
                    return Err(format!("inverse scale [{row}, {block}] of {what} is {got:e}, not {want:e}"));
                }
            }
        }
        Ok(())
    }
}

/// Whether a cast of `x` is that of the reference.
fn compare<R: Runtime>(
    client: &ComputeClient<R>,
    (x, dtype): (&MatrixView, DType),
    cast: Cast,
    scale: &ScaleFrom<Handle>,
    quantized: &Quantized,
) -> Result<(), Mismatch> {
    let sides = [(&quantized.rows, false), (&quantized.cols, true)];
    let mut copies: Vec<_> = sides
        .into_iter()
        .filter_map(|(o, transposed)| Some(Copy::new(o.as_ref()?, cast.scale_mode, transposed)))
        .collect();
    let mut parts = vec![whole(&quantized.amax)];
    if let ScaleFrom::Amax { amax, .. } = scale {
        parts.push((amax, 0..4));
    }
    copies.iter().for_each(|copy| parts.extend(parts_of(copy.operand, &copy.rows)));
    let mut read = bytes(client, &parts).map_err(Mismatch::Unread)?.into_iter();
    let observed = floats(&read.next().expect("the amax"), DType::F32);
    let given =
        matches!(scale, ScaleFrom::Amax { .. }).then(|| floats(&read.next().expect("the given"), DType::F32)[0]);
    let got: Vec<_> = copies
        .iter()
        .map(|copy| Rows::new(copy.operand, &copy.rows, &mut read.by_ref().take(copy.rows.len() + 1)))
        .collect();

    let mut amax = 0f32;
    each_piece(client, x, dtype, |first, values| {
        let [_, cols] = x.shape;
        amax = reference::amax(&[amax, reference::amax(values)]);
        copies.iter_mut().for_each(|copy| copy.fill(first, values, cols));
    })
    .map_err(Mismatch::Unread)?;
    if scale.is_observed() {
        let largest = reference::amax(&observed);
        if largest.to_bits() != amax.to_bits() && !(largest.is_nan() && amax.is_nan()) {
            return Err(Mismatch::Wrong(format!("the amax is {largest:e}, not {amax:e}")));
        }
    }
    let scaling = given.unwrap_or(amax);
    copies.iter().zip(&got).try_for_each(|(copy, got)| copy.compare(got, cast, scaling)).map_err(Mismatch::Wrong)
}
