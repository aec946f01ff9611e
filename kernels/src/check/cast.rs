//! Checks casts on floating-point edge cases. Codes, scales, padding and amax must equal the scalar
//! reference bit for bit.

use core::fmt;

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::{Flaw, in_dtype, read, split_mix};
use crate::element_type::ElementType;
use crate::mx::from_blocked;
use crate::reference::{self, HostQuantized};
use crate::view::Checked;
use crate::{
    Cast, Granularity, InvScale, KernelError, MatrixView, Operand, Orientation, cast_instructions, quantize,
    quantize_with_amax, row_words,
};

/// Compile-time parameters of a cast, and the shape of a small matrix that compiles to the same
/// kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CastVariant {
    /// Format, granularity and scale mode.
    pub cast: Cast,
    /// Copies to write, for a matrix that is row-major in memory.
    pub orientation: Orientation,
    /// The dtype of x.
    pub dtype: StorageType,
    /// `Some` if the amax is given; true if max |x| is computed too.
    pub amax: Option<bool>,
    /// Conversion instructions that are not disabled on the device.
    pub instructions: Option<&'static str>,
    shape: [usize; 2],
    strides: [usize; 2],
    /// Elements before the first one of the view.
    base: usize,
}

/// Largest power of two up to 16 that divides `n`.
const fn alignment(n: usize) -> usize {
    let zeros = n.trailing_zeros();
    1 << if zeros < 4 { zeros } else { 4 }
}

impl CastVariant {
    /// Variant that [`quantize`] runs on this device, or [`quantize_with_amax`] if an amax is
    /// given.
    ///
    /// # Errors
    /// As [`quantize`] and [`quantize_with_amax`].
    pub fn of<R: Runtime>(
        client: &ComputeClient<R>,
        x: &MatrixView,
        cast: Cast,
        orientation: Orientation,
        amax: Option<bool>,
    ) -> Result<Self, KernelError> {
        let (mut view, mut checked, mut orientation) = (x.clone(), Checked::new(client, x)?, orientation);
        if checked.is_column_major() {
            view = view.transposed();
            (checked, orientation) = (checked.transpose(), orientation.transposed());
        }
        let ([rows, cols], [row, col]) = (view.shape, view.strides);
        // The split of a row among units depends on its length.
        let by_row = cast.granularity == Granularity::Row && orientation == Orientation::Rows;
        let own_cols = if by_row { cols } else { 192 + alignment(cols) };
        let own_col = if cols == 1 { 1 } else { col.clamp(1, 2) };
        let pitch = own_cols * own_col;
        let own_row = if row == cols * col || rows == 1 { pitch } else { pitch.next_multiple_of(16) + alignment(row) };
        let own_rows = if rows == 1 {
            1
        } else if by_row {
            19
        } else {
            133
        };
        let element_type = ElementType::of(x.dtype)?;
        let aligned = |elements: usize| elements.is_multiple_of(element_type.vector_len() as usize);
        let has_vectors = own_col == 1 && aligned(own_cols) && (own_rows == 1 || aligned(own_row));
        Ok(Self {
            cast,
            orientation,
            dtype: element_type.storage(),
            amax,
            instructions: cast_instructions(client),
            shape: [own_rows, own_cols],
            strides: [own_row, own_col],
            base: usize::from(has_vectors && !checked.has_vector_loads()),
        })
    }

    /// Element `i` of a matrix: values over many binades, ties between codes, subnormals, zeros and
    /// the largest code. With `not_finite`, also one NaN and one infinity.
    fn value(&self, i: usize, not_finite: bool, seed: u64) -> f32 {
        let [rows, cols] = self.shape;
        let (bits, row, col) = (split_mix(seed, i as u64), i / cols, i % cols);
        let sign = if bits >> 63 == 1 { -1.0 } else { 1.0 };
        let sixteenths = ((bits >> 8) % 512) as f32 / 16.0;
        sign * match bits % 16 {
            _ if not_finite && (row, col) == (rows / 2, cols / 3) => f32::NAN,
            _ if not_finite && (row, col) == (rows / 3, cols / 2) => f32::INFINITY,
            // Every 64 rows: one of zeros and one of tiny values.
            _ if row % 64 == 63 => 0.0,
            _ if row % 64 == 62 => sixteenths * 1e-7,
            0 => 0.0,
            // With the largest code as amax, the next values are ties.
            1 => 448.0,
            2..=7 => sixteenths * 2f32.powi((bits >> 24) as i32 % 8 - 6),
            8..=9 => sixteenths * 2f32.powi(-14),
            _ => sixteenths * 13.37 * 2f32.powi((bits >> 24) as i32 % 12 - 8),
        }
    }

    pub(super) fn judge<R: Runtime>(&self, client: &ComputeClient<R>, seed: u64) -> Result<(), Flaw> {
        [false, true].into_iter().try_for_each(|not_finite| self.compare(client, not_finite, seed))
    }

    fn compare<R: Runtime>(&self, client: &ComputeClient<R>, not_finite: bool, seed: u64) -> Result<(), Flaw> {
        let ([rows, cols], [row, col]) = (self.shape, self.strides);
        let values: Vec<f32> = (0..rows * cols).map(|i| self.value(i, not_finite, seed)).collect();
        let mut memory = vec![0.0; self.base + (rows - 1) * row + (cols - 1) * col + 1];
        for (i, value) in values.iter().enumerate() {
            memory[self.base + i / cols * row + i % cols * col] = *value;
        }
        let (bytes, _) = in_dtype(&memory, self.dtype)?;
        let (_, values) = in_dtype(&values, self.dtype)?;
        let mut handle = client.create_from_slice(&bytes);
        if self.base > 0 {
            handle = handle.offset_start((self.base * ElementType::of(self.dtype)?.size()) as u64);
        }
        let x = MatrixView { handle, shape: self.shape, strides: self.strides, dtype: self.dtype };
        // Larger values saturate.
        let given = 100.0 + (seed % 100) as f32;
        let done = match self.amax {
            None => quantize(client, &x, self.cast, self.orientation)?,
            Some(observe) => {
                let amax = client.create_from_slice(&given.to_le_bytes());
                quantize_with_amax(client, &x, &amax, observe, self.cast, self.orientation)?
            }
        };
        let found = read(client, &[&done.amax])?.remove(0);
        let found = found.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<_>>();
        let want = if self.amax == Some(false) { given } else { reference::amax(&values) };
        same(reference::amax(&found), want).map_err(|how| Flaw::Wrong(format!("the amax {how}")))?;
        for (copy, transposed) in [(&done.rows, false), (&done.cols, true)] {
            let Some(copy) = copy else { continue };
            let mut want = match self.amax {
                None => reference::quantize(&values, rows, cols, self.cast, transposed),
                Some(_) => {
                    let scale = reference::amax_to_scale(given, self.cast.format, self.cast.scale_mode);
                    let mut codes = vec![0; values.len()];
                    reference::cast(&values, scale, self.cast.format, &mut codes);
                    HostQuantized { codes, scales: vec![scale], amax: given }
                }
            };
            if transposed {
                let at = |i: usize| want.codes[i % rows * cols + i / rows];
                want.codes = (0..rows * cols).map(at).collect();
            }
            compare_copy(client, copy, &want).map_err(|flaw| match flaw {
                Flaw::Wrong(how) => Flaw::Wrong(format!("{how} of {}", if transposed { "the transpose" } else { "x" })),
                flaw => flaw,
            })?;
        }
        Ok(())
    }
}

/// # Errors
/// Both values, if they differ.
fn same(got: f32, want: f32) -> Result<(), String> {
    let is_same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
    if is_same { Ok(()) } else { Err(format!("is {got:e}, not {want:e}")) }
}

fn compare_copy<R: Runtime>(client: &ComputeClient<R>, copy: &Operand, want: &HostQuantized) -> Result<(), Flaw> {
    let read = read(client, &[&copy.codes, &copy.inv_scale])?;
    let (&Operand { rows, k, granularity, .. }, pitch) = (copy, 4 * row_words(copy.k));
    for (row, got) in read[0].chunks_exact(pitch).take(rows).enumerate() {
        // Padding is zero codes.
        let want = |col: usize| if col < k { want.codes[row * k + col] } else { 0 };
        if let Some(col) = (0..pitch).find(|col| got[*col] != want(*col)) {
            return Err(Flaw::Wrong(format!("code [{row}, {col}] is {:#04x}, not {:#04x}", got[col], want(col))));
        }
    }
    let [height, width] = granularity.scale_dims(rows, k);
    let scales: Vec<f32> = match granularity {
        Granularity::Block1x32 => {
            let tiles = &read[1][..4 * granularity.scale_words(rows, k)];
            from_blocked(tiles, rows, width).into_iter().map(|byte| InvScale::from_e8m0(byte).get()).collect()
        }
        _ => read[1].as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
    };
    for (i, want) in want.scales.iter().enumerate().take(height * width) {
        let place = format!("inverse scale [{}, {}]", i / width, i % width);
        same(scales[i], want.inverse().get()).map_err(|how| Flaw::Wrong(format!("{place} {how}")))?;
    }
    Ok(())
}

impl fmt::Display for CastVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([rows, cols], Cast { format, granularity, scale_mode }) = (self.shape, self.cast);
        write!(f, "cast of [{rows}, {cols}] {} to {format} {granularity} ({scale_mode}), ", self.dtype)?;
        write!(f, "{:?}{}", self.orientation, if self.amax.is_some() { ", of a given amax" } else { "" })
    }
}
